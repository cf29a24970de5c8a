"""A parameter is freed after the forward pass and comes back before backward."""

import torch


def run(device):
    """Returns what is compared between devices."""
    w = torch.arange(4.0, device=device).requires_grad_()
    full = w.detach() * 2
    y = (full.requires_grad_() ** 2).sum()
    saved = full.detach().clone()
    nbytes = full.untyped_storage().size()
    full.untyped_storage().resize_(0)
    full.untyped_storage().resize_(nbytes)
    full.data.copy_(saved)
    y.backward()
    return [y, full.grad, full]
