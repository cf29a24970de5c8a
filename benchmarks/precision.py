"""Training steps in half precision against the same steps in float32, on acc.

    python benchmarks/precision.py [--threads 1] [--json FILE] [CASE ...]

The three precisions of a case are in one process and take turns; a line of JSON per case and
precision with medians and the ratio to float32 of neighbouring rounds with its 95 % interval, and
what the kernels that cast parameters take of the step; and a table in Markdown. Exit status 4: a
precision may take more than `MUST` times as long as float32.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import turns

if TYPE_CHECKING:
    from benchmarks.programs import Program

CASES = ("resnet18_cifar", "gpt")
PRECISIONS = ("float32", "float16", "bfloat16")
MUST = 1.3


# A parameter in half precision: %3:f16[64,3,3,3], %4:f32[64,3,3,3].
CAST = re.compile(r"aten::copy_\(%\d+:b?f16\[[^]]*\], %\d+:f32\[")


def casts(program: Program) -> tuple[int, float]:
    """How many parameters a step casts, and the milliseconds of the kernels that do it.

    These may do other things, too. Each is the fastest of a few steps.
    """
    import torch

    import torchacc
    import torchacc_device

    with torchacc.profile_plans():
        for index in range(turns.STEPS):
            program.step(index)
        plan = torchacc_device._C.plan_data(torch.acc.current_device())
    nodes, buffers = plan["nodes"], plan["buffers"]
    given = {number for number, buffer in enumerate(buffers) if buffer["kind"] == "input"}
    changed = given & {number for node in nodes for number in node["writes"]}
    found = [
        index
        for index, node in enumerate(nodes)
        if CAST.match(node["text"]) and changed & set(node["reads"])
    ]
    steps = {nodes[index]["step"] for index in found}
    return len(found), 1e3 * sum(plan["steps"][step]["seconds"] or 0.0 for step in steps)


def main(argv: list[str]) -> int:
    arguments = turns.parser("precision.py", __doc__.splitlines()[0], CASES).parse_args(argv)
    import torch

    import torchacc_device  # noqa: F401
    from benchmarks import cases, stats
    from benchmarks.run import EXIT_MISSED

    torch.set_num_threads(arguments.threads)
    lines: list[dict[str, Any]] = [turns.header("precision", arguments)]
    print("| case | precision | ms | times float32's (95 %) | casts | of the step |")
    print("|---" * 6 + "|")
    for case in arguments.cases:
        programs = {p: cases.build(case, "acc", "plain", precision=p) for p in PRECISIONS}
        for precision, found in turns.compared(turns.measured(programs), "float32"):
            count, cast_ms = casts(programs[precision])
            line = {
                "kind": "precision",
                "case": case,
                "precision": precision,
                "median_ms": found["median_ms"],
                "to_float32": found["ratio"],
                "low": found["low"],
                "high": found["high"],
                "casts": count,
                "casts_ms": cast_ms,
                "must": MUST,
                "holds": found["high"] <= MUST + stats.MUST_SLACK,
            }
            lines.append(line)
            print(
                f"| `{case}` | {precision} | {line['median_ms']:.0f} | "
                f"{line['to_float32']:.2f} ({line['low']:.2f} to {line['high']:.2f}) | {count} | "
                f"{100 * cast_ms / line['median_ms']:.2f} % |",
                flush=True,
            )
    turns.write(lines, arguments.json)
    return 0 if all(line.get("holds", True) for line in lines) else EXIT_MISSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
