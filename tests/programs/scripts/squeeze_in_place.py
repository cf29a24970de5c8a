"""squeeze_ and unsqueeze_ between writes."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.zeros(1, 4, 1, device=device)
    x.squeeze_()
    x[1] = 5
    x.unsqueeze_(0).unsqueeze_(-1)
    x.add_(torch.arange(4.0, device=device).view(1, 4, 1))
    x.squeeze_(0)
    return [x, x.shape, x.stride()]
