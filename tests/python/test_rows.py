"""Products with a shared matrix are one product of all their rows; values are those of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "one_thread", "recording")

STEPS, ROWS, WIDTH = 6, 2, 32
X = torch.randn(STEPS, ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
W = torch.randn(4 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(6)) / 8


def check(program: Callable[[Tensor, Tensor], list[Tensor]], apart: float = 1e-4) -> Counter[str]:
    """Runs a program on the CPU and three times on the device; the operators of the last plan."""
    expected = program(X.clone(), W.clone())
    for _ in range(3):
        x, w = X.to(helpers.DEVICE), W.to(helpers.DEVICE)
        helpers.flush()
        made = program(x, w)
        helpers.flush()
        for a, b in zip(made, expected, strict=True):
            torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=apart, atol=apart)
    plan = helpers.extension().plan_data(torch.acc.current_device())
    return Counter(node["op"] for node in plan["nodes"])


def test_inputs_of_all_steps_are_one_product():
    def program(x: Tensor, w: Tensor) -> list[Tensor]:
        total = torch.zeros(ROWS, 4 * WIDTH, device=x.device)
        for each in x.unbind(0):
            total = torch.tanh(total + each @ w.t())
        return [total]

    assert check(program)["aten::mm"] == 1


def test_results_that_are_seen_have_memory_of_their_own():
    def program(x: Tensor, w: Tensor) -> list[Tensor]:
        made = [each @ w.t() for each in x.unbind(0)]
        made[1].mul_(2)
        sums = [each.sum() for each in made]
        return [*made, *sums]

    assert check(program)["aten::mm"] == STEPS


def test_results_may_be_written_in_place():
    def program(x: Tensor, w: Tensor) -> list[Tensor]:
        made = [each @ w.t() for each in x.unbind(0)]
        made[1].mul_(2)
        made[2][:, ::2] = 0
        made[3].t()[0].add_(made[4][0, 0])
        return [each.cumsum(1) for each in made]

    assert check(program)["aten::mm"] == 1


def test_a_weight_that_changes_in_between_is_two_weights():
    def program(x: Tensor, w: Tensor) -> list[Tensor]:
        made = []
        for index, each in enumerate(x.unbind(0)):
            if index == 3:
                w.mul_(0.5)
            made.append((each @ w.t()).cumsum(1))
        return made

    assert check(program)["aten::mm"] == STEPS


def test_an_input_that_changes_afterwards():
    def program(x: Tensor, w: Tensor) -> list[Tensor]:
        made = [each @ w.t() for each in x.unbind(0)]
        x.zero_()
        return [each.cumsum(1) for each in made]

    assert check(program)["aten::mm"] == STEPS


def test_results_may_be_read_as_another_type():
    """Complex numbers are wider than the floats of a result, whose rows are 36 bytes here."""

    def program(x: Tensor, w: Tensor) -> list[Tensor]:
        made = [each[:1] @ w[:9].t() for each in x.unbind(0)]
        return [torch.view_as_complex(each[0, :8].view(4, 2)).cumsum(0).real for each in made]

    assert check(program)["aten::mm"] == STEPS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_types(dtype):
    def program(x: Tensor, w: Tensor) -> list[Tensor]:
        x, w = x.to(dtype), w.to(dtype)
        return [(each @ w.t()).cumsum(1).float() for each in x.unbind(0)]

    counted = check(program, 2e-2 if dtype == torch.bfloat16 else 1e-5)
    assert counted["aten::mm"] == 1


def test_biases_of_one_row_are_shared_and_others_are_not():
    def program(x: Tensor, w: Tensor) -> list[Tensor]:
        one, several = w[:, 0], w[:ROWS].repeat(1, 4)
        made = [torch.addmm(one, each, w.t()) for each in x.unbind(0)]
        made += [torch.addmm(several, each, w.t()) for each in x.unbind(0)]
        made += [torch.addmm(one, each, w.t(), beta=0.5) for each in x.unbind(0)[:3]]
        return [each.cumsum(1) for each in made]

    assert check(program)["aten::addmm"] == 1 + STEPS + 3


class Recurrent(nn.Module):
    """Two layers of a recurrence by hand, layer by layer or step by step."""

    def __init__(self, by_layers: bool) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.by_layers = by_layers

    def forward(self, x: Tensor) -> Tensor:
        sequence = list(x.unbind(0))
        states = [x.new_zeros(x.shape[1], WIDTH) for _ in range(2)]
        order = [(i, j) for i in range(2) for j in range(STEPS)]
        for layer, step in order if self.by_layers else sorted(order, key=lambda at: at[1]):
            gate = self.inputs[layer](sequence[step]) + self.hidden[layer](states[layer])
            states[layer] = sequence[step] = torch.tanh(gate)
        return sequence[-1]


@pytest.mark.parametrize("by_layers", [True, False])
def test_a_recurrent_network_trains(by_layers):
    def program(x: Tensor, _: Tensor) -> list[Tensor]:
        torch.manual_seed(3)
        model = Recurrent(by_layers).to(x.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), torch.ones_like(x[0]))
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return [*losses, *(p.grad for p in model.parameters()), *model.parameters()]

    counted = check(program)
    # The inputs of both layers and the gradients of the second's; where the second waits for the
    # first in each step, the inputs of the first only.
    assert counted["aten::cat"] == (3 if by_layers else 1)
