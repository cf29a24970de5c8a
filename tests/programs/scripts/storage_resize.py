"""The storage of a tensor is emptied and filled again."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(8.0, device=device)
    kept = x.clone()
    size = x.untyped_storage().size()
    x.untyped_storage().resize_(0)
    empty = x.untyped_storage().size()
    x.untyped_storage().resize_(size)
    x.copy_(kept)
    x.mul_(2)
    return [x, size, empty, x.shape]
