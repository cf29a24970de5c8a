"""Grouped, dilated, transposed and channels-last convolutions."""

import torch
import torch.nn.functional as F


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 7, 7).to(device).requires_grad_()
    w = torch.randn(4, 2, 3, 3).to(device).requires_grad_()
    a = F.conv2d(x, w, groups=2, dilation=2, padding=2)
    b = F.conv_transpose2d(x, w.flatten(0, 1)[:4, None], stride=2)
    c = F.conv2d(x.to(memory_format=torch.channels_last), w, groups=2)
    d = F.conv1d(x[:, :, 0], w[:, :, 0], groups=2)
    (a.sum() + b.pow(2).sum() + c.sum() + d.sum()).backward()
    return [a, b, c, d, x.grad, w.grad]
