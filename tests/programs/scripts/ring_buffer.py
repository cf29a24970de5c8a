"""A ring buffer written by slices, with reads of old values kept."""

import torch


def run(device):
    """Returns what is compared between devices."""
    ring = torch.zeros(4, device=device)
    kept = []
    for i in range(10):
        kept.append(ring.clone())
        ring[i % 4] = i
        ring.roll(1)
    kept.append(ring.roll(2))
    return kept
