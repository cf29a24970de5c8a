"""A transformer encoder layer in training mode without dropout."""

import torch
from torch import nn


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).to(device)
    x = torch.randn(2, 5, 8).to(device).requires_grad_()
    pad = torch.tensor([[False] * 5, [False] * 3 + [True] * 2], device=device)
    y = layer(x, src_key_padding_mask=pad)
    y.pow(2).sum().backward()
    return [y, x.grad, *[p.grad for p in layer.parameters()]]
