"""Module.to keeps Parameters and the optimizer made before it."""

import torch
from torch import nn


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    net = nn.Linear(2, 2)
    before, opt = net.weight, torch.optim.SGD(net.parameters(), lr=0.1)
    net.to(device)
    net(torch.ones(1, 2, device=device)).sum().backward()
    opt.step()
    net.double()
    return [net.weight, net.weight is before, net.weight.dtype, net.weight.grad]
