"""Whether a loader's batches are read ahead by a thread, or in the loop: what took less time."""

from __future__ import annotations

import logging
import statistics
import threading
from collections import deque

import torch

from torchacc.logger import logger, say_once

# Batches that come one behind the other are measured together, so many, times the batches of a
# step: worker processes have theirs in bursts.
_RUN = 8
# The first batches of a turn are not measured: with them goes what was ahead before it. And more
# of the first turn, whose steps compile.
_UNMEASURED, _UNMEASURED_FIRST = 3, 16
# Turns are put together until there are so many runs of one way: one that is read ahead, one in the
# loop, and so on. In the loop nothing is lost to the plain loader, so that is chosen as soon as a
# trial of reading ahead took no less than another of reading in the loop; where both are equal, all
# of four do in one case of seventy.
_TRIALS = 4
_RUNS = 2
# Runs of a turn that is a part of a pass: one that was disturbed does not move their median.
_RUNS_OF_PART = 3
# What reading ahead may take, of the time of reading in the loop, to be preferred.
_LESS = 0.97
# Turns until both are tried again; each time twice as many.
_STANDS = 16
# Steps that take so many times as long or short as those that were compared are other steps.
_OTHER = 2.0
# Runs of one turn that are kept, and of one that is a part of a pass when the way is chosen.
_KEPT = 64


class Pace:
    """How fast the batches of one turn come: seconds per batch, in runs.

    Args:
        run: batches of a run.
        unmeasured: batches in whose time the first run has no part: it begins behind them.
    """

    def __init__(self, run: int, unmeasured: int) -> None:
        self.runs: list[float] = []
        self._run, self._unmeasured = run, unmeasured
        self._count = 0
        self._began = 0.0
        self._consumer: int | None = threading.get_ident()

    def handed_out(self, now: float) -> None:
        """A batch was handed out at `now` seconds."""
        if threading.get_ident() != self._consumer:
            self._consumer = None  # of several consumers nothing is learnt
            self.runs.clear()
            return
        measured = self._count - self._unmeasured
        self._count += 1
        if measured < 0 or measured % self._run != 0:
            return
        if measured > 0 and len(self.runs) < _KEPT:
            self.runs.append((now - self._began) / self._run)
        self._began = now


class Ahead:
    """Tells for each turn at a loader whether it is read ahead, and learns from how fast it is.

    A turn is a pass, or a part of one where its iterator may change threads.

    A thread that reads ahead gains nothing where it never gets ahead: where worker processes are
    the bottleneck, or where it computes batches for longer than a step runs, and takes the
    interpreter from the loop. Nothing is tried with deterministic algorithms, where random numbers
    should be drawn in the same order in every run.

    Args:
        kind: what is read, for the log.
        whole: batches of a step.
        slots: how many batches may be ahead.
    """

    def __init__(self, kind: str, whole: int, slots: int) -> None:
        self._kind = kind
        self._run = -(-_RUN // whole) * whole
        self._unmeasured = max(_UNMEASURED, slots + 1)
        self._is_first = True
        # Turns that have ended, and that `begin` has not seen: they may end in a destructor, which
        # may run while the lock is held.
        self._ended: deque[tuple[bool, list[float]]] = deque()
        self._lock = threading.Lock()
        self._told: bool | None = None
        self._forget()

    def _forget(self) -> None:
        self._stands = _STANDS
        self._shown = False  # by all trials: that reading ahead is faster
        self._try()

    def _try(self) -> None:
        self._seconds: dict[bool, list[float]] = {True: [], False: []}  # of its trials
        self._way = True
        self._runs: list[float] = []  # of this trial
        self._chosen: bool | None = None
        self._turns = 0  # since the choice

    @property
    def chosen(self) -> bool | None:
        """The way that took less time; None until both are known."""
        return self._chosen

    def begin(self) -> bool:
        """A turn begins. Returns whether it is read ahead."""
        with self._lock:
            while self._ended:
                self._learn(*self._ended.popleft())
            if torch.are_deterministic_algorithms_enabled():
                return True
            return self._way if self._chosen is None else self._chosen

    def pace(self) -> Pace:
        """For the turn that begins."""
        unmeasured = max(_UNMEASURED_FIRST * self._is_first, self._unmeasured)
        self._is_first = False
        return Pace(self._run, unmeasured)

    def is_over(self, pace: Pace) -> bool:
        """Whether enough is known of a turn that may end before its pass."""
        return len(pace.runs) >= (_RUNS_OF_PART if self._chosen is None else _KEPT)

    def end(self, was_ahead: bool, pace: Pace) -> None:
        """A turn has ended, or its pass was left."""
        self._ended.append((was_ahead, pace.runs))

    def _learn(self, was_ahead: bool, runs: list[float]) -> None:
        if not runs:
            return
        if self._chosen is not None:
            ratio = statistics.median(runs) / statistics.median(self._seconds[self._chosen])
            self._turns += 1
            if was_ahead is self._chosen and not 1 / _OTHER < ratio < _OTHER:
                self._forget()
            elif self._turns == self._stands:
                self._stands *= 2
                self._try()
            return
        if was_ahead is not self._way:
            return
        self._runs += runs
        if len(self._runs) < _RUNS:
            return
        # Not the mean: now and then the program does something else between two batches.
        self._seconds[was_ahead].append(statistics.median(self._runs))
        self._way, self._runs = not self._way, []
        if not was_ahead:
            self._choose()

    def _choose(self) -> None:
        ahead, in_the_loop = self._seconds[True], self._seconds[False]
        # What all trials have shown once does not fall by one that was disturbed.
        is_faster = self._shown or max(ahead) < min(in_the_loop)
        if is_faster and len(ahead) < _TRIALS:
            return
        medians = {way: statistics.median(each) for way, each in self._seconds.items()}
        chosen = is_faster and medians[True] < _LESS * medians[False]
        self._chosen = self._shown = chosen
        if chosen is self._told:
            return
        self._told = chosen
        text = (
            f"[AsyncLoader] batches of a {self._kind} are read "
            f"{'ahead' if chosen else 'in the loop'} from now on: one in "
            f"{medians[chosen] * 1e3:.3g} ms, and in {medians[not chosen] * 1e3:.3g} ms the other "
            "way."
        )
        # Programs make a loader for each evaluation.
        if not say_once(("read", self._kind, chosen), text, logging.INFO):
            logger.debug(text)
