"""Fully sharded data parallel training, by torch's FullyShardedDataParallel.

Of torch's two, this is the one that TorchAcc's options describe: it can make each unit one flat
parameter, its `state_dict()` holds whole tensors under the model's names, so that a checkpoint does
not depend on the number of processes, and it has the functions for optimizer states.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.hooks import RemovableHandle

from torchacc.device import device_type
from torchacc.dist import shards
from torchacc.dist.group import current_index
from torchacc.dist.half import run_in_half
from torchacc.dist.parallel_module import ParallelModule
from torchacc.dist.shard_format import METADATA
from torchacc.dist.shards import ShardedUnits, model_name
from torchacc.dist.units import wrapped_classes

if TYPE_CHECKING:
    from torchacc.config import Config
    from torchacc.dist.mesh import Mesh


class FullyShardedDataParallel(ParallelModule):
    """Each process of the dimension `fsdp` holds a part of every parameter.

    With `dp` above 1 the parts are held once for each of its processes. Parameters and buffers are
    taken as they are: `accelerate` gives all processes the same. `state_dict()` gathers whole
    tensors, so all processes have to call it.
    """

    def __init__(self, model: nn.Module, config: Config) -> None:
        super().__init__(model, config)
        options = config.dist.fsdp
        mesh = self._acc_mesh
        # What trains on other data with the same parts.
        several = mesh.joint_num("dp", "sp") > 1
        strategy = fsdp.ShardingStrategy
        units = wrapped_classes(model, options.wrap_layer_cls)
        half = config.compute.half()
        wrapped = ShardedUnits(
            model,
            device_mesh=_device_mesh(mesh),
            sharding_strategy=strategy.HYBRID_SHARD if several else strategy.FULL_SHARD,
            # In half precision torch keeps batch norms in float32, where there is a policy.
            auto_wrap_policy=ModuleWrapPolicy(units) if units or half is not None else None,
            device_id=torch.device(device_type(), current_index()),
            use_orig_params=not options.flatten_parameters,
            # It would wait for the device in every unit. Memory is planned over the whole step.
            limit_all_gathers=False,
            mixed_precision=None if half is None else _mixed_precision(half),
        )
        run_in_half(half, fsdp.FullyShardedDataParallel.fsdp_modules(wrapped))
        wrapped.replica = mesh.joint_coordinate("dp", "sp")
        self._acc_wrap(wrapped, wrapped)
        # Puts torch's wrappers into the names of a state.
        self._acc_renames = next(iter(wrapped._load_state_dict_pre_hooks))

    def clip_grad_norm_(self, max_grad_norm: float) -> Tensor:
        return self._acc_names.clip_grad_norm_(max_grad_norm)

    # torch's names have its wrappers in them, except inside of `summon_full_params`.

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield model_name(name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield model_name(name), buffer

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        for name, module in super().named_modules(*args, **kwargs):
            if not isinstance(module, fsdp.FullyShardedDataParallel):
                yield model_name(name), module

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self._acc_user.named_children()

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> dict[str, Any]:
        made = super().state_dict(*args, prefix=prefix, **kwargs)
        versions = getattr(made, "_metadata", {})
        for name in [name for name in versions if f"{name}.".startswith(prefix)]:
            versions[model_name(name)] = versions.pop(name)
        return made

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Takes whole tensors, or this process's shards (`sharded_model_state_dict`)."""
        if shards.holds_shards(state_dict):
            return shards.load_model_shards(sharded_module(self), state_dict, *args, **kwargs)
        saved = getattr(state_dict, "_metadata", {})
        versions = {model_name(name): version for name, version in saved.items()}
        state = OrderedDict(state_dict)
        state._metadata = {  # type: ignore[attr-defined]
            name: versions.get(model_name(name), {})
            for name, _ in self._acc_names.named_modules(remove_duplicate=False)
        }
        found = super().load_state_dict(state, *args, **kwargs)
        return type(found)(*([model_name(name) for name in names] for names in found))

    def _register_load_state_dict_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        made = super()._register_load_state_dict_pre_hook(*args, **kwargs)
        # The program's hooks see the model's names.
        self._acc_names._load_state_dict_pre_hooks.move_to_end(self._acc_renames)
        return made

    def get_shard_metadata(self) -> dict[str, Any]:
        """What this process's shards are, in plain values: for files (`docs/checkpoints.md`)."""
        return sharded_module(self).get_shard_metadata()

    @staticmethod
    def sharded_model_state_dict(model: nn.Module) -> dict[str, Any]:
        """This process's shards as a file holds them: `model` and `shard_metadata`.

        They share memory with the model. All processes have to call it.
        """
        sharded = sharded_module(model)
        layout = shards.layout_of(sharded, shards.new_save_id())
        return {"model": shards.model_shards(sharded), METADATA: layout.to_dict()}

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of `optim` in this process as a file holds it: `optimizer`, `shard_metadata`.

        Its tensors share memory with the optimizer's. All processes have to call it.
        """
        sharded = sharded_module(model)
        held = shards.optimizer_shards(sharded, optim)
        layout = shards.layout_of(sharded, shards.new_save_id())
        return {"optimizer": held, METADATA: layout.to_dict()}

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        rank0_only: bool = True,
        cpu_offload: bool = True,
    ) -> dict[str, Any]:
        """The state of `optim` with whole tensors, under the model's names.

        All processes have to call it; with `rank0_only` the others get an empty dictionary.
        """
        sharded = sharded_module(model)
        with _full(sharded, rank0_only, cpu_offload):
            return fsdp.FullyShardedDataParallel.optim_state_dict(sharded, optim)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None,
        rank0_only: bool = True,
    ) -> dict[str, Any]:
        """This process's part of a state with whole tensors, ready for `optim.load_state_dict`.

        All processes have to call it; with `rank0_only` the others need not have the state. What
        `sharded_optim_state_dict` gave is this process's part already; each brings its own.
        """
        sharded = sharded_module(model)
        if optim_state_dict is not None and METADATA in optim_state_dict:
            return shards.optimizer_shards_to_load(sharded, optim, optim_state_dict)
        if optim_state_dict is not None and not {"state", "param_groups"} <= {*optim_state_dict}:
            keys = ", ".join(map(str, optim_state_dict))
            raise ValueError(
                f"[fsdp] the optimizer's state has {keys or 'nothing'}, and should have 'state' "
                f"and 'param_groups', or as a shard 'optimizer' and {METADATA!r}."
            )
        with _full(sharded, rank0_only, cpu_offload=True):
            return fsdp.FullyShardedDataParallel.optim_state_dict_to_load(
                sharded, optim, optim_state_dict
            )


def _device_mesh(mesh: Mesh) -> DeviceMesh:
    """The shards, and before them what has the same ones, if several do: torch's order.

    With a mesh states are DTensors for torch.distributed.checkpoint. Its other kind, ShardedTensor,
    cannot be loaded where a process has nothing of some tensor.
    """
    shards_group, names = mesh.group("fsdp"), ("dp", "sp")
    if mesh.joint_num(*names) == 1:
        return DeviceMesh.from_group(shards_group, device_type(), mesh_dim_names=("fsdp",))
    return DeviceMesh.from_group(
        [mesh.joint_group(*names), shards_group],
        device_type(),
        mesh.joint_array(names, ("fsdp",)),
        mesh_dim_names=("replica", "fsdp"),
    )


def _mixed_precision(half: torch.dtype) -> fsdp.MixedPrecision:
    """Parameters travel and compute in half precision, gradients are added in float32."""
    return fsdp.MixedPrecision(
        param_dtype=half,
        reduce_dtype=torch.float32,
        # Autocast says which operators take half precision; inputs stay as they are, the model's
        # and those of a unit.
        cast_forward_inputs=False,
        cast_root_forward_inputs=False,
    )


def sharded_module(model: nn.Module) -> ShardedUnits:
    """torch's wrapper inside `model`. Raises ValueError if there is none."""
    found = model
    while isinstance(found, ParallelModule):
        found = found._acc_inner
    if isinstance(found, fsdp.FSDPModule):
        raise ValueError(
            f"[fsdp] the parameters of this {type(found).__name__} are DTensors, since its layers "
            "or stages are split, too: there are no flat shards. Save model.state_dict(), which "
            "gathers whole tensors (docs/checkpoints.md)."
        )
    if not isinstance(found, ShardedUnits):
        raise ValueError(
            f"[fsdp] the model is a {type(model).__name__} that is not sharded. Pass what "
            "accelerate returned with dist.fsdp.size above 1."
        )
    return found


@contextmanager
def _full(sharded: ShardedUnits, rank0_only: bool, cpu_offload: bool) -> Iterator[None]:
    model = fsdp.FullStateDictConfig(offload_to_cpu=cpu_offload, rank0_only=rank0_only)
    optim = fsdp.FullOptimStateDictConfig(offload_to_cpu=cpu_offload, rank0_only=rank0_only)
    with warnings.catch_warnings():
        # It recommends functions for code that shall work with all of torch's wrappers.
        warnings.filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
        kind = fsdp.StateDictType.FULL_STATE_DICT
        with fsdp.FullyShardedDataParallel.state_dict_type(sharded, kind, model, optim):
            yield
