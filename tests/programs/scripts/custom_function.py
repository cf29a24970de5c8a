"""A custom autograd function with saved tensors and a non-tensor argument."""

import torch


def run(device):
    """Returns what is compared between devices."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, k):
            ctx.save_for_backward(x)
            ctx.k = k
            return x * x * k

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return 2 * x * ctx.k * g, None

    x = torch.arange(4.0, device=device, requires_grad=True)
    y = Scale.apply(x, 3.0)
    y.sum().backward()
    return [y, x.grad]
