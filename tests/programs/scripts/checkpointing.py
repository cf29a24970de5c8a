"""Activation checkpointing, reentrant and not."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(device)
    r = []
    for reentrant in (True, False):
        x = torch.ones(2, 3, device=device, requires_grad=True)
        y = checkpoint(net, x, use_reentrant=reentrant)
        y.sum().backward()
        r += [y, x.grad, net[0].weight.grad.clone()]
    return r
