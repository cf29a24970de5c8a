"""One parameter used in two layers."""

import torch
import torch.nn.functional as F
from torch import nn


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    emb, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = emb.weight
    net = nn.ModuleList([emb, head]).to(device)
    tokens = torch.tensor([[1, 2, 6], [0, 2, 2]], device=device)
    loss = F.cross_entropy(net[1](net[0](tokens)).flatten(0, 1), tokens.flatten())
    loss.backward()
    return [loss, net[0].weight.grad, net[0].weight is net[1].weight, len(list(net.parameters()))]
