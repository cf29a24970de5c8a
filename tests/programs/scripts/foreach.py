"""Operators on lists of tensors, in place and not."""

import torch


def run(device):
    """Returns what is compared between devices."""
    xs = [torch.full((n,), float(n), device=device) for n in (1, 3, 2)]
    ys = torch._foreach_add(xs, 1.0)
    torch._foreach_mul_(xs, ys)
    torch._foreach_add_(xs, [0.1, 0.2, 0.3])
    torch._foreach_addcdiv_(xs, ys, ys, value=2.0)
    return [*xs, *ys, *torch._foreach_norm(xs), *torch._foreach_sqrt(ys)]
