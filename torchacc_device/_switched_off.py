"""Autocast regions and gradient scalers that torch has switched off because there is no CUDA.

Those that the program made before `patch()` are acc's from then on, and off again from `unpatch()`
on. Nothing of theirs tells them from those that the program made so; they are noted when torch asks
whether there is CUDA.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.amp import autocast_mode

_INITS = {each.__init__.__code__ for each in (autocast_mode.autocast, torch.amp.GradScaler)}

# Where a scaler keeps what it has loaded. It uses it with the first loss.
_LOADED = {
    "scale": "_init_scale",
    "growth_factor": "_growth_factor",
    "backoff_factor": "_backoff_factor",
    "growth_interval": "_growth_interval",
    "_growth_tracker": "_init_growth_tracker",
}
_SWITCH = ("_device", "_enabled")

_noted: dict[int, _Noted] = {}  # by id: subclasses may not be hashable


class _Noted:
    """A region or a scaler, and how its `__init__` was called."""

    def __init__(self, made: Any, frame: FrameType) -> None:
        key = id(made)
        # Bound here: at the end of the program names of modules go first.
        self.made = weakref.ref(made, lambda _, noted=_noted: noted.pop(key, None))
        self._kind: Any = torch.autocast
        if isinstance(made, torch.amp.GradScaler):
            self._kind = torch.amp.GradScaler
            # Its `__init__` calls this one, and goes on where scaling is enabled.
            module = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
            if module is not None and frame.f_back is not None:
                if frame.f_back.f_code is module.ShardedGradScaler.__init__.__code__:
                    self._kind, frame = module.ShardedGradScaler, frame.f_back
        code = frame.f_code
        names = code.co_varnames[1 : code.co_argcount]
        self._arguments = {name: frame.f_locals[name] for name in names}
        # What it was before it was switched on.
        self._before: dict[str, Any] | None = None

    def switch_on(self) -> str | None:
        """Makes it anew, which is acc's; says why it cannot be made so."""
        made = self.made()
        if made is None or self._before is not None:
            return None
        before = dict(vars(made))
        is_scaler = isinstance(made, torch.amp.GradScaler)
        known = (self._kind.__init__, torch.cuda.amp.GradScaler.__init__)
        if is_scaler and type(made).__init__ not in known:
            return "nobody knows what its own __init__ does where scaling is enabled"
        try:
            self._kind.__init__(made, **self._arguments)
        except Exception as error:
            vars(made).clear()
            vars(made).update(before)
            return f"{type(error).__name__}: {error}"
        if is_scaler:
            # What the program has set or loaded since; after `unpatch()`, how far it has come.
            vars(made).update({name: before[name] for name in before if name not in _SWITCH})
            before = {name: before[name] for name in _SWITCH}
        self._before = before
        return None

    def switch_off(self) -> None:
        made = self.made()
        if made is not None and self._before is not None:
            vars(made).update(self._before)
            self._before = None


_moved: list[weakref.ref[Any]] = []  # regions that were CUDA's


def noting(original: Callable[[], bool]) -> Callable[[], bool]:
    """`torch.cuda.amp.common.amp_definitely_not_available`.

    The two `__init__` ask, where they are enabled. They are not wrapped before `patch()`:
    `torch.jit.script` compiles them.
    """

    def amp_definitely_not_available() -> bool:
        absent = original()
        caller = sys._getframe(1)
        if absent and caller.f_code in _INITS:
            made = caller.f_locals["self"]
            _noted[id(made)] = _Noted(made, caller)
        return absent

    return amp_definitely_not_available


def noting_state(original: Callable[..., None]) -> Callable[..., None]:
    """`torch.amp.GradScaler.load_state_dict`, which does nothing where scaling is disabled."""

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        original(self, state_dict)
        if not self._enabled and id(self) in _noted and state_dict:
            loaded = {_LOADED[name]: state_dict[name] for name in _LOADED if name in state_dict}
            vars(self).update(loaded, _scale=None, _growth_tracker=None)

    return load_state_dict


def switch_on() -> list[str]:
    """What the program made before `patch()` is acc's; a region that may be open, when it begins.

    What torch.compile traces has no beginning.

    Returns what to say of scalers that stay off.
    """
    refused: list[str] = []
    for key, noted in list(_noted.items()):
        made = noted.made()
        if made is None or "prev" in vars(made):
            continue
        why = noted.switch_on()
        if why is not None:
            del _noted[key]
            kind = type(made)
            refused.append(
                f"a {kind.__module__}.{kind.__qualname__} that was made before patch() stays "
                f"disabled, as torch has left it without a GPU: {why.rstrip('.')}. Make it after "
                "patch() or accelerate()."
            )
    return refused


def begin(region: Any) -> None:
    """A region that was made for CUDA before `patch()` begins, on acc."""
    noted = _noted.get(id(region))
    if noted is not None:
        noted.switch_on()
    else:
        _moved.append(weakref.ref(region))
        region.device = "acc"


def switch_off() -> None:
    """What was switched on, or moved, is again as torch has made it."""
    for noted in list(_noted.values()):
        noted.switch_off()
    for reference in _moved:
        if (region := reference()) is not None:
            region.device = "cuda"
    _moved.clear()
