"""Copies within one storage, from a range into another one."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(10.0, device=device)
    x[5:].copy_(x[:5])
    y = torch.arange(9.0, device=device).view(3, 3)
    y.copy_(y.t().clone())
    y[0].copy_(y[:, 1].clone())
    return [x, y]
