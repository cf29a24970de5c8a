"""A state_dict loads from the CPU and back."""

import torch
from torch import nn


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    host, net = nn.Linear(3, 2), nn.Linear(3, 2).to(device)
    net.load_state_dict(host.state_dict())
    with torch.no_grad():
        net.weight.mul_(2)
    back = nn.Linear(3, 2)
    back.load_state_dict(net.state_dict())
    return [back.weight, back.bias, host.weight, str(back.weight.device)]
