"""arange, linspace and full of several bounds; float steps give other lengths."""

import torch


def run(device):
    """Returns what is compared between devices."""
    r = [torch.arange(n, device=device) for n in (0, 1, 5)]
    r += [torch.arange(0.0, s, 0.3, device=device) for s in (0.9, 1.0, 1.2, 1.21)]
    r += [torch.linspace(0, s, 4, device=device) for s in (1, 2.5)]
    return [*r, torch.eye(3, 4, device=device), torch.tril(torch.ones(3, 3, device=device), -1)]
