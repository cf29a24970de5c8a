"""Attention over padded and packed sequences, under the names of TorchAcc.

Tensors stay padded, and masks are made on the device: what flash-attention unpads would have
another shape at each step, which the host would have to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchacc.ops import masks
from torchacc.ops.attend import Options, attend, logsumexp
from torchacc.ops.masks import Places


def flash_attn_varlen_xla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over padded sequences.

    Padding may lie anywhere; distances count the elements that are none. Where there are as many
    queries as keys, the mask is of both; else no query is padding, and the last one has the place
    of the last key that is none.

    Args:
        q, k, v: as for `flash_attn_xla`.
        attention_mask: [batch, seqlen_k], 0 for padding, of any type.
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
        return_attn_probs: as for `flash_attn_xla`.

    Returns:
        [batch, seqlen_q, heads, headdim], 0 for padding; with `return_attn_probs` a tuple of this
        and the logarithms of the softmax's sums, [batch, heads, seqlen_q], -inf for padding.

    Raises:
        ValueError: shapes, `window_size`, `alibi_slopes` or `dropout_p` do not fit.
    """
    where = "flash_attn_varlen_xla"
    common = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic)
    options = Options.checked(where, q, k, v, *common)
    _check_mask(where, attention_mask, k)
    places = masks.marked(attention_mask.to(q.device), q.shape[1])
    return _attend(q, k, v, options, places, return_attn_probs)


def flash_attn_varlen_qkvpacked_xla(
    qkv: Tensor,
    attention_mask: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_varlen_xla` of `qkv[:, 0]`, `qkv[:, 1]`, `qkv[:, 2]`.

    Args:
        qkv: [batch, 3, seqlen, heads, headdim].
        attention_mask: [batch, seqlen], 0 for padding.
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
        return_attn_probs: as for `flash_attn_xla`.

    Raises:
        ValueError: as `flash_attn_varlen_xla`; or qkv has another shape.
    """
    where = "flash_attn_varlen_qkvpacked_xla"
    if qkv.dim() != 5 or qkv.shape[1] != 3:
        raise ValueError(
            f"[{where}] qkv has the shape {list(qkv.shape)}: should be [batch, 3, seqlen, heads, "
            "headdim]. torch.stack((q, k, v), dim=1) makes that; move flash-attention's third "
            "dimension there by qkv.transpose(1, 2)."
        )
    q, k, v = qkv.unbind(1)
    common = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic)
    options = Options.checked(where, q, k, v, *common)
    _check_mask(where, attention_mask, k)
    places = masks.marked(attention_mask.to(q.device), q.shape[1])
    return _attend(q, k, v, options, places, return_attn_probs)


def flash_attn_varlen_position_ids_xla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_ids: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over sequences that lie one behind the other; each sees only itself.

    Args:
        q, k, v: as for `flash_attn_xla`, with as many keys as queries; any batch.
        position_ids: [batch, seqlen], or one row for the whole batch: the place of each element in
            its sequence. A sequence begins where it is 0.
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
        return_attn_probs: as for `flash_attn_xla`.

    Returns:
        [batch, seqlen, heads, headdim]; with `return_attn_probs` a tuple of this and the logarithms
        of the softmax's sums, [batch, heads, seqlen].

    Raises:
        ValueError: shapes, `window_size`, `alibi_slopes` or `dropout_p` do not fit.
    """
    where = "flash_attn_varlen_position_ids_xla"
    common = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic)
    options = Options.checked(where, q, k, v, *common)
    check_positions(where, position_ids, q, k)
    return _attend(q, k, v, options, masks.packed(position_ids.to(q.device)), return_attn_probs)


def spmd_flash_attn_varlen_xla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    mesh: Any = None,
    partition_spec: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_varlen_xla`, for programs that call it under this name.

    Raises:
        NotImplementedError: there is a `partition_spec`.
        ValueError: as `flash_attn_varlen_xla`.
    """
    if partition_spec is not None:
        raise NotImplementedError(
            f"[spmd_flash_attn_varlen_xla] partition_spec = {partition_spec!r}: there is no SPMD "
            "program here, each process runs its own. Split heads by torchacc.dist.tp, sequences "
            "by torchacc.ops.context_parallel, and leave it None."
        )
    common = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic)
    return flash_attn_varlen_xla(q, k, v, attention_mask, *common, return_attn_probs)


def check_positions(where: str, position_ids: Tensor, q: Tensor, k: Tensor) -> None:
    """Raises ValueError unless there is a position for each query, which is a key too."""
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"[{where}] {q.shape[1]} queries and {k.shape[1]} keys: position_ids are of both, so "
            "there should be as many."
        )
    if position_ids.dim() != 2 or position_ids.shape not in (q.shape[:2], (1, q.shape[1])):
        raise ValueError(
            f"[{where}] position_ids has the shape {list(position_ids.shape)}: should be "
            f"{list(q.shape[:2])}, [batch, seqlen], or one such row."
        )


def _check_mask(where: str, attention_mask: Tensor, k: Tensor) -> None:
    if attention_mask.shape == k.shape[:2]:
        return
    advice = ""
    if attention_mask.dim() == 1:
        advice = " Cumulated lengths (cu_seqlens) are of TorchAcc's earlier versions."
    raise ValueError(
        f"[{where}] attention_mask has the shape {list(attention_mask.shape)}: should be "
        f"{list(k.shape[:2])}, [batch, seqlen of k].{advice}"
    )


def _attend(
    q: Tensor, k: Tensor, v: Tensor, options: Options, places: Places, with_sums: bool
) -> Tensor | tuple[Tensor, Tensor]:
    out = attend(q, k, v, options, places)
    return (out, logsumexp(q, k, options, places)) if with_sums else out
