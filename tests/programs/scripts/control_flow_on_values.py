"""Python branches and loops decided by values on the device."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.tensor([5.0, 3.0, 8.0], device=device)
    steps = 0
    while x.max() > 1:
        x = torch.where(x % 2 == 0, x / 2, x - 1)
        steps += 1
    if (x == 0).any():
        x[x == 0] = -1
    return [x, steps]
