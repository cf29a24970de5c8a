"""Names change places between steps; values must not."""

import torch


def run(device):
    """Returns what is compared between devices."""
    a, b = torch.zeros(3, device=device), torch.ones(3, device=device)
    for i in range(5):
        a, b = b, a + b * i
        a.add_(1)
    return [a, b]
