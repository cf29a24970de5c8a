"""Two parameters exchange their memory."""

import torch


def run(device):
    """Returns what is compared between devices."""
    a = torch.nn.Parameter(torch.zeros(3, device=device))
    b = torch.nn.Parameter(torch.ones(3, device=device))
    a.data, b.data = b.data, a.data
    loss = (a * 2 + b * 3).sum()
    loss.backward()
    with torch.no_grad():
        a -= 0.5 * a.grad
    return [a, b, a.grad, b.grad]
