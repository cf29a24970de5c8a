"""Attention over sequences of one length, under the names of TorchAcc."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from torchacc.ops.attend import Options, attend, logsumexp


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, which is recorded like any operator.

    Its layout is [batch, heads, seqlen, headdim]; `attn_mask` and `scale` mean what they do there.
    """
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def flash_attn_xla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention over sequences of one length.

    Args:
        q: [batch, seqlen_q, heads, headdim], of any floating point type.
        k, v: [batch, seqlen_k, heads_k, headdim]. `heads_k` divides `heads`: query head h uses head
            h // (heads / heads_k).
        dropout_p: the share of the attention that is dropped; give 0 in evaluation.
        softmax_scale: of the scores; None is 1 / sqrt(headdim).
        causal: a query sees no key behind its place. The last query has the last key's.
        window_size: how many places a query sees before its own and behind it; -1 is all.
        alibi_slopes: [heads] or [batch, heads]: -slope * |distance| is added to the scores. It has
            no gradient.
        deterministic: on a GPU, gradients that are the same in each run, by plain products; on a
            host they are anyway.
        return_attn_probs: returns the softmax's sums too. They are computed by themselves, of all
            scores: for tests.

    Returns:
        [batch, seqlen_q, heads, headdim], 0 for a query that sees no key. With
        `return_attn_probs` a tuple of this, the logarithms of the softmax's sums, float32 (or
        float64) [batch, heads, seqlen_q], and None, as in TorchAcc.

    Raises:
        ValueError: shapes, `window_size`, `alibi_slopes` or `dropout_p` do not fit.
    """
    options = Options.checked(
        "flash_attn_xla",
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        alibi_slopes,
        deterministic,
    )
    out = attend(q, k, v, options)
    return (out, logsumexp(q, k, options), None) if return_attn_probs else out
