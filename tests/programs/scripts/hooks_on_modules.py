"""Forward and backward hooks of modules see and change tensors."""

import torch
from torch import nn


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(device)
    seen = []
    net[0].register_forward_hook(lambda m, i, o: o * 2)
    net[1].register_forward_pre_hook(lambda m, i: seen.append(i[0].detach().clone()))
    net[2].register_full_backward_hook(
        lambda m, gi, go: seen.extend([gi[0].clone(), go[0].clone()])
    )
    net(torch.arange(6.0).view(2, 3).to(device)).sum().backward()
    return [*seen, net[0].weight.grad]
