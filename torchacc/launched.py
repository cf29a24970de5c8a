"""What the launcher says: torchrun's RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE."""

from __future__ import annotations

import os

import torch.distributed as dist


def _read(name: str, default: int, low: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if value < low:
        raise ValueError(
            f"[dist] {name}={text} in the environment should be a number of at least {low}. "
            "Start with torchrun, which sets it, or unset it."
        )
    return value


def world_size() -> int:
    """How many processes were started: WORLD_SIZE in the environment, or 1."""
    return _read("WORLD_SIZE", 1, 1)


def rank() -> int:
    """The number of this process among all: RANK in the environment, or 0."""
    return _read("RANK", 0, 0)


def local_rank() -> int:
    """The number of this process on its machine: LOCAL_RANK in the environment, or 0."""
    return _read("LOCAL_RANK", 0, 0)


def local_world_size(default: int = 1) -> int:
    """How many processes were started on this machine: LOCAL_WORLD_SIZE, or `default`."""
    return _read("LOCAL_WORLD_SIZE", default, 1)


def is_launched() -> bool:
    """Whether a launcher started this process. It may be the only one."""
    return all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE"))


def is_half_launched() -> bool:
    """Whether one of RANK and WORLD_SIZE says that there are others, and the other is missing."""
    return not is_launched() and (world_size() > 1 or bool(os.environ.get("RANK")))


def has_local_rank() -> bool:
    """Whether this process knows its place on its machine."""
    return bool(os.environ.get("LOCAL_RANK"))


def present_world_size() -> int:
    """The size of the default process group; before there is one, what the launcher says."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return world_size()


def present_rank() -> int:
    """The number of this process in the default process group; in none, what the launcher says.

    One of this process alone does not count.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return dist.get_rank()
    return rank()
