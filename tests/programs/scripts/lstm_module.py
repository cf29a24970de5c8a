"""nn.LSTM of two layers, both directions, with its state kept."""

import torch
from torch import nn


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True).to(device)
    x = torch.randn(2, 5, 3).to(device).requires_grad_()
    y, (h, c) = lstm(x)
    y2, _ = lstm(x, (h.detach(), c.detach()))
    (y.sum() + y2.pow(2).sum()).backward()
    return [y, h, c, y2, x.grad, *[p.grad for p in lstm.parameters()]]
