"""index_select, index_add_, index_copy_, take, put_."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(12.0, device=device).view(4, 3)
    i = torch.tensor([3, 0], device=device)
    a = x.index_select(0, i)
    x.index_add_(0, i, torch.ones(2, 3, device=device), alpha=10)
    x.index_copy_(1, torch.tensor([1], device=device), torch.zeros(4, 1, device=device))
    x.put_(torch.tensor([5], device=device), torch.tensor([99.0], device=device))
    return [a, x, x.take(torch.tensor([0, 5, 11], device=device))]
