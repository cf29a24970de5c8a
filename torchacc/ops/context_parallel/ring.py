"""Sequences split over processes: keys and values go around, queries stay (ring attention)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from torchacc.amp import custom_bwd, custom_fwd
from torchacc.ops import masks
from torchacc.ops.attend import Options, in_autocast_type, wide
from torchacc.ops.context_parallel import blocks
from torchacc.ops.context_parallel.blocks import UNSEEN, Block
from torchacc.ops.context_parallel.collectives import passed_on
from torchacc.ops.context_parallel.lengths import lengths
from torchacc.ops.masks import Cover, Places


def ring_attention(
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
) -> Tensor:
    """Attention over sequences of which process r of the group has part r.

    In as many turns as there are processes each attends to the keys that it has, while they travel
    to the next one; keys that no query of it sees are passed on only. The backward does the same
    again, with the gradients of keys and values. All processes of the group have to call it.

    Args:
        q: [batch, seqlen / processes, heads, headdim].
        k, v: [batch, seqlen_k / processes, heads_k, headdim]; heads_k divides heads.
        q_lens, k_lens: integers [batch], how much of the whole sequences is no padding; None: all.
        dropout_p: 0.
        softmax_scale, causal, window_size, alibi_slopes: as for `torchacc.ops.flash_attn_xla`.
        deterministic: it is.
        process_group: None is the default group.

    Returns:
        [batch, seqlen / processes, heads, headdim], 0 for padding.

    Raises:
        NotImplementedError: dropout_p is not 0.
        ValueError: shapes, lengths, `window_size` or `alibi_slopes` do not fit.
    """
    where = "ring_attention"
    common = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic)
    options = Options.checked(where, q, k, v, *common)
    return around(where, q, k, v, q_lens, k_lens, options, process_group)


def around(
    where: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lens: Tensor | None,
    k_lens: Tensor | None,
    options: Options,
    group: ProcessGroup | None,
) -> Tensor:
    """`ring_attention` with options that were checked."""
    if options.dropout_p > 0:
        raise NotImplementedError(
            f"[{where}] dropout_p = {options.dropout_p}: blocks of keys are computed again in the "
            "backward, and no kernel gives back what it dropped. Set 0, or use ulysses."
        )
    if v.shape != k.shape:
        raise ValueError(
            f"[{where}] k has the shape {list(k.shape)}, v {list(v.shape)}: they travel together, "
            "so they should be alike. ulysses takes others."
        )
    size = dist.get_world_size(group)
    lens = lengths(where, q_lens, k_lens, q, (q.shape[1] * size, k.shape[1] * size))
    ring = _Ring(group, size, dist.get_rank(group), q.shape[1], k.shape[1], options, lens)
    # The kernels of blocks take it for granted that what is next to each other in a head lies so.
    q, k, v = (t.contiguous().transpose(1, 2) for t in in_autocast_type(q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        return _Around.apply(q, k, v, ring).transpose(1, 2)


@dataclass(frozen=True)
class _Ring:
    """The processes, and which of the keys of each the queries of this one see."""

    group: ProcessGroup | None
    size: int
    rank: int
    queries: int  # that each process has
    keys: int
    options: Options
    lens: tuple[Tensor, Tensor] | None

    def turns(self) -> range:
        return range(self.size)

    def block(self, turn: int, device: torch.device, wide_type: torch.dtype) -> Block | None:
        """How the queries see what is here in this turn; None: not at all."""
        holder = (self.rank - turn) % self.size
        queries = range(self.rank * self.queries, (self.rank + 1) * self.queries)
        keys = range(holder * self.keys, (holder + 1) * self.keys)
        shift = self.size * (self.keys - self.queries)
        scale, slopes = self.options.scale, self.options.slopes
        if self.lens is not None:
            return Block(
                self._bias(masks.padded(queries, keys, *self.lens), wide_type), False, scale
            )
        cover = self.options.window.cover(
            queries.start + shift - keys.start, self.queries, self.keys
        )
        if cover is Cover.NONE:
            return None
        if slopes is None and cover is not Cover.SOME:
            return Block(None, cover is Cover.TRIANGLE, scale)
        places = masks.in_order(queries, keys, shift, device)
        return Block(self._bias(places, wide_type), False, scale)

    def _bias(self, places: Places, wide_type: torch.dtype) -> Tensor:
        allowed, bias = places.allowed(self.options.window), places.alibi(self.options.slopes)
        if bias is None:
            bias = torch.zeros((), device=places.queries.device)
        bias = bias.to(wide_type)
        return bias if allowed is None else torch.where(allowed, bias, UNSEEN)


class _Around(torch.autograd.Function):
    """Of tensors [batch, heads, seqlen, headdim]; not for autocast regions."""

    @staticmethod
    @custom_fwd
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _Ring) -> Tensor:
        here = torch.stack((k, v))
        kind = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=kind, device=q.device)
        lse = torch.full(q.shape[:3], UNSEEN, dtype=kind, device=q.device)
        for turn in ring.turns():
            # The exchange begins before the block is computed, and is waited for behind it.
            following = passed_on(here, ring.group) if turn + 1 < ring.size else here
            block = ring.block(turn, q.device, kind)
            if block is not None:
                out, lse = blocks.joined(
                    out, lse, *blocks.forward(q, *_for_heads(here, q.shape[1]), block)
                )
            here = following
        # Scores that were seen are far above.
        out = out.masked_fill((lse < UNSEEN / 2)[..., None], 0).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    @custom_bwd
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        grad = grad.masked_fill((lse < UNSEEN / 2)[..., None], 0)
        here = torch.stack((k, v))
        grad_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        # Of the keys that are here, by all processes that had them; it travels along.
        grads = torch.zeros(here.shape, dtype=lse.dtype, device=q.device)
        for turn in ring.turns():
            following = passed_on(here, ring.group) if turn + 1 < ring.size else here
            if turn > 0:
                grads = passed_on(grads, ring.group)
            block = ring.block(turn, q.device, lse.dtype)
            if block is not None:
                mine, *theirs = blocks.backward(
                    grad, q, *_for_heads(here, q.shape[1]), out, lse, block
                )
                grad_q = grad_q + mine
                grads = grads + _of_heads(torch.stack(theirs), k.shape[1])
            here = following
        grads = passed_on(grads, ring.group) if ring.size > 1 else grads
        grad_k, grad_v = grads.to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None


def _for_heads(pair: Tensor, heads: int) -> Tensor:
    """Keys and values, repeated for the heads of the queries."""
    return pair if pair.shape[2] == heads else pair.repeat_interleave(heads // pair.shape[2], dim=2)


def _of_heads(grads: Tensor, heads: int) -> Tensor:
    """Their gradients, added up for the heads that they have."""
    return wide(grads).unflatten(2, (heads, -1)).sum(3)
