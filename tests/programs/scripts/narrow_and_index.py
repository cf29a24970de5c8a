"""narrow and advanced indexing: the first is a view, the second a copy."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(20.0, device=device).view(4, 5)
    n = x.narrow(1, 1, 3)
    i = x[[0, 2]]
    n.add_(100)
    i.zero_()
    return [x, n, i, x[torch.tensor([3, 1]), 2]]
