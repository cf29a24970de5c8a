"""What `torch.compile(model)` costs and changes on acc, by the graph that is run.

    python benchmarks/compiled.py [--threads 1] [--json FILE] [CASE ...]

The ways of a case are in one process and take turns: without torch.compile (`plain`), with the
backend "acc", which runs Dynamo's graph (`model`), and with AOTAutograd's graphs of forward and
backward run as they are (`aot`). A line of JSON per case and way: medians, the ratio to `plain` of
neighbouring rounds with its 95 % interval, the seconds of the first step, and how far the losses of
the first `COUNT` steps are from those of `plain` at most, by these; and a table in Markdown.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import turns

CASES = ("mlp", "resnet18_cifar", "gpt")
WAYS = ("plain", "model", "aot")
COUNT = 20


def main(argv: list[str]) -> int:
    arguments = turns.parser("compiled.py", __doc__.splitlines()[0], CASES).parse_args(argv)
    import torch

    import torchacc_device  # noqa: F401
    from benchmarks import cases

    torch.set_num_threads(arguments.threads)
    lines: list[dict[str, Any]] = [turns.header("compiled", arguments)]
    print(
        "| case | way | ms | times plain's (95 %) | first step | losses |",
        "|---" * 6 + "|",
        sep="\n",
    )
    for case in arguments.cases:
        programs, first_s, losses = {}, {}, {}
        for way in WAYS:
            torch._dynamo.reset()
            programs[way] = cases.build(case, "acc", way)
            began = time.perf_counter()
            losses[way] = [programs[way].step(0)]
            first_s[way] = time.perf_counter() - began
            losses[way] += [programs[way].step(index) for index in range(1, COUNT)]
        for way, found in turns.compared(turns.measured(programs), "plain"):
            pairs = zip(losses[way], losses["plain"], strict=True)
            line = {
                "kind": "compiled",
                "case": case,
                "way": way,
                **found,
                "first_step_s": first_s[way],
                "losses": max(abs(loss / plain - 1) for loss, plain in pairs),
            }
            lines.append(line)
            print(
                f"| `{case}` | {way} | {line['median_ms']:.2f} | {line['ratio']:.2f} "
                f"({line['low']:.2f} to {line['high']:.2f}) | {line['first_step_s']:.2f} s | "
                f"{line['losses']:.1g} |",
                flush=True,
            )
    turns.write(lines, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
