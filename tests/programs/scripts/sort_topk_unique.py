"""Sorting, top-k, unique values and nonzero."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.tensor([3.0, 1.0, 2.0, 3.0, 1.0], device=device)
    values, order = x.sort(stable=True)
    top, where = x.topk(2)
    unique, inverse, counts = x.unique(return_inverse=True, return_counts=True)
    return [values, order, top, where, unique, inverse, counts, (x > 1).nonzero(), x.argmax()]
