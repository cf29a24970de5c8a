"""The backend `acc` (alias `lazy`) of torch.distributed.

    torch.distributed.init_process_group("acc")

Collectives on acc tensors are recorded like operators. What carries them is PyTorch's own: NCCL
where acc tensors lie on GPUs, Gloo on hosts.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import sys
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchacc_device import _C, _patches

# "lazy" is what TorchAcc called it.
NAMES = ("acc", "lazy")

# Seconds from one look into the store at which ranks meet to the next: at most, while they are few;
# and so many for each of them, since it answers all.
_PAUSE = 0.1
_SHARE = 1e-4


def install() -> None:
    """Makes the backend known to torch.distributed, where there is one; a second call does nothing.

    The first name is what `init_process_group()` takes while acc is the accelerator.
    """
    if not dist.is_available():
        return
    for name in NAMES:
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, _create, extended_api=True, devices=["acc"])
    if any(os.environ.get(name, "") not in ("", "0") for name in _SWITCHES):
        follow_switches()


# TI-ACC's, of how gradients are exchanged (torchacc.config_comm says what they mean).
_SWITCHES = (
    "LIGHT_2D_ALLREDUCE",
    "LIGHT_TOPK_ALLREDUCE",
    "TIACC_TRAINING_FUSION_THRESHOLD",
    "TIACC_TRAINING_NUM_NCCL_STREAMS",
)


def follow_switches() -> None:
    """DistributedDataParallel of programs that do not call `accelerate` follows them, too."""
    _patches.apply_exchanging(_construct)


def _construct(*args: Any, **options: Any) -> None:
    # The front end is imported only where it is wanted.
    from torchacc.dist.data_parallel import construct

    construct(*args, **options)


def _create(options: Any, transport_options: Any) -> dist.Backend:
    """Called by torch.distributed on each rank of a new group.

    `transport_options`: of ProcessGroupNCCL, what the user gave as `pg_options`; else None.
    """
    # A group that is made again in the same store has another name there, or its ranks would find
    # the addresses of the old one. All ranks make a group, so that each of them counts the same.
    counter = f"made/{options.group_rank}"
    store = dist.PrefixStore(f"made/{options.store.add(counter, 1)}", options.store)
    arguments = (store, options.group_rank, options.group_size)
    together = options.group_size > 1 and _C.executor_name() == "host"
    if together:
        kernels_problem = _tell_of_kernels(store, options.group_rank)
    try:
        _meet(*arguments, _time_to_meet(options.timeout), options.global_ranks_in_group)
    except BaseException:
        # This rank is not there any more: when it tries again it meets those that come only now.
        with contextlib.suppress(RuntimeError):
            if not store.check([_here(options.group_rank)]):
                options.store.add(counter, -1)
        raise
    if _C.executor_name() == "host":
        transport = dist.ProcessGroupGloo(*arguments, timeout=options.timeout)
    else:
        transport = _nccl(arguments, options, transport_options)
    transport.options.global_ranks_in_group = options.global_ranks_in_group
    transport.options.group_name = options.group_id
    transport._set_sequence_number_for_group()
    if options.group_size > 1:
        # Ranks that do the same have to do it with the same kernels, from the first step on.
        _C.run_alike()
    if together:
        _agree_on_kernels(store, kernels_problem)
    _end_before_the_interpreter()
    return _C.ProcessGroupACC(transport, store)


def default_backend() -> _C.ProcessGroupACC | None:
    """What carries tensors of acc in the default group; None where nothing of ours does."""
    if not dist.is_initialized():
        return None
    group = dist.group.WORLD
    if all(device.type != "acc" for device in group._device_types):
        return None
    backend = group._get_backend(torch.device("acc"))
    return backend if isinstance(backend, _C.ProcessGroupACC) else None


def default_timeout() -> timedelta | None:
    """The default group's, as far as it is ours."""
    backend = default_backend()
    return None if backend is None else backend.transport.options._timeout


def _time_to_meet(timeout: timedelta) -> timedelta:
    """Where the program gives a new group none, torch gives its own: no rank is waited for longer
    than in the default group then, whose timeout the program may have chosen. But for what that
    group may fail with: it says more.
    """
    limit = default_timeout()
    if limit is None or not _patches.without_timeout():
        return timeout
    return min(timeout, limit + _time_to_hear())


def _time_to_hear() -> timedelta:
    """Within which all ranks hear of an error of the default group; who has caught it may come so
    much later.
    """
    return timedelta(seconds=_C.seconds_to_hear())


def _here(rank: int) -> str:
    """The key of a rank that is where a group is made."""
    return f"here/{rank}"


def _meet(
    store: dist.Store, rank: int, size: int, timeout: timedelta, global_ranks: list[int]
) -> None:
    """Waits for all ranks of a new group. Raises RuntimeError that names those that do not come."""
    names = list(global_ranks or range(size))
    store.set(_here(rank), "1")
    places = {name: _here(other) for other, name in enumerate(names)}
    problem = wait_for_ranks(store, "here", places, names[rank], timeout)
    if problem:
        raise RuntimeError(
            f"[torch.distributed] a group of ranks {names} cannot be made: {problem}. All ranks "
            "have to call new_group (or init_process_group), in the same order."
        )


def meeting_keys(meeting: str) -> tuple[str, str]:
    """Where the ranks of that meeting are counted, and what says that all of them have come."""
    return f"{meeting}/count", f"{meeting}/all"


def wait_for_ranks(
    store: dist.Store, meeting: str, places: dict[int, str], rank: int, timeout: timedelta
) -> str:
    """Waits until each rank has come, its key of `places` set; returns "" then, and else why not.

    They are counted under `meeting`, which no other meeting is called: each asks the store for the
    same few keys, however many they are. Only where it is in vain each rank's key is looked at, and
    the one of this `rank` is taken back, also where the user interrupts: who comes later is not to
    meet a rank that waits no longer.
    """
    count, together = meeting_keys(meeting)
    counted = 0

    def take_back() -> None:
        if counted:
            store.add(count, -1)
        store.delete_key(places[rank])

    try:
        counted = store.add(count, 1)
        if counted == len(places):
            store.set(together, "1")
        problem = _wait_for_key(store, together, timeout, len(places))
        if not problem:
            return ""
        late = [other for other, place in places.items() if not store.check([place])]
        if not late:  # the last one has come just now
            return ""
        take_back()
        return f"{problem} ranks {late} have not come"
    except RuntimeError as error:
        return f"the store where they meet does not answer ({error})"
    except KeyboardInterrupt:
        with contextlib.suppress(RuntimeError):
            if not store.check([together]):
                take_back()
        raise


def _wait_for_key(store: dist.Store, key: str, timeout: timedelta, ranks: int) -> str:
    """Waits until `key` is there; returns "" then, and else why it waits no longer.

    That is the time, or that the default group has failed meanwhile: who has ended for that does
    not come any more. Who waits there for this rank cannot be told before from one that is late.
    `ranks` of them may wait at once.

    It asks again and again: nothing but its end ends a store's own wait, of which TCPStore warns.
    """
    known = _default_failure()  # before: they meet all the same
    problem = f"after {timeout.total_seconds():g} s"
    began = time.monotonic()
    end = began + timeout.total_seconds()
    while not store.check([key]):
        now = time.monotonic()
        if now >= end:
            return problem
        if not known and (known := _default_failure()):
            problem = f"the default group has failed meanwhile ({known}), and"
            end = min(end, now + _time_to_hear().total_seconds())
        pause = max(min((now - began) / 4, _PAUSE), ranks * _SHARE)
        time.sleep(min(pause, max(0.0, end - now)))
    return ""


def _default_failure() -> str:
    backend = default_backend()
    return "" if backend is None else backend.failure()


@functools.cache
def _end_before_the_interpreter() -> None:
    """Groups end before the interpreter does, if they are destroyed or only garbage knows them.

    Their threads must not give tensors back while it ends: PyTorch ends the process then.
    """
    if not dist.is_initialized():
        # The default group of when this is imported stays, as a default of its functions. Who wraps
        # a model in DistributedDataParallel imports it.
        import torch.distributed.nn.functional  # noqa: F401

    atexit.register(gc.collect)
    atexit.register(_wait_for_sends)


def _wait_for_sends() -> None:
    """A send has ended for the program when its contents are kept, received or not."""
    # After an error the others may be gone, and a forked child has none of the groups' threads.
    if hasattr(sys, "last_value") or _C.is_in_bad_fork():
        return
    try:
        _C.wait_for_sends()
    except Exception as error:
        warnings.warn(str(error), stacklevel=1)


# Why this process uses no generated kernels, once it has agreed to that; "" before.
_unfused = ""


def _tell_of_kernels(store: dist.Store, rank: int) -> str:
    """Before the ranks meet: when they have met all of them have told. Returns what it tells."""
    problem = _unfused or _C.kernels_problem()
    if problem:
        store.set("kernels/problem", f"rank {rank}: {problem}")
    return problem


def _agree_on_kernels(store: dist.Store, problem: str) -> None:
    """Where one rank has no generated kernels no rank uses any. `problem`: of this one.

    What all ranks compute, the update of replicated parameters, would differ in its last bits, and
    more with each step. That they have kernels is what they agree on, and not whose: compilers and
    processors may differ. On GPUs the compiler comes with torch.
    """
    global _unfused
    if not store.check(["kernels/problem"]):
        return
    told = store.get("kernels/problem").decode()
    if not _unfused and not problem.startswith("ACC_MODE="):
        warnings.warn(
            f"[torch.distributed] no rank uses generated kernels, since one has none: {told}",
            stacklevel=2,
        )
    _unfused = _unfused or told
    _C.run_unfused()


def _let_ranks_capture_alone() -> None:
    """Each rank captures a step when its own plan repeats, and a rank that logs has other plans.

    By default NCCL registers the memory of collectives while they are captured, and waits with that
    until all ranks do the same. It reads the variable at the first communicator of a process.
    """
    name = "NCCL_GRAPH_REGISTER"
    given = os.environ.setdefault(name, "0")
    if given != "0":
        warnings.warn(
            f"[torch.distributed] {name}={given}: NCCL waits for all ranks to capture a collective "
            "together, and acc's do not. Unset it, or set ACC_MODE=nograph.",
            stacklevel=2,
        )


def _nccl(arguments: tuple[Any, int, int], options: Any, given: Any) -> dist.Backend:
    if given is None:
        given = dist.ProcessGroupNCCL.Options()
    elif not isinstance(given, dist.ProcessGroupNCCL.Options):
        raise TypeError(
            f"[torch.distributed] pg_options is a {type(given).__name__}; on GPUs the process "
            'group "acc" takes torch.distributed.ProcessGroupNCCL.Options.'
        )
    given._timeout = options.timeout
    _let_ranks_capture_alone()
    return dist.ProcessGroupNCCL(*arguments, given)
