"""Attention in flash-attention's layout, computed by torch's `scaled_dot_product_attention`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchacc.ops import masks
from torchacc.ops.masks import Cover, Places, Window
from torchacc_device import _C


@dataclass(frozen=True)
class Options:
    """What flash-attention's functions have in common, checked.

    `slopes`: [heads] or [batch, heads], or None. `scale`: of the scores.
    """

    window: Window
    scale: float
    dropout_p: float = 0.0
    slopes: Tensor | None = None
    deterministic: bool = False

    @classmethod
    def checked(
        cls,
        where: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: Sequence[int],
        alibi_slopes: Tensor | None,
        deterministic: bool | None,
    ) -> Options:
        """Raises ValueError, which names `where`, for shapes and values that do not fit."""
        check_shapes(where, q, k, v)
        if not 0 <= dropout_p < 1:
            raise ValueError(f"[{where}] dropout_p = {dropout_p}: should be at least 0, below 1.")
        sizes = tuple(window_size)
        if len(sizes) != 2 or not all(isinstance(size, int) and size >= -1 for size in sizes):
            raise ValueError(
                f"[{where}] window_size = {window_size}: should be two integers, the places that a "
                "query sees before its own and behind it, -1 for all."
            )
        if alibi_slopes is not None:
            allowed = [(q.shape[2],), (q.shape[0], q.shape[2])]
            if tuple(alibi_slopes.shape) not in allowed:
                raise ValueError(
                    f"[{where}] alibi_slopes has the shape {list(alibi_slopes.shape)}: should be "
                    f"[heads] or [batch, heads], here {list(allowed[0])} or {list(allowed[1])}."
                )
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        window = Window.of((sizes[0], sizes[1]), causal)
        return cls(window, scale, dropout_p, alibi_slopes, bool(deterministic))


def check_shapes(where: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ValueError unless they are [batch, seqlen, heads, headdim] and fit together."""
    shown = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not (q.dim() == k.dim() == v.dim() == 4):
        raise ValueError(f"[{where}] {shown}: each should be [batch, seqlen, heads, headdim].")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"[{where}] {shown}: should have the same batch, q and k the same headdim, k and v the "
            "same seqlen and heads."
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2] != 0:
        raise ValueError(
            f"[{where}] {q.shape[2]} heads of q and {k.shape[2]} of k and v: each of the latter "
            "serves as many of the former, so their number should divide q's."
        )


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: Options, places: Places | None = None
) -> Tensor:
    """Attention, [batch, queries, heads, headdim]; 0 for queries that see no key.

    q: [batch, queries, heads, headdim]; k, v: [batch, keys, heads or a divisor of it, headdim].
    places: where they stand; None: sequences without padding, the last query at the last key.
    """
    q, k, v = by_heads(*in_autocast_type(q, k, v))
    counts = q.shape[2], k.shape[2]
    offset = counts[1] - counts[0]
    cover = options.window.cover(offset, *counts)
    if places is None and options.slopes is None and cover in (Cover.ALL, Cover.TRIANGLE):
        return _fused(q, k, v, None, cover is Cover.TRIANGLE, options).transpose(1, 2)
    if places is None:
        places = masks.in_order(range(counts[0]), range(counts[1]), offset, q.device)
    # Where a row of the mask lets nothing through, torch's kernels give 0, and no gradient.
    mask, bias = places.allowed(options.window), places.alibi(options.slopes)
    if bias is not None:
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    return _fused(q, k, v, mask, False, options).transpose(1, 2)


def logsumexp(q: Tensor, k: Tensor, options: Options, places: Places | None = None) -> Tensor:
    """The logarithm of the sum that each query's softmax divides by, [batch, heads, queries].

    float32 at least, without gradient; -inf for a query that sees no key. It computes all scores.
    """
    with torch.no_grad():
        q, k = by_heads(*in_autocast_type(q, k))
        if places is None:
            counts = q.shape[2], k.shape[2]
            places = masks.in_order(
                range(counts[0]), range(counts[1]), counts[1] - counts[0], q.device
            )
        with torch.autocast(q.device.type, enabled=False):
            scores = wide(q) @ wide(k).transpose(-2, -1) * options.scale
        allowed, bias = places.allowed(options.window), places.alibi(options.slopes)
        if bias is not None:
            scores = scores + bias
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        return scores.logsumexp(-1)


def by_heads(q: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """[batch, heads, seqlen, headdim] of each, with as many heads as q has.

    ATen's fused kernels take no others; where it would repeat them, it takes the plain products.
    """
    heads = q.shape[2]
    return q.transpose(1, 2), *(
        other.repeat_interleave(heads // other.shape[2], dim=2).transpose(1, 2)
        if other.shape[2] < heads
        else other.transpose(1, 2)
        for other in others
    )


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32, or in float64 if it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def in_autocast_type(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As an autocast region casts the operands of attention, but for biases, which stay float32."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    half = torch.get_autocast_dtype(kind)
    return tuple(t.to(half) if t.dtype != torch.float64 else t for t in tensors)


def on_host(tensor: Tensor) -> bool:
    """Whether ATen's kernels for CPUs compute what is recorded of it."""
    return tensor.device.type == "cpu" or _C.executor_name() == "host"


def _fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, options: Options
) -> Tensor:
    repeatable: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if options.deterministic and not on_host(q):
        # ATen's fused backward adds up with atomics on a GPU.
        from torch.nn.attention import SDPBackend, sdpa_kernel

        repeatable = sdpa_kernel(SDPBackend.MATH)
    with torch.autocast(q.device.type, enabled=False), repeatable:
        return F.scaled_dot_product_attention(
            q, k, v, mask, options.dropout_p, is_causal, scale=options.scale
        )
