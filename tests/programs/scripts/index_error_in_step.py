"""A bad index is an error, and the tensors beside it stay good."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(4.0, device=device)
    y = x + 1
    text = ""
    try:
        bad = x.index_select(0, torch.tensor([9], device=device))
        bad.sum().item()
    except (IndexError, RuntimeError) as error:
        text = type(error).__name__
    z = y * 2
    return [y, z, bool(text)]
