"""An in-place write to a leaf that requires grad is refused, under no_grad it is not."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.zeros(2, device=device, requires_grad=True)
    try:
        x.add_(1)
        text = "no error"
    except RuntimeError as error:
        text = str(error)
    with torch.no_grad():
        x.add_(2)
    return [x, text, x.is_leaf]
