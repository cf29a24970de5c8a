"""The gradient of a gradient."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.tensor([0.5, -1.0, 2.0], device=device, requires_grad=True)
    y = (x.sin() * x.exp()).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    penalty = (g**2).sum()
    penalty.backward()
    (h,) = torch.autograd.grad((x**4).sum(), x, create_graph=True)
    (hh,) = torch.autograd.grad(h.sum(), x)
    return [y, g, penalty, x.grad, hh]
