"""Writes through as_strided with gaps."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.zeros(20, device=device)
    a = x.as_strided((3, 2), (6, 2), 1)
    a.copy_(torch.arange(6.0).view(3, 2))
    x.as_strided_((4, 5), (1, 4))
    x[0] += 1
    return [x, a, x.is_contiguous()]
