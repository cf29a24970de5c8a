"""Embeddings with padding, bags and renormalised rows."""

import torch
import torch.nn.functional as F


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    w = torch.randn(6, 3).to(device).requires_grad_()
    i = torch.tensor([1, 5, 0, 1, 2], device=device)
    a = F.embedding(i, w, padding_idx=0)
    b = F.embedding_bag(i, w, torch.tensor([0, 3], device=device), mode="mean")
    (a.pow(2).sum() + b.sum()).backward()
    c = F.embedding(i, w.detach().clone(), max_norm=1.0)
    return [a, b, c, w.grad]
