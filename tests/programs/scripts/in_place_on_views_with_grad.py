"""In-place writes to views of a tensor in the graph are differentiated."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(6.0, device=device, requires_grad=True)
    y = x * 1
    y[:3].mul_(2)
    y[4] = y[5] * 3
    y.view(2, 3)[1].add_(x[:3])
    loss = (y**2).sum()
    loss.backward()
    return [y, x.grad]
