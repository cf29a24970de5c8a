"""Gradients through indexing, gather, masks and cat."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(6.0, device=device).requires_grad_()
    i = torch.tensor([0, 0, 5], device=device)
    y = torch.cat([x[i] * 2, x[x.detach() > 2], x.gather(0, i), x[1:4].flip(0)])
    z = x.view(2, 3).index_select(1, torch.tensor([2, 0], device=device))
    (y.pow(2).sum() + z.prod()).backward()
    return [y, z, x.grad]
