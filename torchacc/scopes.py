"""Scopes: `eager`, whose operators run at once, and `step`, which is one step as a whole."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.utils._contextlib import _wrap_generator

from torchacc_device import _C, _boundary

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Scope:
    """A scope that may be entered again, or decorate a function.

    Written out rather than with contextlib, whose frames would stand for the program's line in
    errors and reports.
    """

    def __call__(self, function: _Function) -> _Function:
        """`function` with each of its calls in a scope of its own; of a generator, each of its
        turns.
        """
        if inspect.isgeneratorfunction(function):
            return _wrap_generator(type(self), function)  # type: ignore[return-value]

        @functools.wraps(function)
        def within(*args: Any, **kwargs: Any) -> Any:
            with type(self)():  # type: ignore[attr-defined]
                return function(*args, **kwargs)

        return within  # type: ignore[return-value]


class eager(_Scope):
    """Operators of this thread run at once, as with ACC_MODE=eager, and nothing is recorded.

        with torchacc.eager():
            y = model(x)  # an operator that fails does so here, a debugger sees values

    What was recorded before is submitted first, which ends the step there. Scopes nest; as a
    decorator it is around each call. Backward runs at once too where it is called inside.
    """

    def __init__(self) -> None:
        self._before: list[tuple[bool, bool]] = []

    def __enter__(self) -> None:
        _C.flush(-1, "explicit")
        eagerly = _C.run_eagerly(True)
        # Backward has threads of its own on a GPU, which would go on recording.
        threads = torch._C._is_multithreading_enabled()
        torch._C._set_multithreading_enabled(False)
        self._before.append((eagerly, threads))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        eagerly, threads = self._before.pop()
        _C.run_eagerly(eagerly)
        torch._C._set_multithreading_enabled(threads)


class step(_Scope):
    """What is inside is one step: it begins and ends there, and nowhere in between.

        for batch in batches:
            with torchacc.step():
                train_discriminator(batch)  # each has an optimizer that steps
                train_generator(batch)

    For loops with several optimizers per step or without one, and for steps of several batches.
    Inside, neither `optimizer.step()` nor a loader's next batch nor `mark_step()` ends the step.
    What has to be known on the host (a read) still submits what was recorded so far. A scope within
    another one is part of that. The step ends after an exception too.
    """

    def __init__(self) -> None:
        self._inside: list[AbstractContextManager[None] | None] = []

    def __enter__(self) -> None:
        if _boundary.is_held():
            self._inside.append(None)
            return
        _boundary.mark_step("explicit")
        held = _boundary.held(batches=True)
        held.__enter__()
        self._inside.append(held)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        held = self._inside.pop()
        if held is not None:
            held.__exit__(None, None, None)
            _boundary.mark_step()
