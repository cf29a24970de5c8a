"""Activation functions and their gradients."""

import torch
import torch.nn.functional as F


def run(device):
    """Returns what is compared between devices."""
    x = torch.linspace(-3, 3, 13).to(device).requires_grad_()
    names = "relu gelu silu mish softplus elu selu celu hardswish hardsigmoid logsigmoid tanhshrink"
    ys = [getattr(F, name)(x) for name in names.split()] + [F.gelu(x, approximate="tanh")]
    ys += [F.leaky_relu(x, 0.2), F.glu(x[:12]), F.softmax(x, 0), F.prelu(x, x.detach()[:1])]
    grads = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in ys]
    return [*ys, *grads]
