"""A view read by an operator and then overwritten: the operator sees the old values."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(6.0, device=device)
    total = x[:3] + x[3:]
    x[:3] = total
    again = x[:3] + x[3:]
    x[3:].copy_(again)
    return [x, total, again]
