"""In-place operators keep the dtype of their first argument, or refuse."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(4, device=device)
    x.add_(torch.tensor(2))
    text = ""
    try:
        x.add_(1.5)
    except RuntimeError as error:
        text = str(error)
    f = torch.ones(4, device=device)
    f.add_(x)
    return [x, text, f, f.dtype, x]
