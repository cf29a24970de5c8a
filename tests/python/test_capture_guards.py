"""What a replay would do wrong unseen: it follows what changed, or says what it cannot follow."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchacc
from tests.python.captured import ACC, Trained, batches, make_mlp, refused, sgd
from torchacc_device import _C

pytestmark = [
    pytest.mark.usefixtures("acc_only"),
    pytest.mark.skipif(_C.mode() in ("eager", "nofuse"), reason="nothing is recorded as a whole"),
]


def captured(fn: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """A step that is replayed."""
    step = torchacc.capture(fn)
    for _ in range(4):
        step(*args)
    assert step.replays == 1
    return step


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batches(1, 5, 8)[0]
    return x.to(ACC), y.to(ACC)


# --- random numbers -------------------------------------------------------------------------------


def normal(x: torch.Tensor, n: int) -> torch.Tensor:
    return torch.empty_like(x).normal_(0, n)


def uniform(x: torch.Tensor, n: int) -> torch.Tensor:
    return torch.empty_like(x).uniform_(0, n)


def dropout(x: torch.Tensor, n: int) -> torch.Tensor:
    return F.dropout(x, n / 8)


@pytest.mark.parametrize("draw", [normal, uniform, dropout])
def test_numbers_of_draws_that_change(draw: Callable[..., torch.Tensor]) -> None:
    """Where a random operator draws may differ, and nothing else of it."""
    calls = [0]

    def fn(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return draw(x, calls[0])

    x = torch.ones(8, device=ACC)
    refused(
        fn, x, match=rf"in {draw.__name__}.*the number '.*' was .* in call 2 and is .* in call 3"
    )


def forked(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng([0], device_type=ACC):
        torch.manual_seed(7)
        return x + torch.rand_like(x)


def forked_unseeded(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng([0], device_type=ACC):
        return x + torch.rand_like(x)


def put_back(x: torch.Tensor) -> torch.Tensor:
    first = torch.rand_like(x)
    state = torch.acc.get_rng_state()
    torch.manual_seed(7)
    second = torch.rand_like(x)
    torch.acc.set_rng_state(state)
    return first + second * torch.rand_like(x)


def seeded(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)
    return x + torch.rand_like(x)


def seeded_and_forked(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)
    first = torch.rand_like(x)
    with torch.random.fork_rng([0], device_type=ACC):
        second = torch.rand_like(x)
    return first + second


def seeded_last(x: torch.Tensor) -> torch.Tensor:
    noise = torch.rand_like(x)
    torch.manual_seed(7)
    return x + noise


def seeded_only(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)
    return x + 1


def own_generator(x: torch.Tensor) -> torch.Tensor:
    own = torch.Generator(ACC)
    other = torch.Generator(ACC).manual_seed(3)
    return x + torch.rand(16, device=ACC, generator=own) * torch.rand(
        16, device=ACC, generator=other
    )


@pytest.mark.parametrize("first", [0, 4], ids=["from the first call", "between replays"])
@pytest.mark.parametrize(
    "fn",
    [
        forked,
        forked_unseeded,
        put_back,
        seeded,
        seeded_and_forked,
        seeded_last,
        seeded_only,
        own_generator,
    ],
)
def test_generators_that_the_function_sets(fn: Callable[..., torch.Tensor], first: int) -> None:
    """Other draws of the program come from where they would have."""

    def draws(step: Callable[..., torch.Tensor]) -> list[list[float]]:
        torch.manual_seed(5)
        x = torch.ones(16, device=ACC)
        found = []
        for i in range(8):
            found.append(step(x).tolist())
            if i >= first:
                found.append(torch.rand(3, device=ACC).tolist())
        return found

    assert draws(fn) == draws(torchacc.capture(fn))


def test_generators_that_are_seeded_otherwise_each_time() -> None:
    calls = [0]

    def fn(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        torch.manual_seed(calls[0])
        return x + 1

    refused(fn, torch.ones(2, device=ACC), match=r"ended call 2 at seed 2.* and call 3 at seed 3")


def test_generators_that_are_put_back_where_they_were_twice() -> None:
    """Where the program leaves a generator is also where the function's seed brings it."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        state = torch.acc.get_rng_state()
        torch.manual_seed(7)
        noise = torch.rand_like(x)
        with torch.random.fork_rng([0], device_type=ACC):
            noise += torch.rand_like(x)
        torch.acc.set_rng_state(state)
        return x + noise

    x = torch.ones(4, device=ACC)
    torch.manual_seed(7)
    torch.rand_like(x)
    refused(fn, x, match="a generator is put back to seed 7, offset 4.* before and after")


def test_generators_that_are_given_another_state() -> None:
    generator = torch.Generator(ACC).manual_seed(1)
    x = torch.zeros(3, device=ACC)
    step = captured(lambda x: x + torch.rand(3, device=ACC, generator=generator), x)
    own = generator.graphsafe_get_state()
    generator.graphsafe_set_state(torch.Generator(ACC).manual_seed(7).graphsafe_get_state())
    with pytest.raises(RuntimeError, match=r"generator .* the state of another one"):
        step(x)
    generator.graphsafe_set_state(own)
    same = own.clone_state()
    assert torch.equal(step(x), torch.rand(3, device=ACC, generator=same))


def test_generators_that_the_function_gives_another_state() -> None:
    """And its own one again: the draws follow both."""
    generator = torch.Generator(ACC).manual_seed(1)
    first = generator.graphsafe_get_state()
    second = torch.Generator(ACC).manual_seed(7)

    def fn(x: torch.Tensor) -> torch.Tensor:
        generator.graphsafe_set_state(second)
        noise = torch.rand(3, device=ACC, generator=generator)
        generator.graphsafe_set_state(first)
        return x + noise * torch.rand(3, device=ACC, generator=generator)

    def draws(step: Callable[..., torch.Tensor]) -> list[list[float]]:
        first.manual_seed(1)
        second.manual_seed(7)
        return [step(torch.zeros(3, device=ACC)).tolist() for _ in range(6)]

    assert draws(fn) == draws(torchacc.capture(fn))


# --- memory that is shared ------------------------------------------------------------------------


def test_parts_of_one_tensor_as_argument_and_as_state() -> None:
    """What does not move with the argument is none of it."""
    data = torch.arange(12.0, device=ACC).reshape(6, 2)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 100 + data[0], data[0]

    step = torchacc.capture(fn)
    for i in (1, 2, 3, 5, 4, 0, 2):
        total, first = step(data[i])
        assert total.tolist() == [200.0 * i, 200.0 * i + 101]
        assert first.data_ptr() == data.data_ptr() and first.tolist() == [0.0, 1.0]
    assert step.replays == 4
    # Where it never moved, nothing tells.
    step = captured(fn, data[1])
    with pytest.raises(RuntimeError, match=r"args\[0\] had the memory of .*, at the same place"):
        step(data[2])
    assert step(data[1])[0].tolist() == [200.0, 301.0]


def test_results_that_are_others_at_each_call() -> None:
    calls = [0]

    def turns(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return (x + 1, x + 2)[calls[0] % 2]

    def moves(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return (x + 1)[calls[0] % 2]

    x = torch.ones(2, 2, device=ACC)
    refused(turns, x, match=r"result 0 .* is a tensor that aten::add.* in call 3, and something")
    refused(moves, x, match=r"result 0 has its beginning at byte \d in call 2 and \d in call 3")


def test_constants_that_the_function_keeps() -> None:
    """Each call makes them of the host's numbers, whatever the program writes there meanwhile."""
    kept: dict[str, torch.Tensor] = {}

    def fn(x: torch.Tensor) -> torch.Tensor:
        kept["table"] = torch.tensor([1.0, 2.0], device=ACC)
        kept["sum"] = torch.tensor([1.0, 1.0], device=ACC)
        kept["sum"] += x
        return x * kept["table"]

    step = torchacc.capture(fn)
    for i in range(6):
        assert step(torch.full((2,), float(i), device=ACC)).tolist() == [1.0 * i, 2.0 * i]
        assert kept["table"].tolist() == [1.0, 2.0]
        assert kept["sum"].tolist() == [1.0 + i] * 2
        kept["table"].zero_()
    assert step.replays == 3
    # One of them as the argument: it is read before it is made anew.
    kept["table"].fill_(5)
    assert step(kept["table"]).tolist() == [5.0, 10.0]
    assert kept["sum"].tolist() == [6.0, 6.0]


def test_results_that_are_left_behind_and_fail() -> None:
    """What a failed replay was to write says so."""
    table = torch.arange(4.0, device=ACC)
    kept: dict[str, torch.Tensor] = {}

    def fn(index: torch.Tensor) -> torch.Tensor:
        kept["last"] = table[index] * 2
        return kept["last"]

    good = torch.tensor([0, 1], device=ACC)
    step = captured(fn, good)
    with pytest.raises(IndexError, match="out of"):
        step(torch.tensor([0, 9], device=ACC))
        torch.acc.synchronize()
    with pytest.raises(RuntimeError, match="no valid contents"):
        kept["last"].cpu()
    result = step(good)
    assert result.tolist() == kept["last"].tolist() == [0.0, 2.0]
    kept["last"].zero_()
    assert result.tolist() == [0.0, 2.0]


# --- what the program replaces --------------------------------------------------------------------


def test_learning_rates_on_the_cpu() -> None:
    """They are numbers: a scheduler that writes one is not followed, and not unseen."""
    trained = Trained(make_mlp(), lambda p: torch.optim.SGD(p, lr=torch.tensor(0.5)))
    scheduler = torch.optim.lr_scheduler.StepLR(trained.optimizer, 1, gamma=0.5)
    x, y = batch()
    step = captured(trained.step, x, y)
    scheduler.step()
    with pytest.raises(RuntimeError, match=r"'lr' of SGD is tensor\(0\.25.* was tensor\(0\.5"):
        step(x, y)
    group = trained.optimizer.param_groups[0]
    group["lr"].fill_(0.5)
    step(x, y)
    group["lr"] = torch.tensor(0.125)
    with pytest.raises(RuntimeError, match=r"'lr' of SGD is tensor\(0\.125"):
        step(x, y)


class Scaled(nn.Module):
    """Has settings of both kinds, those of PyTorch's layers and its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.factor = 2.0
        self.calls = 0
        self.epoch = 0
        self.with_gradients = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.note(x.shape[0])
        assert self.epoch >= 0 and self.with_gradients == torch.is_grad_enabled()
        assert self.drop.rows == len(x)
        return self.scaled(self.drop(self.norm(x)))

    def note(self, rows: int) -> None:
        self.with_gradients = torch.is_grad_enabled()
        self.drop.rows = rows

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


SETTINGS = [
    (lambda m: m.drop, "p", 0.5, 0.25, r"'p' of a Dropout is 0.25 and was 0.5"),
    (lambda m: m.norm, "momentum", 0.1, None, r"'momentum' of a BatchNorm1d is None and was 0.1"),
    (lambda m: m, "factor", 2.0, 3.0, r"'factor' of a Scaled is 3.0 and was 2.0"),
]


class Hiding:
    """As type variables are from Python 3.12 on."""

    @property
    def __dict__(self):
        raise AttributeError("__dict__")


def test_objects_that_hide_their_attributes_are_passed_over() -> None:
    model = Scaled().to(ACC)
    model.hiding = Hiding()
    x, _ = batch()
    step = captured(lambda x: model(x).sum(), x)
    step(x)
    model.factor = 3.0
    with pytest.raises(RuntimeError, match="'factor' of a Scaled"):
        step(x)


@pytest.mark.parametrize(("owner", "name", "was", "value", "text"), SETTINGS)
def test_settings_of_modules_that_change(owner, name, was, value, text) -> None:
    model = Scaled().to(ACC)
    x, _ = batch()
    step = captured(lambda x: model(x).sum(), x)
    setattr(owner(model), name, value)
    with pytest.raises(RuntimeError, match=text):
        step(x)
    setattr(owner(model), name, was)
    step(x)


def test_settings_of_modules_that_change_all_the_time() -> None:
    """Two calls with different ones computed the same."""
    model = Scaled().to(ACC)
    x, _ = batch()
    step = torchacc.capture(lambda x: model(x).sum())
    for _ in range(6):
        step(x)
        model.epoch += 1
    assert (step.replays, model.calls) == (3, 3)


class Noting(nn.Dropout):
    """Reads what the module around it sets."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.rows == len(x)
        return super().forward(x)


def test_settings_that_the_step_sets_itself() -> None:
    """What else calls the model sets them otherwise, an evaluation say."""
    model = Scaled().to(ACC)
    model.drop = Noting(0.5)
    x, _ = batch()

    class Trainer:
        def __init__(self) -> None:
            self.last = 7

        def step(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal last
            last = min(last + 1, 1)
            self.last = min(self.last + 1, 5)
            model.train()
            return model(x).sum()

    last, trainer = 0, Trainer()
    step = captured(trainer.step, x)
    model.eval()
    with torch.no_grad():
        model(x[:2])
    assert (model.with_gradients, model.drop.rows, last, trainer.last) == (False, 2, 1, 5)
    last, trainer.last = 0, 0
    step(x)
    assert step.replays == 2
    assert nn.Module.__setattr__.__name__ == "__setattr__"
    assert not hasattr(nn.Module.__setattr__, "__wrapped__")


SCALE = 2.0


def test_variables_that_change() -> None:
    """Global ones, those around the function, and attributes of the object whose method it is."""
    offset, steps = 1.0, 0

    def fn(x: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return x * SCALE + offset

    class Holder:
        bias = 1.0

        def __init__(self) -> None:
            self.scale = 2.0
            self.unread = 0

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale + self.bias

    global SCALE
    x, _ = batch()
    step = captured(torch.no_grad()(fn), x)
    offset = 2.0
    with pytest.raises(RuntimeError, match=r"the variable 'offset' of the function is 2.0 and was"):
        step(x)
    offset, SCALE = 1.0, 3.0
    try:
        with pytest.raises(RuntimeError, match=r"the variable 'SCALE' of the function is 3.0"):
            step(x)
    finally:
        SCALE = 2.0
    assert step(x).equal(x * 2 + 1) and steps == 3
    holder = Holder()
    step = captured(holder.step, x)
    holder.unread = 1
    assert step(x).equal(x * 2 + 1)
    holder.scale = 3.0
    with pytest.raises(RuntimeError, match=r"the variable 'scale' of the function is 3.0"):
        step(x)


def test_layers_and_optimizers_that_are_replaced() -> None:
    trained = Trained(make_mlp(), sgd)
    x, y = batch()
    step = captured(trained.step, x, y)
    old = trained.model[0]
    trained.model[0] = nn.Linear(8, 16).to(ACC)
    with pytest.raises(RuntimeError, match=r"module '0' of a Sequential is another object"):
        step(x, y)
    trained.model[0] = old
    step(x, y)
    # The old one is still there.
    optimizer = trained.optimizer
    trained.optimizer = sgd(trained.model.parameters())
    with pytest.raises(RuntimeError, match=r"the optimizer 'optimizer' of a Trained is another"):
        step(x, y)
    trained.optimizer = optimizer
    step(x, y)
    model = trained.model
    trained.model = make_mlp().to(ACC)
    with pytest.raises(RuntimeError, match=r"the module 'model' of a Trained is another object"):
        step(x, y)
    trained.model = model
    step(x, y)


def test_models_and_optimizers_that_are_gone() -> None:
    """A function finds another one under the same name."""
    x, y = batch()
    model = make_mlp().to(ACC)
    step = captured(lambda x: model(x), x)
    model = make_mlp().to(ACC)
    gc.collect()
    with pytest.raises(RuntimeError, match=r"a \w+ that the function used is gone"):
        step(x)
    optimizer = sgd(model.parameters())

    def train(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    step = captured(train, x)
    optimizer = sgd(model.parameters())
    gc.collect()
    with pytest.raises(RuntimeError, match=r"the SGD that the function used is gone"):
        step(x)
    trained = Trained(make_mlp(), sgd)
    step = captured(lambda x, y: trained.step(x, y), x, y)
    trained = Trained(make_mlp(), sgd)
    gc.collect()
    with pytest.raises(RuntimeError, match=r"a \w+ that the function used is gone"):
        step(x, y)


def test_what_the_collector_does_not_tell_of() -> None:
    """gc.freeze() takes objects from its lists, as programs do that fork."""
    trained = Trained(make_mlp(), sgd)
    x, y = batch()
    gc.collect()
    gc.freeze()
    step = captured(trained.step, x, y)
    group = trained.optimizer.param_groups[0]
    rate, group["lr"] = group["lr"], 0.75
    with pytest.raises(RuntimeError, match=r"'lr' of SGD is 0.75"):
        step(x, y)
    group["lr"] = rate
    trained.model[0].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"requires_grad of parameter 'weight' .* is False"):
        step(x, y)


def test_objects_that_cannot_be_referred_to_weakly() -> None:
    """What they have is noticed when it goes."""

    class Slotted:
        __slots__ = ("__dict__",)

    holder = Slotted()
    holder.model = make_mlp().to(ACC)
    x, _ = batch()
    step = captured(lambda x: holder.model(x), x)
    step(x)
    holder = Slotted()
    holder.model = make_mlp().to(ACC)
    gc.collect()
    with pytest.raises(RuntimeError, match=r"a \w+ that the function used is gone"):
        step(x)


def test_modules_that_the_function_does_not_use() -> None:
    """What else has a model's parts may be replaced, and may go."""
    trained = Trained(make_mlp(), sgd)
    other = nn.ModuleDict({"of": trained.model})
    others = sgd(trained.model.parameters())
    x, y = batch()
    step = captured(trained.step, x, y)
    other["of"] = nn.ReLU()
    step(x, y)
    del other, others
    gc.collect()
    step(x, y)


def test_gradients_that_are_replaced() -> None:
    """The step puts its own in their place, as backward does."""
    plain, trained = Trained(make_mlp(), sgd), Trained(make_mlp(), sgd)
    step = torchacc.capture(trained.step)
    x, y = batch()
    for i in range(7):
        plain.step(x, y)
        step(x, y)
        kept = [p.grad for p in trained.model.parameters()]
        torch.testing.assert_close(trained.values(), plain.values())
        for p in trained.model.parameters():
            p.grad = p.grad / 2
        if i % 2:
            del kept
    assert step.replays == 4


def test_versions_of_gradients_that_are_replaced() -> None:
    """The step writes those that it put there, and no longer what was there before."""
    trained = Trained(make_mlp(), sgd)
    x, y = batch()
    step = captured(trained.step, x, y)
    weight = trained.model[0].weight
    grads = [weight.grad]
    for _ in range(2):
        version = grads[-1]._version
        step(x, y)
        assert grads[-1] is weight.grad and grads[-1]._version > version
        weight.grad = weight.grad / 2
        step(x, y)
        grads.append(weight.grad)
    versions = [grad._version for grad in grads]
    step(x, y)
    now = [grad._version for grad in grads]
    assert now[:-1] == versions[:-1] and now[-1] > versions[-1]


def test_two_steps_of_one_model() -> None:
    """Each leaves its gradients where the other one did."""
    plain, trained = Trained(make_mlp(), sgd), Trained(make_mlp(), sgd)
    steps = [torchacc.capture(trained.step), torchacc.capture(trained.step)]
    for i, (x, y) in enumerate(batches(12, 5, 8)):
        x, y = x.to(ACC), y.to(ACC)
        plain.step(x, y)
        steps[i % 2](x, y)
        torch.testing.assert_close(trained.values(), plain.values())
    assert all(step.replays == 3 for step in steps)
    weight = trained.model[0].weight
    weight.grad = torch.ones_like(weight)
    with pytest.raises(RuntimeError, match="shape"):
        steps[0](x[:2], y)
    assert weight.grad.sum().item() == weight.numel()
    steps[0](x, y)
    plain.step(x, y)
    torch.testing.assert_close(trained.values(), plain.values())


def test_arguments_that_are_written_in_place() -> None:
    """What lends out its memory is compared by what it holds."""
    mask = bytearray(b"ab")
    step = captured(lambda x, mask: x * 2, torch.ones(2, device=ACC), mask)
    mask[0] = 0
    with pytest.raises(RuntimeError, match=r"args\[1\] is bytearray.* and was bytearray\(b'ab'\)"):
        step(torch.ones(2, device=ACC), mask)


@dataclasses.dataclass
class Settings:
    model: nn.Module
    weight: torch.Tensor
    numbers: list[float]
    lock: Any = None

    def set(self, name: str, value: Any) -> None:
        setattr(self, name, value)


def settings(**more: Any) -> Settings:
    return Settings(nn.Linear(2, 2).to(ACC), torch.ones(2, device=ACC), [1.0, 2.0], **more)


DAY = np.timedelta64(1, "D")


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: argparse.Namespace(k=2.0), lambda each: setattr(each, "k", 3.0)),
        (lambda: {1, 2}, lambda each: each.add(3)),
        (lambda: np.array(["2020-01-01"], "M8[D]"), lambda each: np.add(each, DAY, out=each)),
        (settings, lambda each: each.numbers.append(3.0)),
        (settings, lambda each: each.set("weight", each.weight * 2)),
        (settings, lambda each: each.set("model", nn.Linear(2, 2))),
        (lambda: settings(lock=threading.Lock()), lambda each: each.set("numbers", [2.0])),
    ],
)
def test_objects_that_are_changed_in_place(
    make: Callable[[], Any], change: Callable[[Any], Any]
) -> None:
    """Those that define equality; what does not, and tensors, in them are told by identity."""
    x, each = torch.ones(2, device=ACC), make()
    step = captured(lambda x, each: x * 2, x, each)
    assert step(x, each).tolist() == [2.0, 2.0]
    change(each)
    with pytest.raises(RuntimeError, match=r"args\[1\] is .* and was "):
        step(x, each)


def test_objects_that_are_the_same_or_equal_are_taken() -> None:
    x = torch.ones(2, device=ACC)
    for same, equal in ((argparse.Namespace(k=2.0), argparse.Namespace(k=2.0)), ({1, 2}, {2, 1})):
        step = captured(lambda x, each: x * 2, x, same)
        assert step(x, equal).tolist() == [2.0, 2.0]
    untimely = np.array(["NaT"], "M8[D]")  # is not equal to itself
    for each in (settings(), settings(lock=threading.Lock()), object(), float("nan"), untimely):
        step = captured(lambda x, each: x * 2, x, each)
        assert step(x, each).tolist() == [2.0, 2.0]


def test_arrays_that_are_arguments() -> None:
    """Their numbers count, wherever these lie."""
    x = torch.ones(2, device=ACC)
    table = np.arange(6).reshape(2, 3)
    for array in (table, table.T, table[:, ::2]):
        step = captured(lambda x, array: x * 2, x, array)
        step(x, array.copy())
        for other in (array + 1, array[:1], array.astype(float), array.reshape(-1)):
            with pytest.raises(RuntimeError, match=r"args\[1\] is "):
                step(x, other)


def test_replays_of_another_thread_while_a_call_is_recorded() -> None:
    """They submit what was recorded so far."""
    x = torch.ones(2, device=ACC)
    other = captured(lambda x: x * 3, x)

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        thread = threading.Thread(target=other, args=(x,))
        thread.start()
        thread.join()
        return y * 2

    refused(fn, x, match="submits work before its end")
