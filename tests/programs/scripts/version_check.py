"""A saved tensor that was changed in place is noticed in backward."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.ones(3, device=device, requires_grad=True)
    y = x.exp()
    z = y * y
    y.add_(1)
    try:
        z.sum().backward()
        text = "no error"
    except RuntimeError as error:
        text = str(error)[:75]
    return [y, z, text, x.grad, y._version]
