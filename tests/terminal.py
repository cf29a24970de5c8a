"""A terminal in the place of standard error, for what shows how far it is."""

from __future__ import annotations

import io
import sys
import time

from torchacc import progress


class Stream(io.StringIO):
    """Standard error: a terminal, or not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in self.getvalue():
            assert time.monotonic() < deadline, self.getvalue()
            time.sleep(0.001)


def said_to(monkeypatch, terminal: bool) -> Stream:
    """From here on, standard error; nothing is waited for before something is said."""
    monkeypatch.setattr(progress, "_SILENT", 0.0)
    monkeypatch.setattr(progress, "_EACH", 0.01)
    stream = Stream(terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    return stream
