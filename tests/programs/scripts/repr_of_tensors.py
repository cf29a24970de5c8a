"""Texts of tensors are those of the CPU but for the device."""

import re

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.linspace(0, 1, 5).to(device)
    texts = [repr(x), repr(x.int()), repr(x > 0.5), repr(x.view(1, 5).requires_grad_()), str(x[2])]
    texts += [repr(torch.empty(0, device=device)), repr((x * 2).sum())]
    plain = [re.sub(r", device='[a-z:0-9]+'", "", t).split(", grad_fn")[0] for t in texts]
    return [" ".join(t.split()) for t in plain]
