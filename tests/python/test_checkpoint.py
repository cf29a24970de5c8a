"""Activation checkpointing on the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests import helpers
from tests.helpers import drawn, same


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
