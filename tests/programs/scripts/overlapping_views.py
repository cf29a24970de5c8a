"""Two views that overlap, written in turn."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(10.0, device=device)
    a, b = x[:6], x[4:]
    a.add_(100)
    b.mul_(2)
    a.sub_(b.clone())
    x[2:7].add_(x[2:7])
    return [x, a, b]
