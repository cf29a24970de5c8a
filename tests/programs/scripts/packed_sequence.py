"""Packed sequences through a recurrent layer; its weight gradients differ in the last bit.

On the CPU ATen multiplies the inputs of all steps at once, on other devices step by step, so the
sums of the gradients round differently.
"""

import torch
from torch import nn


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    rnn = nn.RNN(2, 3).to(device)
    x = torch.randn(4, 3, 2).to(device)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 3, 1]))
    y, h = rnn(packed)
    padded, lengths = nn.utils.rnn.pad_packed_sequence(y)
    padded.sum().backward()
    return [padded, lengths, h, rnn.weight_ih_l0.grad.isfinite()]
