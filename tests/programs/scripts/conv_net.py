"""Convolutions, pooling and a linear layer, two steps."""

import torch
import torch.nn.functional as F
from torch import nn


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, stride=2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)),
    ).to(device)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    x, losses = torch.randn(2, 1, 8, 8).to(device), []
    for _ in range(2):
        opt.zero_grad()
        losses.append(F.cross_entropy(net(x), torch.tensor([0, 1], device=device)))
        losses[-1].backward()
        opt.step()
    return [*losses, *net.parameters()]
