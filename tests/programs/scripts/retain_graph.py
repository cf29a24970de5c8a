"""Backward twice through one graph, and a third time refused."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(3.0, device=device, requires_grad=True)
    y = (x**3).sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    text = ""
    try:
        y.backward()
    except RuntimeError as error:
        text = str(error)[:60]
    return [first, x.grad, text]
