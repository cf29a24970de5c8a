"""Reductions over some and all dimensions, with keepdim and dtypes."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(24.0, device=device).view(2, 3, 4) - 11
    r = [x.sum(), x.sum((0, 2)), x.mean(1, keepdim=True), x.var(2), x.std(), x.norm(), x.prod(2)]
    r += [
        x.amax((0, 1)),
        x.min(),
        x.argmin(1),
        x.any(),
        (x > 0).all(1),
        x.cumsum(1),
        x.logsumexp(0),
    ]
    r += [x.int().sum(), (x > 0).sum(0), x.int().float().mean(), x.half().sum(dtype=torch.float32)]
    return r
