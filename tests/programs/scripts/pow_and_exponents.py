"""Exponents that kernels specialise on: 0, 1, 2, 3, 0.5, -1 and others."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.tensor([0.5, 1.0, 2.0, 4.0], device=device)
    r = [x**e for e in (0, 1, 2, 3, 0.5, -1, -0.5, 2.5, 2.0)]
    r += [x.pow(x), 2**x, x.int() ** 2, torch.float_power(x, 2), x.square(), x.rsqrt()]
    y = x.clone().requires_grad_()
    sum((y**e).sum() for e in (2, 3, 0.5)).backward()
    return [*r, y.grad]
