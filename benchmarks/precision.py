"""Training steps in half precision against the same steps in float32, on acc.

    python benchmarks/precision.py [--threads 1] [--json FILE] [CASE ...]

The three precisions of a case are in one process and take turns; a line of JSON per case and
precision with medians and the ratio to float32 of neighbouring rounds with its 95 % interval, and a
table in Markdown. Exit status 4: a precision may take more than `MUST` times as long as float32.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CASES = ("resnet18_cifar", "gpt")
PRECISIONS = ("float32", "float16", "bfloat16")
WARM_STEPS, ROUNDS, STEPS = 6, 11, 3
MUST = 1.3


def measure(case: str) -> dict[str, list[float]]:
    """Milliseconds per step by precision, round by round."""
    import torch

    from benchmarks import cases

    programs = {p: cases.build(case, "acc", "plain", precision=p) for p in PRECISIONS}
    for program in programs.values():
        for index in range(WARM_STEPS):
            program.step(index)
    times: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    for _ in range(ROUNDS):
        for precision, program in programs.items():
            torch.acc.synchronize()
            start = time.perf_counter()
            for index in range(STEPS):
                program.step(index, read=False)
            torch.acc.synchronize()
            times[precision].append((time.perf_counter() - start) / STEPS * 1e3)
    return times


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="precision.py", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", default=CASES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    import torch

    import torchacc_device  # noqa: F401
    from benchmarks import report, stats
    from benchmarks.run import EXIT_MISSED

    torch.set_num_threads(arguments.threads)
    settings = {
        "suite": "precision",
        "cases": list(arguments.cases),
        "threads": arguments.threads,
        "alternations": ROUNDS,
        "torch": torch.__version__,
    }
    lines: list[dict[str, Any]] = [report.header(settings, os.environ)]
    print("| case | precision | ms | times float32's (95 %) |\n|---|---|---|---|")
    for case in arguments.cases:
        found = measure(case)
        for precision, times in found.items():
            ratios = [ms / full for ms, full in zip(times, found["float32"], strict=True)]
            ratio = stats.speedup(ratios, [1.0] * len(ratios))
            line = {
                "kind": "precision",
                "case": case,
                "precision": precision,
                "median_ms": stats.median(times),
                "to_float32": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
                "must": MUST,
                "holds": ratio.high <= MUST + stats.MUST_SLACK,
            }
            lines.append(line)
            print(
                f"| `{case}` | {precision} | {line['median_ms']:.0f} | "
                f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) |",
                flush=True,
            )
    if arguments.json is not None:
        arguments.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0 if all(line.get("holds", True) for line in lines) else EXIT_MISSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
