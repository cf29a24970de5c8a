"""masked_fill_, where and masked_scatter_."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(12.0, device=device).view(3, 4)
    m = x > 5
    y = x.masked_fill(m, float("-inf"))
    z = torch.where(m, x, -x)
    x.masked_fill_(m, 0)
    w = torch.zeros(3, 4, device=device).masked_scatter_(m, torch.arange(6.0, device=device))
    return [x, y, z, w, y.softmax(1)]
