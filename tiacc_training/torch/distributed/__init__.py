"""What TI-ACC has for training by several processes."""

from __future__ import annotations


def init_tiacc_training() -> None:
    """From now on torch's DistributedDataParallel exchanges gradients by TI-ACC's switches.

    That is for modules on acc. It need not be called where a switch is set when the device is
    registered.
    """
    from torchacc_device import _distributed

    _distributed.follow_switches()
