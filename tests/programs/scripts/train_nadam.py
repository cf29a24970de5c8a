"""Six steps of NAdam on lists: one by one (the default on the CPU) differs in the last bits."""

import torch
import torch.nn.functional as F
from torch import nn


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).to(device)
    x, t = torch.randn(12, 5).to(device), torch.randint(3, (12,)).to(device)
    opt = torch.optim.NAdam(net.parameters(), lr=0.01, foreach=True)
    losses = []
    for _ in range(6):
        opt.zero_grad()
        loss = F.cross_entropy(net(x), t)
        loss.backward()
        opt.step()
        losses.append(loss)
    return [*losses, *net.parameters()]
