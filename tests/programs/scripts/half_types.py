"""Arithmetic in float16, bfloat16 and float64."""

import torch


def run(device):
    """Returns what is compared between devices."""
    r = []
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        x = torch.linspace(-2, 2, 9, dtype=torch.float64).to(dtype).to(device)
        r += [x * x + 1, x.exp(), x.sum(), x.view(3, 3) @ x.view(3, 3).t(), x.softmax(0), x.std()]
    return r
