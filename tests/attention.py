"""Attention written out, one sequence at a time: what the tests of `torchacc.ops` compare with."""

from __future__ import annotations

import torch
from torch import Tensor


def inputs(
    batch: int,
    queries: int,
    keys: int,
    heads: int = 4,
    kept: int = 2,
    size: int = 8,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and what the result is weighed with, float64 on the CPU; multiples of 1/64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((queries, heads), (keys, kept), (keys, kept), (queries, heads))
    made = [torch.randn(batch, *shape, size, generator=generator) for shape in shapes]
    q, k, v, weights = ((t * 64).round().double() / 64 for t in made)
    return q, k, v, weights


def one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    slopes: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Of one sequence [seqlen, heads, headdim]: the result, and lse [heads, queries]."""
    queries, keys, heads = q.shape[0], k.shape[0], q.shape[1]
    shared, scale = heads // k.shape[1], q.shape[2] ** -0.5 if scale is None else scale
    before, behind = window_size
    behind = 0 if causal else behind
    unseen = torch.zeros(queries, keys, dtype=torch.bool)
    apart = torch.zeros(queries, keys, dtype=q.dtype)
    for i in range(queries):
        for j in range(keys):
            distance = i + keys - queries - j
            apart[i, j] = abs(distance)
            unseen[i, j] = 0 <= before < distance or 0 <= behind < -distance
    rows = []
    for head in range(heads):
        scores = q[:, head] @ k[:, head // shared].T * scale
        if slopes is not None:
            scores = scores - slopes[head] * apart
        rows.append(scores.masked_fill(unseen, -torch.inf))
    scores = torch.stack(rows)
    shares = scores.masked_fill(unseen, -1e9).softmax(-1).masked_fill(unseen, 0)
    values = v.repeat_interleave(shared, dim=1)
    return torch.einsum("hij,jhd->ihd", shares, values), scores.logsumexp(-1)


def batched(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None = None, **options
) -> tuple[Tensor, Tensor]:
    """Of sequences of one length, [batch, seqlen, heads, headdim]; slopes [heads] or with batch."""
    found = []
    for i in range(q.shape[0]):
        own = slopes[i] if slopes is not None and slopes.dim() == 2 else slopes
        found.append(one(q[i], k[i], v[i], slopes=own, **options))
    return torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])


def chosen(
    q: Tensor, k: Tensor, v: Tensor, of_q: list[list[int]], of_k: list[list[int]], **options
) -> tuple[Tensor, Tensor]:
    """Sequences that are the elements of_q[i] and of_k[i] of q[i], k[i], v[i]; else 0 and -inf."""
    outs, sums = [], []
    for i, (rows, columns) in enumerate(zip(of_q, of_k, strict=True)):
        out = torch.zeros_like(q[i])
        lse = torch.full((q.shape[2], q.shape[1]), -torch.inf, dtype=q.dtype)
        if rows and columns:
            mine, mine_lse = one(q[i][rows], k[i][columns], v[i][columns], **options)
            index = torch.tensor(rows)
            out, lse = out.index_copy(0, index, mine), lse.index_copy(1, index, mine_lse)
        outs.append(out)
        sums.append(lse)
    return torch.stack(outs), torch.stack(sums)


def gradients(out: Tensor, weights: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Of (out * weights).sum()."""
    return list(torch.autograd.grad((out * weights.to(out)).sum(), tensors, retain_graph=True))
