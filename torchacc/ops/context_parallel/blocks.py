"""Attention to one block of keys, with what it takes to put blocks together, and its gradients.

A block gives its result and `lse`, the logarithm of the sum that its softmax divides by. Two blocks
weigh as their sums do. In the gradients of the whole the probabilities of a block are
exp(scores - lse) with the lse of the whole, so the backward of a block wants that and the whole's
result.

Tensors are [batch, heads, seqlen, headdim]; lse is [batch, heads, queries], in float32 at least.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchacc.ops.attend import on_host, wide

# Added to the score of what is not seen. A softmax over nothing but such is finite, and weighs
# nothing beside another block.
UNSEEN = -1e30


class Block(NamedTuple):
    """How the queries see a block: `bias` is added to the scores; `triangle`: torch's is_causal."""

    bias: Tensor | None
    triangle: bool
    scale: float


def forward(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """out, in q's type, and lse."""
    if on_host(q):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, block.triangle, attn_mask=block.bias, scale=block.scale
        )
    scores = _scores(q, k, block)
    lse = scores.logsumexp(-1)
    out = torch.exp(scores - lse[..., None]) @ wide(v)
    return out.to(q.dtype), lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, in their types; `out`, `lse` and `grad` are of the whole."""
    if on_host(q):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad,
            q,
            k,
            v,
            out,
            lse,
            0.0,
            block.triangle,
            attn_mask=block.bias,
            scale=block.scale,
        )
    shares = torch.exp(_scores(q, k, block) - lse[..., None])
    grad_v = shares.transpose(-2, -1) @ wide(grad)
    along = (wide(grad) * wide(out)).sum(-1, keepdim=True)
    inner = shares * (wide(grad) @ wide(v).transpose(-2, -1) - along) * block.scale
    grad_q, grad_k = inner @ wide(k), inner.transpose(-2, -1) @ wide(q)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def joined(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of two blocks together; `out` is as wide as lse."""
    both = torch.logaddexp(lse, more_lse)
    share, more_share = torch.exp(lse - both)[..., None], torch.exp(more_lse - both)[..., None]
    return out * share + more * more_share, both


def _scores(q: Tensor, k: Tensor, block: Block) -> Tensor:
    scores = wide(q) @ wide(k).transpose(-2, -1) * block.scale
    if block.triangle:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(unseen, UNSEEN)
    return scores if block.bias is None else scores + block.bias
