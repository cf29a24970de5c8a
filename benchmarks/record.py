"""What recording one `add` of two 4x4 tensors costs, against eager CPU in its own process.

    python benchmarks/record.py [--json FILE]

A round is 1,000 calls whose results are dropped; acc then flushes, which is not timed: the
figures are the cost of recording in steady state, where every round follows the same plan. The
one exception is `add_executed`, a chain of 1,000 dependent additions that are also executed and
read, for information. Exit status as that of run.py.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import load, report, stats
from benchmarks.cases import Case
from benchmarks.driver import Worker, WorkerError, clean_up_when_terminated
from benchmarks.measure import CaseResult, ModeRun, Settings, alternate, ratio_between, start_mode
from benchmarks.run import EXIT_REFUSED, Refused, require_plugin, verdict, write_lines

if TYPE_CHECKING:
    import torch

CALLS = 1000


@dataclass(frozen=True)
class Measurement:
    """One way to call `add`: against eager (`must_ratio`), or against a time (`must_us`)."""

    case: Case
    modes: tuple[str, ...]
    must_ratio: float | None = None
    must_us: float | None = None


MEASUREMENTS = (
    Measurement(Case("add_below_autograd", "through the dispatcher"), ("acc",), must_us=0.4),
    Measurement(Case("add_no_grad", "torch.add, no_grad"), ("eager", "acc"), must_ratio=1.0),
    Measurement(Case("add_aten", "torch.ops.aten.add.Tensor, no_grad"), ("eager", "acc")),
    Measurement(Case("add_inference", "torch.add, inference_mode"), ("eager", "acc")),
    Measurement(Case("add_executed", "torch.add, executed and read"), ("eager", "acc")),
)


class BelowAutograd:
    """Additions that C++ sends through the dispatcher below autograd; no Python between them."""

    def step(self, index: int) -> float:
        import torchacc_device

        torchacc_device._C.bench_record(CALLS, CALLS)
        return float(index)

    def window(self, steps: int) -> float:
        """Seconds for recording steps * CALLS additions."""
        import torchacc_device

        return torchacc_device._C.bench_record(steps * CALLS, CALLS)

    def outputs(self) -> list["torch.Tensor"]:
        return []


class FromPython:
    """Additions called from Python; what acc recorded is executed outside the timed part."""

    def __init__(
        self,
        device: str,
        add: Callable[..., "torch.Tensor"],
        guard: Callable[[], AbstractContextManager],
    ) -> None:
        import torch

        generator = torch.Generator().manual_seed(1)
        self.a, self.b = (torch.randn(4, 4, generator=generator).to(device) for _ in "ab")
        self.add = add
        self.guard = guard
        self.flush: Callable[[], Any] = lambda: None
        if device == "acc":
            import torchacc_device

            self.flush = torchacc_device._C.flush

    def step(self, index: int) -> float:
        del index
        self.window(1)
        with self.guard():
            return self.add(self.a, self.b)[0, 0].item()

    def window(self, steps: int) -> float:
        """Seconds for steps * CALLS calls, without what happens between the rounds."""
        add, a, b = self.add, self.a, self.b
        seconds = 0.0
        with self.guard():
            for _ in range(steps):
                start = time.perf_counter()
                for _ in repeat(None, CALLS):
                    add(a, b)
                seconds += time.perf_counter() - start
                self.flush()
        return seconds

    def outputs(self) -> list["torch.Tensor"]:
        with self.guard():
            return [self.add(self.a, self.b)]


class Executed(FromPython):
    """A chain of dependent additions with the read of its end inside the timed part."""

    def window(self, steps: int) -> float:
        add, b = self.add, self.b
        start = time.perf_counter()
        with self.guard():
            for _ in range(steps):
                x = self.a
                for _ in repeat(None, CALLS):
                    x = add(x, b)
                x[0, 0].item()
        return time.perf_counter() - start


def build(name: str, device: str, variant: str) -> Any:
    """Builds one of MEASUREMENTS in the worker (there is one variant)."""
    import torch

    del variant
    if name == "add_below_autograd":
        return BelowAutograd()
    if name == "add_aten":
        return FromPython(device, torch.ops.aten.add.Tensor, torch.no_grad)
    if name == "add_inference":
        return FromPython(device, torch.add, torch.inference_mode)
    kind = Executed if name == "add_executed" else FromPython
    return kind(device, torch.add, torch.no_grad)


def judge(measurement: Measurement, runs: dict[str, ModeRun], result: CaseResult) -> None:
    """Adds a line per mode to `result`, and the sentences for what does not hold."""
    name = measurement.case.name
    eager = runs.get("eager")
    for mode, run in runs.items():
        selection = stats.select(run.windows)
        if not selection.is_valid():
            result.invalid.append(
                f"{name}: {selection.dropped} of {selection.total} windows of {mode} had foreign "
                "load"
            )
        # A step is CALLS = 1,000 calls, so milliseconds per step are microseconds per call.
        times = [window.step_ms * 1000.0 / CALLS for window in selection.clean]
        line: dict[str, Any] = {
            "kind": "record",
            "case": name,
            "mode": mode,
            "threads": len(run.worker.cores),
            "n": len(times),
            "median_us": stats.median(times) if times else None,
            "min_us": min(times, default=None),
            "max_us": max(times, default=None),
            "dropped": selection.dropped,
            "must": None,
            "holds": None,
            "versions": run.versions,
        }
        ratio, must = None, None
        if mode == "acc" and times and measurement.must_us is not None:
            allowed = [measurement.must_us] * len(times)
            ratio, must, line["against"] = stats.speedup(allowed, times), 1.0, "must_us"
            line["must_us"] = measurement.must_us
        elif mode == "acc" and eager is not None:
            ratio, must = ratio_between(eager, run), measurement.must_ratio
            line["against"] = "eager"
        if ratio is not None:
            line.update(ratio=ratio.value, low=ratio.low, high=ratio.high, must=must)
            if must is not None:
                line["holds"] = ratio.holds(must)
                if not line["holds"]:
                    result.missed.append(
                        f"{name}: {line['median_us']:.3f} us, {ratio.value:.3f}x "
                        f"({ratio.low:.3f} to {ratio.high:.3f}) of what is allowed, must be 1.0x"
                    )
        result.lines.append(line)


class RecordWorker(Worker):
    """A worker whose programs come from this module."""

    def __init__(self, spec: Any, caches: Path | None = None) -> None:
        super().__init__({**spec, "module": "benchmarks.record"}, caches=caches)


def measure(measurement: Measurement, settings: Settings) -> CaseResult:
    """Measures one way to call `add` in all its modes."""
    result = CaseResult(measurement.case.name)
    runs: dict[str, ModeRun] = {}
    try:
        for mode in measurement.modes:
            run = start_mode(measurement.case, mode, settings, [])
            assert run is not None
            runs[mode] = run
        digests = {run.checksum.digest for run in runs.values()}
        if len(digests) > 1:
            result.failures.append(f"{measurement.case.name}: eager and acc do not add alike")
        alternate(list(runs.values()), settings)
    except WorkerError as error:
        result.failures.append(f"{measurement.case.name}: {error}")
    else:
        judge(measurement, runs, result)
    finally:
        for run in runs.values():
            run.worker.close()
    return result


def table(lines: Sequence[dict[str, Any]]) -> str:
    """One row per case and mode."""
    titles = {measurement.case.name: measurement.case.title for measurement in MEASUREMENTS}
    rows = [f"{'case':20}{'mode':8}{'n':>4}{'us per add':>12}  {'min..max':16}  as fast as"]
    for line in lines:
        text = f"{line['case']:20}{line['mode']:8}{line['n']:>4}"
        if line["median_us"] is not None:
            text += f"{line['median_us']:>12.3f}  {line['min_us']:.3f}..{line['max_us']:<9.3f}"
        if "ratio" in line:
            target = f"{line['must_us']} us" if "must_us" in line else "eager"
            text += f"  {line['ratio']:.3f}x {target} ({line['low']:.3f}..{line['high']:.3f})"
        if line["holds"] is not None:
            text += "  must holds" if line["holds"] else "  must MISSED"
        rows.append(f"{text}  [{titles[line['case']]}]")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser("benchmarks/record.py", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON lines to FILE")
    parser.add_argument("--alternations", type=int, default=Settings.alternations)
    parser.add_argument("--window-s", type=float, default=0.5)
    options = parser.parse_args(arguments)
    try:
        require_plugin()
        cores = load.choose_cores(1)
        load.check_usable(cores)
    except (Refused, load.LoadError) as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED
    settings = Settings(
        "host",
        ("eager", "acc"),
        tuple(cores),
        options.alternations,
        options.window_s,
        RecordWorker,
    )
    file: TextIO | None = None
    results = []
    try:
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            file = options.json.open("w")
        described = {
            "suite": "record",
            "threads": 1,
            "alternations": settings.alternations,
            "window_s": settings.window_s,
            "claimable": settings.claimable,
        }
        write_lines(file, [report.header(described, os.environ)])
        for measurement in MEASUREMENTS:
            results.append(measure(measurement, settings))
            write_lines(file, results[-1].lines)
    finally:
        if file is not None:
            file.close()
    print(table([line for result in results for line in result.lines]))
    status, messages = verdict(results, settings.claimable)
    print("\n".join(messages))
    return status


if __name__ == "__main__":
    clean_up_when_terminated()
    sys.exit(main())
