"""The same operator with an int, a float and a bool scalar in turn."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(4, device=device)
    r = []
    for s in (2, 2.0, True, 3, 0.5, 2**40):
        y = x * s
        r += [y, str(y.dtype)]
    return [*r, torch.full((2,), 7, device=device), torch.full((2,), 7.0, device=device)]
