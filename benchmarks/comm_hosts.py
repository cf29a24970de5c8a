"""All-reduces between two simulated hosts: plain, hierarchical and compressed, against the link."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import stats
from benchmarks.hosts import NotAvailable, two_hosts
from benchmarks.ranks import Ranks
from benchmarks.stats import Window

RANKS = 4
WAYS = ("plain", "hierarchical", "fp16", "top-k", "top-k fp16")
GROUPS = ("within a host", "between hosts")
SIZES = (1 << 20, 25 << 20, 100 << 20)
GROUP_SIZES = (4 << 10, 1 << 20, 4 << 20, 25 << 20)
SORTED_AT_MOST = 25 << 20  # bytes for top-k: with more it is the sorting that is measured
MUST_SHARE, MUST_FROM = 0.85, 25 << 20
# The share of the cores' work that may be others'. What sends for our ranks in the kernel is
# counted as others' too: of 256 KiB a third is, so such sizes are not measured.
MOST_FOREIGN = 0.2
# Two hosts of 8 V100 each, per GPU: 116 to 158.6 examples per second (TI-ACC's documentation).
PUBLISHED_RATIO = 158.6 / 116.0
TIMEOUT_S = 300.0


def crossing_bytes(way: str, size: int, inside: int) -> float | None:
    """Bytes that have to cross the link in each direction; None where no formula is known.

    Two hosts of `inside` ranks each. A ring over all ranks passes the link once in each direction,
    and each of its edges carries 2 (n - 1) / n of the bytes. Between equal parts of the two hosts
    travel 2 (2 - 1) / 2 of each part, so the bytes once. top-k: each rank's chosen elements, values
    and 64-bit places, travel along the ring of an all-gather, n - 1 of n parts over each edge.
    """
    ranks = 2 * inside
    if way == "hierarchical":
        return float(size)
    ring = 2.0 * (ranks - 1) / ranks
    if way in ("plain", "fp16"):
        return ring * size / (2 if way == "fp16" else 1)
    if way == "between hosts":
        return float(size) * inside  # all pairs at the same time
    if way.startswith("top-k"):
        chosen = max(1, size // 4 // 100)
        return (ranks - 1) * chosen * (8 + (2 if way.endswith("fp16") else 4))
    return None


def measure(gigabits: float, cores: Sequence[int], alternations: int) -> Iterator[dict[str, Any]]:
    """A line per way and size; one that says why, where hosts cannot be simulated."""
    try:
        with two_hosts(gigabits) as hosts:
            spec = {
                "case": "exchanges",
                "mode": "acc",
                "device": "acc",
                "executor": "host",
                "module": "benchmarks.exchanges",
            }
            ranks = Ranks(spec, [cores[rank % len(cores)] for rank in range(RANKS)], hosts)
            try:
                yield from _measure(ranks, gigabits, alternations)
            finally:
                ranks.close()
    except NotAvailable as error:
        yield {"kind": "exchange", "way": "all", "not_run": str(error)}


def _measure(ranks: Ranks, gigabits: float, alternations: int) -> Iterator[dict[str, Any]]:
    versions = ranks.ask({"do": "build"}, TIMEOUT_S)[0]["versions"]
    yield {"kind": "versions", "versions": versions}
    for sizes, ways in ((GROUP_SIZES, GROUPS), (SIZES, WAYS)):
        for size in sizes:
            if size > SORTED_AT_MOST:
                ways = tuple(way for way in ways if not way.startswith("top-k"))
            times: dict[str, list[float]] = {way: [] for way in ways}
            aways: dict[str, float] = {}
            windows: list[Window] = []
            for alternation in range(alternations):
                for way in ways if alternation % 2 == 0 else ways[::-1]:
                    request = {"do": "measure", "way": way, "bytes": size, "steps": 1}
                    window, answers = ranks.watch(alternation, request, TIMEOUT_S)
                    windows.append(window)
                    times[way].append(max(answer["each"][0] for answer in answers))
                    aways[way] = max(answer["away"] for answer in answers)
            # Of all windows together: one may be as short as the kernel's clock is coarse.
            others = max(0.0, sum(window.foreign_seconds for window in windows))
            foreign = others / max(1e-9, others + sum(window.cpu_seconds for window in windows))
            for way in ways:
                yield _line(way, size, times, aways[way], gigabits, foreign)


def _line(
    way: str,
    size: int,
    times: Mapping[str, list[float]],
    away: float,
    gigabits: float,
    foreign: float,
) -> dict[str, Any]:
    seconds = stats.median(times[way])
    crossing = crossing_bytes(way, size, RANKS // 2)
    limit = None if crossing is None else crossing * 8.0 / (gigabits * 1e9)
    line: dict[str, Any] = {
        "kind": "exchange",
        "way": way,
        "ranks": RANKS if way in WAYS else RANKS // 2,
        "bytes": size,
        "n": len(times[way]),
        "seconds": seconds,
        "min_s": min(times[way]),
        "max_s": max(times[way]),
        "limit_s": limit,
        "share_of_limit": None if limit is None else limit / seconds,
        "away": away,
        "foreign": foreign,
        "valid": foreign <= MOST_FOREIGN,
    }
    if way in WAYS[1:]:
        ratio = stats.speedup(times["plain"], times[way])
        line |= {"over_plain": ratio.value, "low": ratio.low, "high": ratio.high}
    if way == "hierarchical":
        line["published"] = PUBLISHED_RATIO
        if size >= MUST_FROM:
            holds = line["share_of_limit"] >= MUST_SHARE
            line |= {"must": MUST_SHARE, "holds": holds if line["valid"] else None}
    return line


def row(line: Mapping[str, Any]) -> str:
    """A line for people."""
    if "not_run" in line:
        return f"not run: {line['not_run']}"
    text = f"{line['way']}, {line['bytes'] / 2**20:.3g} MiB: {line['seconds'] * 1e3:.2f} ms"
    if line["share_of_limit"] is not None:
        text += f", {line['share_of_limit']:.0%} of the link's limit"
    if "over_plain" in line:
        text += f", {line['over_plain']:.2f}x plain ({line['low']:.2f} to {line['high']:.2f})"
    spoilt = "" if line["valid"] else f"; INVALID: {line['foreign']:.0%} of the work was others'"
    return text + f", {line['away']:.1e} away from the right average{spoilt}"


def markdown(lines: Sequence[Mapping[str, Any]]) -> str:
    """The table of docs/distributed.md; in brackets what others' work makes no evidence."""
    rows = [
        "| way | MiB | ms | share of the link's limit | times as fast as plain (95 %) |",
        "|---|---|---|---|---|",
    ]
    for line in lines:
        if line["kind"] != "exchange" or "not_run" in line:
            continue
        share = line["share_of_limit"]
        cells = [
            f"{line['seconds'] * 1e3:.1f}",
            "" if share is None or line["way"].startswith("top-k") else f"{share:.0%}",
            f"{line['over_plain']:.2f} ({line['low']:.2f} to {line['high']:.2f})"
            if "over_plain" in line
            else "",
        ]
        cells = [cell if line["valid"] or not cell else f"[{cell}]" for cell in cells]
        rows.append(f"| {line['way']} | {line['bytes'] / 2**20:.3g} | {' | '.join(cells)} |")
    return "\n".join(rows)
