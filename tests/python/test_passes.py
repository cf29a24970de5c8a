"""Each pass can be left out, and what is trained without it is the same."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "one_thread")

STEPS = 6
PASSES = (
    "dce lists split cse copies rows widen layout products accumulate epilogues transfers fuse "
    "recompute batch order alias"
).split()


@pytest.fixture(autouse=True)
def passes_back(device: str) -> Iterator[None]:
    yield
    helpers.extension().skip_passes(os.environ.get("ACC_SKIP_PASSES", ""))


# What the rest of this file has nothing for, or nothing on every machine.
ELSEWHERE = {
    "products": "acts on AMD's processors with AVX-512; tests/cpp/test_products.cpp",
    "epilogues": "acts on GPUs; test_epilogues.py",
    "transfers": "acts on collectives; tests/distributed/test_overlap.py",
}


class Model(nn.Module):
    """For every pass but those of `ELSEWHERE` something."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(  # layout
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)
        )
        self.cell = nn.RNNCell(8, 64)
        self.norm = nn.LayerNorm(64)
        self.wide = nn.Linear(64, 512)
        self.hidden, self.last = nn.Linear(512, 256), nn.Linear(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).mean(3).permute(2, 0, 1).contiguous()
        state = x.new_zeros(8, 64)
        for row in x:
            state = self.cell(row, state)  # rows, accumulate
        state.exp()  # dce
        x = self.norm(state).clone()  # split, copies
        x = x + 1e-3 * (x.half() @ x.half().T).float() @ x  # widen
        x = self.hidden(self.wide(x).repeat(32, 1))
        x = x * (x * 1.7).sigmoid()  # recompute, alias
        return self.last(x.repeat(1, 2))  # order


def train(device: str) -> list[Tensor]:
    """Losses, and the parameters in the end."""
    torch.manual_seed(0)
    model = Model().to(device)
    # Of gradients that are nothing but rounding, as before a norm, Adam makes whole steps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-2, foreach=True)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(8, 3, 10, 10, generator=generator).to(device)
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        helpers.flush()
    return [t.detach().cpu() for t in (*losses, *model.parameters())]


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    return train("cpu")


def test_these_are_all_passes():
    text = next(row[4] for row in helpers.extension().environment() if row[0] == "ACC_SKIP_PASSES")
    assert re.search(r": ([a-z, ]+)\.", text)[1].split(", ") == PASSES


def train_without(names: str) -> tuple[list[Tensor], dict[str, Any]]:
    """What `train` returns, and the plan of its last step."""
    helpers.extension().skip_passes(names)
    trained, plan = train(helpers.DEVICE), helpers.extension().plan_data(0) or {}
    return trained, {part: plan.get(part) for part in ("nodes", "steps", "buffers", "kernels")}


@functools.cache
def plan_with_all_passes() -> dict[str, Any]:
    return train_without("")[1]


@pytest.mark.parametrize("name", ["none", *PASSES, ",".join(PASSES)])
def test_without(name, expected):
    trained, without = train_without("" if name == "none" else name)
    for mine, eager in zip(trained, expected, strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-3, atol=1e-5)
    fuses = helpers.extension().mode() in ("full", "nograph")
    if fuses and helpers.extension().executor_name() == "host" and name not in ELSEWHERE:
        same = without == plan_with_all_passes()
        assert same == (name == "none"), f"{name} has changed nothing"


def test_a_name_that_is_none_is_refused():
    with pytest.raises(RuntimeError, match="'fusion', which is no pass. There are: dce, lists"):
        helpers.extension().skip_passes("fusion")
