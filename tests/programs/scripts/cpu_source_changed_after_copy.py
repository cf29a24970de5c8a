"""A CPU tensor that is changed after a copy does not change the copy."""

import torch


def run(device):
    """Returns what is compared between devices."""
    source = torch.arange(4.0)
    x = torch.empty(4, device=device).copy_(source)
    index = torch.tensor([1, 0])
    y = x.clone()[index]
    source.fill_(-1)
    index.fill_(3)
    z = torch.zeros(2, device=device)
    z[0] = source[0]
    source.fill_(5)
    return [x, y, z]
