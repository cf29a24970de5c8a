"""Writes at moving positions of a preallocated cache, read by a growing slice."""

import torch


def run(device):
    """Returns what is compared between devices."""
    cache = torch.zeros(8, 3, device=device)
    outs = []
    for i in range(8):
        cache[i] = torch.arange(3.0, device=device) + i
        outs.append(cache[: i + 1].sum(0))
    cache[2:4].zero_()
    return [*outs, cache]
