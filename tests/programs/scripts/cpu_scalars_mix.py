"""0-dim CPU tensors and CPU index tensors may be mixed in; others are refused."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(4.0, device=device)
    a = x * torch.tensor(3.0)
    c = torch.tensor(2.0)
    b = x + c
    c.fill_(100)
    d = x[torch.tensor([0, 2])]
    return [a, b, d, torch.where(x > 1, x, torch.tensor(-5.0))]
