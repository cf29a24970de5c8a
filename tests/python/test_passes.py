"""Each pass can be left out, and what is trained without it is the same."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "one_thread")

STEPS = 6
PASSES = (
    "dce lists split widen cse copies layout rows products epilogues accumulate transfers fuse "
    "recompute batch order alias"
).split()


@pytest.fixture(autouse=True)
def passes_back(device: str) -> Iterator[None]:
    yield
    helpers.extension().skip_passes(os.environ.get("ACC_SKIP_PASSES", ""))


class Model(nn.Module):
    """For every pass something: convolutions, a recurrence, wide products, norms, shared inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)
        )
        self.cell = nn.RNNCell(8, 8)
        self.norm = nn.LayerNorm(8)
        self.wide = nn.Linear(8, 512)
        self.left, self.right = nn.Linear(512, 256), nn.Linear(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).mean((2, 3))
        state = torch.zeros_like(x)
        for _ in range(5):
            state = self.cell(x, state)
        x = self.wide(self.norm(state + x)).repeat(32, 1)
        return F.gelu(self.left(x)) * self.right(x).tanh()


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


@pytest.mark.parametrize("name", ["none", *PASSES, ",".join(PASSES)])
def test_without(name, expected):
    helpers.extension().skip_passes("" if name == "none" else name)
    for mine, eager in zip(train(helpers.DEVICE), expected, strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-3, atol=1e-5)


def test_a_name_that_is_none_is_refused():
    with pytest.raises(RuntimeError, match="'fusion', which is no pass. There are: dce, lists"):
        helpers.extension().skip_passes("fusion")
