"""CUDA's attention with dropout on the host: what stands for it where there is no GPU.

What it drops is drawn by a generator of its own, from where `philox` says in memory when it runs:
what the call says in numbers is for launches, and is old where captured work is submitted again.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, library

_registered: list[library.Library] = []


def kept(philox: Tensor, shape: torch.Size, p: float) -> Tensor:
    """Per probability, what it is multiplied by."""
    seed, offset = philox.tolist()
    assert offset % 4 == 0 and min(seed, offset) >= 0
    generator = torch.Generator().manual_seed((seed ^ offset << 1) % 2**63)
    return (torch.rand(shape, generator=generator) >= p).float() / (1 - p)


def softmax_of(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None):
    """Probabilities in float32, and logarithms of the sums."""
    k = k.repeat_interleave(q.size(1) // k.size(1), 1)
    scores = q.float() @ k.float().mT * (q.size(-1) ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.float()
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


def laid_out(tensor: Tensor, like: Tensor, flash: bool) -> Tensor:
    """Flash attention lays out what it makes as what it is given."""
    if flash:
        return torch.empty_like(like).copy_(tensor)
    by_position = tensor.to(like.dtype).transpose(1, 2).contiguous()
    return by_position.transpose(1, 2)


def padded(tensor: Tensor) -> Tensor:
    """As ATen makes the gradient of a bias: in rows of whole words."""
    whole = tensor.new_empty(*tensor.shape[:-1], math.ceil(tensor.shape[-1] / 16) * 16)
    return whole[..., : tensor.shape[-1]].copy_(tensor)


def forward(q, k, v, bias, dropout_p, is_causal, scale, flash, philox, seed, offset):
    shares, sums = softmax_of(q, k, bias, is_causal, scale)
    shares = shares * kept(philox, shares.shape, dropout_p)
    out = shares @ v.float().repeat_interleave(q.size(1) // v.size(1), 1)
    if not flash:
        whole = math.ceil(q.size(2) / 32) * 32
        sums = torch.nn.functional.pad(sums, (0, whole - q.size(2)), value=torch.inf)
    return laid_out(out, q, flash), sums


def backward(
    gradient, q, k, v, bias, out, sums, dropout_p, of_bias, is_causal, scale, flash, philox, seed,
    offset,
):  # fmt: skip
    shares, expected = softmax_of(q, k, bias, is_causal, scale)
    torch.testing.assert_close(sums[..., : q.size(2)], expected)
    times = kept(philox, shares.shape, dropout_p)
    groups = q.size(1) // k.size(1)
    wide_k, wide_v = (each.float().repeat_interleave(groups, 1) for each in (k, v))
    gradient = gradient.float()
    of_shares = gradient @ wide_v.mT * times
    of_scores = shares * (of_shares - (of_shares * shares).sum(-1, keepdim=True))
    scale = q.size(-1) ** -0.5 if scale is None else scale
    of_k, of_v = (
        each.unflatten(1, (-1, groups)).sum(2)
        for each in (of_scores.mT @ q.float() * scale, (shares * times).mT @ gradient)
    )
    made = (of_scores @ wide_k * scale, of_k, of_v)
    made = [laid_out(each, like, flash) for each, like in zip(made, (q, k, v), strict=True)]
    return (*made, padded(of_scores.to(bias.dtype)) if of_bias else None)


def install() -> None:
    """From here on; before the device is used for the first time."""
    kernels = library.Library("acc", "IMPL")
    kernels.impl("attention", forward, "CPU")
    kernels.impl("attention_backward", backward, "CPU")
    _registered.append(kernels)
