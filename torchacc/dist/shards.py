"""What a process holds of a sharded model and of its optimizer, given out and taken back.

As it lies in memory, so nothing is exchanged and no whole tensor is ever made.
`torchacc.dist.state_dict_utils` does the rest with the files, without a model.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.nn.modules.module import _IncompatibleKeys

from torchacc.dist import shard_format
from torchacc.dist.group import rendezvous
from torchacc.dist.shard_format import METADATA, Layout, Part, Unit

_WRAPPER = "_fsdp_wrapped_module"  # the attribute that holds what torch's wrapper wraps
_FLAT = "_flat_param"  # the name of a unit's flat parameter
_EXTRA = "_extra_state"  # what nn.Module calls the result of get_extra_state


def model_name(name: str) -> str:
    """The model's name of what is in torch's wrappers."""
    return ".".join(part for part in name.split(".") if part != _WRAPPER)


class ShardedUnits(fsdp.FullyShardedDataParallel):
    """torch's wrapper, which also says what this process holds of each unit."""

    replica = 0  # which of the processes with the same shards this one is

    def get_shard_metadata(self) -> dict[str, Any]:
        """What this process's shards are, in plain values: for files (`docs/checkpoints.md`)."""
        return layout_of(self).to_dict()


def layout_of(sharded: ShardedUnits, save_id: str = "") -> Layout:
    shared: dict[str, str] = {}
    units = {}
    for name, prefix, flat in _flat_parameters(sharded):
        units[name] = unit = _unit(prefix, flat, shared)
        if _local(flat).numel() != unit.shard_numel(sharded.world_size):
            raise RuntimeError(
                f"[fsdp] {name} has {unit.numel} elements in {sharded.world_size} shards of "
                f"{_local(flat).numel()}: torch {torch.__version__} divides units in a way that "
                "the files of torchacc.dist.shards do not describe."
            )
    return Layout(
        rank=sharded.rank,
        world_size=sharded.world_size,
        units=units,
        order=tuple(model_name(name) for name, _ in sharded.named_parameters()),
        shared=shared,
        replica=sharded.replica,
        save_id=save_id,
    )


def new_save_id() -> str:
    """The same for the files of one save on all processes, and for no other save.

    All processes have to call it.
    """
    return rendezvous("torchacc.dist.shards", uuid.uuid4().bytes)[0].hex()


def _flat_parameters(sharded: ShardedUnits) -> Iterator[tuple[str, str, Any]]:
    """The name of each unit's flat parameter, what its parameters' names begin with, and itself."""
    for name, module in sharded.named_modules():
        if isinstance(module, fsdp.FullyShardedDataParallel) and module._handle is not None:
            prefix = model_name(name) + "."
            prefix = "" if prefix == "." else prefix
            yield prefix + _FLAT, prefix, module._handle.flat_param


def _unit(prefix: str, flat: Any, shared: dict[str, str]) -> Unit:
    def full(*path: str) -> str:
        return prefix + model_name(".".join(filter(None, path)))

    parts, offset, infos = [], 0, zip(flat._fqns, flat._shapes, flat._strides, strict=True)
    for numel, fills_up in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not fills_up:
            name, shape, stride = next(infos)
            parts.append(Part(full(name), tuple(shape), tuple(stride), offset))
        offset += numel
    for info in flat._shared_param_infos:
        first = full(info.prim_module_name, info.prim_param_name)
        shared[full(info.module_name, info.param_name)] = first
    end = max(part.offset + part.numel for part in parts)
    return Unit(end, str(_local(flat).dtype).removeprefix("torch."), tuple(parts))


def _local(flat: Any) -> Tensor:
    """This process's shard: the flat parameter itself may hold the whole after a forward."""
    return getattr(flat, "_local_shard", flat).detach()


# --- the model ------------------------------------------------------------------------------------


def model_shards(sharded: ShardedUnits) -> dict[str, Any]:
    """This process's shard of each unit by its name, and buffers and extra states as they are.

    Tensors share memory with the model's.
    """
    shards = {name: _local(flat) for name, _, flat in _flat_parameters(sharded)}
    buffers = {name: module._buffers[key] for name, module, key in _buffers(sharded)}
    extra = {name: module.get_extra_state() for name, module in _extra_states(sharded)}
    return {**shards, **{name: buffer.detach() for name, buffer in buffers.items()}, **extra}


def holds_shards(state_dict: Mapping[str, Any]) -> bool:
    """Whether a state is of shards: that of a file, or what is under its key 'model'."""
    return METADATA in state_dict or any(str(key).split(".")[-1] == _FLAT for key in state_dict)


def load_model_shards(
    sharded: ShardedUnits, state: Mapping[str, Any], strict: bool = True
) -> _IncompatibleKeys:
    """Takes back what `model_shards` gave, or a file that holds it.

    Nothing is changed where something does not fit.

    Raises:
        ValueError: a file of another process, another number of processes, or another model.
        RuntimeError: with `strict`, names are missing or not known; or sizes differ.
    """
    if METADATA in state:
        state = _opened(sharded, state, "model")
    targets: dict[str, Tensor] = {
        name: _local(flat) for name, _, flat in _flat_parameters(sharded)
    } | {name: module._buffers[key].detach() for name, module, key in _buffers(sharded)}
    extra = dict(_extra_states(sharded))
    missing = [name for name in (*targets, *extra) if name not in state]
    unknown = [name for name in state if name not in targets and name not in extra]
    problems = [f"missing: {', '.join(missing)}"] if strict and missing else []
    problems += [f"not known: {', '.join(map(str, unknown))}"] if strict and unknown else []
    for name, target in targets.items():
        value = state.get(name, target)
        if not isinstance(value, Tensor):
            problems.append(f"{name} is a {type(value).__name__} and no tensor")
        elif value.shape != target.shape:
            problems.append(
                f"{name} has the shape {list(value.shape)}, and is {list(target.shape)} in "
                f"{sharded.world_size} processes"
            )
    if problems:
        raise RuntimeError(
            f"[fsdp] shards that are not of this model: {'; '.join(problems)}. "
            "consolidate_and_reshard_fsdp_ckpts --reshard_num makes those of another number of "
            "processes."
        )
    with torch.no_grad():
        for name, target in targets.items():
            if name in state:
                target.copy_(state[name])
    for name, module in extra.items():
        if name in state:
            module.set_extra_state(state[name])
    _drop_whole_parameters(sharded)
    return _IncompatibleKeys(missing, unknown)


def _drop_whole_parameters(sharded: ShardedUnits) -> None:
    """A forward without a backward leaves whole parameters in the root unit for the next one."""
    for module in fsdp.FullyShardedDataParallel.fsdp_modules(sharded):
        handle = module._handle
        # A single process has nothing but whole ones.
        if handle is None or not handle.uses_sharded_strategy:
            continue
        if hasattr(handle.flat_param, "_local_shard") and not handle.needs_unshard():
            _reshard(module, handle, True)


def _modules(sharded: ShardedUnits) -> Iterator[tuple[str, nn.Module]]:
    """The model's modules, under each of their names, and what their tensors' names begin with."""
    for name, module in sharded.named_modules(remove_duplicate=False):
        if not isinstance(module, fsdp.FullyShardedDataParallel):
            name = model_name(name)
            yield f"{name}." if name else "", module


def _buffers(sharded: ShardedUnits) -> Iterator[tuple[str, nn.Module, str]]:
    for prefix, module in _modules(sharded):
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield prefix + key, module, key


def _extra_states(sharded: ShardedUnits) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in _modules(sharded):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield prefix + _EXTRA, module


# --- its optimizer --------------------------------------------------------------------------------


def optimizer_shards(sharded: ShardedUnits, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` with names in the place of numbers.

    Raises ValueError where it holds something that is not the model's.
    """
    names = _names_in(sharded, optimizer)
    state = optimizer.state_dict()
    groups = [
        {**group, "params": [names[number] for number in group["params"]]}
        for group in state["param_groups"]
    ]
    return {
        "state": {names[number]: value for number, value in state["state"].items()},
        "param_groups": groups,
    }


def optimizer_shards_to_load(
    sharded: ShardedUnits, optimizer: torch.optim.Optimizer, checkpoint: Mapping[str, Any]
) -> dict[str, Any]:
    """A file's state for `optimizer.load_state_dict`: numbers in the place of names.

    Raises ValueError for a file of another process, another number of processes, another model, or
    another division into parameter groups.
    """
    held = _opened(sharded, checkpoint, "optimizer")
    if not any(isinstance(key, str) for group in held["param_groups"] for key in group["params"]):
        return dict(held)  # optimizer.state_dict() as it was
    names = _names_in(sharded, optimizer)
    mine, numbers = optimizer.state_dict()["param_groups"], iter(range(len(names)))
    for index, (group, saved) in enumerate(zip(mine, held["param_groups"], strict=False)):
        here = [names[number] for number in group["params"]]
        if here != saved["params"]:
            other = next((n for n in saved["params"] if n not in here), "another order")
            raise ValueError(
                f"[fsdp] parameter group {index} of the optimizer has {len(here)} parameters, and "
                f"the shard's has {len(saved['params'])} ({other}). Make the optimizer as before."
            )
    if len(mine) != len(held["param_groups"]):
        raise ValueError(
            f"[fsdp] the optimizer has {len(mine)} parameter groups, and the shard's has "
            f"{len(held['param_groups'])}. Make the optimizer as before."
        )
    number_of = {name: number for number, name in names.items()}
    unknown = [name for name in held["state"] if name not in number_of]
    if unknown:
        raise ValueError(
            f"[fsdp] the shard has a state of {unknown[0]!r}, which is no parameter of the "
            "optimizer. Make the optimizer as before."
        )
    groups = [
        {**saved, "params": [next(numbers) for _ in saved["params"]]}
        for saved in held["param_groups"]
    ]
    state = {number_of[name]: dict(value) for name, value in held["state"].items()}
    return {"state": state, "param_groups": groups}


def _names_in(sharded: ShardedUnits, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """What the optimizer's parameters are called, by their numbers in its `state_dict()`."""
    names = {id(each): model_name(name) for name, each in sharded.named_parameters()}
    held = [each for group in optimizer.param_groups for each in group["params"]]
    for number, each in enumerate(held):
        if id(each) not in names:
            raise ValueError(
                f"[fsdp] parameter {number} of the optimizer, of shape {list(each.shape)}, is not "
                "one of the sharded model's. Build the optimizer after accelerate."
            )
    return {number: names[id(each)] for number, each in enumerate(held)}


def _opened(sharded: ShardedUnits, checkpoint: Mapping[str, Any], kind: str) -> Any:
    """What a file holds under `kind`. Raises ValueError unless it is this process's shard."""
    where = f"the shard for process {sharded.rank}"
    saved, mine = shard_format.check_shard(checkpoint, where), layout_of(sharded)
    if (saved.rank, saved.world_size) != (mine.rank, mine.world_size):
        raise ValueError(
            f"[fsdp] this process holds shard {mine.rank} of {mine.world_size}, and what is to be "
            f"loaded is shard {saved.rank} of {saved.world_size}. "
            "consolidate_and_reshard_fsdp_ckpts --reshard_num makes those of another number of "
            "processes."
        )
    if (saved.units, saved.order) != (mine.units, mine.order):
        raise ValueError(
            f"[fsdp] what is to be loaded is of another model, or was sharded otherwise: "
            f"{shard_format.difference(saved, mine)}. Load the consolidated file instead."
        )
    if kind not in checkpoint:
        raise ValueError(f"[fsdp] {where} has {', '.join(map(str, checkpoint))}, and no {kind!r}.")
    return checkpoint[kind]
