"""Clipping by norm and by value."""

import torch
from torch import nn


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    net = nn.Linear(4, 4).to(device)
    x = torch.randn(3, 4).to(device)
    (net(x) * 50).pow(2).sum().backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    after = [p.grad.clone() for p in net.parameters()]
    nn.utils.clip_grad_value_(net.parameters(), 0.05)
    vector = nn.utils.parameters_to_vector(net.parameters())
    return [norm, *after, *[p.grad for p in net.parameters()], vector]
