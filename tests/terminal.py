"""A terminal in the place of standard error, for what shows how far it is."""

from __future__ import annotations

import io
import sys
import time
import types

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
    """From here on, standard error; nothing is waited for before something is said.

    No second passes by the clock of the line, however slow the machine is, and a line is waited
    for until it has gone.
    """
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(progress, "_SILENT", 0.0)
    monkeypatch.setattr(progress, "_EACH", 0.01)
    monkeypatch.setattr(progress, "_AT_END", 60.0)
    stream = Stream(terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    return stream
