"""BatchNorm over images with gradients, affine and not."""

import torch
from torch import nn


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    bn, plain = nn.BatchNorm2d(2).to(device), nn.BatchNorm2d(2, affine=False).to(device)
    x = torch.randn(3, 2, 4, 4).to(device).requires_grad_()
    y = plain(bn(x).relu())
    (y * torch.arange(16.0, device=device).view(4, 4)).sum().backward()
    return [y, x.grad, bn.weight.grad, bn.bias.grad, bn.running_var, plain.running_mean]
