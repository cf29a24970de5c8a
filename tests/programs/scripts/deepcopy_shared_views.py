"""deepcopy keeps the sharing of tensors within what is copied."""

import copy

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(6.0, device=device)
    d = {"base": x, "view": x[2:4], "again": x}
    e = copy.deepcopy(d)
    e["base"].mul_(10)
    return [d["base"], d["view"], e["base"], e["view"], e["again"] is e["base"]]
