"""An exponential moving average of the weights beside the training."""

import torch
from torch import nn


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    net = nn.Linear(3, 2).to(device)
    ema = {k: v.clone() for k, v in net.state_dict().items()}
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for i in range(5):
        opt.zero_grad()
        net(torch.full((1, 3), float(i), device=device)).pow(2).sum().backward()
        opt.step()
        for k, v in net.state_dict().items():
            ema[k].mul_(0.9).add_(v, alpha=0.1)
    return [*ema.values(), *net.parameters()]
