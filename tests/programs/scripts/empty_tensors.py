"""Operators on tensors without elements."""

import torch


def run(device):
    """Returns what is compared between devices."""
    e = torch.empty(0, 3, device=device)
    r = [
        e + 1,
        e.sum(),
        e.sum(0),
        torch.cat([e, torch.ones(1, 3, device=device)]),
        e.t(),
        e.clone(),
    ]
    r += [e @ torch.ones(3, 2, device=device), e[:, 1:], e.mean().isnan(), e.view(3, 0)]
    e.add_(1)
    return [*r, e, e.numel()]
