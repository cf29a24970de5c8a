"""Copies in channels-last and contiguous order."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(48.0, device=device).view(2, 3, 2, 4)
    y = x.to(memory_format=torch.channels_last)
    z = (y + 1).clone()
    w = z.contiguous()
    e = torch.empty_like(y)
    return [y, z, w, y.stride(), z.stride(), w.stride(), e.stride(), y.is_contiguous()]
