"""Plain SGD written with no_grad updates."""

import torch


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    x, t = torch.randn(16, 3).to(device), torch.randn(16, 1).to(device)
    w, b = torch.zeros(3, 1, device=device), torch.zeros(1, device=device)
    losses = []
    for _ in range(8):
        w.requires_grad_(), b.requires_grad_()
        loss = ((x @ w + b - t) ** 2).mean()
        loss.backward()
        w, b = (w - 0.1 * w.grad).detach(), (b - 0.1 * b.grad).detach()
        losses.append(loss)
    return [*losses, w, b]
