"""Assignments through index tensors, with and without accumulation."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.zeros(5, 3, device=device)
    x[torch.tensor([0, 3], device=device)] = torch.ones(2, 3, device=device)
    x[torch.tensor([1, 1]), torch.tensor([0, 2])] = 7
    x.index_put_(
        (torch.tensor([4, 4], device=device),), torch.ones(3, device=device), accumulate=True
    )
    x[:, 1] += 0.5
    return [x]
