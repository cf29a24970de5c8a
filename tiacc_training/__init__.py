"""The names of TI-ACC's package for training that programs and command lines use.

Programs of the first generation import `tiacc_training.torch`; those of the second say `from
tiacc_training import tiacc_training, tiacc_init`, where the first name is this package.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from tiacc_training.start import tiacc_init

__all__ = ["calc", "distributed", "tiacc_init", "tiacc_training", "torch"]

tiacc_training = sys.modules[__name__]

# Imported when they are asked for: launchers and tools need none of them.
_PARTS = ("calc", "distributed", "torch")


def __getattr__(name: str) -> ModuleType:
    if name not in _PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
