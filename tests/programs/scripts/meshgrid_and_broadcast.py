"""Broadcasting of views and outer products."""

import torch


def run(device):
    """Returns what is compared between devices."""
    a, b = torch.arange(3.0, device=device), torch.arange(4.0, device=device)
    x, y = torch.meshgrid(a, b, indexing="ij")
    z = (x - y).abs() + a[:, None] * b
    u, v = torch.broadcast_tensors(a[:, None], b)
    return [
        z,
        u,
        v,
        u.stride(),
        a.expand(2, 3).t() + 1,
        b.repeat(2),
        b.repeat_interleave(2),
        torch.cartesian_prod(a, b),
    ]
