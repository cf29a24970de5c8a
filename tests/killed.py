"""A process that is killed at each of its operations on a folder's files, one after the other."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

_CHANGES = {"os.rename", "os.link", "os.symlink", "os.remove", "os.mkdir", "os.rmdir", "open"}


def at_each_operation(before: Path, folder: Path, do: Callable[[], object]) -> Iterator[int]:
    """Yields after each kill, with its number; `folder` is then as the process left it.

    It is a copy of `before` each time. What changes names is counted, and opening to write: the
    process is killed before it does that. The last time it is not killed.
    """
    number = 0
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder, symlinks=True)
        pid = os.fork()
        if pid == 0:
            _die_at(number)
            try:
                do()
                os._exit(0)
            finally:  # the tests go on in the parent only
                os._exit(1)
        status = os.waitpid(pid, 0)[1]
        assert status == 0 or os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        yield number
        if status == 0:
            return
        number += 1


def _die_at(number: int) -> None:
    left = number
    os.fsync = lambda descriptor: None  # only the process dies, and disks are slow

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event not in _CHANGES:
            return
        if event == "open" and not int(arguments[2]) & (os.O_WRONLY | os.O_RDWR):  # type: ignore
            return
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    sys.addaudithook(count)
