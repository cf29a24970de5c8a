"""Where one training step ends and the next begins.

One boundary per iteration. An AsyncLoader that drives the loop makes it when it hands out a batch;
without one it is the end of `optimizer.step()`, through torch's global post hook. This module is
the one place that decides between the two, and it lives beside the device because a script that
only says `model.to("acc")` never imports the front end.

In a loop that a loader drives, the boundary moves up from the batch to the end of the iteration's
last `optimizer.step()`, or GradScaler's `update()` behind it, once an iteration has recorded
nothing between the two. The plan is the same. But the step is submitted before the script looks at
its clock: otherwise a window of n steps would hold the work of n - 1, and its throughput would be
n / (n - 1) of the true one. Where something else follows the step (an EMA), it stays in the step's
plan, and the batch stays the boundary.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
)

from torchacc_device import _C, _replaced


class Loops:
    """The loader-driven loops of one thread, and what its current iteration did so far.

    `open` holds for each what is to be called when work is about to be submitted. It sees only
    atomic operations: any thread may collect a loop that was left behind.
    """

    __slots__ = ("device", "last", "latest", "open", "pending", "stepped", "updates")

    def __init__(self) -> None:
        self.open: dict[int, Callable[[], None]] = {}
        # Index of the device that the innermost loop feeds.
        self.device = 0
        # Optimizers that stepped since the last batch, by identity.
        self.stepped: set[int] = set()
        # How often scalers updated their scale since then: a loop may do so behind each step.
        self.updates = 0
        # The latest of both, and how much was pending behind it: an optimizer's identity, or a
        # scaler's and which of these updates it was.
        self.latest: int | tuple[int, int] | None = None
        self.pending = 0
        # That behind which the previous iteration recorded nothing, if there is one.
        self.last: int | tuple[int, int] | None = None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.loops = Loops()
        # Whether the end of a step is not one: what runs is captured, or a step, as a whole.
        self.held = False
        # Whether a loader's next batch is not one either.
        self.batches_held = False
        # Optimizers that step are noted here, where somebody asks for them.
        self.noted: weakref.WeakSet[Optimizer] | None = None


_thread = _Thread()
_handle: Any = None
# Whether it is known that other processes train together with this one.
_several = False


def mark_step(reason: str = "step") -> None:
    """Ends the step being recorded: everything recorded so far is submitted as one plan.

    `reason` is the name under which the flush is counted.
    """
    if _thread.batches_held if reason == "loader" else _thread.held:
        return
    loops = _thread.loops
    if loops.open and _C.pending(loops.device) > 0:
        for submits in loops.open.copy().values():
            submits()
    _C.flush(-1, reason)


@contextmanager
def held(*, batches: bool = False) -> Iterator[None]:
    """Within this, the calling thread's step does not end: neither by an optimizer nor by hand.

    With `batches`, not by a loader's next batch either.
    """
    before = (_thread.held, _thread.batches_held)
    _thread.held, _thread.batches_held = True, _thread.batches_held or batches
    try:
        yield
    finally:
        _thread.held, _thread.batches_held = before


@contextmanager
def steps_noted() -> Iterator[weakref.WeakSet[Optimizer] | None]:
    """Notes which optimizers of the calling thread step meanwhile; None where the hook is gone."""
    before = _thread.noted
    _thread.noted = None if _handle is None else weakref.WeakSet()
    try:
        yield _thread.noted
    finally:
        _thread.noted = before


def is_held() -> bool:
    """Whether the calling thread is within `held`."""
    return _thread.held


def loops() -> Loops:
    """The loops of the calling thread."""
    return _thread.loops


def loader_batch(loops: Loops, loop: int, device: int, submits: Callable[[], None]) -> None:
    """A loader is about to hand out a batch for `device` in the loop named `loop`: a boundary.

    `submits` is called from now on before each boundary with work, as long as the loop is open.
    """
    if loops.stepped:
        # Of an iteration without a step (accumulation, evaluation) nothing is learned.
        pending = _C.pending(device)
        loops.last = loops.latest if pending in (0, loops.pending) else None
        loops.stepped.clear()
    loops.updates = 0
    loops.open[loop] = submits
    loops.device = device
    mark_step("loader")


def loader_end(loops: Loops, loop: int) -> None:
    """The loop named `loop` hands out nothing any more. No boundary: it may run in a destructor."""
    loops.open.pop(loop, None)


def _look_for_others() -> None:
    """Parameters are updated alike by all ranks only if their kernels are the same."""
    global _several
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        _several = True
        _C.run_alike()


def others_hook() -> bool:
    """Whether somebody else hooks the steps of all optimizers."""
    hooks = {*_global_optimizer_pre_hooks, *_global_optimizer_post_hooks}
    ours = {each.id for each in (_handle, _replaced.handle) if each is not None}
    return bool(hooks - ours)


def after_step(optimizer: Optimizer) -> None:
    """`optimizer` has stepped, and what belongs to its step is recorded."""
    if _handle is not None:
        _after_optimizer_step(optimizer, (), {})


def _after_optimizer_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _C.is_in_bad_fork():
        return  # what it trains is on the CPU
    if not _several:
        _look_for_others()
    if _thread.noted is not None:
        _thread.noted.add(optimizer)
    state = _thread.loops
    if _thread.held:
        return
    if state.open:
        name = id(optimizer)
        # An optimizer that steps again on the same batch is driven by something else than the
        # loader, which may never hand out another batch
        # (test_boundary.py::test_training_on_one_batch_has_a_boundary_per_step).
        again = name in state.stepped
        state.stepped.add(name)
        if not (_is_last(state, name) or again):
            return
        state.pending = 0
    mark_step()


def after_update(scaler: object) -> None:
    """`scaler` has updated its scale: in a loop that a loader drives this may end the step."""
    state = _thread.loops
    if not state.open:
        _C.excuse_step(False)  # a step that was skipped has no end here
    if _handle is None or _thread.held or not state.stepped or _C.is_in_bad_fork():
        return
    state.updates += 1
    if _is_last(state, (id(scaler), state.updates)):
        state.pending = 0
        mark_step()


def _is_last(state: Loops, name: int | tuple[int, int]) -> bool:
    """Whether the previous iteration recorded nothing behind this; else notes what is pending."""
    state.latest = name
    state.pending = _C.pending(state.device)
    return name == state.last


# What torch.compiler.disable does, which would import Dynamo: a step that is compiled is left here.
# Else Dynamo tells the program to have our functions traced.
for _function in (mark_step, after_step, after_update, _after_optimizer_step):
    _function._torchdynamo_disable = True  # type: ignore[attr-defined]


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
