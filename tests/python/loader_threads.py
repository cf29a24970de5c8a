"""The threads of the AsyncLoaders that a test has made."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_BEFORE: set[threading.Thread] = set()


def leave_out_earlier() -> None:
    """From now on those that there are do not count: something else in this process holds them."""
    _BEFORE.clear()
    _BEFORE.update(threads())


def threads() -> list[threading.Thread]:
    """Those that are alive."""
    alive = [thread for thread in threading.enumerate() if thread.name == "AsyncLoader"]
    return [thread for thread in alive if thread not in _BEFORE]


def wait_until(condition: Callable[[], bool], seconds: float = 100.0) -> None:
    """For what one of them does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.005)
