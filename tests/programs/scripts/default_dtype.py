"""A default dtype set for a while; what was recorded inside keeps it."""

import torch


def run(device):
    """Returns what is compared between devices."""
    torch.set_default_dtype(torch.float64)
    try:
        a = torch.ones(2, device=device)
        b = torch.arange(3, device=device) / 2
        c = torch.tensor([1.5], device=device)
    finally:
        torch.set_default_dtype(torch.float32)
    d = torch.ones(2, device=device)
    return [a, b, c, d, a + d, (torch.arange(3, device=device) / 2).dtype]
