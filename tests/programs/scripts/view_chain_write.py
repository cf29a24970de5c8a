"""A write through a chain of views lands at the right elements."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.zeros(4, 6, device=device)
    v = x.t()[1:5:2].unsqueeze(0).transpose(1, 2)
    v += torch.arange(8.0, device=device).view(1, 4, 2)
    v[0, 2].fill_(7)
    return [x, v, v.stride(), v.storage_offset()]
