"""Finds a package named `torchacc` that is not ours.

Two unrelated projects use that name: a package on the public index and Alibaba's TorchAcc. What
comes first on the module path is what `import torchacc` gives, and what it then says about a
missing attribute helps nobody. The device, which has a name of its own, looks and tells.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import sys

# Stands in the first lines of our `torchacc/__init__.py` and in no other package's.
MARKER = "__acc_front_end__"
_HEAD_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A `torchacc` that is not ours: where it lies, and the distribution that owns it if any."""

    path: str
    distribution: str | None = None

    def message(self) -> str:
        """One line: what is in the way and how to remove it."""
        if self.distribution is not None:
            return (
                f"[torchacc] import torchacc gives another project's package: {self.distribution} "
                f"at {self.path}. Remove it (python -m pip uninstall torchacc) and install this "
                "project again; until then only torch.acc works."
            )
        return (
            f"[torchacc] import torchacc gives {self.path}, which is not this project's package. "
            "Rename or remove it, or take its folder off the module path; until then only "
            "torch.acc works."
        )


def find() -> Foreign | None:
    """The foreign `torchacc` that an import would give; None when it is ours or there is none.

    Imports nothing and never raises, because it runs inside `import torch`.
    """
    try:
        spec = importlib.util.find_spec("torchacc")
    except (ImportError, ValueError, AttributeError):
        # A module put into sys.modules by hand may have no spec.
        module = sys.modules.get("torchacc")
        path = getattr(module, "__file__", None)
        if module is None or hasattr(module, MARKER) or path is None:
            return None
        return Foreign(path, _distribution(path))
    if spec is None:
        return None
    path = spec.origin
    if path is None:
        # A folder without __init__.py: a namespace package, for example a checkout beside a script.
        folders = list(spec.submodule_search_locations or [])
        return Foreign(folders[0]) if folders else None
    return None if _is_ours(path) else Foreign(path, _distribution(path))


def _is_ours(path: str) -> bool:
    if path.endswith(".pyc"):  # an installation without sources
        return os.path.isdir(os.path.join(os.path.dirname(os.path.dirname(path)), __package__))
    try:
        with open(path, "rb") as file:
            return MARKER.encode() in file.read(_HEAD_BYTES)
    except OSError:
        return True  # what cannot be read is not accused


def _distribution(path: str) -> str | None:
    """`name version` of the installed distribution that put `path` there."""
    try:
        found = importlib.metadata.distribution("torchacc")
        if os.path.realpath(str(found.locate_file("torchacc"))) != os.path.realpath(
            os.path.dirname(path)
        ):
            return None
        return f"{found.metadata['Name']} {found.version}"
    except Exception:  # a broken installation must not break the import of torch
        return None
