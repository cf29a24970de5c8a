"""LBFGS calls its closure several times per step and reads the loss."""

import torch
from torch import nn


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    x, t = torch.randn(10, 3).to(device), torch.randn(10, 1).to(device)
    net = nn.Linear(3, 1).to(device)
    opt = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")

    def closure():
        opt.zero_grad()
        loss = ((net(x) - t) ** 2).mean()
        loss.backward()
        return loss

    return [*[opt.step(closure) for _ in range(3)], *net.parameters()]
