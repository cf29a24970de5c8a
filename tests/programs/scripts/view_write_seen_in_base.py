"""A write through a view is seen in the base, and the other way."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(12.0, device=device)
    v = x.view(3, 4)
    v[1].mul_(10)
    before = x.clone()
    x[0] = -1
    return [before, x, v, v[0, 0].item()]
