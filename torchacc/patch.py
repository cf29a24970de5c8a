"""What acts on CUDA in a program acts on the lazy device, from `patch()` to `unpatch()`."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torchacc.launched import present_rank
from torchacc.logger import logger
from torchacc_device import _as_cuda, _patches

_OURS = frozenset((*_patches.AS_CUDA, *_patches.DEVICES_AS_CUDA))


def patch(devices: bool = False) -> tuple[str, ...]:
    """Lets what a program says of "cuda" and "xla" act on the lazy device. `accelerate` calls it.

    Concerned are `torch.autocast("cuda")`, `torch.cuda.amp.autocast` and `GradScaler`, however they
    were imported and those that were made before, `custom_fwd`, `torch.is_autocast_enabled()`, and
    the functions of `torch.cuda` for memory, streams, events, random states and properties. What
    decides where tensors go stays: `torch.cuda.is_available`, `torch.cuda.device_count`, and
    devices themselves.

    With `devices` that changes too: the name "cuda" stands for the lazy device wherever torch takes
    one, `torch.cuda.is_available()` is true, tensors of the device say `is_cuda`, and a process
    group of NCCL's is one of the lazy device's. A device says what it is: its `type` is not "cuda".
    `python -m torchacc run` does this for a script.

    A second call changes nothing, or adds the devices. The log lists what was patched, once: that
    of the first process at the level INFO, that of others at DEBUG.

    Returns:
        The full names of what is patched now.
    """
    before = set(_patches.applied())
    refused = _patches.apply_devices_as_cuda() if devices else _patches.apply_as_cuda()
    for what in refused:
        logger.warning("[patch] %s", what)
    names = tuple(name for name in _patches.applied() if name in _OURS)
    if not before.issuperset(names):
        logger.log(
            logging.INFO if present_rank() == 0 else logging.DEBUG,
            "%sautocast, GradScaler and %d names of torch.cuda act on the lazy device; "
            "torchacc.unpatch() takes that back. Patched: %s",
            "devices called cuda, " if devices else "",
            sum(name.startswith("torch.cuda.") for name in names),
            _by_owner(name for name in names if name not in before),
        )
    return names


def _by_owner(names: Iterable[str]) -> str:
    """The names in the order of their modules and classes, each of which is named once."""
    found: dict[str, list[str]] = {}
    for name in names:
        owner, _, own = name.rpartition(".")
        found.setdefault(owner, []).append(own)
    return "; ".join(f"{owner}: {', '.join(sorted(found[owner]))}" for owner in sorted(found))


def unpatch() -> None:
    """Takes back what `patch()` did; without it, and a second time, does nothing.

    Regions and scalers that were made before `patch()` are what they were. What was made since goes
    on with the lazy device.

    Raises RuntimeError inside an autocast region of any thread, which would not end as it began.
    """
    if _as_cuda.is_inside_a_region():
        raise RuntimeError("[unpatch] this is inside an autocast region: call it after its end.")
    if set(_patches.applied()).intersection(_OURS):
        _patches.undo_as_cuda()
        logger.info("what is called cuda is torch's again")
