"""x.data = y gives x new memory, and views of the old one keep the old."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.ones(4, device=device)
    old = x[:2]
    x.data = torch.arange(3.0, device=device)
    x.add_(1)
    old.mul_(5)
    p = torch.nn.Parameter(torch.zeros(2, device=device))
    p.data = p.data + 3
    p.data.mul_(2)
    return [x, old, p, p.requires_grad]
