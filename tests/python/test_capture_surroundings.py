"""A captured step and what stands around it: kernels, loss scaling, loaders, hooks, groups."""

from __future__ import annotations

import collections
import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchacc
from tests import helpers
from tests.python.captured import ACC, Trained, adamw, batches, make_dropout, make_mlp, sgd
from torchacc_device import _C

pytestmark = [
    pytest.mark.usefixtures("acc_only"),
    pytest.mark.skipif(_C.mode() in ("eager", "nofuse"), reason="nothing is recorded as a whole"),
]


@pytest.mark.parametrize("kept", [False, True], ids=["shared plan", "own plan"])
def test_replays_run_the_kernels(kept: bool) -> None:
    """From the first replay on a step is fused: the recorded calls had the kernels made."""
    left: list[torch.Tensor] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        inner = (x * 2 + (1 if kept else 3)).abs()
        left.append(inner)
        y = (inner - x) * x
        return (y + 1).abs()

    x = torch.randn(100, device=ACC)
    torchacc.sync()
    # Who keeps more of the same step: the cache's plan makes more than the captured step needs.
    if kept:
        expected = fn(x)
        torchacc.sync()

    def step_of(x: torch.Tensor) -> torch.Tensor:
        result = fn(x)
        left.clear()
        return result

    step = torchacc.capture(step_of)
    for _ in range(3):
        expected = step(x)
    torchacc.sync()
    with helpers.counting() as counted:
        for _ in range(4):
            result = step(x)
        torchacc.sync()
    assert torch.equal(result.cpu(), expected.cpu())
    assert counted["replays"] == 4
    assert counted["kernel_launches"] == counted["steps"] == 4, dict(counted.after)


def takes_scale(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def scaled(
    captured: bool, whole: bool, make: Callable[..., torch.optim.Optimizer], begin: int = 0
) -> tuple[list[float], list[torch.Tensor], float, int]:
    """Losses, parameters, scale and number of replays; of the 12 steps overflow the first `begin`
    and one later.
    """
    torch.manual_seed(4)
    trained = Trained(make_dropout(), make)
    scaler = torch.amp.GradScaler(ACC, init_scale=1024.0, growth_interval=3)

    def backward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        trained.optimizer.zero_grad()
        loss = F.mse_loss(trained.model(x), y)
        scaler.scale(loss).backward()
        return loss

    def update() -> None:
        scaler.step(trained.optimizer)
        scaler.update()

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = backward(x, y)
        if whole:
            update()
        return loss

    step = torchacc.capture(fn) if captured else fn
    losses = []
    for i, (x, y) in enumerate(batches(12, 5, 8)):
        # An overflow: this step is not taken, and the scale goes down.
        losses.append(step((x * (1e30 if i < begin or i == 8 else 1)).to(ACC), y.to(ACC)).item())
        if not whole:
            update()
    return losses, trained.values(), scaler.get_scale(), step.replays if captured else 0


@pytest.mark.parametrize("make", [takes_scale, sgd, torch.optim.Adam])
@pytest.mark.parametrize("whole", [True, False])
def test_loss_scaling(whole: bool, make: Callable[..., torch.optim.Optimizer]) -> None:
    """The scale is state; nothing is asked of the host where the optimizer takes the scale, or is
    one of torch's that can be capturable."""
    losses, values, scale, _ = scaled(False, whole, make)
    captured_losses, captured_values, captured_scale, replays = scaled(True, whole, make)
    assert captured_scale == scale != 1024.0 and replays == 9
    torch.testing.assert_close(captured_losses, losses)
    torch.testing.assert_close(captured_values, values, equal_nan=True)


@pytest.mark.parametrize("begin", [1, 2, 4])
def test_a_scale_that_is_too_large_at_first(begin: int) -> None:
    """Each call asks the host until an optimizer has its state, and the warm-up waits for that."""
    losses, values, scale, _ = scaled(False, True, torch.optim.Adam, begin)
    captured_losses, captured_values, captured_scale, replays = scaled(
        True, True, torch.optim.Adam, begin
    )
    # Behind the skipped calls: the one that makes the state, and two that are compared.
    assert captured_scale == scale and replays == 12 - (begin + 3)
    torch.testing.assert_close(captured_losses, losses)
    torch.testing.assert_close(captured_values, values, equal_nan=True)


def test_a_loss_that_always_overflows_is_told() -> None:
    trained = Trained(make_mlp(), adamw)
    scaler = torch.amp.GradScaler(ACC)

    def fn(x: torch.Tensor) -> None:
        trained.optimizer.zero_grad()
        scaler.scale(trained.model(x).sum() * float("inf")).backward()
        scaler.step(trained.optimizer)
        scaler.update()

    step = torchacc.capture(fn)
    x = batches(1, 5, 8)[0][0].to(ACC)
    with pytest.warns(UserWarning, match="50 calls were recorded.* all its gradients overflowed"):
        for _ in range(52):
            step(x)
    assert (step.recorded, step.replays) == (52, 0)


def test_loss_scaling_that_reads_on_the_host_is_refused() -> None:
    trained = Trained(make_mlp(), lambda p: torch.optim.Adagrad(p, lr=1e-2))
    scaler = torch.amp.GradScaler(ACC)

    def fn(x: torch.Tensor, y: torch.Tensor) -> None:
        trained.optimizer.zero_grad()
        scaler.scale(F.mse_loss(trained.model(x), y)).backward()
        scaler.step(trained.optimizer)
        scaler.update()

    step = torchacc.capture(fn, warmup=2)
    x, y = (each.to(ACC) for each in batches(1, 5, 8)[0])
    step(x, y)
    for _ in range(2):
        with pytest.raises(
            RuntimeError,
            match=r"reads a tensor on the host.* in fn.* GradScaler.step reads for Adagrad: it is "
            r"not known .*Call scaler.step and scaler.update behind",
        ):
            step(x, y)


def reading(*calls: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step that reads on the host in these of its calls."""
    count = itertools.count(1)

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        if next(count) in calls:
            y.sum().item()
        return y * 2

    return fn


@pytest.mark.parametrize(
    ("calls", "warmup", "recorded"),
    [
        ((), 3, 3),
        ((1,), 3, 3),
        ((2,), 3, 4),
        ((3,), 3, 5),
        ((1, 2), 3, 4),
        ((2, 3), 3, 5),
        ((2,), 2, 4),
        ((2, 4), 3, 6),
        ((2, 3, 4, 5), 3, 7),
    ],
)
def test_two_whole_calls_are_compared(calls: tuple[int, ...], warmup: int, recorded: int) -> None:
    """As a DDP's second forward reads, a step may at first, and is recorded until it does not."""
    step = torchacc.capture(reading(*calls), warmup=warmup)
    for i in range(10):
        assert step(torch.full((3,), float(i), device=ACC)).tolist() == [2.0 * (i + 1)] * 3
    assert (step.recorded, step.replays) == (recorded, 10 - recorded)


@pytest.mark.parametrize(
    ("calls", "warmup", "last"),
    [
        ((1, 2), 2, 2),
        ((1, 2, 3), 3, 3),
        (range(2, 20), 3, 7),
        (range(2, 20), 2, 6),
        (range(2, 20, 2), 3, 7),
        (range(1, 20, 2), 3, 7),
    ],
)
def test_a_step_that_goes_on_reading_is_refused_soon(
    calls: Collection[int], warmup: int, last: int
) -> None:
    step = torchacc.capture(reading(*calls), warmup=warmup)
    x = torch.ones(3, device=ACC)
    for _ in range(last - 1):
        step(x)
    assert step.recorded == last - 1
    match = r"reads a tensor on the host.*surroundings.py:\d+ in fn.*Return the tensor"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=match):
            step(x)


def test_batches_of_a_loader() -> None:
    """The loader's thread copies ahead while calls are recorded, and while they are replayed."""
    data = batches(20, 5, 8)

    def losses(captured: bool) -> list[float]:
        trained = Trained(make_mlp(), adamw)
        step = torchacc.capture(trained.step) if captured else trained.step
        found = [step(x, y) for x, y in torchacc.AsyncLoader(data, ACC)]
        assert not captured or step.replays == 17
        return [loss.item() for loss in found]

    torch.testing.assert_close(losses(True), losses(False))


def test_other_threads_make_tuples() -> None:
    """CPython refuses to resize a tuple that is on somebody's list of all objects."""
    ended = threading.Event()
    errors: list[BaseException] = []

    def make() -> None:
        try:
            while not ended.is_set():
                tuple(i for i in range(100))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=make)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        x, y = (each.to(ACC) for each in batches(1, 5, 8)[0])
        for _ in range(3):
            step = torchacc.capture(Trained(make_mlp(), adamw).step)
            for _ in range(4):
                step(x, y)
            assert step.replays == 1
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(before)
    assert not errors, errors


def test_a_hook_of_backward_that_reads() -> None:
    """Hooks run in a thread of autograd: what they read on the host is seen all the same."""
    flag = torch.ones((), device=ACC)
    torchacc.sync()
    weight = torch.ones(3, device=ACC, requires_grad=True)

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = weight * x
        y.register_hook(lambda grad: grad * 2 if flag.item() > 0 else grad)
        return torch.autograd.grad(y.sum(), weight)[0]

    step = torchacc.capture(fn, warmup=2)
    x = torch.ones(3, device=ACC)
    assert step(x).tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="reads a tensor on the host"):
        step(x)


def test_a_model_that_holds_its_step_is_collected() -> None:

    def used_model() -> weakref.ref[nn.Module]:
        model = make_mlp().to(ACC)
        model.step = torchacc.capture(lambda x, scale: model(x) * scale)
        for _ in range(4):
            model.step(torch.ones(2, 8, device=ACC), 2.0)
        return weakref.ref(model)

    gone = used_model()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("where", ["cpu", ACC])
def test_views_that_autograd_refuses_and_that_others_hold(where: str) -> None:
    """As FSDP's parameters are, which are parts of one that was written to."""
    whole = torch.zeros(4, device=where, requires_grad=True)
    module = nn.Linear(2, 1)
    del module.bias
    module.bias = whole.split(2)[0]
    with torch.no_grad():
        whole.add_(1)
    with pytest.raises(RuntimeError, match="is a view"):
        assert not module.bias.is_leaf
    step = torchacc.capture(lambda x: x * 2)
    for _ in range(4):
        made = step(torch.ones(3, device=ACC))
    assert step.replays == 1 and made.tolist() == [2.0] * 3


def test_inference_tensors() -> None:
    """They have no version that a write could count."""
    with torch.inference_mode():
        total = torch.zeros(3, device=ACC)

        def fn(x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return total.add_(x)

        step = torchacc.capture(fn)
        x = torch.zeros(3, device=ACC)
        for _ in range(5):
            result = step(x)
    assert result.tolist() == [15.0] * 3 and x.tolist() == [5.0] * 3


def test_objects_that_pytree_knows() -> None:
    """Arguments and results nest as anything that torch.utils._pytree takes apart."""
    Pair = collections.namedtuple("Pair", "a b")

    def fn(pair: Any, **named: Any) -> Any:
        return collections.OrderedDict(sum=pair.a + pair.b, pair=Pair(pair.b * 2, named["n"]))

    step = torchacc.capture(fn)
    for i in range(5):
        x = torch.full((2,), float(i), device=ACC)
        out = step(Pair(x, x + 1), n=3)
        assert isinstance(out, collections.OrderedDict) and isinstance(out["pair"], Pair)
        assert out["sum"].tolist() == [2.0 * i + 1] * 2 and out["pair"].b == 3
    assert step.replays == 2
    with pytest.raises(RuntimeError, match=r"args\[0\]\.a has shape \[3\].*\[2\]"):
        step(Pair(torch.ones(3, device=ACC), x), n=3)
    with pytest.raises(RuntimeError, match=r"argument 'n' is 4 and was 3"):
        step(Pair(x, x), n=4)


def test_a_call_that_failed_before_the_last() -> None:
    """An operator that fails while calls are recorded: the next ones are compared."""
    table = torch.arange(4.0, device=ACC)
    step = torchacc.capture(lambda index: table[index] * 2, warmup=2)
    for _ in range(2):
        with pytest.raises(IndexError):
            step(torch.tensor([9], device=ACC))
    for i in range(4):
        assert step(torch.tensor([i], device=ACC)).tolist() == [2.0 * i]
    assert step.replays == 2


def test_collectives_on_the_host_are_refused() -> None:
    """A step that averages its gradients over a Gloo group by way of the host."""
    helpers.run_python(
        """
import torch.distributed as dist, torchacc
from torch import nn
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Linear(3, 3).to("acc")
def fn(x):
    model.zero_grad()
    model(x).sum().backward()
    for p in model.parameters():
        grad = p.grad.cpu()
        dist.all_reduce(grad)
        p.grad.copy_(grad)
step = torchacc.capture(fn, warmup=2)
x = torch.ones(2, 3, device="acc")
step(x)
try:
    step(x)
except RuntimeError as error:
    assert "reads a tensor on the host" in str(error) and "in fn" in str(error), error
else:
    raise AssertionError("captured a collective of the host")
assert model.bias.grad.tolist() == [2.0] * 3
dist.destroy_process_group()
"""
    )


def test_lists_of_modules_stay_guarded() -> None:
    """eval() of one part of a model is noticed like that of the whole."""
    model = nn.ModuleList([make_dropout(), make_dropout()]).to(ACC)
    step = torchacc.capture(lambda x: model[1](model[0](x)[:, :1] + x))
    x = torch.ones(4, 8, device=ACC)
    for _ in range(4):
        step(x)
    model[1].eval()
    with pytest.raises(RuntimeError, match="'training'"):
        step(x)
