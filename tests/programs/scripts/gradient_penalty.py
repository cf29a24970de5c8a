"""A gradient penalty through a small network."""

import torch
from torch import nn


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    x = torch.randn(5, 4).to(device).requires_grad_()
    out = net(x).sum()
    (g,) = torch.autograd.grad(out, x, create_graph=True)
    loss = ((g.norm(dim=1) - 1) ** 2).mean() + out
    loss.backward()
    return [loss, g, *[p.grad for p in net.parameters()]]
