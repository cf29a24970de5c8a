"""Frozen layers have no gradient and do not change; thawed ones do."""

import torch
from torch import nn


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).to(device)
    net[0].requires_grad_(False)
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    for i in range(4):
        net[0].requires_grad_(i >= 2)
        opt.zero_grad()
        net(torch.ones(2, 3, device=device)).sum().backward()
        opt.step()
    return [*net.parameters(), net[0].weight.grad]
