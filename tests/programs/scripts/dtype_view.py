"""The same bits seen as another dtype."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.tensor([1.0, -2.0, 0.5], device=device)
    bits = x.view(torch.int32)
    bits.bitwise_and_(0x7FFFFFFF)
    halves = x.view(torch.int16)
    return [x, bits, halves, halves.shape]
