"""Hooks that change gradients, and one that is removed."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.ones(3, device=device, requires_grad=True)
    seen = []
    y = x * 2
    handle = y.register_hook(lambda g: seen.append(g.clone()) or g * 10)
    x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad * 1))
    y.sum().backward()
    handle.remove()
    (x * 3).sum().backward()
    return [*seen, x.grad]
