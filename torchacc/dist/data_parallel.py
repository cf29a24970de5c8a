"""Data parallel training: every process has the whole model, and gradients are averaged."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed import ProcessGroup, get_rank
from torch.distributed.distributed_c10d import _get_default_group
from torch.nn.parallel import DistributedDataParallel

from torchacc.config_comm import AUTO, CommConfig
from torchacc.dist.comm import Policy, make_policy, register_policy
from torchacc.dist.cost import measured
from torchacc.dist.parallel_module import ParallelModule
from torchacc.logger import logger

if TYPE_CHECKING:
    from torchacc.config import Config

_MEBIBYTE = 1 << 20


def _suitable_bucket(model: nn.Module, group: ProcessGroup) -> int | None:
    """How many bytes of gradients should travel together, by a measurement of the group."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if group.size() == 1 or not trained:
        return None
    cost = measured(group, trained[0].device)
    bucket = cost.bucket(sum(parameter.nbytes for parameter in trained))
    if get_rank() == 0:
        logger.info(
            "gradients travel in buckets of %.1f MiB: an all-reduce takes %.3f ms and %.3g MB/s",
            bucket / _MEBIBYTE,
            cost.latency * 1e3,
            cost.bandwidth / 1e6,
        )
    return bucket


def _bucket_options(model: nn.Module, comm: CommConfig, group: ProcessGroup) -> dict[str, Any]:
    bucket = comm.fusion_threshold
    if bucket == AUTO:
        bucket = _suitable_bucket(model, group)
    return {} if bucket is None else {"bucket_cap_mb": bucket / _MEBIBYTE}


# A configuration has said how gradients are exchanged, whatever the environment says.
_configured: ContextVar[bool] = ContextVar("_configured", default=False)


def construct(
    original: Callable[..., None], self: DistributedDataParallel, *args: Any, **options: Any
) -> None:
    """DistributedDataParallel's `__init__` for programs that do not call `accelerate`.

    Gradients of modules on acc are exchanged as TI-ACC's switches in the environment say. What a
    program says itself goes first: its `bucket_cap_mb`, and a communication hook that it registers
    before the first forward. Raises ValueError for switches that `dist.comm` would refuse.
    """
    bound = inspect.signature(original).bind(self, *args, **options)
    given = bound.arguments
    mesh = given.get("device_mesh")
    group = mesh.get_group(0) if mesh is not None else given.get("process_group")
    group = group or _get_default_group()
    if _configured.get() or group.size() == 1:
        return original(self, *args, **options)
    comm = CommConfig()
    comm.validate()
    if given.get("bucket_cap_mb") is None:
        given |= _bucket_options(given["module"], comm, group)
    original(*bound.args, **bound.kwargs)
    policy = make_policy(comm, group)
    if policy is not None:
        self.register_forward_pre_hook(_LateHook(policy))


class _LateHook:
    """Registers a policy at the first forward, unless torch or the program has registered one."""

    def __init__(self, policy: Policy | None) -> None:
        self._policy = policy

    def __call__(self, model: DistributedDataParallel, *_: Any) -> None:
        policy, self._policy = self._policy, None
        if policy is None or getattr(model, "_comm_hooks", None):
            return
        if any(hasattr(p, "_in_backward_optimizers") for p in model.parameters()):
            return
        try:
            register_policy(model, policy)
        except RuntimeError as refused:  # one of torch's own, which `_comm_hooks` has not
            logger.warning("gradients are exchanged by the program's own hook: %s", refused)

    def __reduce__(self) -> Any:
        return _LateHook, (None,)  # groups cannot be pickled


class DataParallel(ParallelModule):
    """Wraps a model in torch's DistributedDataParallel over the processes that see other data.

    These are the dimensions `dp` and `sp` of the mesh. Parameters and buffers are taken as they
    are: `accelerate` gives all processes the same. Before each forward in training mode the buffers
    are those of the first process, as DistributedDataParallel does it.
    """

    def __init__(self, model: nn.Module, config: Config) -> None:
        super().__init__(model, config)
        dist = config.dist
        group = self._acc_mesh.joint_group("dp", "sp")
        options = _bucket_options(model, dist.comm, group)
        configured = _configured.set(True)
        try:
            wrapped = DistributedDataParallel(
                model,
                process_group=group,
                init_sync=False,
                find_unused_parameters=dist.dp.find_unused_parameters,
                **options,
            )
        finally:
            _configured.reset(configured)
        policy = make_policy(dist.comm, group)
        if policy is not None:
            register_policy(wrapped, policy)
        self._acc_wrap(wrapped)
