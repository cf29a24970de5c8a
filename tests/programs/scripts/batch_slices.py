"""Slices of a data set at moving offsets."""

import torch


def run(device):
    """Returns what is compared between devices."""
    data = torch.arange(60.0, device=device).view(20, 3)
    sums = []
    for i in range(0, 20, 6):
        batch = data[i : i + 6]
        sums.append((batch * 2).sum(0))
    return [torch.stack(sums), data.shape]
