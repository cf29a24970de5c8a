"""A training loop with all that comes between its steps is a small fixed number of graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "capturing")


class Loop:
    """Logging, a schedule, accumulation over two batches, evaluation, two sizes of batches; in half
    precision also a loss scale, and gradients that are clipped.
    """

    def __init__(self, device: str, half: bool) -> None:
        torch.manual_seed(0)
        self.half = half
        self.scaler = torch.amp.GradScaler(device, enabled=half)
        self.device = device
        layers = [nn.Linear(12, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 5)]
        self.model = nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.rates = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1000)
        self.generator = torch.Generator().manual_seed(1)
        self.logged: list[float] = []

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(size, 12, generator=self.generator)
        y = torch.randint(0, 5, (size,), generator=self.generator)
        return x.to(self.device), y.to(self.device)

    def epoch(self, steps: int = 12) -> None:
        """The last batch of each is smaller."""
        for i in range(steps):
            self.optimizer.zero_grad()
            for _ in range(2):
                x, y = self.batch(8 if i + 1 < steps else 6)
                with torch.autocast(self.device, torch.float16, enabled=self.half):
                    loss = F.cross_entropy(self.model(x), y) / 2
                self.scaler.scale(loss).backward()
            if self.half:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.rates.step()
            if i % 4 == 3:
                self.logged.append(loss.item())
        self.model.eval()
        with torch.no_grad():
            right = torch.zeros((), device=self.device)
            for _ in range(3):
                x, y = self.batch(8)
                right += (self.model(x).argmax(1) == y).sum()
            self.logged.append(right.item())
        self.model.train()


def count_graphs(half: bool) -> None:
    """The test, in a process of its own."""
    torch.set_num_threads(1)
    helpers.emulate_gpu()
    helpers.extension().capture_plans(True)
    # Without it kernels would first be tried against what they replace.
    torch.use_deterministic_algorithms(True)
    loop = Loop(helpers.DEVICE, half)
    with helpers.counting() as first:
        for _ in range(6):
            loop.epoch()
    assert first["captures"] <= (16 if half else 12)  # anew where an input moved
    # A scaler reads whether the gradients are finite before an optimizer's first step: cut in two.
    assert first["plans_built"] == (7 if half else 4)
    with helpers.counting() as later:
        for _ in range(4):
            loop.epoch()
    assert later["captures"] == 0
    assert later["plans_built"] == 0
    # Each run of a plan is one launch: nothing of it is called between pieces.
    assert later["captured_launches"] == later["captures_submitted"] == later["flushes"]
    assert len(loop.logged) == 10 * 4


@pytest.mark.parametrize("half", [False, True], ids=["", "half precision"])
def test_a_loop_is_a_small_fixed_number_of_graphs(half):
    # Small batches of a host come from the C library, and where they lie depends on all that the
    # process has done before: on a GPU they come to lie in the same places again.
    helpers.run_python(f"from tests.python import test_captured_loops as t; t.count_graphs({half})")


@pytest.mark.usefixtures("plans_of_a_gpu")
def test_kernels_of_captured_work_count_as_launched(device):
    """Nothing is called for them where a GPU launches the graph."""
    x = torch.ones(64, 64).to(device)
    for _ in range(8):
        with helpers.counting() as counted:
            made = (x * 2 + 1).cumsum(0).neg().sub(1)
            helpers.flush()
    assert counted["captures_submitted"] == counted["captured_launches"] == 1
    assert counted["kernel_launches"] == 2
    assert made[0, 0].item() == -4


@pytest.fixture(params=["kernels", "kernels of a GPU"])
def captured(request, capturing) -> Iterator[None]:
    """Plans are captured, and their kernels not compared with what they replace."""
    if request.param == "kernels of a GPU":
        helpers.emulate_gpu()
    helpers.extension().capture_plans(True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    helpers.extension().capture_plans(None)
    helpers.emulate_gpu(on=False)


@pytest.mark.usefixtures("captured")
def test_what_is_as_it_was_is_not_uploaded_again(device):
    """A submission uploads the words of the table that a changed number or address changes."""
    given = [torch.full((64,), float(i)).to(device) for i in range(3)]
    kept = list(given)

    def words(factor: float) -> int:
        with helpers.counting() as counted:
            made = [torch.relu(each * factor) + 1 for each in given]
            helpers.flush()
        for i, each in enumerate(made):
            assert each.cpu().tolist() == [i * factor + 1] * 64
        return counted["argument_words"]

    everything = words(2.0)  # of a run step by step, or of captured work for the first time
    for _ in range(8):
        everything = max(everything, words(2.0))
    assert words(2.0) == 0
    assert 0 < words(3.0) < everything
    assert words(3.0) == 0
    for place in (1, 2):
        given[place] = given[place].clone()  # the other one lives on in `kept`
        helpers.flush()
        assert 0 < words(3.0) < everything
        assert words(3.0) == 0
    given[:] = kept
    assert 0 < words(2.0) <= everything
    assert words(2.0) == 0
