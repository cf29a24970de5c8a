"""What the tests of torchacc.capture train, and what they ask of a step that is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchacc
from tests import helpers

ACC = "acc"


def captured(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A step that was replayed once."""
    step = torchacc.capture(fn)
    for _ in range(4):
        step(*args, **kwargs)
    assert step.replays == 1
    return step


def ones() -> torch.Tensor:
    """(2, 4) on acc."""
    return torch.ones(2, 4, device=ACC)


class Trained:
    """A model, its optimizer and the step that trains it."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[..., torch.optim.Optimizer],
        loss: Callable[..., torch.Tensor] = F.mse_loss,
        set_to_none: bool = True,
    ) -> None:
        self.model = model.to(ACC)
        self.optimizer = make_optimizer(self.model.parameters())
        self.loss = loss
        self.set_to_none = set_to_none

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        loss = self.loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def values(self) -> list[torch.Tensor]:
        state = [t for s in self.optimizer.state.values() for t in s.values()]
        grads = [p.grad for p in self.model.parameters()]
        found = [*self.model.state_dict().values(), *state, *grads]
        return [each.cpu() for each in found if isinstance(each, torch.Tensor)]


def make_mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def make_dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Dropout(), nn.Linear(16, 4)
    )


def make_conv() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(8, 12, 2)
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][-1])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(1e-2, device=ACC), capturable=True)


def batches(n: int, *shape: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(*shape, generator=generator), torch.randn(shape[0], 4, generator=generator))
        for _ in range(n)
    ]


def refused(fn: Callable[..., Any], *args: Any, match: str) -> None:
    """The third call says why; those after it say so again, and run nothing."""
    step = torchacc.capture(fn)
    step(*args)
    step(*args)
    with pytest.raises(RuntimeError, match=match) as first:
        step(*args)
    before = helpers.stats()["nodes"]
    with pytest.raises(RuntimeError) as again:
        step(*args)
    assert str(first.value) == str(again.value) and helpers.stats()["nodes"] == before
    # The device works on as if nothing had been.
    assert (torch.ones(2, device=ACC) + 1).tolist() == [2.0, 2.0]
