"""Sequences split over processes in two dimensions: Ulysses within groups, a ring of groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchacc.ops.attend import Options
from torchacc.ops.context_parallel.ring import around
from torchacc.ops.context_parallel.ulysses import heads_apart, heads_together, ulysses


def context_parallel_2d(
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
    inter_process_group: ProcessGroup | None = None,
    intra_process_group: ProcessGroup | None = None,
) -> Tensor:
    """Attention over sequences of which process r of those that share them has part r.

    Heads are split over the inner group, where an exchange of all with all is cheap; keys and
    values go around the outer one. `initialize_context_parallel` makes both. A group that is None,
    or of one process, splits nothing.

    Args:
        q, k, v: as for `ulysses`, [batch, seqlen / processes, heads, headdim].
        q_lens, k_lens, softmax_scale, causal, window_size, alibi_slopes, deterministic: as there.
        dropout_p: 0, unless the outer group splits nothing.
        inter_process_group: the outer group, of which keys and values go around.
        intra_process_group: the inner group; its size divides heads.

    Returns:
        [batch, seqlen / processes, heads, headdim], 0 for padding.

    Raises:
        NotImplementedError: dropout_p is not 0, and there is an outer group.
        ValueError: no group is of several processes; else as `ulysses` and `ring_attention`.
    """
    where = "context_parallel_2d"
    sizes = [
        1 if group is None else dist.get_world_size(group)
        for group in (inter_process_group, intra_process_group)
    ]
    if max(sizes) == 1:
        raise ValueError(
            f"[{where}] inter_process_group and intra_process_group are None or of one process: at "
            "least one should be of several."
        )
    common = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic)
    if sizes[0] == 1:
        return ulysses(q, k, v, q_lens, k_lens, *common, process_group=intra_process_group)
    options = Options.checked(where, q, k, v, *common)
    if sizes[1] == 1:
        return around(where, q, k, v, q_lens, k_lens, options, inter_process_group)
    q, k, v, slopes = heads_apart(where, q, k, v, alibi_slopes, intra_process_group)
    options = dataclasses.replace(options, slopes=slopes)
    out = around(where, q, k, v, q_lens, k_lens, options, inter_process_group)
    return heads_together(out, intra_process_group)
