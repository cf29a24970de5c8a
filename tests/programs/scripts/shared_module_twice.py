"""One module called twice in a forward pass."""

import torch
from torch import nn


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    lin = nn.Linear(3, 3).to(device)
    x = torch.ones(2, 3, device=device)
    y = lin(torch.relu(lin(x)))
    y.sum().backward()
    return [y, lin.weight.grad, lin.bias.grad]
