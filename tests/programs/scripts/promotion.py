"""Type promotion between tensors, 0-dim tensors and Python numbers."""

import torch


def run(device):
    """Returns what is compared between devices."""
    i = torch.arange(3, device=device)
    f = torch.ones(3, device=device)
    h = f.half()
    zero = torch.tensor(2.5, dtype=torch.float64, device=device)
    r = [i + 1, i + 1.5, i / 2, i // 2, f + zero, h + f, h * 2.5, i * zero, i > 1.5, i + True, f**2]
    return [*r, [str(t.dtype) for t in r], torch.result_type(i, 1.0)]
