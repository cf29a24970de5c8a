"""Activation checkpointing on the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests import helpers
from tests.helpers import drawn, same
from torchacc.utils.checkpoint import checkpoint_classes, checkpoint_module


def _net(where: str, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 8), nn.GELU()),
        nn.Linear(8, 2),
    ).to(where)


@pytest.mark.parametrize("reentrant", [True, False])
def test_equal_to_the_cpu(device, reentrant):
    def run(where):
        net, x = _net(where), drawn(5, 4, device=where, grad=True)
        y = checkpoint(net, x * 1, use_reentrant=reentrant)
        y.pow(2).sum().backward()
        return [y, x.grad, *(p.grad for p in net.parameters())]

    same(run, device)


@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_draws_the_same_mask_again(device, unfused, reentrant):
    def gradients(checkpointed: bool) -> list[torch.Tensor]:
        net, x = _net(device, dropout=0.5), drawn(50, 4, device=device, grad=True)
        torch.manual_seed(7)
        h = x * 1
        y = checkpoint(net, h, use_reentrant=reentrant) if checkpointed else net(h)
        after = torch.rand(3, device=device)  # the generator goes on as without a checkpoint
        y.sum().backward()
        return [x.grad.cpu(), y.detach().cpu(), after.cpu(), net[0].weight.grad.cpu()]

    helpers.assert_same(gradients(True), gradients(False))


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor, p: float = 0.0) -> torch.Tensor:
        return nn.functional.dropout(self.linear(x), p)


@pytest.mark.parametrize("by_keyword", [False, True])
def test_dropout_draws_the_same_mask_again_however_the_module_is_called(device, by_keyword):
    net = checkpoint_module(Dropped().to(device))
    x = drawn(50, 4, device=device, grad=True)
    y = net(p=0.5, x=x) if by_keyword else net(x, 0.5)
    y.sum().backward()
    assert torch.equal(net.linear.bias.grad.cpu(), 2.0 * (y.cpu() != 0).sum(0))


def test_sequential_in_segments(device):
    def run(where):
        net, x = _net(where), drawn(5, 4, device=where, grad=True)
        y = checkpoint_sequential(net, 3, x, use_reentrant=False)
        y.sum().backward()
        return [y, x.grad, *(p.grad for p in net.parameters())]

    same(run, device)


def test_nested(device):
    def run(where):
        net, x = _net(where), drawn(5, 4, device=where, grad=True)

        def outer(t):
            return checkpoint(
                net[3:], checkpoint(net[:3], t, use_reentrant=False) * 2, use_reentrant=False
            )

        y = checkpoint(outer, x, use_reentrant=False)
        y.sum().backward()
        return [y, x.grad, net[0].weight.grad]

    same(run, device)


def test_recomputation_with_other_shapes_is_noticed(device):
    calls = []

    def changing(t):
        calls.append(1)
        return (t * 2)[: 3 if len(calls) == 1 else 2].exp()

    x = torch.ones(4, device=device, requires_grad=True)
    y = checkpoint(changing, x, use_reentrant=False)
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        y.sum().backward()
    assert (x * 2).tolist() == [2.0] * 4


def test_inside_a_training_loop(device, unfused):
    def run(where):
        net = _net(where)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        losses = []
        for step in range(5):
            opt.zero_grad()
            x = drawn(6, 4, device=where, seed=step)
            loss = checkpoint(net, x, use_reentrant=False).pow(2).mean()
            loss.backward()
            opt.step()
            losses.append(loss.detach())
        return [*losses, *net.parameters()]

    same(run, device)


def test_without_keeping_the_generator(device):
    def run(where):
        net, x = _net(where), drawn(5, 4, device=where, grad=True)
        y = checkpoint(net, x, use_reentrant=False, preserve_rng_state=False)
        y.sum().backward()
        return [y, x.grad]

    same(run, device)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(x))))


@pytest.mark.usefixtures("only_this_frees")
@pytest.mark.parametrize("autocast", [False, True])
def test_the_plan_of_a_checkpointed_step_needs_less_memory(recording, unfused, autocast):
    """No pass reads what the forward computed where the backward computes it again."""
    rows, layers = 512, 4

    def step(count: int) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        net = nn.Sequential(*(Wide() for _ in range(layers))).to(recording)
        if count:
            assert checkpoint_classes(net, {"Wide"}, count) == count
        x = drawn(rows, 32, device=recording)
        for _ in range(3):
            net.zero_grad(set_to_none=False)
            torch.manual_seed(1)
            helpers.synchronize()
            torch.acc.reset_peak_memory_stats()
            before = torch.acc.memory_allocated()
            with torch.autocast(recording, torch.bfloat16, enabled=autocast):
                loss = net(x).float().square().mean()
            loss.backward()
            helpers.synchronize()
        peak = torch.acc.max_memory_allocated() - before
        return [loss.cpu(), *(p.grad.cpu() for p in net.parameters())], peak

    plain, whole = step(0)
    some, fewer = step(2)
    every, least = step(layers)
    helpers.assert_same([some, every], [plain, plain])
    # The two products of a layer, and what lies between them.
    one_layer = rows * 128 * 2 * (2 if autocast else 4)
    assert whole - fewer >= 1.9 * one_layer
    assert fewer - least >= 0.9 * one_layer, "the last one is there at the peak"
