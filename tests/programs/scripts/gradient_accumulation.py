"""Gradients add up over backward calls until they are cleared."""

import torch


def run(device):
    """Returns what is compared between devices."""
    w = torch.ones(2, 2, device=device, requires_grad=True)
    seen = []
    for i in range(4):
        (w * (i + 1)).sum().backward()
        seen.append(w.grad.clone())
        if i == 1:
            w.grad = None
    w.grad.zero_()
    (w**2).sum().backward()
    return [*seen, w.grad]
