"""Saving without the device in the file, and sending what was loaded to it."""

from __future__ import annotations

import os
import pickle
import types
from typing import IO, Any

import torch
from torch import Tensor, nn

from torchacc import launched
from torchacc.boundary import sync
from torchacc.device import is_lazy_tensor
from torchacc.files import replacing
from torchacc.loader import move_to_device


def save(
    data: Any,
    file_or_path: str | os.PathLike[str] | IO[bytes],
    master_only: bool = True,
    global_master: bool = False,
) -> None:
    """`torch.save` of what may lie on the device, as if it lay on the CPU.

    So the file can be loaded where there is no such device. A file that is there already stays
    whole until the new one is on the disk. Every process may call it, and none waits for another:
    so of shards that are saved over old ones, a process that is killed leaves some of both. Save to
    a new folder each time (`docs/checkpoints.md`).

    Args:
        data: anything that torch.save takes. Tensors may share memory, and do so when loaded.
        file_or_path: with `master_only` False a different one for each process.
        master_only: whether only the first process of each machine writes, by the LOCAL_RANK of a
            launcher. Without it every process does.
        global_master: with `master_only`, whether only the first of all processes writes.

    Raises OSError where the file cannot be written.
    """
    # Others may wait for what this process has recorded, whether or not it writes.
    sync()
    first = launched.present_rank() if global_master else launched.local_rank()
    if master_only and first != 0:
        return
    # torch.save asks only for the name and the Pickler of a module.
    on_cpu: Any = types.SimpleNamespace(__name__="pickle", Pickler=_OnCpu)
    if isinstance(file_or_path, (str, os.PathLike)):
        with replacing(file_or_path) as path:
            write(data, path, pickle_module=on_cpu)
    else:
        _write_to(data, file_or_path, pickle_module=on_cpu)


def write(data: Any, path: str | os.PathLike[str], **options: Any) -> None:
    """`torch.save` to a path. Raises OSError, with the path, where it cannot be written.

    With a path torch itself raises RuntimeError("unexpected pos ...") where the disk is full.
    """
    try:
        with open(path, "wb") as file:
            _write_to(data, file, **options)
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise


def _write_to(data: Any, file: IO[bytes], **options: Any) -> None:
    try:
        torch.save(data, file, **options)
    except RuntimeError as error:
        # After an error of the file torch writes its end, and raises what comes of that.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def send_cpu_data_to_device(
    datas: Any, device: torch.device | str | int, input_sharding: object = None
) -> Any:
    """`datas` with every tensor in it on `device`, in the containers that it came in, copied.

    A single tensor comes back as a list of one, as torch_xla gives it.

    Raises NotImplementedError when `input_sharding`, which is of SPMD programs, is given.
    """
    if input_sharding is not None:
        raise NotImplementedError(
            "[send_cpu_data_to_device] input_sharding is not available in this version. "
            "Leave it None."
        )
    if isinstance(datas, Tensor):
        datas = [datas]
    return move_to_device(datas, torch.device(device))


class _OnCpu(pickle.Pickler):
    """Pickles tensors of the device as if they lay on the CPU; those that share memory still do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # By address; the storages of the device are kept, so that the address stays theirs.
        self._moved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def reducer_override(self, value: Any) -> Any:
        # Subclasses are taken apart by their own rules, down to such tensors.
        if type(value) not in (Tensor, nn.Parameter) or not is_lazy_tensor(value):
            return NotImplemented
        here = self._on_cpu(value.detach()).requires_grad_(value.requires_grad)
        if type(value) is nn.Parameter:
            here = nn.Parameter(here, value.requires_grad)
        here.__dict__.update(value.__dict__)
        return here.__reduce_ex__(2)

    def _on_cpu(self, value: Tensor) -> Tensor:
        if value.layout is not torch.strided or value.is_conj() or value.is_neg():
            return value.cpu()
        storage = value.untyped_storage()
        if storage._cdata not in self._moved:
            self._moved[storage._cdata] = (storage, storage.cpu())
        _, moved = self._moved[storage._cdata]
        place = (value.storage_offset(), value.size(), value.stride())
        return torch.empty(0, dtype=value.dtype, device="cpu").set_(moved, *place)
