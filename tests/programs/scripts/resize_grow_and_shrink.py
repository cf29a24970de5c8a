"""resize_ keeps the elements that both sizes have."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(6.0, device=device)
    x.resize_(2, 2)
    small = x.clone()
    x.resize_(6)
    grown = x.clone()
    x.resize_(9)
    x[6:] = 1
    return [small, grown, x, x.shape]
