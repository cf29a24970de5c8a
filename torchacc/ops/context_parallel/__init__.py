"""Attention over sequences that are split over processes.

from torchacc.ops import context_parallel

context_parallel.initialize_context_parallel(4)
group = context_parallel.get_context_parallel_group()
out = context_parallel.ulysses(q, k, v, causal=True, process_group=group)
"""

from torchacc.ops.context_parallel.collectives import (
    gather_forward_split_backward,
    split_forward_gather_backward,
)
from torchacc.ops.context_parallel.groups import (
    get_context_parallel_group,
    get_inter_cp_process_group,
    get_intra_cp_process_group,
    initialize_context_parallel,
)
from torchacc.ops.context_parallel.ring import ring_attention
from torchacc.ops.context_parallel.two_d import context_parallel_2d
from torchacc.ops.context_parallel.ulysses import ulysses

__all__ = [
    "context_parallel_2d",
    "gather_forward_split_backward",
    "get_context_parallel_group",
    "get_inter_cp_process_group",
    "get_intra_cp_process_group",
    "initialize_context_parallel",
    "ring_attention",
    "split_forward_gather_backward",
    "ulysses",
]
