"""requires_grad_ on a leaf, switched on and off."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.full((2,), 3.0, device=device)
    a = x * x
    x.requires_grad_()
    (x * x).sum().backward()
    first = x.grad.clone()
    x.requires_grad_(False)
    b = x * x
    return [a, first, b.requires_grad, x.grad]
