"""Gradients of max, min, norm, prod, cumsum, logsumexp, var."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.tensor([[1.0, 2.0, 2.0], [0.0, -1.0, 3.0]], device=device, requires_grad=True)
    ys = [
        x.max(),
        x.max(1).values,
        x.amin(0),
        x.norm(dim=1),
        x.prod(1),
        x.cumsum(1),
        x.logsumexp(1),
    ]
    ys += [x.var(1), x.std(), x.median(), x.sort(1).values, x.topk(2).values, x.mean((0, 1))]
    return [*ys, *[torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in ys]]
