"""Reading and writing through boolean masks."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(10.0, device=device)
    mask = x % 3 == 0
    taken = x[mask]
    x[mask] = -1
    x[x > 7] *= 2
    return [taken, x, mask, mask.sum().item(), x[~mask].shape]
