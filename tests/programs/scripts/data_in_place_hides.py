"""Writes through .data are not seen by autograd."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.ones(3, device=device, requires_grad=True)
    y = x * x
    x.data.mul_(10)
    y.sum().backward()
    return [x, y, x.grad]
