"""detach_ cuts the graph of a tensor in place."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.ones(3, device=device, requires_grad=True)
    y = x * 3
    y.detach_()
    y.mul_(2)
    z = (x * y).sum()
    z.backward()
    return [y, y.requires_grad, x.grad]
