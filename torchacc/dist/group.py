"""The default process group: made from the launcher's variables, or of this process alone."""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from torchacc import launched
from torchacc.device import device_type
from torchacc.dist import mesh
from torchacc.logger import logger
from torchacc_device import _C, _patches
from torchacc_device._distributed import default_timeout, meeting_keys, wait_for_ranks

if TYPE_CHECKING:
    from torchacc.config import Config

# The backends under the names of TorchAcc's constants.
BACKEND_NAME = "lazy"
EAGER_BACKEND_NAME = "nccl"

# The group of this process alone that nobody asked for: a group that the program makes replaces it.
_implicit: ProcessGroup | None = None
# The group of the launcher's processes, where the program has not made it.
_of_all: weakref.ref[ProcessGroup] | None = None
_leaves_at_exit = False
# How often some of the ranks have met (`rendezvous`). It goes on with another default group, whose
# store may be the same one, as torchrun's is.
_met: dict[tuple[int, ...], int] = {}


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

    Under a launcher it is that of all its processes, and a later call of
    `torch.distributed.init_process_group` an error that says so: models are wrapped with it. Else
    it is one of this process alone, which such a call replaces.

    Raises:
        ValueError: the group that is there cannot exchange tensors of this device.
        RuntimeError: the launcher's variables are incomplete.
    """
    if dist.is_initialized():
        _check_backend()
    elif launched.is_launched() or launched.is_half_launched():
        _check_variables()
        _make_of_all()
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

    Returns the payloads of all, in the order of their ranks. Processes that are not in `replicas`
    need not call it: the others meet in the store, which asks for no group of theirs.

    Raises:
        ValueError: this process is not one of `replicas`.
        RuntimeError: the processes meet under different tags, or one of them has not come within
            the timeout of the default group, or some seconds after that group has failed meanwhile.
    """
    ensure_group()
    ranks = sorted(set(replicas)) or list(range(dist.get_world_size()))
    if dist.get_rank() not in ranks:
        raise ValueError(
            f"[rendezvous] {tag!r}: process {dist.get_rank()} is not one of the replicas {ranks}."
        )
    found = _meet(tag, bytes(payload), tuple(ranks)) if len(ranks) > 1 else [(tag, payload)]
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
        on_gpus = _C.executor_name() == "cuda"
        if on_gpus and launched.world_size() > 1 and not launched.has_local_rank():
            raise RuntimeError(
                f"[accelerate] WORLD_SIZE={launched.world_size()} and no LOCAL_RANK in the "
                "environment: all processes of a machine would use its first GPU. Start with "
                "torchrun, which sets it, or set it to the process's number on its machine."
            )
        if on_gpus and processes > count:
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


def _make_of_all() -> None:
    global _of_all
    dist.init_process_group(device_type())
    _of_all = weakref.ref(dist.group.WORLD)
    _patches.before_group(_before_the_programs)


def _before_the_programs() -> Callable[[], None] | None:
    """Called before the program makes its own default group; returns what puts things back."""
    if dist.is_initialized() and _of_all is not None and dist.group.WORLD is _of_all():
        raise ValueError(
            "[init_process_group] torchacc has made the default process group of the launcher's "
            f"{dist.get_world_size()} processes already, with the backend {dist.get_backend()!r}: "
            "accelerate does where there is none. Call torch.distributed.init_process_group before "
            "accelerate, which then takes that group, or leave it out."
        )
    return _forget_implicit()


def _make_implicit() -> None:
    global _implicit
    _patches.before_group(_before_the_programs)
    hook = sys.excepthook
    dist.init_process_group(device_type(), store=dist.HashStore(), rank=0, world_size=1)
    # torch's puts "[rank0]" before each line of a traceback; this program has no ranks.
    sys.excepthook = hook
    _implicit = dist.group.WORLD


def _forget_implicit() -> Callable[[], None] | None:
    """Takes away the group that nobody asked for, if it is the default one; returns its maker."""
    global _implicit
    known, _implicit = _implicit, None
    if known is None or not dist.is_initialized() or dist.group.WORLD is not known:
        return None
    _destroy()
    return _make_implicit


def _meet(tag: str, payload: bytes, ranks: tuple[int, ...]) -> list[tuple[str, bytes]]:
    """What each of `ranks` has brought to this meeting of theirs."""
    store = dist.distributed_c10d._get_default_store()
    time = _met.get(ranks, 0) + 1

    def meeting(time: int) -> str:
        return f"rendezvous/{'-'.join(map(str, ranks))}/{time}"

    def place(rank: int, time: int) -> str:
        return f"{meeting(time)}/{rank}"

    store.set(place(dist.get_rank(), time), pickle.dumps((tag, payload)))
    places = {rank: place(rank, time) for rank in ranks}
    timeout = default_timeout() or dist.constants.default_pg_timeout
    problem = wait_for_ranks(store, meeting(time), places, dist.get_rank(), timeout)
    if problem:  # the others may come yet: who tries again meets them there
        raise RuntimeError(
            f"[rendezvous] {tag!r} of ranks {list(ranks)}: {problem}. All have to come to the same "
            "calls in the same order."
        )
    _met[ranks] = time
    found = [pickle.loads(store.get(name)) for name in places.values()]
    # All are here, so nobody reads any more what was brought to the meeting before.
    store.delete_key(place(dist.get_rank(), time - 1))
    if dist.get_rank() == ranks[0]:
        for key in meeting_keys(meeting(time - 1)):
            store.delete_key(key)
    return found


def _destroy() -> None:
    mesh.forget()
    dist.destroy_process_group()


def _leave_at_exit() -> None:
    global _leaves_at_exit
    if not _leaves_at_exit:
        atexit.register(_leave)
        _leaves_at_exit = True


def _leave() -> None:
    """For programs that never destroy their group: the others get what they still wait for."""
    # A forked child shares its parent's connections.
    if not dist.is_initialized() or _C.is_in_bad_fork():
        return
    _C.set_strict(False, 0)  # a step that was given up may be pending
    try:
        # After an error the others may be gone, and nobody needs the results.
        if not hasattr(sys, "last_value"):
            module = torch.get_device_module(device_type())
            for index in range(module.device_count() if module.is_initialized() else 0):
                module.synchronize(index)
        _destroy()
    except Exception as error:
        logger.warning("the process group was left with an error: %s", error)
