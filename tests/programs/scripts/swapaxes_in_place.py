"""swapaxes_, swapdims_ and a write in between."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(24.0, device=device).view(2, 3, 4)
    x.swapaxes_(0, 2)
    x[0].mul_(-1)
    x.swapdims_(1, 2)
    return [x, x.shape, x.stride(), x.contiguous()]
