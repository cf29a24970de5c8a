"""Random number generators of the acc device: the part of `torch.acc` that torch.cuda.random is.

A state is a CPU tensor of 16 bytes (uint8): seed and offset, 8 bytes each, little-endian.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Generator, Tensor

from torchacc_device import _C
from torchacc_device._devices import Device, device_index

__all__ = [
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]

_SEEDS = 1 << 64


def _generator(device: Device = None) -> Generator:
    """The default generator of `device`."""
    return _C.default_generator(device_index(device))


def _as_seed(seed: int) -> int:
    # Like torch.manual_seed: negative numbers count from the end of the 64-bit range.
    seed = int(seed)
    if not -(_SEEDS >> 1) <= seed < _SEEDS:
        raise RuntimeError(
            f"[torch.acc.manual_seed] the seed {seed} is out of range. "
            "Use a number from -2**63 to 2**64 - 1."
        )
    return seed % _SEEDS


def get_rng_state(device: Device = "acc") -> Tensor:
    """The state of the default generator of `device`: 16 bytes, uint8, on the CPU."""
    return _generator(device).get_state()


def get_rng_state_all() -> list[Tensor]:
    """The states of all devices, in the order of their indices."""
    return [get_rng_state(index) for index in range(_C.device_count())]


def set_rng_state(new_state: Tensor, device: Device = "acc") -> None:
    """Sets the state of the default generator of `device` to one that `get_rng_state` returned.

    Raises TypeError for a tensor that is not uint8 on the CPU, RuntimeError for another size.
    """
    _generator(device).set_state(new_state)


def set_rng_state_all(new_states: Iterable[Tensor]) -> None:
    """Sets the states of the devices 0, 1, ... in turn."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    """Seeds the default generator of the current device."""
    _C.manual_seed(_C.current_device(), _as_seed(seed))


def manual_seed_all(seed: int) -> None:
    """Seeds the default generators of all devices; torch.manual_seed calls it.

    It uses no device: what is forked later may.
    """
    _C.seed_all(_as_seed(seed))


def seed() -> None:
    """Seeds the default generator of the current device with a random number."""
    _generator().seed()


def seed_all() -> None:
    """Seeds the default generators of all devices with one random number."""
    manual_seed_all(_generator().seed())


def initial_seed() -> int:
    """The seed of the default generator of the current device."""
    return _generator().initial_seed()


def _get_rng_state_offset(device: Device = "acc") -> int:
    """The offset of the default generator of `device`; DTensor keeps it in step between ranks."""
    return _generator(device).get_offset()


def _set_rng_state_offset(offset: int, device: Device = "acc") -> None:
    """Sets the offset, a multiple of 4, of the default generator of `device`."""
    _generator(device).set_offset(offset)
