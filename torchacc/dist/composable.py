"""Sharding and replication by torch's composable functions, `fully_shard` and `replicate`.

They take what FullyShardedDataParallel and DistributedDataParallel do not: layers that are split
over processes (`torchacc.dist.tp`), and stages of a pipeline, which run several micro batches
forward before the first goes backward.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.modules.batchnorm import _BatchNorm

from torchacc.dist.buffers import ReplicaBuffers
from torchacc.dist.half import run_in_half
from torchacc.dist.parallel_module import ParallelModule, with_versions
from torchacc.dist.units import wrapped_classes

if TYPE_CHECKING:
    from torchacc.config import Config
    from torchacc.dist.mesh import Mesh


def check_composable(config: Config, mesh: Mesh) -> None:
    """Raises ValueError for what `Composable` cannot do.

    These are `dist.sp.size` above 1, policies of `dist.comm`, which are of
    DistributedDataParallel's buckets, and an order of the dimensions that torch does not take.
    """
    if mesh.num("sp") > 1:
        raise ValueError(
            f"[config] dist.sp.size = {mesh.num('sp')}: parts of a sequence go together with dp "
            "and fsdp, and not with layers or stages that are split as well."
        )
    if not config.dist.comm.is_default():
        raise ValueError(
            "[config] dist.comm chooses how DistributedDataParallel exchanges gradients, which "
            "does not take layers that are split. Leave its defaults (and TI-ACC's switches in "
            "the environment unset), or set dist.tp.size to 1."
        )
    wide = [name for name in config.dist.topology if name != "pp" and mesh.num(name) > 1]
    order = [name for name in ("dp", "fsdp", "tp") if name in wide]
    if wide != order:
        raise ValueError(
            f"[config] dist.topology = {config.dist.topology!r}: where layers or stages are split, "
            f"torch shards only over dimensions in the order {', '.join(order)}."
        )


class Composable(ParallelModule):
    """Each parameter is a DTensor: sharded over `fsdp`, or, without that, replicated over `dp`.

    With `dp` above 1 as well the shards are held once for each of its processes. Parameters are
    taken as they are: `accelerate` gives all processes the same. Before a forward the buffers are
    those of the first process that has the same layers; of a stage, the pipeline sees to it.
    `state_dict()` gathers whole tensors, so all processes have to call it; with `keep_vars` it has
    the parameters themselves. `load_state_dict` takes whole tensors.

    Raises ValueError for what `check_composable` refuses.
    """

    def __init__(self, model: nn.Module, config: Config) -> None:
        super().__init__(model, config)
        self._acc_without_sync = 0  # scopes of no_sync
        check_composable(config, self._acc_mesh)
        half = config.compute.half()
        several = tuple(name for name in ("dp", "fsdp") if self._acc_mesh.num(name) > 1)
        mesh = self._acc_mesh.device_mesh[several]
        if "fsdp" in several:
            units = wrapped_classes(model, config.dist.fsdp.wrap_layer_cls)
            # Autocast says which operators take half precision; inputs of a unit stay as they are.
            policy = MixedPrecisionPolicy(half, half and torch.float32, cast_forward_inputs=False)
            # As torch's older way has it: statistics stay in float32, also of units.
            exact = (_BatchNorm,) if half is not None else ()
            whole = MixedPrecisionPolicy(cast_forward_inputs=False)
            modules = [m for m in dict.fromkeys(_leaves_first(model)) if m is not model]
            for module in modules:
                if isinstance(module, exact):
                    fully_shard(module, mesh=mesh, mp_policy=whole)
            kinds = tuple(units)
            inside = [m for m in modules if isinstance(m, kinds) and not isinstance(m, exact)]
            for module in (*inside, model):
                fully_shard(module, mesh=mesh, mp_policy=policy)
            run_in_half(half, (*inside, model))
        else:
            replicate(model, mesh=mesh)
        self._acc_buffers_of_all = ReplicaBuffers(model, self._acc_mesh, "dp", "fsdp")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        exchanges = torch.is_grad_enabled() and self._acc_without_sync == 0
        self._acc_buffers_of_all.share(changes=exchanges)
        return super().forward(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._acc_without_sync += 1
        self._acc_inner.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._acc_without_sync -= 1
            if self._acc_without_sync == 0:
                self._acc_inner.set_requires_gradient_sync(True)

    def state_dict(
        self, *args: Any, prefix: str = "", keep_vars: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        made = super().state_dict(*args, prefix=prefix, keep_vars=keep_vars, **kwargs)
        if not keep_vars:
            make_whole(made, prefix)
        return made

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        parts = split_as_held(state_dict, self._acc_names)
        return super().load_state_dict(parts, *args, **kwargs)


def _leaves_first(module: nn.Module) -> Iterator[nn.Module]:
    """A unit takes all parameters inside of it that no unit has yet: inner ones come first."""
    for child in module.children():
        yield from _leaves_first(child)
    yield module


def make_whole(state: dict[str, Any], prefix: str) -> None:
    """Puts whole tensors in the places of split ones, under names that begin with `prefix`.

    All processes that have parts of them have to call it.
    """
    for name, value in state.items():
        if name.startswith(prefix) and isinstance(value, DTensor):
            state[name] = value.full_tensor()


def split_as_held(state_dict: Mapping[str, Any], module: nn.Module) -> OrderedDict[str, Any]:
    """Whole tensors as `module` holds those with their names, ready for its `load_state_dict`."""
    held = module.state_dict()
    made = OrderedDict(
        (name, _like(value, held[name]) if name in held else value)
        for name, value in state_dict.items()
    )
    return with_versions(made, state_dict)


def _like(whole: Any, held: Any) -> Any:
    """A whole tensor as `held` is split; anything else as it is.

    By hand: torch 2.11 cannot divide a dimension that is split twice into parts of unequal size.
    """
    if not isinstance(held, DTensor) or isinstance(whole, DTensor) or whole.shape != held.shape:
        return whole
    mesh, part = held.device_mesh, whole
    # What torch calls a strided shard is a part of what a later dimension of the mesh has split.
    for axis in sorted(
        range(mesh.ndim), key=lambda axis: isinstance(held.placements[axis], _StridedShard)
    ):
        dim = getattr(held.placements[axis], "dim", None)
        if dim is None:
            continue
        chunks = part.chunk(mesh.size(axis), dim)
        index = mesh.get_local_rank(axis)
        part = chunks[index] if index < len(chunks) else part.narrow(dim, 0, 0)
    local = part.to(held.device)
    return DTensor.from_local(
        local, mesh, held.placements, run_check=False, shape=held.shape, stride=held.stride()
    )
