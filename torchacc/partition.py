"""Cuts a row of things into runs at the least cost, exactly."""

from __future__ import annotations

import operator
from collections.abc import Callable


def best_cuts(
    count: int,
    parts: int,
    cost: Callable[[int, int], float],
    joined: Callable[[float, float], float] = operator.add,
) -> list[int]:
    """Where to cut things 0 .. count - 1 into runs that are not empty.

    Args:
        count: how many things, at least 1.
        parts: how many runs; fewer where there are fewer things.
        cost: of the run from its first argument up to, and without, its second.
        joined: the cost of two runs together: their sum, or the larger one (`max`).

    Returns:
        Where each run ends, in order; the last is `count`. Of equal costs the earliest cuts.
    """
    # least[end]: the least cost of things up to `end` in as many runs as rounds have gone by.
    least = [cost(0, end) if end else 0.0 for end in range(count + 1)]
    begins: list[list[int]] = []
    for done in range(1, min(parts, count)):
        found, begin_of = [0.0] * (count + 1), [0] * (count + 1)
        for end in range(done + 1, count + 1):
            found[end], begin_of[end] = min(
                (joined(least[begin], cost(begin, end)), begin) for begin in range(done, end)
            )
        least = found
        begins.append(begin_of)
    ends = [count]
    for begin_of in reversed(begins):
        ends.append(begin_of[ends[-1]])
    return ends[::-1]
