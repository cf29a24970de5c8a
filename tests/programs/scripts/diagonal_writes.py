"""Writes to diagonals, rows and single elements."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.zeros(4, 4, device=device)
    x.diagonal().fill_(2)
    x.diagonal(1).copy_(torch.tensor([1.0, 2.0, 3.0]))
    x[2, 0] = 9
    x.select(1, 3).add_(0.5)
    x.fill_diagonal_(5)
    return [x, x.diagonal(-2), x.trace()]
