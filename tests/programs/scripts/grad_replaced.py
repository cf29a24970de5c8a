"""The gradient is replaced, edited and read between backward and step."""

import torch


def run(device):
    """Returns what is compared between devices."""
    w = torch.nn.Parameter(torch.ones(3, device=device))
    opt = torch.optim.SGD([w], lr=1.0)
    w.grad = torch.arange(3.0, device=device)
    opt.step()
    opt.zero_grad()
    (w * 2).sum().backward()
    w.grad[0] = 0
    w.grad = w.grad * 0.5
    opt.step()
    return [w, w.grad]
