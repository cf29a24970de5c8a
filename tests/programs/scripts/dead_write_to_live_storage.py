"""A write through a view whose names are all gone must still happen."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.zeros(2, 3, device=device)
    w = x.view(6)
    w.add_(torch.arange(6.0, device=device))
    w = None
    x[0].mul_(2)
    return [x]
