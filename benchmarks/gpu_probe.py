"""What gpu_check.py asks of a process of its own. Prints a line `ROW [what, status, text]` each.

python benchmarks/gpu_probe.py env | steps CASE | kernels [--small]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import cases


def row(what: str, status: str, text: str) -> None:
    """Tells a finding."""
    print("ROW " + json.dumps([what, status, text]), flush=True)


def env(small: bool) -> None:
    """Versions, and the GPU as torch sees it."""
    row("python, torch", "ok", f"{sys.version.split()[0]}, {torch.__version__}")
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        memory = f"{found.total_memory / 2**30:.0f} GiB"
        row("GPU", "ok", f"{found.name}, sm_{found.major}{found.minor}, {memory}")
    else:
        row("GPU", "not run" if small else "BAD", "torch sees none")


def device() -> Any:
    """The extension, loaded; a row tells where its operators run."""
    import torchacc_device

    extension = torchacc_device._C
    row("executor", "ok", extension.executor_name())
    return extension


def steps(case: str, small: bool) -> None:
    """How the steps of a case run once they repeat: what is submitted, and what keeps it back."""
    extension = device()
    if small:
        extension.capture_plans(True)
        torch.use_deterministic_algorithms(True)  # no trials of kernels first
    program = cases.build(case, "acc", "plain")
    warm, counted = (6, 4) if small else (30, 50)
    for index in range(warm):
        program.step(index)
    before = dict(extension.stats())
    wall, cpu = [], []
    for index in range(counted):
        began, began_cpu = time.perf_counter(), time.thread_time()
        program.step(index)
        wall.append(time.perf_counter() - began)
        cpu.append(time.thread_time() - began_cpu)
    after = dict(extension.stats())
    times = f"{1e3 * statistics.median(wall):.3f} ms, {1e6 * statistics.median(cpu):.0f} us of CPU"
    row(f"{case}: a step", "ok", times)
    changed = {key: after[key] - before.get(key, 0) for key in after}
    submitted = changed.get("captures_submitted", 0)
    launches, captures = changed.get("captured_launches", 0), changed.get("captures", 0)
    said = f"{submitted} submissions of captured work, {launches} launches, {captures} captures"
    row(f"{case}: {counted} steps", "ok" if submitted >= counted else "BAD", said)
    for key, number in sorted(after.items()):
        reasons = ("not_captured", "captured_again", "fallback", "jit/", "kernel_put_aside")
        if number and key.startswith(reasons):
            row(f"{case}: {key}", "ok", f"{number}, {changed[key]} of them in these steps")


def bandwidth(make: Callable[[], object], moved: int, runs: int) -> float:
    """Bytes per second of a step that moves so many bytes: the median of some runs.

    Results are held while steps run: what nobody holds is not computed.
    """
    for _ in range(6):
        kept = make()
        torch.acc.synchronize()
    times = []
    for _ in range(runs):
        torch.acc.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            kept = make()
            torch.acc.synchronize()
        times.append((time.perf_counter() - began) / 10)
    del kept
    return moved / statistics.median(times)


def kernels(small: bool) -> None:
    """Generated kernels beside a copy of as much memory, each step with its launch."""
    device()
    rows, columns = (64, 1024) if small else (1 << 16, 1024)
    runs = 2 if small else 7
    x, y, z = (torch.randn(rows, columns, device="acc") for _ in range(3))
    weight, bias = torch.randn(columns, device="acc"), torch.randn(columns, device="acc")
    size = x.numel() * 4
    state = [torch.zeros_like(x) for _ in range(2)]

    def moments() -> object:
        state[0].lerp_(x, 0.1)
        state[1].mul_(0.99).addcmul_(x, x, value=0.01)
        return y.addcdiv_(state[0], state[1].sqrt().add_(1e-8), value=-1e-4)

    functional = torch.nn.functional
    programs: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (lambda: z.copy_(x), 2 * size),
        "pointwise": (lambda: torch.tanh(x * y + x) * 0.5, 3 * size),
        "dropout": (lambda: functional.dropout(x + y, 0.1), 3 * size),
        "softmax": (lambda: functional.softmax(x * 0.5, -1), 2 * size),
        "sum": (lambda: (x * 0.5).sum(), size),
        "layer norm": (lambda: functional.layer_norm(x, (columns,), weight, bias), 2 * size),
        "column sums": (lambda: (x * y).sum(0), 2 * size),
        "moments (Adam)": (moments, 7 * size),
    }
    copied = 0.0
    for name, (make, moved) in programs.items():
        reached = bandwidth(make, moved, runs)
        copied = copied or reached
        row(name, "ok", f"{reached / 1e9:.0f} GB/s, {100 * reached / copied:.0f} % of the copy's")


def main() -> None:
    """The command line."""
    small = "--small" in sys.argv
    verb, *rest = (word for word in sys.argv[1:] if word != "--small")
    if verb == "env":
        env(small)
    elif verb == "steps":
        steps(rest[0], small)
    else:
        kernels(small)


if __name__ == "__main__":
    main()
