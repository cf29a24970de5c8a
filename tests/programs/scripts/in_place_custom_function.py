"""A custom function that marks its argument dirty."""

import torch


def run(device):
    """Returns what is compared between devices."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx, g):
            return g * 2

    x = torch.ones(3, device=device, requires_grad=True)
    h = x + 1
    y = Twice.apply(h)
    y.pow(2).sum().backward()
    return [h, y, x.grad]
