"""Which keys a query sees, and what its distance to them adds to the scores.

A query and a key of the same place in a sequence have the distance 0; keys before the query have
positive distances. Where there are not as many keys as queries, the last query has the place of the
last key: flash-attention's rule since its version 2.1 (docstring of `flash_attn_func`). Torch's
`is_causal` gives the first query the place of the first key.

Masks are made on the device, of numbers that are there: nothing is read, and a step stays one plan.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor


class Cover(enum.Enum):
    """Which pairs of a query and a key a window lets through."""

    NONE = enum.auto()
    ALL = enum.auto()
    TRIANGLE = enum.auto()  # what torch's is_causal lets through
    SOME = enum.auto()


@dataclass(frozen=True)
class Window:
    """How many places a query sees before its own and behind it; None is without limit."""

    before: int | None
    behind: int | None

    @classmethod
    def of(cls, window_size: tuple[int, int], causal: bool) -> Window:
        """Of flash-attention's arguments, where -1 is without limit."""
        before, behind = (None if size < 0 else size for size in window_size)
        return cls(before, 0 if causal else behind)

    def cover(self, offset: int, queries: int, keys: int) -> Cover:
        """For a block whose first query has the distance `offset` from its first key."""
        nearest, farthest = offset - (keys - 1), offset + queries - 1
        before = farthest if self.before is None else self.before
        behind = -nearest if self.behind is None else self.behind
        if farthest < -behind or nearest > before:
            return Cover.NONE
        if nearest >= -behind and farthest <= before:
            return Cover.ALL
        if offset == 0 and behind == 0 and farthest <= before:
            return Cover.TRIANGLE
        return Cover.SOME


@dataclass(frozen=True)
class Places:
    """Where queries and keys stand in their sequences.

    Attributes:
        queries: integers [batch or 1, queries].
        keys: integers [batch or 1, keys].
        together: booleans that broadcast to [batch, 1, queries, keys]: false where one of the two
            is padding, or where they are of different sequences. None: all belong together.
    """

    queries: Tensor
    keys: Tensor
    together: Tensor | None = None

    def distance(self) -> Tensor:
        """[batch or 1, 1, queries, keys]."""
        return self.queries[:, None, :, None] - self.keys[:, None, None, :]

    def allowed(self, window: Window) -> Tensor | None:
        """The pairs that a window lets through; None: all."""
        found = self.together
        limits: list[Tensor] = []
        if window.before is not None:
            limits.append(self.distance() <= window.before)
        if window.behind is not None:
            limits.append(self.distance() >= -window.behind)
        for limit in limits:
            found = limit if found is None else found & limit
        return found

    def alibi(self, slopes: Tensor | None) -> Tensor | None:
        """-slope * |distance| for each head, float32 [batch or 1, heads, queries, keys].

        slopes: [heads] or [batch, heads].
        """
        if slopes is None:
            return None
        slopes = (
            slopes.detach()
            .to(self.queries.device, torch.float32)
            .reshape(-1, slopes.shape[-1], 1, 1)
        )
        return -slopes * self.distance().abs()


def in_order(queries: range, keys: range, shift: int, device: torch.device) -> Places:
    """Parts of sequences without padding; `shift`: the place of query 0 beside key 0."""
    return Places(
        torch.arange(queries.start + shift, queries.stop + shift, device=device)[None],
        torch.arange(keys.start, keys.stop, device=device)[None],
    )


def padded(queries: range, keys: range, q_lens: Tensor, k_lens: Tensor) -> Places:
    """Parts of sequences of which only the first so many elements are no padding.

    q_lens, k_lens: integers [batch], on the device. The last query has the place of the last key.
    """
    q = torch.arange(queries.start, queries.stop, device=q_lens.device)[None]
    k = torch.arange(keys.start, keys.stop, device=k_lens.device)[None]
    q_lens, k_lens = q_lens[:, None], k_lens[:, None]
    together = (q < q_lens)[:, None, :, None] & (k < k_lens)[:, None, None, :]
    return Places(q + (k_lens - q_lens), k, together)


def marked(attention_mask: Tensor, queries: int) -> Places:
    """Sequences whose elements are marked by 1 and whose padding by 0, wherever that lies.

    Places count the marked elements. As many queries as keys are marked alike; else no query is
    padding, and the last one has the place of the last key.

    attention_mask: [batch, keys].
    """
    there = attention_mask != 0
    places = there.long().cumsum(-1) - 1
    if queries == there.shape[1]:
        return Places(places, places, there[:, None, :, None] & there[:, None, None, :])
    last = places[:, -1:]
    own = last + torch.arange(1 - queries, 1, device=last.device)
    return Places(own, places, there[:, None, None, :])


def packed(position_ids: Tensor) -> Places:
    """Sequences one behind the other; each begins where the position is 0.

    position_ids: [batch, queries].
    """
    sequence = (position_ids == 0).long().cumsum(-1)
    places = torch.arange(position_ids.shape[1], device=position_ids.device)[None]
    return Places(places, places, sequence[:, None, :, None] == sequence[:, None, None, :])
