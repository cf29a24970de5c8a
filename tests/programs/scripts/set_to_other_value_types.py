"""setitem with numbers, lists, tensors of other dtypes and broadcasts."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.zeros(3, 4, device=device)
    x[0] = 1
    x[1, :2] = torch.tensor([5, 6])
    x[:, 3] = torch.tensor(2.5, dtype=torch.float64)
    x[2] = torch.arange(4, device=device)
    x[..., 0] = x[..., 1]
    x[None, 1:, 2] = -1
    return [x]
