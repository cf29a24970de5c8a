"""AsyncLoaders that read as a test says: ahead of the loop, or in it."""

from __future__ import annotations

import itertools


def told(loader, *ways):
    """The loader, whose passes are read ahead or in the loop as `ways` say in turn."""
    each = itertools.cycle(ways)
    loader._ahead.begin = lambda: next(each)
    return loader


def in_turns(loader, *ways):
    """The loader, whose passes change the way as `ways` say behind each batch."""
    loader._ahead.is_over = lambda pace: True
    return told(loader, *ways)
