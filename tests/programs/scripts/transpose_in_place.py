"""t_ and transpose_ change the tensor, not its memory."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(6.0, device=device).view(2, 3)
    y = x[:]
    x.t_()
    x[0] = -1
    y.transpose_(0, 1).mul_(2)
    return [x, y, x.stride(), y.shape]
