"""Lengths of padded sequences, as the functions of context parallel attention take them."""

from __future__ import annotations

import torch
from torch import Tensor


def lengths(
    where: str, q_lens: Tensor | None, k_lens: Tensor | None, q: Tensor, whole: tuple[int, int]
) -> tuple[Tensor, Tensor] | None:
    """Both on q's device, or None where there are neither.

    whole: how many queries and keys the padded sequences have, for the one that is None.

    Raises ValueError for lengths that are not [batch].
    """
    if q_lens is None and k_lens is None:
        return None
    made = []
    for name, given, most in zip(("q_lens", "k_lens"), (q_lens, k_lens), whole, strict=True):
        if given is None:
            made.append(torch.full((q.shape[0],), most, device=q.device))
        elif given.shape != q.shape[:1]:
            raise ValueError(
                f"[{where}] {name} has the shape {list(given.shape)}: should be [{q.shape[0]}], a "
                "length for each sequence of the batch."
            )
        else:
            made.append(given.to(q.device))
    return made[0], made[1]
