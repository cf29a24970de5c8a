"""`torchacc.progress`: the line that a terminal shows of what takes long."""

from __future__ import annotations

import logging
import re
import sys
import time

import pytest

from tests.terminal import said_to
from torchacc import progress
from torchacc.logger import logger
from torchacc.progress import Progress


def test_the_line_is_written_anew_and_goes(monkeypatch):
    stream, done = said_to(monkeypatch, terminal=True), 0
    with pytest.raises(KeyError), Progress("tests", lambda: f"{done} of 2"):
        for done in range(3):
            stream.wait_for(f"[tests] {done} of 2, 0 s")
        raise KeyError
    lines = re.findall(r"\r\x1b\[K([^\r]*)", stream.getvalue())
    assert "".join(f"\r\x1b[K{line}" for line in lines) == stream.getvalue()
    assert lines[-1] == "" and lines.count("") == 1
    assert list(dict.fromkeys(lines[:-1])) == [f"[tests] {each} of 2, 0 s" for each in range(3)]


def test_elsewhere_and_of_what_is_short_nothing_is_said(monkeypatch):
    stream = said_to(monkeypatch, terminal=False)
    with Progress("tests", lambda: "never"):
        time.sleep(0.1)
    assert stream.getvalue() == ""
    stream = said_to(monkeypatch, terminal=True)
    monkeypatch.setattr(progress, "_SILENT", 60.0)
    with Progress("tests", lambda: "never"):
        pass
    assert stream.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", None)  # a program without a console
    with Progress("tests", lambda: "never"):
        pass


def test_what_is_logged_does_not_stand_behind_the_line(monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # a program that set up none
    stream = said_to(monkeypatch, terminal=True)
    logger.warning("before")
    with Progress("tests", lambda: "here"):
        stream.wait_for("here, 0 s")
        logger.warning("within")
    logger.warning("after")
    said = re.sub(r"\[\d[^\]]*WARNING\] ", "LOG ", stream.getvalue())
    said = re.sub(r"(\r\x1b\[K\[tests\] here, 0 s)+", "LINE", said)
    assert re.fullmatch(r"LOG before\nLINE\r\x1b\[KLOG within\n(LINE)?\r\x1b\[KLOG after\n", said)
