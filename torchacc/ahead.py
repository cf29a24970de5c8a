"""Whether a loader's batches are read ahead by a thread, or in the loop: what took less time."""

from __future__ import annotations

import torch

# Batches of a trial: first steps make plans and compile, and behind a change of ways some batches
# are there already.
_FIRST, _UNCOUNTED, _COUNTED = 16, 4, 16
# Each way is tried twice and its better time counts: the program does something else now and then.
_TRIALS = (True, False, True, False)
# What reading in the loop has to take, of the time of reading ahead, to be preferred.
_LESS = 0.98


class Ahead:
    """Tells for each batch of a loader whether it is read ahead, and learns from when they come.

    A thread that reads ahead gains nothing where it never gets ahead: where worker processes are
    the bottleneck, or where it computes batches for longer than a step runs, and takes the
    interpreter from the loop. Nothing is tried with deterministic algorithms, where random numbers
    should be drawn in the same order in every run.

    Args:
        whole: a trial has a multiple of so many batches (steps of several batches).
    """

    def __init__(self, whole: int) -> None:
        self._counted = -(-_COUNTED // whole) * whole
        self._trial = -1  # the first batches
        self._left = _FIRST
        self._seconds = 0.0
        self._best: dict[bool, float] = {}
        self._chosen = True

    @property
    def wanted(self) -> bool:
        """Whether the next batch is read ahead."""
        return self._chosen

    @property
    def best(self) -> dict[bool, float]:
        """Seconds per batch, read ahead and in the loop; empty until both are known."""
        return self._best if self._trial == len(_TRIALS) else {}

    def took(self, seconds: float) -> bool:
        """A batch came `seconds` after the one before it. Returns whether this has decided."""
        if self._trial == len(_TRIALS):
            return False
        if self._trial < 0 and torch.are_deterministic_algorithms_enabled():
            return False
        self._left -= 1
        if self._left < self._counted:
            self._seconds += seconds
        if self._left > 0:
            return False
        if self._trial >= 0:
            way = _TRIALS[self._trial]
            mean = self._seconds / self._counted
            self._best[way] = min(mean, self._best.get(way, mean))
        self._trial += 1
        self._seconds = 0.0
        self._left = _UNCOUNTED + self._counted
        if self._trial < len(_TRIALS):
            self._chosen = _TRIALS[self._trial]
            return False
        self._chosen = self._best[False] >= _LESS * self._best[True]
        return True
