"""docs/scaling.md: its tables follow from the result file that they name, and the formulas hold.

So does docs/distributed.md's of exchanges, from the same file.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.scaling import Network

EXCHANGES = scaling.report.ROOT / "docs" / "distributed.md"
FLAT = Network(0.0, 1e9, 0.0, 1e9)
SLOW = Network(1e-6, 1e15, 1e-3, 1e15)


def tables() -> tuple[str, Path]:
    """docs/scaling.md's, and the file that they name."""
    _, _, rest = scaling.DOCUMENT.read_text().partition(scaling.BEGIN)
    found, end, _ = rest.partition(scaling.END)
    name = re.search(r"Constants \(`(benchmarks/results/[^`]+)`\)", found)
    assert end and name, "the tables are there: benchmarks/scaling.py FILE --write"
    return found, scaling.report.ROOT / name[1]


def test_the_tables_follow_from_their_file():
    found, file = tables()
    assert found == scaling.text(file)


def test_exchanges_are_told_from_the_same_file():
    file = tables()[1]
    lines = [line for line in scaling.report.read([file]) if line["kind"] == "exchange"]
    assert all(line["valid"] for line in lines), "a file counts where nothing was disturbed"
    rows = []
    for line in lines:
        if line["ranks"] < 4:
            continue
        # of top-k the link's limit says nothing
        limit = "" if line["way"].startswith("top-k") else f"{line['share_of_limit']:.0%}"
        ratio = "{over_plain:.2f} ({low:.2f} to {high:.2f})".format(**line) if "low" in line else ""
        what = (line["way"], line["bytes"] >> 20, f"{line['seconds'] * 1e3:.1f}", limit, ratio)
        rows.append("| " + " | ".join(map(str, what)) + " |")
    _, _, rest = EXCHANGES.read_text().partition(f"`benchmarks/results/{file.name}`")
    head, _, rest = rest.partition("|---|---|---|---|---|\n")
    assert head and rest.partition("\n\n")[0].splitlines() == rows


def test_two_hosts_of_two_ranks_save_a_third_of_the_links_bytes():
    fast_inside = Network(0.0, 1e15, 0.0, 1e9)
    plain, ours = fast_inside.ring(4, 1e9), fast_inside.hierarchical(4, 2, 1e9)
    assert plain / ours == pytest.approx(1.5, rel=1e-4)


def test_all_ways_move_twice_the_bytes_where_ranks_are_many():
    assert FLAT.ring(10_000, 1e9) == pytest.approx(2.0, rel=1e-3)
    assert FLAT.tree(10_000, 8, 1e9) == pytest.approx(2.0)
    assert FLAT.sharded(10_000, 1e9) == pytest.approx(3.0, rel=1e-3)


def test_latencies_grow_with_ranks_with_hosts_and_with_their_logarithm():
    assert SLOW.ring(1000, 0) == pytest.approx(1.998)
    assert SLOW.hierarchical(1000, 10, 0) == pytest.approx(0.198 + 18e-6)
    assert SLOW.tree(1024, 8, 0) == pytest.approx(0.014 + 14e-6)
    assert SLOW.sharded(1000, 0) == pytest.approx(2.997)


def test_constants_are_found_again():
    """Lines of a machine with known constants."""
    sizes = (4096, 1 << 20, 25 << 20)
    lines = [
        {
            "kind": "exchange",
            "way": way,
            "ranks": 2,
            "bytes": size,
            "seconds": 2 * late + size / w,
            "valid": True,
        }
        for way, late, w in (("within a host", 1e-4, 1e9), ("between hosts", 1e-3, 5e7))
        for size in sizes
    ]
    found = scaling.measured(lines)
    assert found.latency_in == pytest.approx(1e-4) and found.bandwidth_in == pytest.approx(1e9)
    assert found.latency_out == pytest.approx(1e-3) and found.bandwidth_out == pytest.approx(1e8)
    with pytest.raises(ValueError, match="no exchanges between hosts"):
        scaling.measured(lines[:3])
    lines[-1]["valid"] = False
    with pytest.raises(ValueError, match="others used the cores during the exchanges between"):
        scaling.measured(lines)
