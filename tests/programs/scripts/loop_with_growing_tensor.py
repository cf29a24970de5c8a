"""A tensor that grows by concatenation in a loop, as a cache does."""

import torch


def run(device):
    """Returns what is compared between devices."""
    cache = torch.empty(1, 0, 2, device=device)
    outs = []
    for i in range(6):
        cache = torch.cat([cache, torch.full((1, 1, 2), float(i), device=device)], dim=1)
        outs.append((cache * cache).mean(1))
    return [*outs, cache]
