"""TorchAcc's function that takes torch's decompositions away."""

from __future__ import annotations

import logging

from torchacc.logger import say_once


def replace_decompose() -> None:
    """Replaces nothing, and says so: what the lazy device records was not decomposed by torch."""
    say_once(
        "replace_decompose",
        "[replace_decompose] nothing is replaced: operators are recorded as they are called.",
        logging.INFO,
    )
