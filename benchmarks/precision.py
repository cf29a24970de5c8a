"""Training steps in half precision against the same steps in float32, on acc.

    python benchmarks/precision.py [--threads 1] [--json FILE] [CASE ...]

The three precisions of a case are in one process and take turns; a line of JSON per case and
precision with medians and the ratio to float32, and a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CASES = ("resnet18_cifar", "gpt")
PRECISIONS = ("float32", "float16", "bfloat16")
WARM_STEPS, ROUNDS, STEPS = 6, 10, 3


def measure(case: str) -> dict[str, float]:
    """Milliseconds per step by precision."""
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
    return {precision: statistics.median(found) for precision, found in times.items()}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="precision.py", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", default=CASES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    import torch

    import torchacc_device  # noqa: F401
    from benchmarks import report

    torch.set_num_threads(arguments.threads)
    settings = {
        "suite": "precision",
        "cases": list(arguments.cases),
        "threads": arguments.threads,
        "alternations": ROUNDS,
        "torch": torch.__version__,
    }
    lines: list[dict[str, Any]] = [report.header(settings, os.environ)]
    print("| case | precision | ms | times float32's |\n|---|---|---|---|")
    for case in arguments.cases:
        found = measure(case)
        for precision, ms in found.items():
            ratio = ms / found["float32"]
            print(f"| `{case}` | {precision} | {ms:.0f} | {ratio:.2f} |", flush=True)
            lines.append(
                {
                    "kind": "precision",
                    "case": case,
                    "precision": precision,
                    "median_ms": ms,
                    "to_float32": ratio,
                }
            )
    if arguments.json is not None:
        arguments.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
