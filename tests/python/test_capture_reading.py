"""Settings that the code of a captured step reads in other ways than by a plain `self.name`."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.python.captured import ACC, captured, ones
from torchacc_device import _C

pytestmark = [
    pytest.mark.usefixtures("acc_only"),
    pytest.mark.skipif(_C.mode() in ("eager", "nofuse"), reason="nothing is recorded as a whole"),
]


class Dropping(nn.Dropout):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Twice(Dropping):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super(Twice, self).forward(x)  # noqa: UP008 as older programs say it


@pytest.mark.parametrize("kind", [Dropping, Twice])
def test_settings_that_the_base_reads(kind: type[nn.Dropout]) -> None:
    drop, x = kind(0.5), ones()
    step = captured(lambda x: drop(x) * 1, x)
    drop.p = 0.25
    with pytest.raises(RuntimeError, match=r"'p' of a \w+ is 0\.25 and was 0\.5"):
        step(x)


def logged(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any) -> Any:
        return method(*args)

    return call


class Scaling:
    """Is called, and reads its numbers by helpers."""

    def __init__(self) -> None:
        self.scale, self.offset, self.kept = 2.0, 1.0, 3.0
        self.unread = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x) * self.power

    @logged
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.offset

    @property
    def power(self) -> float:
        return self.kept


@pytest.mark.parametrize("name", ["scale", "offset", "kept"])
def test_settings_that_helpers_of_callable_objects_read(name: str) -> None:
    scaling, x = Scaling(), ones()
    step = captured(scaling, x)
    scaling.unread = 1
    step(x)
    setattr(scaling, name, 7.0)
    with pytest.raises(RuntimeError, match=rf"the variable '{name}' of the function is 7\.0 and"):
        step(x)


class Rounding(enum.Enum):
    UP = 1
    DOWN = 2


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (np.float32(2.0), np.float32(3.0)),
        (np.int64(2), np.int64(3)),
        (Rounding.UP, Rounding.DOWN),
        (torch.device("cpu"), torch.device(ACC)),
    ],
)
def test_numbers_of_numpy_members_of_enums_and_devices(was: Any, now: Any) -> None:
    x, setting = ones(), was
    step = captured(lambda x: x * (2 if setting == was else 3), x)
    setting = now
    with pytest.raises(RuntimeError, match="the variable 'setting' of the function is "):
        step(x)
