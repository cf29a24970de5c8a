"""What gpu_check.py asks of a process of its own. Prints a line `ROW [what, status, text]` each.

python benchmarks/gpu_probe.py env | steps CASE | trace CASE cuda|acc | copies | epilogues | kernels
    | norms | record | gradients CASE DEVICE FILE [--small]
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import cases, models

# How far the gradients of one step, in float32, may be from eager's, relative to their norm; those
# of one parameter five times as far. An activation that rounds to the other side of zero takes its
# whole gradient with it: 2.5e-3 were measured for a small ResNet, 4.5e-7 for a GPT.
GRADIENTS = 1e-2
# Steps count once so many in a row were captured work and nothing was captured anew; for kernels of
# a cold cache, and comparing them with what they replace, is waited so long.
CALM, PATIENCE_S = 10, 15.0
# Microseconds of the CPU that the end of a step may take, launches of graphs in it, and the share
# of a copy's bandwidth that generated kernels must reach: must and goal.
REPLAY_US, LAUNCHES, BANDWIDTH = (30.0, 10.0), 1, (0.85, 0.92)
# Microseconds that recording an operator below autograd may take: must and goal.
RECORD_US = (0.4, 0.25)
# Parameters of the optimizers whose replays are timed: about as many as ResNet-50 and GPT-2 have,
# and more.
UPDATED = (160, 500)
# How far cublasLt's GELU may be from the exact one, of numbers up to 8 in float32: docs/gpu.md.
GELU_OFF = 5.5e-6


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


def device(small: bool = False) -> Any:
    """The extension, loaded; a row tells where its operators run. If small, the host captures."""
    import torchacc_device

    extension = torchacc_device._C
    row("executor", "ok", extension.executor_name())
    if small:
        extension.capture_plans(True)
        torch.use_deterministic_algorithms(True)  # no trials of kernels first
    return extension


def judge(what: str, holds: bool, text: str) -> None:
    """A row for a requirement of speed, which is of a GPU's; one that is missed is no fault."""
    if torch.cuda.is_available():
        row(what, "ok" if holds else "missed", text)
    else:
        row(what, "ok", f"{text}; no GPU: not judged")


def settle(extension: Any, step: Callable[[int], object]) -> tuple[bool, str]:
    """Runs steps until they are captured work; whether they became it in time, and in how long.

    Results are held while the next step runs: what nobody holds is not computed.
    """
    began = time.perf_counter()
    index = calm = 0
    before = extension.stats()
    while calm < CALM and time.perf_counter() - began < PATIENCE_S:
        kept = step(index)
        index += 1
        now = extension.stats()
        submitted, captured = (
            now.get(name, 0) - before.get(name, 0) for name in ("captures_submitted", "captures")
        )
        calm = calm + 1 if submitted and not captured else 0
        before = now
    del kept
    took = f"{time.perf_counter() - began:.1f} s, {index} steps"
    return calm >= CALM, took if calm >= CALM else f"not within {took}"


def steps(case: str, small: bool) -> None:
    """How the steps of a case run once they repeat: what is submitted, and what keeps it back."""
    extension = device(small)
    program = cases.build(case, "acc", "plain", small)
    counted = 4 if small else 200
    settled, took = settle(extension, program.step)
    row(f"{case}: until it is captured", "ok" if settled else "BAD", took)
    row(f"{case}: host memory of captures", "ok", host_memory_of_captures(extension, program))
    settle(extension, program.step)  # that dropped them
    before = dict(extension.stats())
    whole, boundary = Times(), Times()
    for index in range(counted):
        with whole.one():
            program.step(index)
    after = dict(extension.stats())
    with boundary.of_boundaries():
        for index in range(counted):
            program.step(index)
    row(f"{case}: a step", "ok", str(whole))
    row(f"{case}: its boundary", "ok", str(boundary))
    judge_replay(case, boundary)
    changed = {key: after[key] - before.get(key, 0) for key in after}
    submitted = changed.get("captures_submitted", 0)
    launches, captures = changed.get("captured_launches", 0), changed.get("captures", 0)
    said = f"{submitted} submissions of captured work, {launches} launches, {captures} captures"
    row(f"{case}: {counted} steps", "ok" if submitted >= counted else "BAD", said)
    judge_launches(case, launches, counted)
    took = f"{after['captures']} runs in {1e-3 * after['capture_us']:.1f} ms"
    row(f"{case}: captured", "ok", took)
    for key, number in sorted(after.items()):
        reasons = ("not_captured", "captured_again", "fallback", "jit/", "kernel_put_aside")
        if number and key.startswith(reasons):
            row(f"{case}: {key}", "ok", f"{number}, {changed[key]} of them in these steps")


def judge_replay(case: str, boundary: Times) -> None:
    """Rows for the time that replaying a step takes of the CPU."""
    most, goal = REPLAY_US
    for what, share in (("median", 0.5), ("99 %", 0.99)):
        took = boundary.cpu_us(share)
        said = f"{took:.0f} us of the CPU, at most {most:.0f}, goal {goal:.0f}"
        judge(f"{case}: replay, {what}", took <= most, said)


def judge_launches(case: str, launches: int, counted: int) -> None:
    """A row for the launches of captured work: a step is one."""
    said = f"{launches / counted:.2f}, at most {LAUNCHES}"
    judge(f"{case}: launches of graphs in a step", launches <= LAUNCHES * counted, said)


def resident() -> int:
    """Bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def host_memory_of_captures(extension: Any, program: Any) -> str:
    """What the process has more once its steps are captured, and what the cache of plans counts."""
    torch.acc.empty_cache()  # drops them
    before = resident()
    steps = extension.stats()["steps"]
    program.step(0)
    steps = extension.stats()["steps"] - steps
    counted = dict(extension.held_memory(0))["of captured work, on the host"]
    grown = max(0, resident() - before)
    return f"{grown / 2**20:.1f} MiB more for {steps} calls, {counted / 2**20:.1f} MiB are counted"


def gradients(case: str, where: str, file: str, small: bool) -> None:
    """The gradients of one step: kept in the file, or on acc compared with those there.

    It begins with the first weights, but steps have gone before it, so that it is captured work.
    """
    if where == "acc":
        device(small)
    program = cases.build(case, where, "plain", small)
    begin = {name: value.clone() for name, value in program.model.state_dict().items()}
    for _ in range(6):
        program.step(0)
    program.model.load_state_dict(begin)
    program.step(0)
    found = {
        name: parameter.grad.double().cpu()
        for name, parameter in program.model.named_parameters()
        if parameter.grad is not None
    }
    if where != "acc":
        return torch.save(found, file)
    expected = torch.load(file)
    if expected.keys() != found.keys() or not found:
        return row(f"gradients of {case}", "BAD", "they are of other parameters than eager's")
    errors = {name: (found[name] - each).norm().item() for name, each in expected.items()}
    norms = {name: each.norm().item() for name, each in expected.items()}
    whole = math.hypot(*errors.values()) / math.hypot(*norms.values())
    # One that cancels out to almost nothing is mostly rounding.
    least = 1e-2 * max(norms.values())
    worst = max(errors, key=lambda name: errors[name] / max(norms[name], least))
    said = f"off by {whole:.1e} of their norm, {worst} by {errors[worst]:.1e} of {norms[worst]:.1e}"
    good = whole <= GRADIENTS and errors[worst] <= 5 * GRADIENTS * max(norms[worst], least)
    return row(f"gradients of {case}", "ok" if good else "BAD", said)


class Times:
    """How long something took, each time: by the clock, and of the thread's processor."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """The body is one."""
        began, began_cpu = time.perf_counter(), time.thread_time()
        yield
        self.wall.append(time.perf_counter() - began)
        self.cpu.append(time.thread_time() - began_cpu)

    @contextlib.contextmanager
    def of_boundaries(self) -> Iterator[None]:
        """Each end of a step within the body is one: it looks the plan up, compares what the
        captured work depends on, fills the table of arguments and submits.

        It waits for the step before, too (ACC_MAX_INFLIGHT), by spinning, which would be
        the GPU's time. So the GPU has finished before each of them.
        """
        from torchacc_device import _boundary

        mark_step = _boundary.mark_step

        def timed(*arguments: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # acc's own would submit what the step has recorded
            with self.one():
                mark_step(*arguments)

        _boundary.mark_step = timed
        try:
            yield
        finally:
            _boundary.mark_step = mark_step

    def cpu_us(self, share: float) -> float:
        """Microseconds of the processor that such a share of them took at most."""
        if not self.cpu:
            return math.inf
        ordered = sorted(self.cpu)
        return 1e6 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def __str__(self) -> str:
        if not self.wall:
            return "none"
        return (
            f"{1e3 * statistics.median(self.wall):.3f} ms, of the CPU "
            f"{self.cpu_us(0.5):.0f} us (99 %: {self.cpu_us(0.99):.0f} us)"
        )


def trace(case: str, where: str, small: bool) -> None:
    """What torch.profiler sees of steps: launches, and how long the GPU does nothing."""
    extension = device(small) if where == "acc" else None
    program = cases.build(case, where, "plain", small)
    warm, counted = (6, 4) if small else (30, 20)
    for index in range(warm):
        program.step(index)
    if extension is not None:
        settle(extension, program.step)

    def run() -> None:
        for index in range(counted):
            program.step(index, read=index == counted - 1)

    launches, graphs, busy, idle = gpu_work(traced(run))
    said = f"{launches / counted:.1f} launches and {graphs / counted:.1f} graphs in a step"
    if busy + idle:
        said += f", the GPU is idle {100 * idle / (busy + idle):.0f} % of the time"
    row(f"{case} on {where}", "ok", said)


def traced(run: Callable[[], object]) -> list[dict[str, Any]]:
    """The events of torch.profiler's Chrome trace of a call, and of the work that it submitted."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        return json.loads(file.read_text())["traceEvents"]


def gpu_work(events: Iterable[Mapping[str, Any]]) -> tuple[int, int, float, float]:
    """Of a Chrome trace: launches of kernels, of graphs; microseconds that the GPU worked, and did
    not between the first and the last of its work."""
    launches = graphs = 0
    work = []
    for event in events:
        category, name = event.get("cat", ""), event.get("name", "")
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            work.append((event["ts"], event["ts"] + event["dur"]))
        elif category in ("cuda_runtime", "cuda_driver"):
            graphs += name.startswith("cudaGraphLaunch")
            launches += "LaunchKernel" in name
    busy, end = 0.0, -math.inf
    for begins, ends in sorted(work):
        busy += max(0.0, ends - max(begins, end))
        end = max(end, ends)
    whole = end - min(begins for begins, _ in work) if work else 0.0
    return launches, graphs, busy, whole - busy


def copies(small: bool) -> None:
    """Whether a batch's copy to the device waits for the work that was submitted before it."""
    device()
    import torchacc

    size, products = (64, 2) if small else (8192, 20)
    matrix = torch.randn(size, size, device="acc")
    batch = torch.randn(8, 3, 32, 32) if small else torch.randn(64, 3, 224, 224)
    pinned = torch.cuda.is_available()
    sources = {"pageable": batch} | ({"pinned": batch.pin_memory()} if pinned else {})

    def work() -> torch.Tensor:
        made = matrix
        for _ in range(products):
            made = made @ matrix * 1e-2
        torchacc.mark_step()
        return made

    def timed(function: Callable[[], object]) -> float:
        began = time.perf_counter()
        kept = function()
        took = time.perf_counter() - began
        del kept
        return 1e3 * took

    def worked() -> None:
        work()
        torch.acc.synchronize()

    for _ in range(4):
        worked()
    whole = timed(worked)
    for name, source in sources.items():
        copy = functools.partial(source.to, "acc", non_blocking=True)
        for _ in range(3):
            kept = copy()
            torch.acc.synchronize()
        idle = timed(copy)
        torch.acc.synchronize()
        kept = work()
        busy = timed(copy)
        torch.acc.synchronize()
        del kept
        said = f"{busy:.2f} ms beside {whole:.1f} ms of work, {idle:.2f} ms alone"
        late = busy > idle + whole / 2 and pinned
        row(f"copy of a batch, {name}", "BAD" if late else "ok", said)


def judge_relu(dtype: torch.dtype, where: str, shapes: Iterable[tuple[int, int, int]]) -> None:
    """Whether the ReLU behind a product is torch's. Each shape may have a kernel of its own."""
    odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0, -1.0, 1.0, 0.0, 2.0])
    wrong = []
    for rows, terms, columns in shapes:
        left = torch.zeros(rows, terms, dtype=dtype, device=where)
        right = torch.zeros(terms, columns, dtype=dtype, device=where)
        before = odd.repeat(columns // len(odd))
        made = torch.ops.aten._addmm_activation(before.to(where, dtype), left, right).float().cpu()
        if not torch.allclose(made, before.relu(), rtol=0, atol=0, equal_nan=True):
            wrong.append(f"({rows}, {terms}) @ ({terms}, {columns}): {made[0, :8].tolist()}")
    said = "; ".join(wrong) or "as without a product"
    row(f"relu of NaN and infinities, {dtype}", "BAD" if wrong else "ok", said)


def epilogues(small: bool) -> None:
    """What NVIDIA does not say of cublasLt's epilogues: NaN, how exact, what is summed."""
    device()
    where = "cuda" if torch.cuda.is_available() else "cpu"
    size = 64 if small else 1024
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        judge_relu(dtype, where, ((8, 8, 8), (size, size, size), (8, 16 * size, 8)))
    for dtype in (torch.float32, torch.float16):
        x = torch.linspace(-8, 8, size * size).view(size, size).to(dtype)
        wide = x.double().requires_grad_()
        exact = torch.nn.functional.gelu(wide, approximate="tanh")
        (slope,) = torch.autograd.grad(exact.sum(), wide)
        eye = torch.eye(size, dtype=dtype, device=where)
        bias = torch.zeros(size, dtype=dtype, device=where)
        after, before = torch.ops.acc.addmm_gelu(bias, x.to(where), eye)
        back = torch.ops.acc.mm_gelu_backward(eye, torch.ones_like(eye) / size, x.to(where))
        for what, mine, expected in (
            ("gelu", after, exact.detach()),
            ("its input", before, x.double()),
            ("its backward", back * size, slope),
        ):
            error = (mine.double().cpu() - expected).abs().max().item()
            # of numbers up to 8
            most = 16 * torch.finfo(dtype).eps
            if what == "gelu" and dtype == torch.float32:
                most = GELU_OFF
            bad = error > most
            row(f"{what}, {dtype}", "BAD" if bad else "ok", f"off by {error:.1e} at most")

    before_tf32 = torch.backends.cuda.matmul.allow_tf32
    try:
        for tf32 in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            gradient = torch.full((size, size), 1 + 2.0**-12, device=where)
            _, total = torch.ops.acc.mm_and_sum(gradient.t(), torch.ones_like(gradient), False)
            error = (total.double() / size - (1 + 2.0**-12)).abs().max().item()
            said = f"off by {error:.1e}"
            row(f"sums of a bias, tf32 {tf32}", "BAD" if error > 2.0**-20 else "ok", said)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before_tf32


def seconds_of(make: Callable[[], object], runs: int) -> float:
    """Seconds that the GPU works in a call: its kernels and copies, not what submits them.

    Where there is no GPU it is the time of the call.
    """
    times = Times()

    def run() -> None:
        for _ in range(runs):
            with times.one():
                kept = make()
                torch.acc.synchronize()
        del kept

    events = traced(run)
    if not torch.cuda.is_available():
        return statistics.median(times.wall)
    # The arguments of captured work come from the host.
    own = [event for event in events if "HtoD" not in event.get("name", "")]
    return 1e-6 * gpu_work(own)[2] / runs


def record(small: bool) -> None:
    """What operators cost the host whatever they compute: recorded, looked up, replayed, and their
    memory."""
    extension = device(small)
    operators, rounds = (20, 4) if small else (1000, 100)
    took = 1e6 * extension.bench_record(rounds * operators, operators) / (rounds * operators)
    most, goal = RECORD_US
    said = f"{took:.2f} us below autograd, at most {most}, goal {goal}"
    judge("recording an operator", took <= most, said)
    plans = lookups(extension, operators, rounds)
    followed, found = (1e6 * statistics.median(times.wall) for times in plans)
    said = f"{(found - followed) / operators:.3f} us per operator more than the {followed:.0f} us "
    said += f"of {operators} that come as expected"
    row("looking for a plan by its hash", "ok", said)
    memory(extension, operators)
    for count in (2, 20) if small else (10, 100, 1000):
        replays(extension, count, rounds)
    for count in (2, 20) if small else UPDATED:
        updates(extension, count, 10 * rounds)


def lookups(extension: Any, operators: int, rounds: int) -> tuple[Times, Times]:
    """Ends of recordings that came as their predecessor was followed the last time, and of those
    that did not: two in three, which are looked for. Nobody holds a result: nothing is computed.
    """
    followed, found = Times(), Times()
    x = torch.ones(4, 4, device="acc")
    extension.flush()
    for operator in (torch.add, torch.add, torch.mul) * rounds:
        for _ in range(operators):
            operator(x, x)
        before = extension.stats()
        took = Times()
        with took.one():
            extension.flush()
        after = extension.stats()
        for counter, times in (("plan_follows", followed), ("plan_hits", found)):
            if after[counter] > before[counter]:
                times.wall += took.wall
    return followed, found


def memory(extension: Any, tensors: int) -> None:
    """A row for new tensors: acc's have memory once it is asked for."""
    where = "cuda" if torch.cuda.is_available() else "cpu"

    def microseconds(make: Callable[[], object]) -> float:
        times = Times()
        for _ in range(tensors):
            with times.one():
                made = make()
                del made  # its memory is the next one's
        return 1e6 * statistics.median(times.wall)

    new = functools.partial(torch.empty, 1 << 18, device="acc")
    with_memory = microseconds(lambda: extension.alias(new()))
    own = microseconds(lambda: torch.empty(1 << 18, device=where))
    said = (
        f"{microseconds(new):.2f} us, {with_memory:.2f} with memory, torch's {own:.2f} on {where}"
    )
    row("a tensor of 1 MiB", "ok", said)


def replays(extension: Any, count: int, runs: int) -> None:
    """A row for the ends of steps of so many operators that no kernel takes together."""
    from torchacc_device import _boundary

    matrix = torch.eye(16, device="acc")

    def step(_: int) -> torch.Tensor:
        made = matrix
        for _ in range(count):
            made = made @ matrix
        _boundary.mark_step()
        return made

    settled, took = settle(extension, step)
    boundary = Times()
    with boundary.of_boundaries():
        for index in range(runs):
            kept = step(index)
    del kept
    said = f"{boundary}" if settled else f"{boundary}; captured: {took}"
    row(f"replay of {count} products", "ok" if settled else "BAD", said)


def updates(extension: Any, count: int, runs: int) -> None:
    """Rows for the ends of AdamW's steps over so many parameters of 4 elements: one launch, so that
    what they take of the CPU is what each buffer costs. Where there is no GPU it has the kernel,
    too, in this thread alone."""
    torch.set_num_threads(1)
    parameters = [torch.zeros(4, device="acc").requires_grad_() for _ in range(count)]
    for each in parameters:
        each.grad = torch.full_like(each, 1e-3)
    step = torch.optim.AdamW(parameters, lr=1e-4).step  # its end is a boundary
    settled, took = settle(extension, lambda _: step())
    boundary = Times()
    with boundary.of_boundaries():
        for _ in range(runs):
            step()
    case = f"AdamW of {count} parameters"
    row(f"{case}: captured", "ok" if settled else "BAD", took)
    judge_replay(case, boundary)


# What a step does, and the bytes that it has to read and write at least.
Moving = tuple[Callable[[], object], int]


def kernels(small: bool) -> None:
    """How long generated kernels work, beside torch's copy of as many bytes on the same device."""
    extension = device(small)
    rows, columns = (64, 1024) if small else (1 << 16, 1024)
    x, y, z = (torch.randn(rows, columns, device="acc") for _ in range(3))
    weight, bias = torch.randn(columns, device="acc"), torch.randn(columns, device="acc")
    size = x.numel() * 4
    functional = torch.nn.functional
    programs: dict[str, Moving] = {
        "copy": (lambda: z.copy_(x), 2 * size),
        "pointwise": (lambda: torch.tanh(x * y + x) * 0.5, 3 * size),
        "dropout": (lambda: functional.dropout(x + y, 0.1), 3 * size),
        "softmax": (lambda: functional.softmax(x * 0.5, -1), 2 * size),
        "sum": (lambda: (x * 0.5).sum(), size),
        "layer norm": (lambda: functional.layer_norm(x, (columns,), weight, bias), 2 * size),
        "column sums": (lambda: (x * y).sum(0), 2 * size),
        "AdamW": adamw(small),
    }
    judge_bandwidths(extension, programs, small)


def adamw(small: bool) -> Moving:
    """The optimizer's step over the tensors of a GPT-2's blocks: it reads parameters, gradients and
    two moments, and writes all but the gradients."""
    layers, heads, width = (2, 2, 32) if small else (12, 12, 768)
    with torch.device("meta"):
        blocks = torch.nn.ModuleList(models.Block(width, heads, True) for _ in range(layers))
    parameters = [torch.zeros(each.shape, device="acc") for each in blocks.parameters()]
    for each in parameters:
        each.requires_grad_().grad = torch.full_like(each, 1e-3)
    size = 4 * sum(each.numel() for each in parameters)
    return torch.optim.AdamW(parameters, lr=1e-4).step, 7 * size


def norms(small: bool) -> None:
    """The same of softmaxes and norms: of long rows, over images, backward.

    A batch norm reads its images, and in the backward their gradients, twice: they are more than a
    GPU holds.
    """
    extension = device(small)
    rows, columns, long = (64, 1024, 4) if small else (1 << 16, 1024, 1 << 10)
    shape = (4, 16, 32, 32) if small else (64, 256, 64, 64)
    aten, functional = torch.ops.aten, torch.nn.functional
    x, gradient = (torch.randn(rows, columns, device="acc") for _ in range(2))
    weight, bias = torch.randn(columns, device="acc"), torch.randn(columns, device="acc")
    softmax = functional.softmax(x, -1)
    _, mean, rstd = aten.native_layer_norm(x, (columns,), weight, bias, 1e-5)
    words = torch.randn(long, 50304, device="acc")
    images, back = x.view(shape), gradient.view(shape)
    scale, shift = (torch.randn(shape[1], device="acc") for _ in range(2))
    running = torch.zeros(shape[1], device="acc"), torch.ones(shape[1], device="acc")
    _, channel_mean, channel_rstd = aten.native_batch_norm(
        images, scale, shift, *running, True, 0.1, 1e-5
    )
    size, all_three = x.numel() * 4, [True] * 3
    programs: dict[str, Moving] = {
        "softmax, backward": (
            lambda: aten._softmax_backward_data(gradient, softmax, -1, torch.float32),
            3 * size,
        ),
        "softmax of 50,304": (lambda: functional.softmax(words, -1), 2 * words.numel() * 4),
        "layer norm, backward": (
            lambda: aten.native_layer_norm_backward(
                gradient, x, (columns,), mean, rstd, weight, bias, all_three
            ),
            3 * size,
        ),
        "batch norm": (
            lambda: functional.batch_norm(images, *running, scale, shift, training=True),
            3 * size,
        ),
        "batch norm, backward": (
            lambda: aten.native_batch_norm_backward(
                back, images, scale, *running, channel_mean, channel_rstd, True, 1e-5, all_three
            ),
            5 * size,
        ),
    }
    judge_bandwidths(extension, programs, small)


def judge_bandwidths(extension: Any, programs: Mapping[str, Moving], small: bool) -> None:
    """A row for each of the steps."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    most = max(moved for _, moved in programs.values()) // 8
    source, target = (torch.zeros(most, device=where) for _ in range(2))
    for name, (make, moved) in programs.items():
        judge_bandwidth(extension, name, make, moved, 4 if small else 50, source, target)


def judge_bandwidth(
    extension: Any,
    name: str,
    make: Callable[[], object],
    moved: int,
    runs: int,
    source: torch.Tensor,
    target: torch.Tensor,
) -> None:
    """A row for a step that moves so many bytes; torch's copy reads half of them, writes half."""

    def step(_: int) -> object:
        made = make()
        torch.acc.synchronize()
        return made

    settled, took = settle(extension, step)
    part = slice(moved // 8)
    target[part].copy_(source[part])
    copied, reached = (
        moved / max(1e-9, seconds_of(call, runs))
        for call in (lambda: target[part].copy_(source[part]), make)
    )
    least, goal = BANDWIDTH
    said = f"{reached / 1e9:.0f} GB/s, {100 * reached / copied:.0f} % of a copy's, at least "
    said += f"{100 * least:.0f}, goal {100 * goal:.0f}"
    said += "" if settled else f"; captured: {took}"
    judge(name, reached >= least * copied and settled, said)


def main() -> None:
    """The command line."""
    small = "--small" in sys.argv
    verb, *rest = (word for word in sys.argv[1:] if word != "--small")
    if verb == "env":
        env(small)
    elif verb == "steps":
        steps(rest[0], small)
    elif verb == "trace":
        trace(rest[0], rest[1], small)
    elif verb == "gradients":
        gradients(*rest, small)
    elif verb == "copies":
        copies(small)
    elif verb == "epilogues":
        epilogues(small)
    elif verb == "norms":
        norms(small)
    elif verb == "record":
        record(small)
    else:
        kernels(small)


if __name__ == "__main__":
    main()
