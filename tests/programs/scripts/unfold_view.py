"""unfold gives a view whose elements overlap; a write to the base is seen in all."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(7.0, device=device)
    u = x.unfold(0, 3, 2)
    before = u.clone()
    x[2] = 100
    return [u, before, u.sum(1), u.stride()]
