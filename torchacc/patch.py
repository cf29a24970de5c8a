"""What acts on CUDA in a program acts on the lazy device, from `patch()` to `unpatch()`."""

from __future__ import annotations

import logging

from torchacc.launched import rank
from torchacc.logger import logger
from torchacc_device import _as_cuda, _patches


def patch() -> tuple[str, ...]:
    """Lets what a program says of "cuda" and "xla" act on the lazy device. `accelerate` calls it.

    Concerned are `torch.autocast("cuda")`, `torch.cuda.amp.autocast` and `GradScaler`, however they
    were imported, `custom_fwd`, `torch.is_autocast_enabled()`, and the functions of `torch.cuda`
    for memory, streams, events, random states and properties. What decides where tensors go stays:
    `torch.cuda.is_available`, `torch.cuda.device_count`, and devices themselves.

    A second call changes nothing. The log of the first process says, at the level INFO, that it
    happened, and each process's, at the level DEBUG, to what.

    Returns:
        The full names of what is patched now.
    """
    before = set(_patches.applied())
    _patches.apply_as_cuda()
    if not before.issuperset(_patches.AS_CUDA):
        logger.log(
            logging.INFO if rank() == 0 else logging.DEBUG,
            "autocast, GradScaler and %d names of torch.cuda act on the lazy device; "
            "torchacc.unpatch() takes that back",
            sum(name.startswith("torch.cuda.") for name in _patches.AS_CUDA),
        )
        logger.debug("patched: %s", ", ".join(_patches.AS_CUDA))
    return _patches.AS_CUDA


def unpatch() -> None:
    """Takes back what `patch()` did; without it, and a second time, does nothing.

    A GradScaler that was made before goes on with the lazy device.

    Raises RuntimeError inside an autocast region of any thread, which would not end as it began.
    """
    if _as_cuda.is_inside_a_region():
        raise RuntimeError("[unpatch] this is inside an autocast region: call it after its end.")
    if set(_patches.applied()).intersection(_patches.AS_CUDA):
        _patches.undo_as_cuda()
        logger.info("autocast, GradScaler and torch.cuda are torch's again")
