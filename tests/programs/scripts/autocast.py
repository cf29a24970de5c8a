"""Autocast chooses bfloat16 for products and float32 for sums."""

import torch
from torch import nn


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    net, x = nn.Linear(4, 3).to(device), torch.randn(2, 4).to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = net(x)
        z = y.float().softmax(1)
        s = torch.mm(x, x.t())
    (z.sum() + y.float().pow(2).sum()).backward()
    return [y.dtype, s.dtype, z.dtype, y, s, net.weight.grad]
