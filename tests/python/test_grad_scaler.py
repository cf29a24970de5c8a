"""Steps under a GradScaler: torch's results, and nothing read on the host."""

from __future__ import annotations

import collections
import copy
import math
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_flatten_with_path

import torchacc
from tests import helpers
from torchacc import syncfree

pytestmark = pytest.mark.usefixtures("acc_only")

ACC = "acc"
Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw for-loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw maximize": lambda p: torch.optim.AdamW(p, lr=0.01, maximize=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01, t0=3),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "two groups": lambda p: torch.optim.AdamW(
        [{"params": p[:1], "weight_decay": 0.1}, {"params": p[1:], "lr": 0.1}], lr=0.01
    ),
}
# They count steps on the host, or may not be told otherwise.
ON_HOST = ("adagrad",)


class Training:
    """A small network on one device; `step(overflow)` is a step under a scaler."""

    def __init__(self, device: str, make: Make, **scaler: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).to(device)
        self.optimizer = make(list(self.net.parameters()))
        self.scaler = torch.amp.GradScaler(device, **scaler)
        self.x = torch.randn(16, 5).to(device)
        self.factor = torch.ones((), device=device)

    def step(self, overflow: bool, before: Callable[[Training], None] | None = None) -> None:
        self.optimizer.zero_grad()
        loss = self.net(self.x).square().mean() * (math.inf if overflow else 1.0)
        self.scaler.scale(loss).backward()
        if before is not None:
            before(self)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state(self) -> dict[str, Any]:
        parameters = [p.detach().cpu() for p in self.net.parameters()]
        state = self.optimizer.state_dict()
        return {
            "parameters": parameters,
            "groups": state["param_groups"],
            "state": {
                index: {
                    key: value.cpu() if isinstance(value, torch.Tensor) else value
                    for key, value in of.items()
                }
                for index, of in state["state"].items()
            },
            "scale": self.scaler.get_scale(),
            "tracker": self.scaler._get_growth_tracker(),
        }


def same(found: Training, other: Training) -> None:
    """Plain values are equal, tensors within 2e-4 of the largest number of their kind (of all
    parameters, of all first moments), since a sum may come to nearly nothing in one of them.
    RAdam, which needs most, corrects by counts in float32 on the device and in Python on a host.
    """
    mine, theirs = (tree_flatten_with_path(each.state()) for each in (found, other))
    assert mine[1] == theirs[1]
    largest: dict[Any, float] = collections.defaultdict(float)
    for one, value in theirs[0]:
        if isinstance(value, torch.Tensor):
            largest[kind(one)] = max(largest[kind(one)], value.abs().max().item())
    for (path, one), (_, value) in zip(mine[0], theirs[0], strict=True):
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(one, value, rtol=0, atol=2e-4 * largest[kind(path)])
        else:
            assert one == value, path


def kind(path: tuple[Any, ...]) -> Any:
    """What a tensor of `Training.state` is: ("state", index, name) or ("parameters", index)."""
    return path[-1] if len(path) == 3 else path[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("first", [False, True], ids=["", "overflow at first"])
def test_states_are_torchs_after_each_step(name: str, first: bool) -> None:
    trainings = [
        Training(device, OPTIMIZERS[name], init_scale=256.0, growth_interval=3)
        for device in (ACC, "cpu")
    ]
    for i in range(14):
        for training in trainings:
            training.step(i in (4, 5, 9) or (first and i == 0))
        same(*trainings)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_may_join_later(name: str) -> None:
    """Their state is made by the first step that they take, beside others' that is on acc."""
    trainings = [
        Training(device, OPTIMIZERS[name], init_scale=256.0, growth_interval=3)
        for device in (ACC, "cpu")
    ]
    for i in range(12):
        for training in trainings:
            training.net[0].weight.requires_grad_(i >= 4)
            training.net[2].bias.requires_grad_(i >= 8)
            training.step(i in (2, 6, 8))
        same(*trainings)


def test_five_hundred_steps_are_torchs() -> None:
    order = torch.randperm(500, generator=torch.Generator().manual_seed(3))
    overflows = set(order[:60].tolist())
    trainings = [
        Training(device, OPTIMIZERS["adamw"], init_scale=2.0**16, growth_interval=7)
        for device in (ACC, "cpu")
    ]
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(t.optimizer, T_max=500) for t in trainings
    ]
    for i in range(500):
        for training, schedule in zip(trainings, schedules, strict=True):
            training.step(i in overflows)
            schedule.step()
        same(*trainings)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ON_HOST])
@pytest.mark.usefixtures("recording")
def test_a_steady_state_reads_nothing_and_makes_no_plan(name: str) -> None:
    """Mixed precision, overflows that skip steps, and a schedule; 500 steps with one optimizer."""
    warm_up, steps = 4, 500 if name == "adamw" else 60
    training = Training(ACC, OPTIMIZERS[name], init_scale=256.0, growth_interval=3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, T_max=500)
    factors = [torch.tensor(factor).to(ACC) for factor in (1.0, math.inf)]

    def step(i: int) -> None:
        training.optimizer.zero_grad()
        with torch.autocast(ACC, torch.float16):
            output = training.net(training.x)
        assert output.dtype == torch.float16
        loss = output.float().square().mean() * factors[i % 7 == 3]
        training.scaler.scale(loss).backward()
        training.scaler.step(training.optimizer)
        training.scaler.update()
        schedule.step()

    for i in range(warm_up):
        step(i)
    with helpers.counting() as counted:
        for i in range(warm_up, steps):
            step(i)
    assert counted["plans_built"] == 0
    # Work is submitted at the ends of steps, for no other reason, and nowhere else.
    reasons = {key for key in counted.after if re.fullmatch("flush_[a-z_]+", key)}
    found = {key: counted[key] for key in reasons if counted[key]}
    assert found == {"flush_step": steps - warm_up} and counted["flushes"] == steps - warm_up
    # Nor is anything read of what was submitted before, as behind the end of the step.
    assert not [key for key in counted.after if key.startswith("waits/") and counted[key]]
    assert training.scaler.get_scale() != 256.0


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("strict", [False, True])
def test_a_line_of_log_in_a_loop_with_a_loader_makes_no_plan(strict: bool) -> None:
    """The step has ended when it is read, with the scaler's update in its plan; strict mode agrees,
    and excuses the steps that overflow before an optimizer has its state.
    """
    training = Training(ACC, OPTIMIZERS["adamw"], init_scale=2.0**16)
    data = [torch.randn(16, 5) * (1e6 if i < 5 else 1) for i in range(40)]
    built, logged = [], []
    with torchacc.strict(strict):
        for i, x in enumerate(torchacc.AsyncLoader(data, ACC), 1):
            before = helpers.stats().get("plans_built", 0)
            training.optimizer.zero_grad()
            with torch.autocast(ACC, torch.float16):
                output = training.net(x)
            loss = output.float().square().mean()
            training.scaler.scale(loss).backward()
            training.scaler.step(training.optimizer)
            training.scaler.update()
            if i % 10 == 0:
                logged.append(f"{loss:.4f}")
            built.append(helpers.stats().get("plans_built", 0) - before)
    assert len(logged) == 4 and training.scaler.get_scale() < 2.0**16
    skipped = 40 - int(training.optimizer.state_dict()["state"][0]["step"])
    assert skipped == 5, "more have to be skipped than strict mode warms up"
    assert not any(built[skipped + 3 :]), built


def trained_scaled(net: nn.Module, batches: Any) -> None:
    """Steps with an optimizer and a scaler of their own."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(ACC, init_scale=1024.0)
    for x in batches:
        optimizer.zero_grad()
        scaler.scale(net(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.usefixtures("recording")
def test_what_strict_mode_excuses_ends_with_the_step() -> None:
    """Neither is evaluation taken for training behind it, nor may what follows read."""
    net = nn.Linear(4, 3).to(ACC)
    good = [helpers.drawn(8, 4, device="cpu", seed=i) for i in range(8)]
    overflows = [x * 1e30 for x in good[:4]]
    with torchacc.strict():
        trained_scaled(net, torchacc.AsyncLoader(good, ACC))
        trained_scaled(net, torchacc.AsyncLoader(overflows, ACC))
        with torch.no_grad():
            for x in torchacc.AsyncLoader([x[:5] for x in good[:2]], ACC):
                net(x).sum()
        trained_scaled(net, [x.to(ACC) for x in overflows])  # nor has a skipped step an end here
        loss = net(good[0].to(ACC)).square().mean()
        with pytest.raises(RuntimeError, match="a value is read in the middle of a step"):
            loss.item()


def test_gradients_may_be_unscaled_and_clipped_before() -> None:
    def clip(training: Training) -> None:
        training.scaler.unscale_(training.optimizer)
        nn.utils.clip_grad_norm_(training.net.parameters(), 0.05)

    trainings = [
        Training(device, OPTIMIZERS["adamw"], init_scale=256.0, growth_interval=3)
        for device in (ACC, "cpu")
    ]
    for i in range(12):
        for training in trainings:
            training.step(i in (3, 7), clip)
        same(*trainings)


def test_torchs_scaler_of_sharded_gradients() -> None:
    """Its found_inf has a dimension, which counts of steps have not."""
    dist.init_process_group(ACC, store=dist.HashStore(), rank=0, world_size=1)
    try:
        options = {"init_scale": 256.0, "growth_interval": 3}
        trainings = [Training(device, OPTIMIZERS["adam"], **options) for device in (ACC, "cpu")]
        trainings[0].scaler = ShardedGradScaler(ACC, **options)
        for i in range(8):
            for training in trainings:
                training.step(i in (3, 4))
            same(*trainings)
    finally:
        dist.destroy_process_group()


def test_unscaling_twice_is_refused() -> None:
    training = Training(ACC, OPTIMIZERS["adamw"])
    training.scaler.scale(training.net(training.x).sum()).backward()
    training.scaler.unscale_(training.optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        training.scaler.unscale_(training.optimizer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_without_autocast_the_scaler_takes_float32_and_refuses_what_torch_refuses(
    dtype: torch.dtype,
) -> None:
    told = []
    for device in (ACC, "cpu"):
        net = nn.Linear(3, 2).to(device, dtype)
        scaler = torch.amp.GradScaler(device, init_scale=4.0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler.scale(net(torch.ones(1, 3, device=device, dtype=dtype)).sum()).backward()
        try:
            scaler.step(optimizer)
            told.append("")
        except ValueError as error:
            told.append(str(error))
    # Gradients in float16 have overflowed before they can be unscaled.
    assert told[0] == told[1] and bool(told[0]) == (dtype == torch.float16)


def hooked(parameters: Any) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(parameters, lr=0.01)
    made.register_step_post_hook(lambda *_: None)
    return made


class Mine(torch.optim.AdamW):
    """A user's: nobody knows what its step does beside writing tensors."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        Mine.calls += 1
        return super().step(closure)


def replaced(parameters: Any) -> torch.optim.Optimizer:
    """A step of the program's own, which a scheduler has wrapped since."""
    made = torch.optim.AdamW(parameters, lr=0.01)
    made.step = types.MethodType(lambda self: type(self).step(self), made)  # type: ignore
    torch.optim.lr_scheduler.StepLR(made, 1000)
    return made


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (replaced, "AdamW.*was replaced"),
        (OPTIMIZERS["adagrad"], "Adagrad.*not known to keep all of its state on the device"),
        (hooked, "AdamW.*step hooks"),
        (lambda p: Mine(p, lr=0.01), "Mine.*not known"),
    ],
    ids=["replaced", "adagrad", "hooks", "a user's"],
)
def test_others_keep_torchs_read_and_are_reported(make: Make, why: str) -> None:
    Mine.calls = 0
    trainings = [Training(device, make, init_scale=4.0) for device in (ACC, "cpu")]
    for i in range(6):
        for training in trainings:
            training.step(i == 2)
    same(*trainings)
    assert Mine.calls in (0, 10)  # skipped steps are no calls
    assert re.search(why, str(torchacc.report()))


class Failing(torch.optim.SGD):
    """Its first step raises."""

    failed = False

    def step(self, closure: Any = None) -> Any:
        if not self.failed:
            self.failed = True
            raise ArithmeticError("once")
        return super().step(closure)


@pytest.mark.parametrize("device", ["cpu", ACC])
def test_a_step_that_failed_may_be_taken_again_where_it_is_torchs(device: str) -> None:
    training = Training(device, lambda p: Failing(p, lr=0.1), init_scale=4.0)
    before = training.net[0].weight.tolist()
    with pytest.raises(ArithmeticError):
        training.step(False)
    if device == "cpu":
        training.scaler.step(training.optimizer)
    else:
        with pytest.raises(RuntimeError, match="already been called"):
            training.scaler.step(training.optimizer)
    training.scaler.update()
    assert (training.net[0].weight.tolist() == before) == (device != "cpu")


def test_a_step_without_scaler_goes_on_where_one_ended() -> None:
    trainings = [Training(device, OPTIMIZERS["adamw"]) for device in (ACC, "cpu")]
    for training in trainings:
        for _ in range(3):
            training.step(False)
        training.optimizer.zero_grad()
        training.net(training.x).sum().backward()
        training.optimizer.step()
        training.step(False)
    same(*trainings)


def test_a_state_that_is_loaded_goes_on() -> None:
    first, second = (Training(ACC, OPTIMIZERS["adamw"]) for _ in range(2))
    for _ in range(3):
        first.step(False)
    second.net.load_state_dict(first.net.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    second.scaler.load_state_dict(first.scaler.state_dict())
    for training in (first, second):
        training.step(True)
        training.step(False)
    same(first, second)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_syncfree_optimizers_take_found_inf(kind: str) -> None:
    options = {"lr": 0.05} | ({"momentum": 0.9} if kind == "SGD" else {})
    found = torch.ones(3).to(ACC).requires_grad_()
    expected = torch.ones(3, requires_grad=True)
    mine = getattr(syncfree, kind)([found], **options)
    torchs = getattr(torch.optim, kind)([expected], **options)
    for i in range(8):
        overflow = i in (0, 3, 6)
        for parameter in (found, expected):
            parameter.grad = torch.full((3,), math.inf if overflow else 0.5 + i).to(
                parameter.device
            )
        mine.step(found_inf=torch.tensor([float(overflow)]).to(ACC))
        if not overflow:
            torchs.step()
        torch.testing.assert_close(found.detach().cpu(), expected.detach())
    mine.step()
    torchs.step()
    torch.testing.assert_close(found.detach().cpu(), expected.detach())


def test_hooks_of_all_optimizers_see_steps_that_are_taken() -> None:
    calls: list[str] = []
    hook = register_optimizer_step_post_hook(
        lambda optimizer, *_: calls.append(type(optimizer).__name__)
    )
    try:
        training = Training(ACC, OPTIMIZERS["adamw"], init_scale=4.0)
        for i in range(5):
            training.step(i == 2)
        assert calls == ["AdamW"] * 4
        calls.clear()
        optimizer = syncfree.AdamW(training.net.parameters(), lr=0.1)
        optimizer.step()
        optimizer.step(found_inf=torch.zeros(()).to(ACC))
        assert calls == ["AdamW"] * 2
    finally:
        hook.remove()


def test_a_step_without_gradients_does_nothing() -> None:
    optimizer = syncfree.SGD([torch.ones(3).to(ACC).requires_grad_()], lr=0.1)
    optimizer.step(found_inf=torch.zeros(()).to(ACC))


def test_syncfree_optimizers_refuse_what_they_cannot_do() -> None:
    optimizer = syncfree.SGD([torch.ones(3).to(ACC).requires_grad_()], lr=0.1)
    with pytest.raises(ValueError, match=r"found_inf is a tensor of one element.*\(2,\)"):
        optimizer.step(found_inf=torch.zeros(2).to(ACC))
    with pytest.raises(RuntimeError, match="closure or found_inf"):
        optimizer.step(lambda: 0.0, found_inf=torch.zeros(()).to(ACC))


def test_the_scaler_of_torchacc_has_its_scale_on_the_device_from_the_start() -> None:
    scaler = torchacc.amp.GradScaler(init_scale=8.0)
    assert scaler._scale is not None and scaler._scale.device.type == ACC
    assert not torchacc.amp.GradScaler(enabled=False).is_enabled()


@pytest.mark.parametrize("name", ["momentum", "adamw", "adamw fused"])
def test_zero_gradients_instead_of_a_skipped_step(name: str) -> None:
    """Momenta and counts go on; parameters stay finite."""
    training = Training(ACC, OPTIMIZERS[name])
    training.scaler = torchacc.amp.GradScaler(init_scale=8.0, use_zero_grad=True)
    expected = Training("cpu", OPTIMIZERS[name])
    for i in range(6):
        training.step(i == 3)
        expected.optimizer.zero_grad()
        (expected.net(expected.x).square().mean()).backward()
        if i == 3:
            for p in expected.net.parameters():
                p.grad.zero_()
        expected.optimizer.step()
    for found, wanted in zip(training.net.parameters(), expected.net.parameters(), strict=True):
        torch.testing.assert_close(found.detach().cpu(), wanted.detach(), rtol=1e-5, atol=1e-6)
    assert training.scaler.get_scale() == 4.0
