"""Gradients kept by set_to_none=False live in the same memory."""

import torch


def run(device):
    """Returns what is compared between devices."""
    w = torch.nn.Parameter(torch.arange(3.0, device=device))
    opt = torch.optim.SGD([w], lr=0.1)
    kept = None
    for i in range(4):
        opt.zero_grad(set_to_none=False)
        (w * (i + 1)).sum().backward()
        kept = w.grad if kept is None else kept
        opt.step()
    return [w, w.grad, kept, kept is w.grad]
