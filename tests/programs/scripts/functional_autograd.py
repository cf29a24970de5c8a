"""Jacobian, Hessian, vjp and jvp of torch.autograd.functional."""

import torch


def run(device):
    """Returns what is compared between devices."""

    def f(x):
        return x.sin() * x.sum()

    x = torch.tensor([0.1, 0.2, 0.3], device=device)
    v = torch.tensor([1.0, 0.0, -1.0], device=device)
    hessian = torch.autograd.functional.hessian(lambda t: f(t).sum(), x)
    jvp, vjp = torch.autograd.functional.jvp(f, x, v), torch.autograd.functional.vjp(f, x, v)
    return [torch.autograd.functional.jacobian(f, x), hessian, *jvp, *vjp]
