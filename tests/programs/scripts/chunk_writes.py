"""Each chunk of a tensor is written in place."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(12.0, device=device).reshape(3, 4)
    for i, c in enumerate(x.chunk(4, dim=1)):
        c.mul_(i)
    for i, s in enumerate(x.split([1, 2])):
        s.sub_(i + 1)
    first, second = x.unbind(0)[:2]
    first.copy_(second)
    return [x, first, second]
