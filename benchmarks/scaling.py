"""What exchanges cost with up to 10,000 ranks, by formulas and constants: docs/scaling.md's tables.

    python benchmarks/scaling.py benchmarks/results/DATE-comm-MACHINE-hosts.jsonl [--write]

The constants of this machine are fitted to the all-reduces of two ranks in the result file (from
comm.py), those of NCCL are published. --write puts the tables into the document.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import report
from torchacc.dist.cost import Cost, fit

DOCUMENT = report.ROOT / "docs" / "scaling.md"
BEGIN, END = "<!-- tables: benchmarks/scaling.py -->\n", "<!-- end of tables -->\n"
RANKS = (16, 64, 512, 4096, 10_000)
PER_HOST = 8
GRADIENTS = 25_557_032 * 4  # bytes: ResNet-50 in float32
# Times of the smallest all-reduces (8 bytes), in seconds, by ranks: 2, 4 and 8 hosts of 8 V100.
PUBLISHED_SMALLEST = {16: 163.4e-6, 32: 319.4e-6, 64: 631.3e-6}
# A ring of 40 H100 on 5 hosts: 1 MiB, in seconds.
PUBLISHED_MIB = (40, 354.9e-6)


@dataclass(frozen=True)
class Network:
    """Seconds per message and bytes per second: between ranks of a host, and of a host's link."""

    latency_in: float
    bandwidth_in: float
    latency_out: float
    bandwidth_out: float

    def ring(self, ranks: int, size: float) -> float:
        """A plain all-reduce: a ring over all ranks, which passes each host's link once."""
        share = (ranks - 1) / ranks
        return 2 * (ranks - 1) * self.latency_out + 2 * share * size / self.bandwidth_out

    def tree(self, ranks: int, per_host: int, size: float) -> float:
        """Two binary trees over hosts and chains within them, as NCCL has them."""
        rounds = math.ceil(math.log2(ranks // per_host))
        inside = 2 * (per_host - 1) * self.latency_in
        return inside + 2 * rounds * self.latency_out + 2 * size / self.bandwidth_out

    def hierarchical(self, ranks: int, per_host: int, size: float) -> float:
        """Rings within hosts (to each rank its part, and back) and across, over the parts."""
        hosts = ranks // per_host
        inside, across = (per_host - 1) / per_host, (hosts - 1) / hosts
        return (
            2 * (per_host - 1) * self.latency_in
            + 2 * inside * size / self.bandwidth_in
            + 2 * (hosts - 1) * self.latency_out
            + 2 * across * size / self.bandwidth_out
        )

    def sharded(self, ranks: int, size: float) -> float:
        """A step of sharded training: parameters gathered twice, gradients scattered once."""
        share = (ranks - 1) / ranks
        return 3 * ((ranks - 1) * self.latency_out + share * size / self.bandwidth_out)

    def bucket(self, ranks: int, gradients: int) -> int:
        """Bytes that should travel together in plain all-reduces (fusion_threshold "auto")."""
        share = 2 * (ranks - 1) / ranks
        latency = 2 * (ranks - 1) * self.latency_out
        return Cost(latency, self.bandwidth_out / share).bucket(gradients)


def published() -> Network:
    """NCCL's; docs/scaling.md names the sources."""
    # The least squares of times that are 2 (n - 1) messages one after another.
    messages = {2 * (ranks - 1): seconds for ranks, seconds in PUBLISHED_SMALLEST.items()}
    latency = sum(m * s for m, s in messages.items()) / sum(m * m for m in messages)
    return Network(latency, 370e9, latency, 190e9)


def measured(lines: Sequence[Mapping[str, Any]]) -> Network:
    """Those of the machine that the lines are of.

    Two ranks send each other a half of the bytes, twice: 2 latencies, and the bytes over the
    bandwidth. The smallest size tells the one and the largest the other: what lies between passes
    the link's bucket of tokens in part. Between hosts all ranks of a host do so at the same time.
    """
    costs = {}
    for way in ("within a host", "between hosts"):
        found = [line for line in lines if line["kind"] == "exchange" and line["way"] == way]
        if not found:
            raise ValueError(f"[benchmarks.scaling] no exchanges {way} in this file")
        found.sort(key=lambda line: line["bytes"])
        used = found[0], found[-1]
        if not all(line["valid"] for line in used):
            raise ValueError(
                f"[benchmarks.scaling] others used the cores during the exchanges {way}. Measure "
                "again on a quiet machine: benchmarks/comm.py --part hosts"
            )
        costs[way] = fit([(line["bytes"], line["seconds"]) for line in used])
    inside, across = costs["within a host"], costs["between hosts"]
    per_host = next(line["ranks"] for line in lines if line.get("way") == "between hosts")
    return Network(
        inside.latency / 2, inside.bandwidth, across.latency / 2, across.bandwidth * per_host
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rest)) + "\n"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _costs(network: Network) -> str:
    rows = [["ranks", "plain", "two trees", "hierarchical", "sharded step", "bucket for plain"]]
    for ranks in RANKS:
        rows.append(
            [
                f"{ranks:,}",
                _time(network.ring(ranks, GRADIENTS)),
                _time(network.tree(ranks, PER_HOST, GRADIENTS)),
                _time(network.hierarchical(ranks, PER_HOST, GRADIENTS)),
                _time(network.sharded(ranks, GRADIENTS)),
                f"{network.bucket(ranks, GRADIENTS) / 2**20:.3g} MiB",
            ]
        )
    return _table(rows)


def _checks(own: Network, nccl: Network, lines: Sequence[Mapping[str, Any]]) -> str:
    """The formulas beside times that the constants were not fitted to."""
    rows = [["what", "by the formula", "of that latencies", "measured"]]
    for line in lines:
        if line.get("way") not in ("plain", "hierarchical"):
            continue
        size, ranks = line["bytes"], line["ranks"]
        if line["way"] == "plain":
            expected = own.ring(ranks, size), own.ring(ranks, 0)
        else:
            expected = own.hierarchical(ranks, 2, size), own.hierarchical(ranks, 2, 0)
        named = f"here, 2 x 2 ranks, {line['way']}, {size >> 20} MiB"
        rows.append([named, *map(_time, expected), _time(line["seconds"])])
    for ranks, seconds in PUBLISHED_SMALLEST.items():
        named = f"NCCL, {ranks} ranks, 8 bytes (fitted)"
        rows.append([named, *(_time(nccl.ring(ranks, size)) for size in (8, 0)), _time(seconds)])
    ranks, seconds = PUBLISHED_MIB
    found = (_time(nccl.ring(ranks, size)) for size in (1 << 20, 0))
    rows.append([f"NCCL, {ranks} ranks, 1 MiB", *found, _time(seconds)])
    return _table(rows)


def text(file: Path) -> str:
    """The tables, of a result file."""
    lines = report.read([file])
    own, nccl = measured(lines), published()
    rows = [["", "latency within a host", "bandwidth", "latency between hosts", "of a host's link"]]
    for name, network in (("this machine", own), ("NCCL, published", nccl)):
        rows.append(
            [
                name,
                f"{network.latency_in * 1e6:.3g} us",
                f"{network.bandwidth_in / 1e9:.3g} GB/s",
                f"{network.latency_out * 1e6:.3g} us",
                f"{network.bandwidth_out / 1e9:.3g} GB/s",
            ]
        )
    title = f"{GRADIENTS / 1e6:.0f} MB (ResNet-50, float32), hosts of {PER_HOST} ranks"
    return (
        f"Constants (`benchmarks/results/{file.name}`):\n\n{_table(rows)}\n"
        f"{title}, constants of NCCL:\n\n{_costs(nccl)}\n"
        f"{title}, constants of this machine:\n\n{_costs(own)}\n"
        f"The formulas beside measurements:\n\n{_checks(own, nccl, lines)}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser("benchmarks/scaling.py", description="Costs on paper.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true", help="into docs/scaling.md")
    options = parser.parse_args(arguments)
    tables = text(options.file)
    if not options.write:
        print(tables)
        return 0
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(before + BEGIN + tables + END + after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
