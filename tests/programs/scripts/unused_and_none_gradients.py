"""Unused inputs have no gradient; materialised ones are zero."""

import torch


def run(device):
    """Returns what is compared between devices."""
    a = torch.ones(2, device=device, requires_grad=True)
    b = torch.ones(2, device=device, requires_grad=True)
    y = (a * 3).sum()
    g = torch.autograd.grad(y, [a, b], allow_unused=True, retain_graph=True)
    m = torch.autograd.grad(y, [a, b], materialize_grads=True)
    return [g[0], g[1] is None, *m, b.grad is None]
