"""Sequences split over processes: each gets all of them for a part of the heads (Ulysses)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchacc.ops import masks
from torchacc.ops.attend import Options, attend
from torchacc.ops.context_parallel.collectives import all_to_all
from torchacc.ops.context_parallel.lengths import lengths
from torchacc.ops.masks import Places
from torchacc.ops.varlen import check_positions

Rope = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def ulysses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lens: Tensor | None = None,
    k_lens: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    process_group: ProcessGroup | None = None,
    position_ids: Tensor | None = None,
    rope_func: Rope | None = None,
) -> Tensor:
    """Attention over sequences of which process r of the group has part r.

    An exchange gives each process whole sequences for a part of the heads, another gives back the
    results. All processes of the group have to call it.

    Args:
        q: [batch, seqlen / processes, heads, headdim]; the processes divide `heads`.
        k, v: [batch, seqlen / processes, heads_k, headdim]; the processes divide `heads_k`, or
            `heads_k` divides them: then several processes get the same head.
        q_lens, k_lens: integers [batch], how much of the whole sequences is no padding; None: all.
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic: as for
            `torchacc.ops.flash_attn_xla`; slopes are of all heads.
        process_group: None is the default group.
        position_ids: [batch, seqlen] of the whole sequences, or one row for all: sequences that
            lie one behind the other, each beginning where it is 0, see only themselves.
        rope_func: called with q, k and v, [batch, seqlen, a part of the heads, headdim], for what
            needs the places of a whole sequence; what it returns is taken instead.

    Returns:
        [batch, seqlen / processes, heads, headdim], 0 for padding.

    Raises:
        ValueError: heads cannot be divided, shapes do not fit, or both lengths and positions.
    """
    where = "ulysses"
    common = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic)
    options = Options.checked(where, q, k, v, *common)
    q, k, v, slopes = heads_apart(where, q, k, v, alibi_slopes, process_group)
    places = _places(q, k, q_lens, k_lens, position_ids)
    if rope_func is not None:
        q, k, v = rope_func(q, k, v)
    out = attend(q, k, v, dataclasses.replace(options, slopes=slopes), places)
    return heads_together(out, process_group)


def heads_apart(
    where: str, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, group: ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v and slopes of this process's part of the heads, of all places that the group has.

    Raises ValueError for heads that the processes cannot divide.
    """
    size = dist.get_world_size(group)
    heads, kept = q.shape[2], k.shape[2]
    if heads % size != 0 or (kept % size != 0 and size % kept != 0):
        raise ValueError(
            f"[{where}] {heads} heads of q, {kept} of k and v, and {size} processes: the processes "
            "should divide the heads. ring_attention divides none."
        )
    if kept < size:
        k, v = (t.repeat_interleave(size // kept, dim=2) for t in (k, v))
    q, k, v = (all_to_all(t, scatter_dim=2, gather_dim=1, group=group) for t in (q, k, v))
    if slopes is not None:
        slopes = slopes.chunk(size, dim=-1)[dist.get_rank(group)]
    return q, k, v, slopes


def heads_together(out: Tensor, group: ProcessGroup | None) -> Tensor:
    """All heads of this process's part of the places."""
    return all_to_all(out, scatter_dim=1, gather_dim=2, group=group)


def _places(
    q: Tensor,
    k: Tensor,
    q_lens: Tensor | None,
    k_lens: Tensor | None,
    position_ids: Tensor | None,
) -> Places | None:
    if position_ids is not None:
        if q_lens is not None or k_lens is not None:
            raise ValueError(
                "[ulysses] lengths are of padded sequences, position_ids of packed ones: give one "
                "of the two."
            )
        check_positions("ulysses", position_ids, q, k)
        return masks.packed(position_ids.to(q.device))
    lens = lengths("ulysses", q_lens, k_lens, q, (q.shape[1], k.shape[1]))
    if lens is None:
        return None
    return masks.padded(range(q.shape[1]), range(k.shape[1]), *lens)
