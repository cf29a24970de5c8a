"""How far something is that takes long, on a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar, TextIO

# How many seconds pass before a terminal is told, and between two times.
_SILENT, _EACH = 3.0, 1.0
# How many seconds the end of a block waits for its line to go: a terminal may be stopped (Ctrl-S).
_AT_END = 1.0
_ERASED = "\r\033[K"


class Progress:
    """A line of standard error that says how far a block is. It goes when the block ends.

        with Progress("checkpoint", lambda: f"{done} of {count} files"):
            ...

    Nothing is said of what takes less than three seconds, and where that is no terminal. A thread
    asks for the text: what has no steps to count, such as a write to a slow disk, is seen to run.

    Args:
        name: who says it.
        text: how far it is; seconds are put behind it.
    """

    # The terminal on which a line is, with the cursor at its end.
    _shown: ClassVar[TextIO | None] = None

    def __init__(self, name: str, text: Callable[[], str]) -> None:
        self._name, self._text = name, text
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        stream = sys.stderr
        if _is_terminal(stream):
            name = f"torchacc.progress.{self._name}"
            arguments = (stream, time.monotonic())
            thread = threading.Thread(target=self._tell, name=name, args=arguments, daemon=True)
            with contextlib.suppress(RuntimeError):  # the system has no more threads
                thread.start()
                self._thread = thread
        return self

    def __exit__(self, *exception: Any) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=_AT_END)

    def _tell(self, stream: TextIO, began: float) -> None:
        shown = False
        try:
            while not self._ended.wait(_EACH if shown else _SILENT):
                text = f"[{self._name}] {self._text()}, {time.monotonic() - began:.0f} s"
                Progress._shown = stream  # again: another one's line may have gone meanwhile
                _write(stream, text)
                shown = True
        finally:
            if shown:
                _write(stream, "")
                Progress._shown = None

    @classmethod
    def erased(cls) -> str:
        """What to write before anything else, so that it does not stand behind a line that is
        there: that comes again, below. What else has the place of standard error has no line.
        """
        return _ERASED if cls._shown is not None and cls._shown is sys.stderr else ""


def _is_terminal(stream: Any) -> bool:
    """Programs put anything into the place of standard error: an object that only writes, a closed
    stream.
    """
    try:
        return bool(stream.isatty())
    except Exception:
        return False


def _write(stream: TextIO, text: str) -> None:
    with contextlib.suppress(Exception):  # the terminal is gone, or is none after all
        stream.write(f"{_ERASED}{text}")
        stream.flush()
