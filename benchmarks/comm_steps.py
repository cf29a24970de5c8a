"""Training steps of two processes: DistributedDataParallel on acc and in eager over Gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import cases, stats
from benchmarks.checksums import Checksum, mismatch
from benchmarks.driver import WorkerError
from benchmarks.ranks import Ranks
from benchmarks.stats import Window

CASES = ("gpt", "resnet18_cifar")
# torch's own buckets of gradients (25 MiB), and smaller ones: more of them travel under computation
VARIANTS = ("ddp", "ddp+buckets4")
MUST = 1.0
MUST_OVERLAP = 0.5  # of the exchanges' time
COLD_STEPS = 20
TIMEOUT_S = 600.0


@dataclass
class Mode:
    """One mode of a case: its processes, and what was measured of them."""

    name: str
    ranks: Ranks
    versions: dict[str, Any] = field(default_factory=dict)
    checksums: list[Checksum] = field(default_factory=list)
    step_ms: float = 0.0
    windows: list[Window] = field(default_factory=list)
    overlaps: list[float] = field(default_factory=list)

    def start(self) -> None:
        """Builds the program and runs its first steps."""
        self.versions = self.ranks.ask({"do": "build"}, TIMEOUT_S)[0]["versions"]
        self.ranks.ask({"do": "cold", "steps": COLD_STEPS}, TIMEOUT_S)
        answers = self.ranks.ask({"do": "check"}, TIMEOUT_S)
        self.checksums = [Checksum.from_json(answer["checksum"]) for answer in answers]
        window, _ = self.ranks.watch(0, {"do": "window", "steps": 3}, TIMEOUT_S)
        self.step_ms = window.step_ms

    def measure(self, alternation: int, window_s: float) -> Window:
        """One window; on acc also the share of exchanges under computation, over the ranks."""
        steps = max(1, round(1000.0 * window_s / self.step_ms))
        before = self._counters()
        window, _ = self.ranks.watch(alternation, {"do": "window", "steps": steps}, TIMEOUT_S)
        self.windows.append(window)
        for old, new in zip(before, self._counters(), strict=True):
            whole, waited = (new[name] - old[name] for name in ("transfer_us", "transfer_wait_us"))
            self.overlaps.append(max(0.0, 1.0 - waited / whole))
        return window

    def _counters(self) -> list[dict[str, int]]:
        if self.name != "acc":
            return []
        return [each["counters"] for each in self.ranks.ask({"do": "counters"}, TIMEOUT_S)]


def measure(
    names: Sequence[str],
    variants: Sequence[str],
    cores: Sequence[int],
    alternations: int,
    window_s: float,
) -> Iterator[dict[str, Any]]:
    """The lines of all cases. Raises WorkerError where a mode fails or computes something else."""
    for name in names:
        for variant in variants:
            yield from _case(name, variant, cores, alternations, window_s)


def _case(
    name: str, variant: str, cores: Sequence[int], alternations: int, window_s: float
) -> Iterator[dict[str, Any]]:
    spec = {"case": name, "variant": variant}
    with contextlib.ExitStack() as started:
        modes = []
        for mode, device in (("eager", "cpu"), ("acc", "acc")):
            own = {"executor": "host"} if mode == "acc" else {}
            ranks = Ranks({**spec, **own, "mode": mode, "device": device}, cores)
            started.callback(ranks.close)
            modes.append(Mode(mode, ranks))
            modes[-1].start()
        eager, acc = modes
        for rank, (want, got) in enumerate(zip(eager.checksums, acc.checksums, strict=True)):
            tolerance = cases.CASES[name].tolerance
            if why := mismatch(want, got, exact=False, tolerance=tolerance):
                raise WorkerError(f"[benchmarks.comm] {name}, {variant}, rank {rank}: acc {why}")
        clean = 0
        for alternation in range(2 * alternations):
            if clean >= alternations:
                break
            order = modes if alternation % 2 == 0 else modes[::-1]
            windows = [mode.measure(alternation, window_s) for mode in order]
            clean += not any(window.is_dirty() for window in windows)
    selected = {mode.name: stats.select(mode.windows) for mode in modes}
    for mode in modes:
        yield _line(name, variant, mode, selected[mode.name], len(cores))
    yield _ratio_line(name, variant, modes, selected)


def _line(
    name: str, variant: str, mode: Mode, selection: stats.Selection, ranks: int
) -> dict[str, Any]:
    counted = selection.clean or mode.windows
    times = [window.step_ms for window in counted]
    steps = sum(window.steps for window in counted)
    overlap = stats.median(mode.overlaps) if mode.overlaps else None
    return {
        "kind": "steps",
        "case": name,
        "variant": variant,
        "mode": mode.name,
        "ranks": ranks,
        "threads": 1,
        "n": len(selection.clean),
        "dropped": selection.dropped,
        "valid": selection.is_valid(),
        "median_ms": stats.median(times),
        "min_ms": min(times),
        "max_ms": max(times),
        "cpu_ms": 1000.0 * sum(window.cpu_seconds for window in counted) / steps / ranks,
        "overlap": overlap,
        "overlap_holds": None if overlap is None else overlap >= MUST_OVERLAP,
        "versions": mode.versions,
    }


def _ratio_line(
    name: str, variant: str, modes: Sequence[Mode], selected: Mapping[str, stats.Selection]
) -> dict[str, Any]:
    """acc against eager, of windows without foreign load; of all, and no evidence, without such."""
    eager, acc = modes
    valid = all(selection.is_valid() for selection in selected.values())
    pairs = stats.pair(selected[eager.name].clean, selected[acc.name].clean)
    if not valid or not pairs[0]:
        valid, pairs = False, stats.pair(eager.windows, acc.windows)
    ratio = stats.speedup(*pairs)
    return {
        "kind": "ratio",
        "case": name,
        "variant": variant,
        "mode": acc.name,
        "against": eager.name,
        "threads": 1,
        "valid": valid,
        "ratio": ratio.value,
        "low": ratio.low,
        "high": ratio.high,
        "must": MUST,
        "holds": ratio.holds(MUST) if valid else None,
    }


def row(line: Mapping[str, Any]) -> str:
    """A mode of a case for people."""
    overlap = ""
    if line["overlap"] is not None:
        missed = "" if line["overlap_holds"] else f" (MISSED: must >= {MUST_OVERLAP:.0%})"
        overlap = f", {line['overlap']:.0%} of the exchanges under computation{missed}"
    spoilt = "" if line["valid"] else f"; INVALID: {line['dropped']} windows with foreign load"
    return (
        f"{line['case']} {line['variant']} {line['mode']}: {line['median_ms']:.1f} ms, "
        f"{line['cpu_ms']:.1f} ms of CPU time per rank{overlap}{spoilt}"
    )


def ratio_row(line: Mapping[str, Any]) -> str:
    """A ratio for people."""
    answers = {True: "holds", False: "MISSED", None: "not judged, foreign load"}
    return (
        f"{line['case']} {line['variant']}: {line['ratio']:.3f}x eager "
        f"({line['low']:.3f} to {line['high']:.3f}), must >= {line['must']:.2f}: "
        f"{answers[line['holds']]}"
    )


def markdown(lines: Sequence[Mapping[str, Any]]) -> str:
    """The table of docs/distributed.md; in brackets what others' work makes no evidence."""
    found = {
        (line["case"], line["variant"], line["kind"], line["mode"]): line
        for line in lines
        if line["kind"] != "header"
    }
    rows = [
        "| case | buckets | eager ms | acc ms | times as fast (95 %) | CPU time of eager, acc "
        "| exchanges under computation |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, variant in dict.fromkeys(key[:2] for key in found if key[2] == "ratio"):
        eager, acc = (found[case, variant, "steps", mode] for mode in ("eager", "acc"))
        ratio = found[case, variant, "ratio", "acc"]
        cells = [
            f"{eager['median_ms']:.0f}",
            f"{acc['median_ms']:.0f}",
            f"{ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
        ]
        cells = [cell if ratio["valid"] else f"[{cell}]" for cell in cells]
        cells += [f"{eager['cpu_ms']:.0f}, {acc['cpu_ms']:.0f} ms", f"{acc['overlap']:.0%}"]
        size = f"{variant.partition('buckets')[2] or 25} MiB"
        rows.append(f"| `{case}` | {size} | {' | '.join(cells)} |")
    return "\n".join(rows)
