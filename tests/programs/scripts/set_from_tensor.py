"""set_ makes a tensor share the storage of another one."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.zeros(2, device=device)
    y = torch.arange(6.0, device=device)
    x.set_(y)
    x[0] = 10
    z = torch.empty(0, device=device)
    z.set_(y.untyped_storage(), 2, (2, 2), (2, 1))
    z.add_(1)
    return [x, y, z, x.shape]
