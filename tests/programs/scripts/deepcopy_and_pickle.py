"""Copies by deepcopy and pickle share nothing with the original."""

import copy
import pickle

import torch
from torch import nn


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(device)
    other = copy.deepcopy(net)
    third = pickle.loads(pickle.dumps(net))
    with torch.no_grad():
        net[0].weight.zero_()
    other(torch.ones(2, 2, device=device))
    return [m.state_dict()[k] for m in (net, other, third) for k in m.state_dict()]
