"""The default process group: made from the launcher's variables, or of this process alone."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from torchacc import launched
from torchacc.device import device_type
from torchacc.dist import mesh
from torchacc.logger import logger
from torchacc_device import _C, _patches

if TYPE_CHECKING:
    from torchacc.config import Config

# The backends under the names of TorchAcc's constants.
BACKEND_NAME = "lazy"
EAGER_BACKEND_NAME = "nccl"

# The group of this process alone that nobody asked for: a group that the program makes replaces it.
_implicit: ProcessGroup | None = None
_leaves_at_exit = False
# Groups of some of the ranks, by the ranks; of the present default group.
_subsets: dict[tuple[int, ...], ProcessGroup] = {}


def choose_device() -> None:
    """Makes the device of the launcher's LOCAL_RANK the current one; without a launcher it stays.

    Raises RuntimeError when more processes were started on this machine than it has GPUs.
    """
    _check_device_count()
    module = torch.get_device_module(device_type())
    if launched.is_launched():
        module.set_device(launched.local_rank())
    # A DeviceMesh would choose one by the rank for a process that has not used any.
    module.init()


def ensure_group() -> None:
    """Makes the default process group unless there is one.

    Under a launcher it is that of all its processes, else one of this process alone, which a later
    `torch.distributed.init_process_group` replaces.

    Raises:
        ValueError: the group that is there cannot exchange tensors of this device.
        RuntimeError: the launcher's variables are incomplete.
    """
    if dist.is_initialized():
        _check_backend()
    elif launched.is_launched() or launched.world_size() > 1:
        _check_variables()
        dist.init_process_group(device_type())
    else:
        _make_implicit()
    _leave_at_exit()


def init_process_group(config: Config | None = None) -> None:
    """Makes the default process group from the launcher's variables; one that is there is kept.

    With a `config` the number of processes is checked against its sizes first.
    """
    if config is not None:
        config.validate()
    choose_device()
    ensure_group()


def init_nccl_context(config: Config) -> None:
    """Connects the processes of every group of the mesh, which else happens at the first exchange.

    All processes have to call it. Returns when all have.
    """
    made = config.get_mesh()
    here = torch.zeros(1, device=torch.device(device_type(), current_index()))
    for name in ("dp", "fsdp", "pp", "tp", "sp"):
        if made.num(name) > 1:
            dist.all_reduce(here, group=made.group(name))
    torch.get_device_module(device_type()).synchronize()


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Waits for all processes, or those whose ranks are in `replicas`, and exchanges payloads.

    Returns the payloads of all, in the order of their ranks.

    Raises:
        ValueError: this process is not one of `replicas`.
        RuntimeError: the processes meet under different tags.
    """
    ensure_group()
    ranks = sorted(set(replicas)) or list(range(dist.get_world_size()))
    if dist.get_rank() not in ranks:
        raise ValueError(
            f"[rendezvous] {tag!r}: process {dist.get_rank()} is not one of the replicas {ranks}."
        )
    found: list[tuple[str, bytes]] = [(tag, payload)] * len(ranks)
    if len(ranks) > 1:
        dist.all_gather_object(found, (tag, bytes(payload)), group=_group_of(tuple(ranks)))
    for rank, (other, _) in zip(ranks, found, strict=True):
        if other != tag:
            raise RuntimeError(
                f"[rendezvous] process {dist.get_rank()} is at {tag!r} and process {rank} at "
                f"{other!r}. All have to come to the same calls in the same order."
            )
    return [content for _, content in found]


def torchrun_line() -> str | None:
    """How to use all GPUs of this machine; None where that is done, or there is one."""
    count = torch.get_device_module(device_type()).device_count()
    if launched.is_launched() or _C.executor_name() != "cuda" or count < 2:
        return None
    script = os.path.basename(sys.argv[0]) or "script.py"
    return (
        f"One of {count} GPUs is used. To train on all of them: "
        f"torchrun --nproc_per_node={count} {script}"
    )


def current_index() -> int:
    """The index of the device that this process uses."""
    return torch.get_device_module(device_type()).current_device()


def _check_device_count() -> None:
    count = torch.get_device_module(device_type()).device_count()
    processes = launched.local_world_size()
    if launched.is_launched():
        if _C.executor_name() == "cuda" and processes > count:
            raise RuntimeError(
                f"[accelerate] {processes} processes were started on this machine "
                f"(LOCAL_WORLD_SIZE), and it has {count} usable GPUs; each process needs one of "
                f"its own. Start with `torchrun --nproc_per_node={count} ...`, or make more GPUs "
                "visible (CUDA_VISIBLE_DEVICES)."
            )
        if launched.local_rank() >= count:
            raise RuntimeError(
                f"[accelerate] LOCAL_RANK={launched.local_rank()}, and there are {count} devices. "
                "Start with torchrun, which numbers the processes of a machine from 0."
            )


def _check_backend() -> None:
    name = device_type()
    backends = dict(
        part.split(":", 1) for part in dist.get_backend_config().split(",") if ":" in part
    )
    if name not in backends:
        raise ValueError(
            f"[accelerate] the process group was made with {dist.get_backend_config()!r}, which "
            f"cannot exchange tensors of {name}. Make it with "
            f"torch.distributed.init_process_group('{name}') or 'cpu:gloo,{name}:{name}', or leave "
            "it to accelerate."
        )


def _check_variables() -> None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        there = [name for name in names if name not in missing]
        raise RuntimeError(
            f"[dist] {_listed(there)} set in the environment, and {_listed(missing)} not. Start "
            f"with torchrun, which sets all of them, or unset {' and '.join(there)} to train alone."
        )
    if launched.rank() >= launched.world_size():
        raise RuntimeError(
            f"[dist] RANK={launched.rank()} and WORLD_SIZE={launched.world_size()} in the "
            "environment: ranks are numbered from 0. Start with torchrun, which sets both."
        )


def _listed(names: list[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _make_implicit() -> None:
    global _implicit
    _patches.before_group(_forget_implicit)
    hook = sys.excepthook
    dist.init_process_group(device_type(), store=dist.HashStore(), rank=0, world_size=1)
    # torch's puts "[rank0]" before each line of a traceback; this program has no ranks.
    sys.excepthook = hook
    _implicit = dist.group.WORLD


def _forget_implicit() -> None:
    """Takes away the group that nobody asked for, if it is still the default one."""
    global _implicit
    if _implicit is None:
        return
    if dist.is_initialized() and dist.group.WORLD is _implicit:
        _destroy()
    _implicit = None


def _group_of(ranks: tuple[int, ...]) -> ProcessGroup:
    default = dist.group.WORLD
    if len(ranks) == dist.get_world_size():
        return default
    kept = _subsets.get(ranks)
    # Those of a default group that was destroyed are of no use.
    if kept is None or kept not in dist.distributed_c10d._world.pg_map:
        kept = dist.new_group(list(ranks), use_local_synchronization=True)
        _subsets[ranks] = kept
    return kept


def _destroy() -> None:
    _subsets.clear()
    mesh.forget()
    dist.destroy_process_group()


def _leave_at_exit() -> None:
    global _leaves_at_exit
    if not _leaves_at_exit:
        atexit.register(_leave)
        _leaves_at_exit = True


def _leave() -> None:
    """For programs that never destroy their group: the others get what they still wait for."""
    if not dist.is_initialized():
        return
    try:
        # After an error the others may be gone, and nobody needs the results.
        if not hasattr(sys, "last_value"):
            module = torch.get_device_module(device_type())
            for index in range(module.device_count() if module.is_initialized() else 0):
                module.synchronize(index)
        _destroy()
    except Exception as error:
        logger.warning("the process group was left with an error: %s", error)
