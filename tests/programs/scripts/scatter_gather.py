"""scatter_, scatter_add_ and gather."""

import torch


def run(device):
    """Returns what is compared between devices."""
    index = torch.tensor([[0, 1, 2], [2, 0, 0]], device=device)
    src = torch.arange(6.0, device=device).view(2, 3)
    x = torch.zeros(3, 3, device=device).scatter_(0, index, src)
    y = torch.zeros(3, 3, device=device).scatter_add_(1, index, src)
    z = src.gather(1, index)
    w = torch.ones(3, 3, device=device).scatter_reduce_(0, index, src, "amax")
    return [x, y, z, w]
