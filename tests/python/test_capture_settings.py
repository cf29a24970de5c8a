"""Settings that a captured step reads of objects and dicts: `args.alpha`, `self.cfg["scale"]`."""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchacc
from tests.python.captured import ACC, Trained, batches, captured, make_mlp, ones
from torchacc_device import _C

pytestmark = [
    pytest.mark.usefixtures("acc_only"),
    pytest.mark.skipif(_C.mode() in ("eager", "nofuse"), reason="nothing is recorded as a whole"),
]


@dataclasses.dataclass
class Options:
    alpha: float = 2.0


class Nested:
    """Has settings in others."""

    def __init__(self) -> None:
        self.inner = types.SimpleNamespace(alpha=2.0)
        self.table = {"scale": 2.0, "sizes": (1, 2)}
        self.listed = [{"alpha": 2.0}]


class Entries(dict[str, float]):
    """A dict whose entries are attributes, too."""

    __getattr__ = dict.__getitem__


def constants() -> type:
    return type("Constants", (), {"alpha": 2.0, "__module__": __name__})


def file() -> types.ModuleType:
    made = types.ModuleType("settings")
    made.alpha = 2.0
    return made


def parts() -> nn.Module:
    return nn.ModuleDict({"all": nn.ModuleList([nn.Dropout(0.25)])})


def put(value: Any, **settings: Any) -> None:
    vars(value).update(settings)


ARGS: Any = None


def aliased(x: torch.Tensor) -> torch.Tensor:
    inner = ARGS.inner
    alpha = inner.alpha
    return x * alpha


def aliased_around(x: torch.Tensor) -> torch.Tensor:
    inner = ARGS.inner
    (scaled,) = [each * inner.alpha for each in [x]]
    return scaled


@pytest.mark.parametrize(
    ("make", "read", "change", "text"),
    [
        (
            lambda: argparse.Namespace(alpha=2.0),
            lambda x: x * ARGS.alpha,
            lambda: put(ARGS, alpha=3.0),
            r"ARGS\.alpha' of the function is 3\.0 and was 2\.0",
        ),
        (
            Options,
            lambda x: x * ARGS.alpha,
            lambda: put(ARGS, alpha=3.0),
            r"ARGS\.alpha' of the function is 3\.0 and was 2\.0",
        ),
        (
            constants,
            lambda x: x * ARGS.alpha,
            lambda: setattr(ARGS, "alpha", 3.0),
            r"ARGS\.alpha' of the function is 3\.0 and was 2\.0",
        ),
        (
            file,
            lambda x: x * ARGS.alpha,
            lambda: put(ARGS, alpha=3.0),
            r"ARGS\.alpha' of the function is 3\.0 and was 2\.0",
        ),
        (
            lambda: {"alpha": 2.0},
            lambda x: x * ARGS["alpha"],
            lambda: ARGS.update(alpha=3.0),
            r"ARGS\['alpha'\]' of the function is 3\.0 and was 2\.0",
        ),
        (
            lambda: {"alpha": 2.0},
            lambda x: x * ARGS.get("alpha", 1),
            lambda: ARGS.clear(),
            r"ARGS\['alpha'\]' of the function is gone",
        ),
        (
            lambda: Entries(alpha=2.0),
            lambda x: x * ARGS.alpha,
            lambda: ARGS.update(alpha=3.0),
            r"ARGS\.alpha' of the function is 3\.0 and was 2\.0",
        ),
        (
            Nested,
            lambda x: x * ARGS.inner.alpha,
            lambda: put(ARGS, inner=types.SimpleNamespace(alpha=3.0)),
            r"ARGS\.inner\.alpha' of the function is 3\.0 and was 2\.0",
        ),
        (
            Nested,
            aliased,
            lambda: put(ARGS.inner, alpha=3.0),
            r"ARGS\.inner\.alpha' of the function is 3\.0 and was 2\.0",
        ),
        (
            Nested,
            aliased_around,
            lambda: put(ARGS.inner, alpha=3.0),
            r"ARGS\.inner\.alpha' of the function is 3\.0 and was 2\.0",
        ),
        (
            Nested,
            lambda x: x * ARGS.table["scale"],
            lambda: ARGS.table.update(scale=3.0),
            r"ARGS\.table\['scale'\]' of the function is 3\.0 and was 2\.0",
        ),
        (
            Nested,
            lambda x: x * ARGS.table["sizes"][1],
            lambda: ARGS.table.update(sizes=(1, 3)),
            r"ARGS\.table\['sizes'\]' of the function is \(1, 3\) and was \(1, 2\)",
        ),
        (
            Nested,
            lambda x: x * ARGS.listed[0]["alpha"],
            lambda: ARGS.listed[0].update(alpha=3.0),
            r"ARGS\.listed\[0\]\['alpha'\]' of the function is 3\.0 and was 2\.0",
        ),
        (
            parts,
            lambda x: x * ARGS["all"][0].p,
            lambda: put(ARGS["all"][0], p=0.75),
            r"ARGS\['all'\]\[0\]\.p' of the function is 0\.75 and was 0\.25",
        ),
    ],
)
def test_settings_that_are_read_of_global_objects(
    make: Callable[[], Any],
    read: Callable[[torch.Tensor], torch.Tensor],
    change: Callable[[], None],
    text: str,
) -> None:
    global ARGS
    ARGS, x = make(), ones()
    try:
        step = captured(read, x)
        before = read(x)
        change()
        with pytest.raises(RuntimeError, match=f"the variable '{text}"):
            step(x)
        ARGS = make()  # another one with the same settings
        assert step(x).equal(before)
    finally:
        ARGS = None


class Configured(nn.Module):
    """Reads what it was given, in forward and in a helper."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.cfg = cfg
        self.drop = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x) * self.cfg.table["scale"] + self.drop.p

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.cfg.inner.alpha


class Trainer:
    def __init__(self) -> None:
        self.cfg = Nested()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.cfg.inner.alpha


def test_settings_in_objects_of_modules_and_of_other_objects() -> None:
    x, cfg = ones(), Nested()
    model = Configured(cfg)
    step = captured(lambda x: model(x), x)
    cfg.inner.alpha = 3.0
    with pytest.raises(RuntimeError, match=r"'cfg\.inner\.alpha' of a Configured is 3\.0 and was"):
        step(x)
    cfg.inner.alpha, cfg.table["scale"] = 2.0, 3.0
    with pytest.raises(RuntimeError, match=r"'cfg\.table\['scale'\]' of a Configured is 3\.0 and"):
        step(x)
    cfg.table["scale"] = 2.0
    model.drop.p = 0.75
    with pytest.raises(RuntimeError, match=r"'drop\.p' of a Configured is 0\.75 and was 0\.25"):
        step(x)
    model.drop.p = 0.25
    assert step(x).equal(x * 4 + 0.25)
    trainer = Trainer()
    for fn in (trainer.step, lambda x: x * trainer.cfg.inner.alpha):
        step = captured(fn, x)
        trainer.cfg.inner.alpha = 3.0
        with pytest.raises(RuntimeError, match=r"cfg\.inner\.alpha' of the function is 3\.0 and"):
            step(x)
        trainer.cfg.inner.alpha = 2.0
        step(x)


def test_entries_that_the_loop_and_the_step_write() -> None:
    """What the code does not read, what it sets itself, and what changed between recorded calls."""
    x, seen = ones(), {"scale": 2.0, "loss": 0.0, "own": 1, "sum": 1, "calls": 0}
    state = types.SimpleNamespace(own=1, epoch=0, best=0.0)

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen["own"] = 5
        seen["sum"] += seen["own"] - 5
        state.own = state.own and 5
        assert seen["sum"] is not None and seen["calls"] >= 0 and state.epoch >= 0
        return x * seen["scale"]

    step = torchacc.capture(fn)
    for i in range(6):
        assert step(x).equal(x * 2)
        seen.update(loss=float(i // 4), calls=i, best=i)
        state.best, state.epoch = float(i // 4), i
    assert step.replays == 3
    seen["own"], seen["sum"], state.own = 7, 7, 7
    step(x)
    seen["scale"] = 3.0
    with pytest.raises(RuntimeError, match=r"'seen\['scale'\]' of the function is 3\.0 and was 2"):
        step(x)


def test_objects_with_settings_are_not_held() -> None:
    """A setting of another object in its place is the one that counts."""
    x, gone = ones(), []

    class Noted(types.SimpleNamespace):
        def __del__(self) -> None:
            gone.append(self.alpha)

    args = Noted(alpha=2.0)
    step = captured(lambda x: x * args.alpha, x)
    args = Noted(alpha=3.0)
    assert gone == [2.0]
    with pytest.raises(RuntimeError, match=r"'args\.alpha' of the function is 3\.0 and was 2\.0"):
        step(x)
    args = None
    with pytest.raises(RuntimeError, match=r"'args\.alpha' of the function is gone from where"):
        step(x)


def test_tensors_and_arrays_in_objects() -> None:
    """In the place of another one that lives on, and written on the host."""
    x = ones()
    masks = [torch.full((4,), 2.0, device=ACC) for _ in range(2)]
    state = types.SimpleNamespace(
        mask=masks[0], listed=[masks[0]], host=torch.tensor(2.0), array=np.array([2.0])
    )
    trainer = Trainer()
    trainer.cfg.inner.mask = masks[0]
    step = captured(
        lambda x: (
            x * state.mask * state.listed[0] * state.host.to(ACC) * float(state.array[0])
            + trainer.cfg.inner.mask
        ),
        x,
    )
    for owner, name in ((state, "mask"), (trainer.cfg.inner, "mask"), (state, "listed")):
        before = getattr(owner, name)
        setattr(owner, name, [masks[1]] if name == "listed" else masks[1])
        with pytest.raises(RuntimeError, match=rf"{name}\S*' of the function is another object"):
            step(x)
        setattr(owner, name, before)
    state.host.fill_(3.0)
    with pytest.raises(RuntimeError, match=r"'state\.host' of the function is tensor\(3\.\) and"):
        step(x)
    state.host = torch.tensor(2.0)
    state.array[0] = 3.0
    with pytest.raises(
        RuntimeError, match=r"'state\.array' of the function is array\(\[3\.\]\) an"
    ):
        step(x)
    state.array = np.array([2.0])
    assert step(x).equal(x * 16 + 2)


def test_dicts_that_another_thread_adds_to() -> None:
    """In between two entries, for which a key does it here."""

    class Key(tuple[int, ...]):
        def __iter__(self) -> Iterator[int]:
            table[len(table)] = 0
            return super().__iter__()

    x = ones()
    table: dict[Any, int] = {Key((1,)): 1, "scale": 2}
    step = captured(lambda x: x * table["scale"], x)
    assert len(table) > 2
    table["scale"] = 3
    with pytest.raises(RuntimeError, match=r"'table\['scale'\]' of the function is 3 and was 2"):
        step(x)


# --- types and messages ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("was", "now"), [(2, 2.0), (True, 1), ((1, (2, 0)), (1, (2, False))), (2.0, np.float64(2.0))]
)
def test_settings_of_another_type_that_are_equal(was: Any, now: Any) -> None:
    """They may compute results of another dtype."""
    x, setting = ones(), was
    step = captured(lambda x: x * (2 if setting == was else 3), x)
    setting = now
    with pytest.raises(RuntimeError, match="the variable 'setting' of the function is "):
        step(x)
    setting = was
    step(x)


def test_settings_of_optimizers_that_are_equal() -> None:
    """A scheduler turns a learning rate of 1 into 1.0."""
    trained = Trained(make_mlp(), lambda parameters: torch.optim.SGD(parameters, lr=1))
    x, y = (each.to(ACC) for each in batches(1, 5, 8)[0])
    step = captured(trained.step, x, y)
    trained.optimizer.param_groups[0]["lr"] = 1.0
    step(x, y)
    trained.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match=r"'lr' of SGD is 0\.5 and was 1 .* Make it a tensor on"):
        step(x, y)


@pytest.mark.parametrize(
    ("was", "now", "advice"),
    [
        (2.0, 3.0, "Make it a tensor on acc if it is to change"),
        (np.float32(2.0), 3.0, "Make it a tensor on acc if it is to change"),
        (torch.ones(1), torch.zeros(1), "Make it a tensor on acc if it is to change"),
        (np.ones(1), np.zeros(1), "Make it a tensor on acc if it is to change"),
        ("mean", "sum", "Capture one step for each value"),
        (None, 2.0, "Capture one step for each value"),
        (False, True, "Capture one step for each value"),
        (torch.device("cpu"), torch.device(ACC), "Capture one step for each value"),
    ],
)
def test_what_to_do_about_settings_that_change(was: Any, now: Any, advice: str) -> None:
    x, setting = ones(), was
    step = captured(lambda x: x * (2 if setting is was else 3), x)
    setting = now
    with pytest.raises(RuntimeError, match=rf"'setting' of the function is .*\. {advice}, or cap"):
        step(x)


def test_what_to_do_about_modes_that_change() -> None:
    drop, x = nn.Dropout(0.25), ones()
    step = captured(lambda x: drop(x), x)
    drop.eval()
    with pytest.raises(RuntimeError, match=r"False and was True .* Capture one step for each val"):
        step(x)


@pytest.mark.parametrize(
    "make",
    [lambda: 2.0, lambda: np.ones(1), lambda: torch.tensor(2.0), lambda: torch.ones(1, device=ACC)],
)
def test_variables_that_are_deleted(make: Callable[[], Any]) -> None:
    x, was = ones(), make()

    class Scaling:
        def __init__(self) -> None:
            self.scale = was

        def step(self, x: torch.Tensor) -> torch.Tensor:
            scale = self.scale
            return x * (scale if isinstance(scale, (float, torch.Tensor)) else 1)

    trainer = Scaling()
    step = captured(trainer.step, x)
    del trainer.scale
    with pytest.raises(RuntimeError, match=r"'scale' of the function is gone from .* Put it back"):
        step(x)
    trainer.scale = was
    step(x)
