"""0-dim tensors in place, as scalars, in comparisons."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.tensor(3.0, device=device)
    x += 1
    y = x.view(1)
    y.mul_(2)
    if x > 7:
        x.sub_(1)
    return [x, y, float(x), int(x), bool(x == 7), x.expand(3), [1, 2, 3][int(x) - 6]]
