"""A recurrent cell unrolled by hand, with truncated backpropagation."""

import torch
from torch import nn


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    cell = nn.GRUCell(3, 5).to(device)
    opt = torch.optim.SGD(cell.parameters(), lr=0.1)
    x = torch.randn(8, 2, 3).to(device)
    h, losses = torch.zeros(2, 5, device=device), []
    for chunk in x.split(4):
        h = h.detach()
        for step in chunk:
            h = cell(step, h)
        opt.zero_grad()
        losses.append(h.pow(2).sum())
        losses[-1].backward()
        opt.step()
    return [*losses, h, *cell.parameters()]
