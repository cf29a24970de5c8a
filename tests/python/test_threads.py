"""Threads, interrupts, re-run cells and kernels written in Python."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests import helpers
from tests.helpers import drawn, extension, run_python, same, small_net


def in_threads(count: int, fn: Callable[[int], None], timeout: float = 120) -> None:
    """Runs `fn(i)` in `count` threads at once and raises the first exception of any."""
    errors: list[BaseException] = []
    gate = threading.Barrier(count)

    def body(i: int) -> None:
        try:
            gate.wait(timeout)
            fn(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def train(where: str, seed: int, steps: int = 10) -> list[torch.Tensor]:
    """Losses and parameters of a short training run."""
    net = small_net(where)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        opt.zero_grad()
        x = drawn(6, 4, device=where, seed=seed * 1000 + step)
        loss = F.mse_loss(net(x), x[:, :1])
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return [t.detach().cpu() for t in (*losses, *net.parameters())]


def test_training_in_a_thread(device, unfused):
    found: list[list[torch.Tensor]] = []
    in_threads(1, lambda i: found.append(train(device, 0)))
    helpers.assert_same(found[0], train("cpu", 0))


def test_training_in_several_threads_at_once(device, unfused):
    # One generator seeds all networks: they are made one after the other.
    lock = threading.Lock()
    found: dict[int, list[torch.Tensor]] = {}

    def body(i: int) -> None:
        with lock:
            net = small_net(device)
        opt = torch.optim.SGD(net.parameters(), lr=0.05)
        losses, read = [], []
        for step in range(15):
            x = drawn(6, 4, device=device, seed=i * 1000 + step)
            loss = F.mse_loss(net(x), x[:, :1])
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.detach())
            if step % 4 == i % 4:
                read.append(loss.item())
        assert read == [loss.item() for loss in losses[i % 4 :: 4]]
        found[i] = [t.detach().cpu() for t in (*losses, *net.parameters())]

    in_threads(4, body)
    for i in range(4):
        net = small_net("cpu")
        opt = torch.optim.SGD(net.parameters(), lr=0.05)
        expected = []
        for step in range(15):
            x = drawn(6, 4, device="cpu", seed=i * 1000 + step)
            loss = F.mse_loss(net(x), x[:, :1])
            opt.zero_grad()
            loss.backward()
            opt.step()
            expected.append(loss.detach())
        expected += [p.detach() for p in net.parameters()]
        helpers.assert_same(found[i], expected, what=f"thread {i}")


def test_a_kernel_runs_in_the_threads_of_the_pool(acc_only):
    """By the time that the system counts for each thread, in ticks of 10 ms."""
    body = """
import pathlib
from tests import helpers
torch.set_num_threads(2)

def busy():
    counted = {}
    for stat in pathlib.Path("/proc/self/task").glob("*/stat"):
        fields = stat.read_text().rpartition(")")[2].split()
        counted[stat.parent.name] = int(fields[11]) + int(fields[12])
    return counted

x = torch.rand(1 << 22, device=DEVICE)
y = x.exp()
def run():
    global y
    y = (y.tanh() * x).exp()
    helpers.synchronize()
for _ in range(4):
    run()
before, launched, runs = busy(), helpers.stats()["kernel_launches"], 0
spent = []
while sum(spent) < 40:
    run()
    runs += 1
    spent = sorted(count - before.get(thread, 0) for thread, count in busy().items())
assert helpers.stats()["kernel_launches"] - launched == runs
assert spent[-2] > spent[-1] / 3, spent
"""
    run_python(body, ACC_MODE="full", OMP_WAIT_POLICY="passive")


def test_backward_in_another_thread_than_forward(device):
    def run(where):
        net, x = small_net(where), drawn(5, 4, device=where, grad=True)
        loss = net(x).pow(2).sum()
        in_threads(1, lambda i: loss.backward())
        return [x.grad, *(p.grad for p in net.parameters())]

    same(run, device)


def test_backward_of_separate_graphs_in_several_threads(unfused, device):
    results: dict[int, torch.Tensor] = {}

    def body(i: int) -> None:
        for _ in range(20):
            x = drawn(50, device=device, seed=i, grad=True)
            (x.sin() * x).sum().backward()
            results[i] = x.grad.cpu()

    in_threads(4, body)
    for i in range(4):
        x = drawn(50, device="cpu", seed=i, grad=True)
        (x.sin() * x).sum().backward()
        helpers.assert_same(results[i], x.grad, what=f"thread {i}")


def test_backward_through_one_graph_from_two_threads(device):
    x = torch.ones(8, device=device, requires_grad=True)
    y = x * 2
    a, b = y.pow(2).sum(), y.pow(3).sum()

    def body(i: int) -> None:
        (a, b)[i].backward(retain_graph=True)

    in_threads(2, body)
    assert x.grad.tolist() == [8.0 + 24.0] * 8


def test_reentrant_backward_in_a_thread(device):
    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            with torch.enable_grad():
                y = torch.ones(3, device=g.device, requires_grad=True)
                (y * 4).sum().backward()
            return g + y.grad

    def body(i: int) -> None:
        x = torch.ones(3, device=device, requires_grad=True)
        Inner.apply(x * 2).sum().backward()
        assert x.grad.tolist() == [10.0] * 3

    in_threads(3, body)


def test_a_reader_thread_sees_whole_values(device):
    # A logging thread reads losses that the training thread records.
    losses: list[torch.Tensor] = []
    read: list[float] = []
    done = threading.Event()

    def reader() -> None:
        at = 0
        while not done.is_set() or at < len(losses):
            if at < len(losses):
                read.append(losses[at].item())
                at += 1

    def body(i: int) -> None:
        if i:
            reader()
            return
        x = torch.zeros(4, device=device)
        try:
            for step in range(100):
                x = x + 1
                losses.append(x.sum() * step)
        finally:
            done.set()

    in_threads(2, body)
    assert read == [4.0 * (step + 1) * step for step in range(100)]


def test_tensors_handed_to_a_thread_and_freed_there(device):
    def body(i: int) -> None:
        for step in range(200):
            t = torch.full((64,), float(step), device=device)
            u = t * 2
            del t
            if step % 50 == 49:
                assert u[0].item() == 2.0 * step

    in_threads(4, body)


def test_an_error_in_one_thread_stays_there(device):
    good: list[list[float]] = []

    def body(i: int) -> None:
        x = torch.arange(4.0, device=device)
        if i == 0:
            with pytest.raises(RuntimeError):
                x @ torch.ones(3, device=device)
        good.append((x * 2).tolist())

    in_threads(3, body)
    assert good == [[0.0, 2.0, 4.0, 6.0]] * 3


# --- notebooks and interrupts -----------------------------------------------------------------

CELL = """
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(device)
opt = torch.optim.Adam(net.parameters(), lr=0.01, foreach=True)
x = torch.arange(32.0).view(8, 4).div(32).to(device)
losses = []
for step in range(8):
    opt.zero_grad()
    loss = net(x).pow(2).mean()
    loss.backward()
    opt.step()
    losses.append(loss.detach())
out = [float(v) for v in losses]
"""


def test_a_cell_that_is_run_again_gives_the_same(device, unfused):
    space = {"torch": torch, "device": device}
    seen, plans = [], []
    for _ in range(4):
        with helpers.counting() as counted:
            exec(CELL, space)
        seen.append(space["out"])
        plans.append(counted["plans_built"])
    assert seen[1:] == seen[:-1]
    on_cpu = {"torch": torch, "device": "cpu"}
    exec(CELL, on_cpu)
    assert seen[0] == on_cpu["out"]
    assert plans[2] + plans[3] <= 1, f"a cell that is run again makes new plans: {plans}"


def test_a_cell_that_raises_and_is_run_again(device, unfused):
    space = {"torch": torch, "device": device}
    with pytest.raises(RuntimeError):
        exec(CELL.replace("loss.backward()", "loss.backward(); x @ x"), space)
    exec(CELL, space)
    on_cpu = {"torch": torch, "device": "cpu"}
    exec(CELL, on_cpu)
    assert space["out"] == on_cpu["out"]


def test_interrupt_in_a_step(device):
    done = run_python(
        """
import os, signal, threading
net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).to(DEVICE)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
x = torch.ones(8, 64, device=DEVICE)
kept = x * 3
caught = 0
for attempt in range(5):
    timer = threading.Timer(0.2 + 0.07 * attempt, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()  # in here: it may come at once
        while True:
            opt.zero_grad()
            net(x).pow(2).mean().backward()
            opt.step()
    except KeyboardInterrupt:
        caught += 1
    timer.join()
    assert all(p.isfinite().all() for p in net.parameters())
    assert kept.sum().item() == 3 * 8 * 64
for _ in range(3):
    opt.zero_grad()
    loss = net(x).pow(2).mean()
    loss.backward()
    opt.step()
print("caught", caught, loss.isfinite().item())
""",
        timeout=300,
    )
    assert done.stdout.split() == ["caught", "5", "True"]


def test_interrupt_while_the_host_waits_for_a_value(device):
    # The wait for a result must not swallow Ctrl-C, nor lose it.
    done = run_python(
        """
import os, signal, threading
a = torch.rand(700, 700).to(DEVICE)
for _ in range(3):
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            b = a
            for _ in range(6):
                b = (b @ a).clamp(-1, 1)
            b.sum().item()
    except KeyboardInterrupt:
        print("caught")
print((a * 0 + 1).sum().item() == 700 * 700)
""",
        timeout=300,
    )
    assert done.stdout.split() == ["caught", "caught", "caught", "True"]


# --- kernels written in Python ------------------------------------------------------------------

PYTHON_KERNEL = """
import torch
from torch import library
ones = [torch.ones(3, device=f"acc:{i}") for i in range(2)]
lib = library.Library("aten", "IMPL")
def kernel(x, *, out):
    BODY
    return out.copy_(x + 1)
lib.impl("erfinv.out", kernel, "CPU")
"""


def with_kernel(body: str, code: str) -> str:
    """What a process prints in which `erfinv` adds one and does `body` beside it."""
    code = PYTHON_KERNEL.replace("BODY", body) + code
    return run_python(code, timeout=300, ACC_HOST_DEVICES="2", ACC_EXECUTOR="host").stdout


@pytest.mark.usefixtures("recording")
def test_a_kernel_that_raises(acc_only):
    told = with_kernel(
        "raise kind('why')",
        """
from torchacc_device import _C
class Own(Exception):
    pass
for kind in (KeyError, KeyboardInterrupt, Own):
    for end in (lambda: y.cpu(), _C.flush):
        y = torch.erfinv(ones[0])
        try:
            end()
        except kind as error:
            notes = "".join(getattr(error, "__notes__", ["aten::erfinv"]))
            print(error.args, "aten::erfinv" in notes)
        try:
            y.cpu()
        except RuntimeError as error:
            print("no valid contents" in str(error))
""",
    )
    assert told.splitlines() == ["('why',) True", "True"] * 6


@pytest.mark.usefixtures("recording")
def test_a_kernel_that_uses_the_device_is_refused(acc_only):
    # Its step cannot wait for itself, nor two devices for each other.
    uses = ["ones[0].sum().item()", "ones[1].add_(1)", "torch.acc.empty_cache()", "made.cpu()"]
    uses += ["made.untyped_storage().resize_(4096)", "ones[1] * 2; torch.acc.synchronize(1)"]
    uses += ["torch.eye(2, device='acc')", "torch.randperm(4, device='acc')"]
    told = with_kernel(
        "exec(use)",
        f"""
for use in {uses!r}:
    for t in ones:
        t.cpu()
    made = ones[0] * 2
    torch.use_deterministic_algorithms(True)
    y = torch.erfinv(made * 0)
    torch.use_deterministic_algorithms(False)
    try:
        y.cpu()
    except RuntimeError as error:
        print("while the step that called it runs" in str(error))
    print(made.tolist(), [t.tolist() for t in ones], (ones[1] + 1).tolist())
""",
    )
    assert told.splitlines() == [
        "True",
        "[2.0, 2.0, 2.0] [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]] [2.0, 2.0, 2.0]",
    ] * len(uses)


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize(
    "body",
    [
        "out.as_strided_(out.shape, (1, out.shape[0]))",
        "return out.set_(x + 1)",
        "return out.set_(torch.cat([x, x + 1]).untyped_storage(), x.numel(), x.shape, x.stride())",
    ],
)
def test_a_kernel_that_lays_its_result_out_anew(acc_only, body):
    told = with_kernel(
        body,
        """
x = torch.arange(6.0, device="acc").reshape(2, 3)
for _ in range(2):
    y = torch.erfinv(x)
    print(y.stride(), y.tolist())
""",
    )
    assert told.splitlines() == ["(3, 1) [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]"] * 2


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("body", ["out.set_(x + 1)", "out.as_strided_(out.shape, (1, 2))"])
def test_a_kernel_that_moves_what_the_user_gave_it(acc_only, body):
    told = with_kernel(
        body,
        """
x = torch.arange(6.0, device="acc").reshape(2, 3)
out = torch.zeros(2, 3, device="acc")
kept = out.view(6)
for _ in range(3):
    torch.erfinv(x, out=out)
    print(out.tolist(), kept.sum().item())
    out.zero_()
""",
    )
    assert told.splitlines() == ["[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]] 21.0"] * 3


@pytest.mark.usefixtures("recording")
def test_a_kernel_that_changes_the_type_of_its_result(acc_only):
    told = with_kernel(
        """
    if act == "double":
        out.data = (x + 1).double()
        return out""",
        """
x = torch.arange(6.0, device="acc")
for act in ["", "double", ""]:
    try:
        print(torch.erfinv(x).tolist())
    except RuntimeError as error:
        print("had promised Float" in str(error))
""",
    )
    good = "[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]"
    assert told.splitlines() == [good, "True", good]


@pytest.mark.usefixtures("recording")
def test_a_kernel_that_gives_another_shape_or_fails_spoils_nothing(acc_only):
    told = with_kernel(
        """
    if act == "shape":
        return out.resize_(1, 3)
    if act == "raise":
        out.resize_(3, 1)
        raise ValueError("once")""",
        """
x = torch.arange(6.0, device="acc").reshape(2, 3)
x.cpu()
for act in ["", "shape", "raise", ""]:
    try:
        print(torch.erfinv(x).tolist())
    except (RuntimeError, ValueError) as error:
        print(type(error).__name__, "promised" in str(error), "once" in str(error))
""",
    )
    good = "[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]"
    assert told.splitlines() == [good, "RuntimeError True False", "ValueError False True", good]


# --- settings of the process --------------------------------------------------------------------


@pytest.mark.usefixtures("recording")
def test_settings_while_the_plan_of_another_thread_has_its_own(acc_only):
    told = with_kernel(
        "entered.set(); assert leave.wait(30)",
        """
import threading
entered, leave = threading.Event(), threading.Event()
zeros, index, one = torch.zeros(4), torch.tensor([1]), torch.ones(1)
zeros, index, one = (t.to("acc:1") for t in (zeros, index, one))
x = torch.zeros(3, device="acc:0")
zeros.put_(index, one * 0)  # what is not known of an operator would have to wait below
for t in (zeros, index, one, x):
    t.cpu()

torch.use_deterministic_algorithms(True)
torch.set_default_dtype(torch.float64)
y = torch.erfinv(x * 2)
torch.use_deterministic_algorithms(False)
torch.set_default_dtype(torch.float32)
runs = threading.Thread(target=y.cpu)
runs.start()
assert entered.wait(30)
zeros.put_(index, one)  # has no deterministic form
torch.set_default_dtype(torch.bfloat16)
leave.set()
runs.join()
print(torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), zeros.tolist())
print(y.tolist())

# What is learnt about an operator meanwhile is learnt under the program's settings.
entered.clear(), leave.clear()
torch.set_default_dtype(torch.float64)
y = torch.erfinv(x * 2)
torch.set_default_dtype(torch.float32)
runs = threading.Thread(target=y.cpu)
runs.start()
assert entered.wait(30)
made = []
maker = threading.Thread(target=lambda: made.append(index / 2))
maker.start()
maker.join(0.5)
leave.set()
runs.join(), maker.join()
print(made[0].dtype, made[0].tolist(), torch.get_default_dtype())
""",
    )
    assert told.splitlines() == [
        "torch.bfloat16 False [0.0, 1.0, 0.0, 0.0]",
        "[1.0, 1.0, 1.0]",
        "torch.float32 [0.5] torch.float32",
    ]


WAITING = """
import threading
entered, leave = threading.Event(), threading.Event()
index = torch.tensor([1001], device="acc:1")
x = torch.zeros(3, device="acc:0")
x.cpu(), index.cpu()
def start(y):
    runs = threading.Thread(target=y.cpu)
    runs.start()
    assert entered.wait(30)
    return runs
"""


@pytest.mark.usefixtures("recording")
def test_what_is_learnt_is_learnt_under_the_settings_of_the_call(acc_only):
    told = with_kernel(
        "entered.set(); assert leave.wait(30)",
        WAITING
        + """
torch.set_default_dtype(torch.float64)
y = torch.erfinv(x)
torch.set_default_dtype(torch.float32)
runs = start(y)
made = []
maker = threading.Thread(target=lambda: made.append(index / 3))
maker.start()
maker.join(0.5)  # it waits, since what it wants to know was never asked
torch.set_default_dtype(torch.bfloat16)
leave.set()
runs.join(), maker.join()
torch.set_default_dtype(torch.float32)
for _ in range(2):
    print((index / 3).dtype, (index / 3).tolist() == (index.cpu() / 3).tolist())
""",
    )
    assert told.splitlines() == ["torch.float32 True"] * 2


@pytest.mark.usefixtures("recording")
def test_settings_that_change_while_a_step_runs(acc_only):
    told = with_kernel(
        "entered.set(); assert leave.wait(30)",
        WAITING
        + """
index = index.to("acc:0")
index.cpu()
y = torch.erfinv(x)
third = index / 3
runs = start(y)
torch.set_default_dtype(torch.bfloat16)
leave.set()
runs.join()
print(third.dtype, torch.get_default_dtype())
torch.set_default_dtype(torch.float32)
print(third.tolist() == (index.cpu() / 3).tolist())
""",
    )
    assert told.splitlines() == ["torch.float32 torch.bfloat16", "True"]


def test_no_python_thread_sees_the_settings_of_a_step(acc_only):
    told = run_python(
        """
import threading
a = torch.rand(600, 600).to(DEVICE)
i = torch.arange(600).to(DEVICE)
a.cpu(), i.cpu()
torch.set_default_dtype(torch.float64)
b = i / 3
torch.set_default_dtype(torch.float32)
for _ in range(30):
    a = (a @ a).clamp(-1, 1)
step = threading.Thread(target=lambda: (b.cpu(), a.cpu()))
seen = {torch.get_default_dtype()}  # should the step end before this thread runs again
step.start()
while step.is_alive():
    old = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    seen.add(old)
    torch.set_default_dtype(old)
step.join()
print(seen, torch.get_default_dtype(), b.dtype)
""",
        timeout=300,
    ).stdout
    assert told.splitlines() == ["{torch.float32} torch.float32 torch.float64"]


def test_a_step_that_has_to_run_alone_gets_its_turn(acc_only):
    # The steps of two other devices overlap without a gap.
    code = """
import os, threading, time
import torch
from torch import library
lib = library.Library("aten", "IMPL")
def kernel(x, *, out):
    time.sleep(0.05 + 0.02 * x.numel())
    return out.copy_(x)
lib.impl("erfinv.out", kernel, "CPU")
x = torch.zeros(3, device="acc:0")
x.cpu()
runs = [0, 0]
def spin(i):
    z = torch.zeros(i, device=f"acc:{i + 1}")
    while True:
        torch.erfinv(z).cpu()
        runs[i] += 1
for i in range(2):
    threading.Thread(target=spin, args=(i,), daemon=True).start()
while min(runs) < 5:
    time.sleep(0.01)
torch.set_default_dtype(torch.float64)
y = x + 1
torch.set_default_dtype(torch.float32)
before = sum(runs)
y.cpu()
print(sum(runs) - before < 20, flush=True)
os._exit(0)
"""
    told = run_python(code, timeout=300, ACC_HOST_DEVICES="3", ACC_EXECUTOR="host").stdout
    assert told.split() == ["True"]


def test_two_devices_whose_steps_change_the_settings(acc_only):
    # Each layer wants the settings that the other thread's plan may have taken away.
    code = """
import threading
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(256, 256) for _ in range(3))

    def forward(self, x):
        x = self.first(x).relu()
        with torch.backends.mkldnn.flags(enabled=False):
            x = self.second(x).relu()
        return self.last(x)

def train(device):
    with one_generator:
        torch.manual_seed(0)
        net = Net().to(device)
    x = torch.ones(64, 256, device=device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(60):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
    last[device] = loss.item()

last = {}
one_generator = threading.Lock()
devices = ["acc:0", "acc:1"]
threads = [threading.Thread(target=train, args=(each,), daemon=True) for each in devices]
for t in threads:
    t.start()
for t in threads:
    t.join(60)
assert not any(t.is_alive() for t in threads)
train("cpu")
assert all(abs(last[each] / last["cpu"] - 1) < 1e-3 for each in devices), last
print("done")
"""
    told = run_python(code, timeout=300, ACC_HOST_DEVICES="2", ACC_EXECUTOR="host").stdout
    assert told == "done\n"


def test_backward_stays_in_its_thread_behind_inference_mode(acc_only: str) -> None:
    """The end of a thread's first scope of inference brings autograd's settings back."""
    if extension().executor_name() != "host":
        pytest.skip("on a GPU backward has a thread of its own, as for CUDA")
    found: list[list[int]] = []

    def run() -> None:
        threads = []
        x = torch.ones(2, device=acc_only, requires_grad=True)
        with torch.inference_mode():
            x * 2
        y = x * 2
        y.register_hook(lambda grad: threads.append(threading.get_ident()))
        y.sum().backward()
        found.append([threading.get_ident(), *threads])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(found) == 1 and len(found[0]) == 2 and len(set(found[0])) == 1
