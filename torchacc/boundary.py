"""Step boundaries under the user's control, and the hook that finds them without being asked."""

from __future__ import annotations

import torch

from torchacc.device import device_type
from torchacc_device import _boundary


def mark_step() -> None:
    """Ends the step being recorded. What was recorded is submitted; nothing is waited for.

    An AsyncLoader does this for each batch, and without one `optimizer.step()` does. A call of
    one's own is needed only in a loop that has neither.
    """
    _boundary.mark_step()


def sync(wait: bool = False) -> None:
    """Ends the step being recorded and submits it; with `wait`, returns when all devices are idle.

    An error of work submitted earlier is raised here when `wait` is set.
    """
    _boundary.mark_step("explicit")
    if wait:
        module = torch.get_device_module(device_type())
        for index in range(module.device_count()):
            module.synchronize(index)


def install_hooks() -> None:
    """Makes the end of `optimizer.step()` a step boundary where no AsyncLoader drives the loop.

    Registers one global post hook of torch's optimizers. Calling it again does nothing.
    """
    _boundary.install()


def remove_hooks() -> None:
    """Undoes `install_hooks`."""
    _boundary.uninstall()
