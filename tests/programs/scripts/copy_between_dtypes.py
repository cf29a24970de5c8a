"""copy_ and to() between dtypes, with rounding and truncation."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.tensor([1.7, -2.3, 1e-8, 300.0], device=device)
    i = torch.zeros(4, dtype=torch.int32, device=device).copy_(x)
    b = x.bool()
    h = x.half().float()
    g = x.bfloat16()
    u = x.abs().clamp(max=255).to(torch.uint8)
    return [i, b, h, g, u, i.double(), x.to(torch.float64) - x]
