"""What a step consists of on acc, and how fast it could be: the profile behind what is missed.

    python benchmarks/limits.py [--case NAME ...] [--threads N] [--json FILE]

Per case, in milliseconds: a step in eager and on acc, each in its own process on the same core; of
acc's the operators that are the library's (products, convolutions, attention), the generated
kernels, the rest of the plan, and what is left, which is Python, autograd and recording. The times
of a plan's steps are their fastest, so that what is left is at most a little too large. Then what
acc would be against eager if only the plan took time, if only its library operators did, and what
the machine copies per second.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import driver, load, report
from benchmarks.cases import CASES, build, names_of

WARM_UP = 20
ROUNDS = 9
ROUND_S = 0.5
COPIED_BYTES = 1 << 28
# Matrix products, convolutions, attention, recurrent layers: what no fusion makes faster.
LIBRARY = ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_scaled", "mkldnn_rnn")


def milliseconds(step: Callable[[int], object], least_s: float) -> float:
    """The median over rounds of at least so many seconds, per step."""
    index, times = 0, []
    for _ in range(ROUNDS):
        began, first = time.perf_counter(), index
        while time.perf_counter() - began < least_s or index == first:
            step(index)
            index += 1
        times.append((time.perf_counter() - began) / (index - first))
    return 1e3 * statistics.median(times)


def copy_gb_s(least_s: float) -> float:
    """Bytes read and written per second by a copy that no cache holds."""
    import torch

    source = torch.ones(COPIED_BYTES // 4)
    target = torch.empty_like(source)
    return 2e-6 * COPIED_BYTES / milliseconds(lambda _: target.copy_(source), least_s)


def parts_of_plan() -> dict[str, float]:
    """Milliseconds of the last plan's steps: each the fastest that was seen."""
    import torch

    import torchacc_device

    plan = torchacc_device._C.plan_data(torch.acc.current_device())
    nodes = plan["nodes"]
    found = {"library": 0.0, "kernels": 0.0, "other": 0.0}
    for step in plan["steps"]:
        if step["kernel"] is not None:
            part = "kernels"
        else:
            operator = nodes[step["nodes"][0]]["op"].partition("::")[2]
            part = "library" if operator.startswith(LIBRARY) else "other"
        found[part] += 1e3 * (step["seconds"] or 0.0)
    return found


def work(name: str, device: str, threads: int, least_s: float) -> dict[str, float]:
    """What a process of its own measures."""
    import torch

    torch.set_num_threads(threads)
    if device == "acc":
        import torchacc
    program = build(name, device, "plain")
    for index in range(WARM_UP):
        program.step(index)
    found = {"step": milliseconds(program.step, least_s)}
    if device == "acc":
        with torchacc.profile_plans():
            for index in range(WARM_UP):
                program.step(index)
            found |= parts_of_plan()
    else:
        found["copy_gb_s"] = copy_gb_s(min(least_s, 0.2))
    return found


def measure(name: str, threads: int, least_s: float, caches: Path) -> dict[str, Any]:
    """The line of a case."""
    cores = load.choose_cores(threads)
    found: dict[str, dict[str, float]] = {}
    for device in ("cpu", "acc"):
        words = [name, device, str(threads), str(least_s)]
        done = subprocess.run(
            [sys.executable, __file__, "--work", *words],
            env=driver.environment(threads, caches, "host"),
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found[device] = json.loads(done.stdout.splitlines()[-1])
    eager, acc = found["cpu"], found["acc"]
    plan = acc["library"] + acc["kernels"] + acc["other"]
    return {
        "kind": "limit",
        "case": name,
        "threads": threads,
        "eager_ms": eager["step"],
        "acc_ms": acc["step"],
        "library_ms": acc["library"],
        "kernels_ms": acc["kernels"],
        "other_ms": acc["other"],
        "left_ms": acc["step"] - plan,
        "ratio": eager["step"] / acc["step"],
        "plan_alone": eager["step"] / plan,
        "library_alone": eager["step"] / acc["library"] if acc["library"] else None,
        "copy_gb_s": eager["copy_gb_s"],
    }


COLUMNS = (
    "eager_ms acc_ms library_ms kernels_ms other_ms left_ms ratio plan_alone library_alone"
    " copy_gb_s"
).split()


def line_of(row: dict[str, Any]) -> str:
    """A line of the table."""
    numbers = ["-" if row[name] is None else f"{row[name]:.3g}" for name in COLUMNS]
    return f"{row['case']:16}" + "".join(f"{number:>14}" for number in numbers)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser("benchmarks/limits.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--case",
        nargs="+",
        choices=CASES,
        default=names_of("host"),
        metavar="NAME",
        help="default: all but those for GPUs only",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--round-s", type=float, default=ROUND_S, help="seconds of a round")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work:
        name, device, threads, least_s = options.work
        print(json.dumps(work(name, device, int(threads), float(least_s))))
        return 0
    settings = {"suite": "host", "cases": options.case, "threads": options.threads}
    lines: list[dict[str, Any]] = [report.header(settings, dict(os.environ))]
    print(" " * 16 + "".join(f"{name:>14}" for name in COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        for name in options.case:
            lines.append(measure(name, options.threads, options.round_s, Path(folder)))
            print(line_of(lines[-1]), flush=True)
            if options.json:  # what was measured stays when the rest is not waited for
                options.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
