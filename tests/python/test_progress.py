"""`torchacc.progress`: the line that a terminal shows of what takes long."""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
import time

import pytest
import torch

from tests.terminal import said_to
from torchacc import progress
from torchacc.dist.state_dict_utils import save_checkpoints
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


class Writes:
    """In the place of standard error, as some programs put it there."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("make", [Writes, closed])
def test_whatever_stands_for_standard_error_ends_no_save(monkeypatch, tmp_path, make):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(sys, "stderr", stream := make())
    save_checkpoints({"weight": torch.ones(3)}, None, tmp_path / "file.pth", "model")
    assert torch.load(tmp_path / "file.pth")["weight"].tolist() == [1.0] * 3
    if make is Writes:
        assert stream.text.endswith(f"[checkpoint] written: {tmp_path / 'file.pth'}\n")


def test_a_text_that_fails_leaves_no_line_and_no_stroke_before_others(monkeypatch):
    failed = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda arguments: failed.set())
    stream = said_to(monkeypatch, terminal=True)
    texts = iter(["first"])
    with Progress("tests", lambda: next(texts)):
        assert failed.wait(60)
    assert stream.getvalue().endswith("first, 0 s\r\x1b[K")
    assert Progress.erased() == ""


def test_only_the_terminal_with_the_line_is_erased(monkeypatch):
    stream = said_to(monkeypatch, terminal=True)
    with Progress("outer", lambda: "here"):
        stream.wait_for("here, 0 s")
        assert Progress.erased() == "\r\x1b[K"
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        assert Progress.erased() == ""
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress("inner", lambda: "there"):
            stream.wait_for("there, 0 s")
        there = len(stream.getvalue())
        deadline = time.monotonic() + 60
        while "here" not in stream.getvalue()[there:]:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert Progress.erased() == "\r\x1b[K"  # the outer one's line, which came again
