"""Permutations are views; contiguous() of one is a copy."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(24.0, device=device).view(2, 3, 4)
    a = x.permute(2, 0, 1)
    b = a.contiguous()
    c = x.movedim(0, -1).flatten(0, 1)
    a[0].zero_()
    return [x, a, b, c, a.stride(), b.stride(), c.shape]
