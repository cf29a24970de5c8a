"""The attribute `device` of an accelerated model: where its parameters are now.

A note made once would be wrong after `model.cpu()`, and would put the name of the lazy device into
a saved model, which then loads only where this package is installed. So the class of the model gets
a descriptor that looks, and the model a mark that says that it is meant. Other instances of the
class behave as before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchacc.device import lazy_device

_MARK = "_torchacc_follows_device"


class _Device:
    """Reads the device of the first parameter or buffer of a marked model.

    What the model itself noted under `device` stays in its `__dict__`, unseen, decides whether a
    `torch.device` or a `str` is given, and is what a saved model is loaded with.
    """

    def __get__(self, model: nn.Module | None, owner: type | None = None) -> Any:
        if model is None:
            return self
        state = model.__dict__
        if not state.get(_MARK, False):
            if "device" in state:
                return state["device"]
            raise AttributeError(f"'{type(model).__name__}' object has no attribute 'device'")
        here = lazy_device()
        for tensors in (model.parameters(), model.buffers()):
            found = next(tensors, None)
            if found is not None:
                here = found.device
                break
        return str(here) if isinstance(state.get("device"), str) else here

    def __set__(self, model: nn.Module, value: Any) -> None:
        # From here on it is the script's own note again.
        model.__dict__.pop(_MARK, None)
        model.__dict__["device"] = value

    def __delete__(self, model: nn.Module) -> None:
        state = model.__dict__
        if state.pop(_MARK, None) is None and "device" not in state:
            raise AttributeError("device")
        state.pop("device", None)


def follow_device(model: nn.Module) -> None:
    """Makes `model.device` readable and right, unless its class computes one."""
    kind = type(model)
    if not isinstance(getattr(kind, "device", None), _Device):
        noted = model.__dict__.get("device")
        if not isinstance(noted, (torch.device, str)) and hasattr(model, "device"):
            return
        if hasattr(getattr(kind, "device", None), "__set__"):
            return
        kind.device = _Device()  # type: ignore[attr-defined]
    model.__dict__[_MARK] = True
