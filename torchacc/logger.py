"""The logger `TorchAcc`: standard library logging, with its level from ACC_LOG_LEVEL."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Hashable

from torchacc.progress import Progress

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_VARIABLE = "ACC_LOG_LEVEL"


class _OwnHandler(logging.Handler):
    """Prints to standard error while the program has configured no logging of its own.

    A program that called `logging.basicConfig` gets our records through its own handlers, once.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        try:
            # The stream of this moment: notebooks and test runners replace it.
            sys.stderr.write(Progress.erased() + self.format(record) + "\n")
        except Exception:
            with contextlib.suppress(Exception):  # it prints to the same stream
                self.handleError(record)


def level_from_environment() -> int:
    """The level that ACC_LOG_LEVEL asks for: debug, info (default), warning or error.

    Raises ValueError for any other word.
    """
    word = os.environ.get(_VARIABLE, "")
    level = _LEVELS.get(word.lower() or "info")
    if level is None:
        raise ValueError(
            f"[env] {_VARIABLE}={word} is not allowed. Set it to one of: {', '.join(_LEVELS)}, "
            "or unset it (info)."
        )
    return level


def _make_logger() -> logging.Logger:
    made = logging.getLogger("TorchAcc")
    made.setLevel(level_from_environment())
    if not any(isinstance(handler, _OwnHandler) for handler in made.handlers):
        handler = _OwnHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s - %(levelname)s] %(message)s"))
        made.addHandler(handler)
    return made


logger = _make_logger()

# dict.setdefault is atomic, so no lock is held that a fork could copy.
_said: dict[Hashable, object] = {}


def say_once(key: Hashable, message: str, level: int = logging.WARNING) -> bool:
    """Logs `message` unless this process has already said something under `key`.

    Returns whether it was said. A forked worker counts as the process it came from.
    """
    mine = object()
    if _said.setdefault(key, mine) is not mine:
        return False
    logger.log(level, message)
    return True


def forget_said_for_testing() -> None:
    """Makes every `say_once` speak again."""
    _said.clear()
