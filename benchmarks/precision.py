"""Training steps in half precision against the same steps in float32, on acc.

    python benchmarks/precision.py [--threads 1] [--json FILE] [CASE ...]

The three precisions of a case are in one process and take turns; a line of JSON per case and
precision with medians and the ratio to float32 of neighbouring rounds with its 95 % interval, and a
table in Markdown. Exit status 4: a precision may take more than `MUST` times as long as float32.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CASES = ("resnet18_cifar", "gpt")
PRECISIONS = ("float32", "float16", "bfloat16")
MUST = 1.3


def main(argv: list[str]) -> int:
    from benchmarks import turns

    arguments = turns.parser("precision.py", __doc__.splitlines()[0], CASES).parse_args(argv)
    import torch

    import torchacc_device  # noqa: F401
    from benchmarks import cases, stats
    from benchmarks.run import EXIT_MISSED

    torch.set_num_threads(arguments.threads)
    lines: list[dict[str, Any]] = [turns.header("precision", arguments)]
    print("| case | precision | ms | times float32's (95 %) |\n|---|---|---|---|")
    for case in arguments.cases:
        programs = {p: cases.build(case, "acc", "plain", precision=p) for p in PRECISIONS}
        for precision, found in turns.compared(turns.measured(programs), "float32"):
            line = {
                "kind": "precision",
                "case": case,
                "precision": precision,
                "median_ms": found["median_ms"],
                "to_float32": found["ratio"],
                "low": found["low"],
                "high": found["high"],
                "must": MUST,
                "holds": found["high"] <= MUST + stats.MUST_SLACK,
            }
            lines.append(line)
            print(
                f"| `{case}` | {precision} | {line['median_ms']:.0f} | "
                f"{line['to_float32']:.2f} ({line['low']:.2f} to {line['high']:.2f}) |",
                flush=True,
            )
    turns.write(lines, arguments.json)
    return 0 if all(line.get("holds", True) for line in lines) else EXIT_MISSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
