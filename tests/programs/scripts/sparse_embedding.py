"""Sparse gradients of an embedding, with SGD, or a refusal that names the option."""

import torch
from torch import nn


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    emb = nn.Embedding(6, 2, sparse=True).to(device)
    opt = torch.optim.SGD(emb.parameters(), lr=0.5)
    emb(torch.tensor([1, 4, 1], device=device)).pow(2).sum().backward()
    dense = emb.weight.grad.to_dense()
    opt.step()
    return [dense, emb.weight, emb.weight.grad.is_sparse]
