"""What cannot be captured, and what a replay forbids: each says what, where, and both values."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import library, nn

import torchacc
from tests import helpers
from tests.python.captured import (
    ACC,
    Trained,
    adamw,
    batches,
    make_dropout,
    make_mlp,
    refused,
    sgd,
)
from torchacc.guards import Guards
from torchacc_device import _C

pytestmark = [
    pytest.mark.usefixtures("acc_only"),
    pytest.mark.skipif(_C.mode() in ("eager", "nofuse"), reason="nothing is recorded as a whole"),
]


def test_numbers_that_change_are_named() -> None:
    trained = Trained(make_mlp(), lambda p: torch.optim.Adam(p, lr=1e-2))
    x, y = (each.to(ACC) for each in batches(1, 5, 8)[0])
    refused(trained.step, x, y, match=r"aten::.*the number '.*' was .* in call 2 and is .* in call "
                                      r"3.*capturable=True")  # fmt: skip

    lr = [0.1]

    def scaled(x: torch.Tensor) -> torch.Tensor:
        lr[0] *= 0.5
        return x * lr[0]

    refused(scaled, x, match=r"aten::mul.*refusals.py:\d+ in scaled.*'other' was 0\.025 .* "
                             r"0\.0125")  # fmt: skip


def read_item(x: torch.Tensor) -> torch.Tensor:
    return x * (x + 1).sum().item()


def read_argument(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x[0, 0].item() >= 0 else x * 3


def print_it(x: torch.Tensor) -> torch.Tensor:
    str(x + 1)
    return x * 2


def nonzero(x: torch.Tensor) -> torch.Tensor:
    return (x + 1).nonzero() + 1


def synchronize(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    torch.acc.synchronize()
    return y * 2


@pytest.mark.parametrize("fn", [read_item, read_argument, print_it, nonzero, synchronize])
def test_reads_on_the_host_are_named(fn: Callable[..., Any]) -> None:
    refused(fn, torch.ones(2, 3, device=ACC), match=rf"refusals.py:\d+ in {fn.__name__}")


# It lives as long as the process: torch's tables keep the names of operators that are gone.
LIBRARY = library.Library("acc_refused", "FRAGMENT")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: x * 2, "CPU")


def test_operators_that_run_at_once_are_named() -> None:
    x = torch.ones(2, 3, device=ACC)
    refused(
        lambda x: torch.ops.acc_refused.twice(x + 1),
        x,
        match=r"calls acc_refused::twice, which cannot be recorded at .*refusals.py:\d+ in",
    )
    refused(nonzero, x, match="calls aten::nonzero, whose result has a shape that depends on data")


def test_a_cpu_argument_that_is_read_on_the_host() -> None:
    refused(
        lambda x: torch.ones(2, device=ACC) * x.max().item(),
        torch.ones(3),
        match="reads a tensor on the host",
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_cpu_argument_that_is_written(mode: Callable[[], Any]) -> None:
    """The first call says so, and those after it, which run nothing."""
    step = torchacc.capture(lambda x: x[1:].add_(1))
    x = torch.zeros(3)
    with mode():
        for _ in range(3):
            with pytest.raises(RuntimeError, match=r"writes args\[0\].*CPU.*Pass a tensor on acc"):
                step(x)
    assert step.recorded == 1 and x.tolist() == [0.0] * 3


def test_cpu_arguments_that_require_gradients() -> None:
    step = torchacc.capture(lambda x, *, w: (x * w).sum())
    x, w = torch.ones(3), torch.ones(3)
    text = r"argument 'w' is on the CPU and requires gradients"
    with pytest.raises(RuntimeError, match=text):
        step(x, w=w.requires_grad_())
    for _ in range(4):
        step(x, w=w.detach())
    assert step.replays == 1
    with pytest.raises(RuntimeError, match=text):
        step(x, w=w)
    # One that is on acc now is what it is there.
    assert step(x, w=torch.ones(3, device=ACC).add_(1)).item() == 6.0


def test_nothing_and_several_devices_and_caps() -> None:
    refused(lambda: None, match="recorded nothing")
    refused(lambda x: x, torch.ones(2, device=ACC), match="recorded nothing")
    helpers.run_python(
        """
import torchacc
def fn(x, y):
    return x + 1, y + 1
step = torchacc.capture(fn, warmup=2)
args = torch.ones(2, device="acc:0"), torch.ones(2, device="acc:1")
step(*args)
try:
    step(*args)
except RuntimeError as error:
    assert "2 acc devices" in str(error), error
else:
    raise AssertionError("captured on two devices")
def long(x):
    for _ in range(40):
        x = x + 1
    return x
step = torchacc.capture(long, warmup=2)
step(torch.ones(2, device="acc"))
try:
    step(torch.ones(2, device="acc"))
except RuntimeError as error:
    assert "records more than may be pending" in str(error) and "in long" in str(error), error
else:
    raise AssertionError("captured in parts")
""",
        ACC_HOST_DEVICES="2",
        ACC_MAX_PENDING="16",
    )


def test_eager_modes_run_the_function() -> None:
    for mode in ("eager", "nofuse"):
        helpers.run_python(
            """
import torchacc
step = torchacc.capture(lambda x, w: (x * w).sum())
w = torch.ones(2, device="acc", requires_grad=True)
for i in range(6):
    out = step(torch.full((2,), float(i), device="acc"), w)
    assert out.item() == 2.0 * i and not out.requires_grad
""",
            ACC_MODE=mode,
        )


def test_results_that_python_computes() -> None:
    count = [0]

    def counted(x: torch.Tensor) -> Any:
        count[0] += 1
        return x + 1, count[0]

    x = torch.ones(2, device=ACC)
    refused(counted, x, match="returned 2 and then 3")
    refused(lambda x: (x + 1, torch.ones(2)), x, match="not on acc")


@dataclasses.dataclass
class Output:
    loss: Any
    n: int = 3


def test_results_in_objects_that_pytree_does_not_know() -> None:
    x = torch.ones(2, device=ACC)
    for shape in ((), (2,)):  # a number that is equal at each call, and what has no truth value
        refused(
            lambda x, shape=shape: Output((x + 1).sum().expand(shape)),
            x,
            match=r"returns tensors in a Output.*register_dataclass\(Output\)",
        )
    # Equal values, and what the function keeps, are results.
    kept = Output(torch.zeros(2, device=ACC))

    def fn(x: torch.Tensor) -> Any:
        kept.loss.add_(x)
        return Output(1.5), kept, np.arange(3)

    step = torchacc.capture(fn)
    for i in range(1, 6):
        plain, tensors, array = step(x)
        assert plain == Output(1.5) and array.tolist() == [0, 1, 2]
        assert tensors is kept and kept.loss.tolist() == [i, i]
    calls = itertools.count()
    refused(lambda x: (x + 1, np.arange(3) + next(calls)), x, match=r"returned array.* and then")


def test_constants_from_the_host() -> None:
    """The same at each call: kept. Different: refused, with the line."""

    def constant(x: torch.Tensor) -> torch.Tensor:
        table = torch.tensor([1.0, 2.0, 3.0], device=ACC)
        table += 1
        return x * table + torch.arange(3, device=ACC)

    step = torchacc.capture(constant)
    x = torch.ones(3, device=ACC)
    for _ in range(6):
        assert step(x).tolist() == [2.0, 4.0, 6.0]
    source = iter(range(100))

    def loaded(x: torch.Tensor) -> torch.Tensor:
        return x * torch.full((3,), float(next(source))).to(ACC)

    refused(loaded, x, match=r"aten::mul.*in loaded.*comes from the host")


def test_the_line_is_that_of_the_function_whoever_recorded_its_operators_first() -> None:
    x = torch.ones(5, device=ACC)

    def others() -> None:
        for i in range(3):
            assert (x * torch.full((5,), float(i)).to(ACC)).tolist() == [i] * 5

    others()
    source = iter(range(100))

    def loaded(x: torch.Tensor) -> torch.Tensor:
        return x * torch.full((5,), float(next(source))).to(ACC)

    refused(loaded, x, match=r"aten::mul.*in loaded.*comes from the host")
    others()
    before = iter(range(100))

    def branches(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return y * 2 if next(before) % 2 else y * 3 + y

    for k in range(4):
        y = x + 1
        (y * 2 if k % 2 else y * 3 + y).tolist()
    refused(branches, x, match=r"operator 2 of call 2 is its end.*is aten::add.*in branches")


def test_other_tensors_at_each_call() -> None:
    pool = [torch.full((3,), float(i), device=ACC) for i in range(2)]

    def swapped(x: torch.Tensor) -> torch.Tensor:
        pool.reverse()
        return x + pool[0]

    refused(swapped, torch.ones(3, device=ACC), match=r"in swapped.*another tensor at each call")


def test_a_step_that_changes() -> None:
    calls = [0]

    def growing(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        for _ in range(calls[0]):
            x = x + 1
        return x

    refused(growing, torch.ones(3, device=ACC), match="not the same at each call")


def test_an_error_in_the_function_ends_the_recording() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    x = torch.ones(2, device=ACC)
    with pytest.raises(KeyError, match="mine"):
        torchacc.capture(broken)(x)
    assert torchacc.capture(lambda x: x + 1)(x).tolist() == [2.0, 2.0]
    inner = torchacc.capture(lambda x: x + 1)
    for _ in range(4):
        inner(x)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="within another one"):
            torchacc.capture(lambda x: inner(x) * 2)(x)
    with pytest.raises(RuntimeError, match="within another one"):
        torchacc.capture(lambda x: torchacc.capture(lambda y: y + 1)(x))(x)
    with pytest.raises(ValueError, match="warmup is 1"):
        torchacc.capture(broken, warmup=1)


# --- guards ---------------------------------------------------------------------------------------


def test_guards_of_arguments() -> None:
    """Each names what differs, with both values, and changes nothing."""
    state = torch.zeros(3, device=ACC)

    def fn(x: torch.Tensor, y: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        state.add_(1)
        return x.add_(y * scale)

    step = torchacc.capture(fn)
    ones = torch.ones(3, 3, device=ACC)
    for _ in range(4):
        step(torch.ones(3, 3, device=ACC), ones)
    bad: list[tuple[tuple[Any, ...], str]] = [
        ((torch.ones(2, 3, device=ACC), ones), r"args\[0\] has shape \[2, 3\].*\[3, 3\]"),
        ((torch.ones(3, 3, device=ACC).double(), ones), r"dtype Double.*Float"),
        ((torch.ones(3, 3, device=ACC).t(), ones), r"strides \[1, 3\].*\[3, 1\]"),
        ((torch.ones(3, 3), ones), r"args\[0\] is a tensor on cpu"),
        ((torch.ones(3, 3, device=ACC), 1.0), r"args\[1\] was a tensor .* is 1\.0"),
        ((ones, ones), "share memory now and did not"),
        ((state.expand(3, 3), ones), "strides"),
    ]
    for args, match in bad:
        with pytest.raises(RuntimeError, match=match):
            step(*args)
    with pytest.raises(RuntimeError, match=r"args\[1\] was a tensor"):
        step(ones, [ones])
    with pytest.raises(RuntimeError, match="nested in another way"):
        step(ones, ones, 3.0)
    assert ones.tolist() == [[1.0] * 3] * 3
    assert state.tolist() == [4.0] * 3
    assert step(torch.ones(3, 3, device=ACC), ones).tolist() == [[3.0] * 3] * 3
    assert state.tolist() == [5.0] * 3


def test_guards_of_plain_arguments() -> None:
    step = torchacc.capture(lambda x, n: x * n)
    x = torch.ones(2, device=ACC)
    for _ in range(4):
        step(x, 2)
    with pytest.raises(RuntimeError, match=r"args\[1\] is 3 and was 2"):
        step(x, 3)
    with pytest.raises(RuntimeError, match=r"args\[1\] is 2\.0 and was 2"):
        step(x, 2.0)
    # Arrays are compared number by number: they may be written in place.
    step, numbers = torchacc.capture(lambda x, n: x * 2), np.ones(2)
    for _ in range(4):
        step(x, numbers)
    step(x, numbers.copy())
    numbers[0] = 2
    with pytest.raises(
        RuntimeError,
        match=r"args\[1\] is array\(\[2\., 1\.\]\) and was array\(\[1\., 1\.\]\).* pass a tensor",
    ):
        step(x, numbers)
    numbers[0] = 1
    step(x, numbers)
    with pytest.raises(RuntimeError, match=r"args\[1\] is array"):
        step(x, np.ones((2, 1)))


def test_arguments_that_share_memory_at_capture() -> None:
    step = torchacc.capture(lambda a, b: a.add_(b))
    base = torch.arange(6.0, device=ACC)
    for _ in range(4):
        step(base[:3], base[3:])
    assert base.tolist() == [12.0, 17.0, 22.0, 3.0, 4.0, 5.0]
    with pytest.raises(RuntimeError, match="shared memory at capture"):
        step(base[:3], torch.ones(3, device=ACC))
    with pytest.raises(RuntimeError, match="shared memory at capture"):
        step(base[1:4], base[3:])
    other = torch.arange(8.0, device=ACC)
    step(other[1:4], other[4:7])
    assert other.tolist() == [0.0, 5.0, 7.0, 9.0, 4.0, 5.0, 6.0, 7.0]


def captured(
    optimizer: Callable[..., torch.optim.Optimizer], x: torch.Tensor, y: torch.Tensor
) -> tuple[Trained, Any]:
    """A training and its step, which is replayed."""
    trained = Trained(make_mlp(), optimizer)
    step = torchacc.capture(trained.step)
    for _ in range(4):
        step(x, y)
    return trained, step


def test_guards_of_state() -> None:
    x, y = (each.to(ACC) for each in batches(1, 5, 8)[0])

    trained, step = captured(adamw, x, y)
    before = [each.clone() for each in trained.values()]
    trained.model.to("cpu")
    with pytest.raises(RuntimeError, match=r"parameter 'weight' of a Linear has another storage"):
        step(x, y)
    trained, step = captured(adamw, x, y)
    trained.model[0].weight = nn.Parameter(torch.ones(16, 8, device=ACC))
    with pytest.raises(RuntimeError, match=r"parameter 'weight' of a Linear is another object"):
        step(x, y)
    trained, step = captured(adamw, x, y)
    trained.optimizer.load_state_dict(copy.deepcopy(trained.optimizer.state_dict()))
    with pytest.raises(RuntimeError, match=r"of AdamW is another object"):
        step(x, y)
    trained, step = captured(adamw, x, y)
    for ours, theirs in zip(trained.values(), before, strict=True):
        torch.testing.assert_close(ours, theirs)
    # New values in the same place are fine.
    trained.model.load_state_dict({k: v * 0 for k, v in trained.model.state_dict().items()})
    assert step(x, y).item() == pytest.approx(y.square().mean().item())


def test_guards_of_settings() -> None:
    """What Python would read anew at each call may not change unnoticed."""
    x, y = (each.to(ACC) for each in batches(1, 5, 8)[0])
    trained = Trained(make_dropout(), sgd)
    other = make_mlp().to(ACC)
    step = torchacc.capture(trained.step)
    for _ in range(4):
        step(x, y)
    other.eval()
    step(x, y)
    trained.model.eval()
    with pytest.raises(RuntimeError, match=r"'training'\) is False and was True"):
        step(x, y)
    trained.model.train()
    step(x, y)
    group = trained.optimizer.param_groups[0]
    group["lr"] *= 0.5
    with pytest.raises(RuntimeError, match=r"'lr' of SGD is 0\.025 and was 0\.05"):
        step(x, y)
    group["lr"] = 0.05
    step(x, y)


@pytest.mark.parametrize(
    ("switch", "match"),
    [
        (torch.set_flush_denormal, "flushing of denormals: off -> on"),
        (torch.use_deterministic_algorithms, "deterministic algorithms: off -> on"),
        (lambda on: torch.set_num_threads(2 if on else 1), "number of threads: 1 -> 2"),
        (lambda on: torch._C._set_mkldnn_enabled(not on), "oneDNN: on -> off"),
    ],
)
@pytest.mark.usefixtures("one_thread")
def test_guards_of_settings_of_pytorch(switch: Callable[[bool], object], match: str) -> None:
    """The function would compute under those in force, and a replay computes as at capture."""
    x = torch.full((8,), 1.5e-38, device=ACC)
    step = torchacc.capture(lambda x: x * 0.5)
    for _ in range(3):
        expected = step(x).tolist()
    switch(True)
    try:
        with pytest.raises(RuntimeError, match=match):
            step(x)
    finally:
        switch(False)
    with torch.no_grad():  # which no result shows
        assert step(x).tolist() == expected


def test_guards_of_what_is_trained() -> None:
    """Freezing a parameter, adding one to the optimizer: a replay would go on as before."""
    x, y = (each.to(ACC) for each in batches(1, 5, 8)[0])

    trained, step = captured(sgd, x, y)
    trained.model[0].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"requires_grad of parameter 'weight' of a Linear is F"):
        step(x, y)
    trained.model[0].weight.requires_grad_(True)
    step(x, y)
    added = nn.Parameter(torch.ones(3, device=ACC))
    trained.optimizer.add_param_group({"params": [added]})
    with pytest.raises(RuntimeError, match=r"groups of SGD have 2 entries and had 1"):
        step(x, y)
    trained, step = captured(sgd, x, y)
    trained.optimizer.param_groups[0]["params"].append(added)
    with pytest.raises(RuntimeError, match=r"parameters of a group of SGD have 5 entries"):
        step(x, y)


def test_steps_that_set_requires_grad_in_turn() -> None:
    """As those of two networks that train against each other do: it is part of them."""
    models = [make_mlp().to(ACC) for _ in range(2)]
    unused = nn.LazyLinear(3)  # which has no shape

    def make(own: nn.Module, other: nn.Module) -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            for p in own.parameters():
                p.requires_grad_(True)
                p.grad = None
            for p in other.parameters():
                p.requires_grad_(False)
            loss = (own(x) - other(x)).square().mean()
            loss.backward()
            return loss.detach()

        step.unused = unused
        return torchacc.capture(step)

    steps = [make(*models), make(*models[::-1])]
    same = torch.randn(5, 8, device=ACC)
    losses = [step(same).item() for _ in range(6) for step in steps]
    assert losses == losses[:1] * 12
    assert all(step.replays == 3 for step in steps)


def test_guards_of_modules_without_parameters() -> None:
    """Their mode counts where they were called."""
    dropout, other = nn.Dropout(0.5), nn.Dropout(0.5)
    x = torch.ones(1000, device=ACC)
    step = torchacc.capture(lambda x: dropout(x) * 1)
    for _ in range(4):
        step(x)
    other.eval()
    step(x)
    dropout.eval()
    with pytest.raises(RuntimeError, match=r"mode of a Dropout .*'training'\) is False and was Tr"):
        step(x)


class Hidden(nn.Module):
    """A module with a state that it is also given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("start", torch.ones(2))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * 10 + self.start


KNOWN: list[torch.Tensor] = []


def _uses_a_global(x: torch.Tensor) -> torch.Tensor:
    return sum(x * 10 + each for each in KNOWN)


def test_arguments_that_are_state_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls with the same tensor do not tell whether it is the argument that is used."""
    monkeypatch.setattr(f"{__name__}.KNOWN", [torch.ones(2, device=ACC)])
    module = Hidden().to(ACC)
    step = torchacc.capture(module)
    for _ in range(4):
        assert step(module.start).tolist() == [11.0, 11.0]
    with pytest.raises(RuntimeError, match=r"args\[0\] had the memory of buffer 'start' of a Hidd"):
        step(torch.zeros(2, device=ACC))
    # What the function knows by another way than the model's: here, by a list of a variable's.
    kept = {"of": [torch.ones(2, device=ACC)]}
    step = torchacc.capture(functools.partial(lambda c, x: x * 10 + kept["of"][0] + c, 1))
    for _ in range(4):
        assert step(kept["of"][0]).tolist() == [12.0, 12.0]
    with pytest.raises(RuntimeError, match="memory of a tensor that the function"):
        step(torch.zeros(2, device=ACC))
    # By a global, in what is defined within.
    step = torchacc.capture(_uses_a_global)
    for _ in range(4):
        assert step(KNOWN[0]).tolist() == [11.0, 11.0]
    with pytest.raises(RuntimeError, match="memory of a tensor that the function"):
        step(torch.zeros(2, device=ACC))
    # A view of what a closure reads.
    weight = nn.Parameter(torch.ones(2, device=ACC))
    step = torchacc.capture(lambda x: x * 10 + weight.detach())
    for _ in range(4):
        assert step(weight.detach()).tolist() == [11.0, 11.0]
    with pytest.raises(RuntimeError, match="memory of a tensor that the function"):
        step(torch.zeros(2, device=ACC))
    # Calls that differ do tell.
    step = torchacc.capture(module)
    for h in (module.start, torch.ones(2, device=ACC), torch.zeros(2, device=ACC)):
        step(h)
    assert step(torch.full((2,), 2.0, device=ACC)).tolist() == [21.0, 21.0]
    assert step(module.start).tolist() == [11.0, 11.0]
    # Nobody else knows this one.
    step = torchacc.capture(module)
    same = torch.ones(2, device=ACC)
    for _ in range(3):
        step(same)
    assert step(torch.zeros(2, device=ACC)).tolist() == [1.0, 1.0]


def test_schedulers_write_a_learning_rate_that_is_a_tensor() -> None:
    def rates(captured: bool) -> list[float]:
        trained = Trained(make_mlp(), adamw)
        scheduler = torch.optim.lr_scheduler.StepLR(trained.optimizer, 1, gamma=0.7)
        step = torchacc.capture(trained.step) if captured else trained.step
        x, y = (each.to(ACC) for each in batches(1, 5, 8)[0])
        found = []
        for _ in range(8):
            found.append(step(x, y))
            scheduler.step()
        return [each.item() for each in found]

    torch.testing.assert_close(rates(True), rates(False))


def test_gradients_that_are_state_stay_in_place() -> None:
    model = make_mlp().to(ACC)

    def fn(x: torch.Tensor) -> None:
        model(x).sum().backward()

    step = torchacc.capture(fn)
    x = torch.ones(2, 8, device=ACC)
    for _ in range(4):
        step(x)
    bias = model[2].bias
    kept, bias.grad = bias.grad, torch.zeros(4, device=ACC)
    with pytest.raises(RuntimeError, match="gradient of parameter 'bias' of a Linear"):
        step(x)
    bias.grad = kept
    step(x)
    assert kept.tolist() == [10.0] * 4


def test_gradients_of_arguments_are_refused() -> None:
    def fn(x: torch.Tensor) -> None:
        (x * x).sum().backward()

    x = torch.ones(3, device=ACC, requires_grad=True)
    refused(fn, x, match=r"leaves a gradient on args\[0\]")

    def grad(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((x * x).sum(), x)[0]

    step = torchacc.capture(grad)
    for i in range(5):
        y = torch.full((3,), float(i), device=ACC, requires_grad=True)
        assert step(y).tolist() == [2.0 * i] * 3


def test_gradients_set_to_none_stay_none() -> None:
    trained = Trained(make_mlp(), sgd)
    step = torchacc.capture(trained.step)
    x, y = (each.to(ACC) for each in batches(1, 5, 8)[0])
    for _ in range(4):
        step(x, y)
    weight = trained.model[0].weight
    grad = weight.grad
    value = grad.clone()
    step(x, y)
    assert weight.grad is grad and not torch.equal(grad.cpu(), value.cpu())
    trained.optimizer.zero_grad()
    del grad
    step(x, y)
    assert weight.grad is None


def test_failures_of_a_replay_poison_as_ever() -> None:
    table = torch.arange(4.0, device=ACC)
    total = torch.zeros(2, device=ACC)

    def fn(index: torch.Tensor) -> torch.Tensor:
        picked = table[index]
        total.add_(picked)
        return picked * 2

    step = torchacc.capture(fn)
    good = torch.tensor([0, 1], device=ACC)
    for _ in range(4):
        step(good)
    with pytest.raises(IndexError, match="out of"):
        step(torch.tensor([0, 9], device=ACC))
        torch.acc.synchronize()
    with pytest.raises(RuntimeError, match="no valid contents"):
        step(good)
    total.copy_(torch.zeros(2))
    assert step(good).tolist() == [0.0, 2.0]
    assert total.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("call", [0, 1, 2])
def test_out_of_memory_for_a_copy_of_a_constant(call: int) -> None:
    """The step itself is done: only what a replay would need is missing."""
    if _C.executor_name() != "host":
        pytest.skip("the allocations that fail are those of the host executor")
    total = torch.zeros(2, device=ACC)
    kept: list[torch.Tensor] = []

    def fn(x: torch.Tensor) -> None:
        kept[:] = [torch.ones(1 << 16).to(ACC)]
        total.add_(kept[0][:2] * x)
        if step.recorded == call:
            _C.fail_allocations(0, 1 << 40, 1 << 18)

    step = torchacc.capture(fn)
    x = torch.ones(2, device=ACC)
    told = []
    for i in range(3):
        try:
            step(x)
        except RuntimeError as error:
            told.append(str(error))
        finally:
            _C.fail_allocations(0, 0)
        assert total.tolist() == [i + 1.0] * 2
    if call == 0:  # which is not one of those that are compared
        assert told == []
        step(x)
        assert total.tolist() == [4.0] * 2
    else:
        assert len(told) == 1 and f"what call {call + 1} copied" in told[0], told
        assert "can't allocate memory" in told[0]


def test_out_of_memory_in_a_replay() -> None:
    """The work waits, and goes on where it stopped: nothing is done twice."""
    if _C.executor_name() != "host":
        pytest.skip("the allocations that fail are those of the host executor")
    total = torch.zeros(2, device=ACC)
    kept: dict[str, torch.Tensor] = {}

    def fn(x: torch.Tensor) -> torch.Tensor:
        total.add_(1)
        kept["product"] = x @ x
        return kept["product"].sum()

    step = torchacc.capture(fn)
    x = torch.ones(256, 256, device=ACC)
    for i in range(4):
        step(x * i)
    three = x * 3
    torchacc.sync()
    torch.acc.empty_cache()
    _C.fail_allocations(0, 1 << 40, 1 << 16)
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"aten::mm.*in fn"):
            step(three)
    finally:
        _C.fail_allocations(0, 0)
    assert total.tolist() == [5.0, 5.0]
    assert kept["product"][0, 0].item() == 9 * 256
    assert step(x).item() == 256.0**3
    assert total.tolist() == [6.0, 6.0]


def test_what_cannot_be_captured_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the step, nor what its variables were."""

    class Number(float):
        """One that can be referred to weakly."""

    made = []

    def keep_and_fail(guards: Guards, step: Any) -> None:
        original(guards, step)
        made.append(weakref.ref(step))
        raise RuntimeError("no")

    original = Guards.keep
    monkeypatch.setattr(Guards, "keep", keep_and_fail)
    x = torch.ones(3, device=ACC)
    scale: Any = Number(2.0)
    known = weakref.ref(scale)
    unguarded = torchacc.capture(lambda x: x * scale)
    reading = torchacc.capture(lambda x: (x * scale).sum().item())
    for step, text in (
        (unguarded, "the step cannot be guarded: no"),
        (reading, "reads a tensor on the"),
    ):
        for _ in range(2):
            step(x)
        with pytest.raises(RuntimeError):
            step(x)
        with pytest.raises(RuntimeError, match=text):
            step(x)
    scale = None
    gc.collect()
    assert len(made) == 1 and made[0]() is None
    assert known() is None
