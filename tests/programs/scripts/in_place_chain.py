"""A long chain of in-place operators on one tensor."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.linspace(-2, 2, 9).to(device)
    for i in range(5):
        x.mul_(1.5).add_(i).clamp_(-4, 4)
    x.sigmoid_().neg_()
    x.div_(3).sqrt_() if x.min() > 0 else x.abs_().sqrt_()
    return [x]
