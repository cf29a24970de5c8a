"""detach shares memory: writes to it are seen in the original."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.ones(3, device=device, requires_grad=True)
    y = x * 2
    d = y.detach()
    d[0] = 50
    z = y.sum()
    z.backward()
    return [y, d, z, x.grad, d.requires_grad]
