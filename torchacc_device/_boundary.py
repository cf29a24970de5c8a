"""Where one training step ends and the next begins.

One boundary per iteration. An AsyncLoader that drives the loop marks it when it hands out a batch;
without one it is the end of `optimizer.step()`, through torch's global post hook. This module is
the one place that decides between the two, and it lives beside the device because a script that
only says `model.to("acc")` never imports the front end.
"""

from __future__ import annotations

import threading
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchacc_device import _C


class Loops:
    """The loader-driven loops of one thread, and the optimizers that stepped since the last batch.

    Set operations only, which are atomic: any thread may collect a loop that was left behind.
    """

    __slots__ = ("open", "stepped")

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.stepped: set[int] = set()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.loops = Loops()


_thread = _Thread()
_handle: Any = None


def mark_step() -> None:
    """Ends the step being recorded: everything recorded so far is submitted as one plan."""
    _C.mark_step()


def loops() -> Loops:
    """The loops of the calling thread."""
    return _thread.loops


def loader_batch(loops: Loops, loop: int) -> None:
    """A loader is about to hand out a batch in the loop named `loop`: a boundary."""
    mark_step()
    loops.open.add(loop)
    loops.stepped.clear()


def loader_end(loops: Loops, loop: int) -> None:
    """The loop named `loop` hands out nothing any more. No boundary: it may run in a destructor."""
    loops.open.discard(loop)


def _after_optimizer_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    state = _thread.loops
    if state.open:
        # One step per batch: the next batch is the boundary, so that what follows the step (the
        # scaler's update, an EMA) belongs to it. An optimizer that steps again on the same batch
        # is driven by something else than the loader, which may never hand out another one
        # (test_boundary.py::test_training_on_one_batch_has_a_boundary_per_step).
        if id(optimizer) not in state.stepped:
            state.stepped.add(id(optimizer))
            return
    mark_step()


def install() -> None:
    """Registers the optimizer hook; a second call does nothing."""
    global _handle
    if _handle is None:
        _handle = register_optimizer_step_post_hook(_after_optimizer_step)


def uninstall() -> None:
    """Takes the optimizer hook away again."""
    global _handle
    if _handle is not None:
        _handle.remove()
        _handle = None
