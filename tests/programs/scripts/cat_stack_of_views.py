"""cat and stack of views, then a write to the sources."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(6.0, device=device)
    c = torch.cat([x[:2], x[4:], x[1:3]])
    s = torch.stack([x[::2], x[1::2]], dim=1)
    x.zero_()
    b = torch.cat([c.int(), c.half()])
    return [c, s, b, b.dtype, x]
