"""A value read into a new tensor before an in-place write keeps the old value."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.ones(5, device=device)
    y = x + 1
    x.mul_(3)
    z = x + y
    x.zero_()
    return [x, y, z]
