"""States of optimizers, between shards and whole tensors.

A state has values for each key of an optimizer: a unit of FSDP, or a parameter. Vectors lie as the
parameters do; numbers, tensors without dimensions (`step`) and None belong to all elements.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchacc.dist.shard_format import (
    Layout,
    Part,
    Unit,
    check_whole,
    from_memory_order,
    in_memory_order,
)


def names_of(optimizer: Mapping[str, Any], layout: Layout, where: str) -> dict[Any, str]:
    """The keys of an optimizer's state, and the unit or parameter that each stands for."""
    keys = [key for group in optimizer["param_groups"] for key in group["params"]]
    if all(isinstance(key, str) for key in keys):
        names = {key: key for key in keys}
    else:
        groups = optimizer["param_groups"]
        given = [name for group in groups for name in group.get("param_names", ())]
        given = given or list(layout.order if len(groups) == 1 else ())
        if len(given) != len(keys):
            raise ValueError(
                f"[checkpoint] {where}: the optimizer has {len(keys)} parameters in {len(groups)} "
                f"groups, by numbers, and the model has {len(layout.order)}; which is which cannot "
                "be told. Save FullyShardedDataParallel.sharded_optim_state_dict(model, optimizer)."
            )
        names = dict(zip(keys, given, strict=True))
    known = {*layout.units, *layout.parts()}
    unknown = [name for name in names.values() if name not in known]
    unknown += [key for key in optimizer["state"] if key not in names]
    if unknown:
        raise ValueError(
            f"[checkpoint] {where}: the optimizer holds {unknown[0]!r}, which the model has not."
        )
    return names


def named(optimizer: Mapping[str, Any], layout: Layout, where: str) -> dict[str, Any]:
    names = names_of(optimizer, layout, where)
    groups = [
        {
            **{key: value for key, value in group.items() if key != "param_names"},
            "params": [names[key] for key in group["params"]],
        }
        for group in optimizer["param_groups"]
    ]
    state = {names[key]: value for key, value in optimizer["state"].items()}
    return {"state": state, "param_groups": groups}


def parameters_of(layout: Layout, name: str) -> list[str]:
    unit = layout.units.get(name)
    return [name] if unit is None else [part.name for part in unit.parameters]


def _is_vector(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def whole_of_unit(unit: Unit, states: Sequence[Any], where: str) -> dict[str, dict[str, Any]]:
    """The states of a unit's parameters, from those of its shards."""
    made: dict[str, dict[str, Any]] = {part.name: {} for part in unit.parameters}
    length = unit.shard_numel(len(states))
    for key in _common_keys(states, where):
        values = [state[key] for state in states]
        if not _is_vector(values[0]):
            _check_equal(values, f"{where}, {key},")
            for each in made.values():
                each[key] = copy.deepcopy(values[0])
            continue
        for rank, value in enumerate(values):
            _check_length(value, length, f"{where}, {key}, in shard {rank}")
        for name, tensor in unit.whole(values).items():
            made[name][key] = tensor
    return made


def whole_of_part(part: Part, unit: Unit, states: Sequence[Any], where: str) -> dict[str, Any]:
    """The state of a parameter, from those of the shards in which it lies."""
    length = unit.shard_numel(len(states))
    held = {rank: part.held_by(rank, length) for rank in range(len(states))}
    # An empty parameter lies nowhere; then any will do that has a state.
    ranks = [rank for rank, (begin, end) in held.items() if end > begin]
    ranks = ranks or [rank for rank, state in enumerate(states) if state is not None][:1]
    made: dict[str, Any] = {}
    for key in _common_keys([states[rank] for rank in ranks], where):
        values = [states[rank][key] for rank in ranks]
        if not _is_vector(values[0]):
            _check_equal(values, f"{where}, {key},")
            made[key] = copy.deepcopy(values[0])
            continue
        for rank, value in zip(ranks, values, strict=True):
            begin, end = held[rank]
            _check_length(value, end - begin, f"{where}, {key}, in shard {rank}")
        made[key] = from_memory_order(torch.cat(values), part)
    return made


def shards_of_unit(unit: Unit, whole: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [{} for _ in range(count)]
    names = [part.name for part in unit.parameters]
    for key in _common_keys([whole[name] for name in names], "the optimizer's state"):
        values = {name: whole[name][key] for name in names}
        if not _is_vector(values[names[0]]):
            _check_equal(list(values.values()), f"the optimizer's state {key} of {names[0]}")
            shards: Sequence[Any] = [copy.deepcopy(values[names[0]]) for _ in range(count)]
        else:
            for part in unit.parameters:
                check_whole(values[part.name], part, f"{part.name}, {key}")
            shards = unit.shards(values, count)
        for state, shard in zip(made, shards, strict=True):
            state[key] = shard
    return made


def shards_of_part(
    part: Part, unit: Unit, state: Mapping[str, Any], count: int
) -> list[dict[str, Any] | None]:
    """The state in each shard; None where nothing of the parameter lies in it."""
    length = unit.shard_numel(count)
    made: list[dict[str, Any] | None] = []
    for rank in range(count):
        begin, end = part.held_by(rank, length)
        made.append({} if end > begin else None)
        for key, value in state.items() if end > begin else ():
            if _is_vector(value):
                check_whole(value, part, f"{part.name}, {key}")
                value = in_memory_order(value, part)[begin:end].clone()
            made[-1][key] = copy.deepcopy(value)  # type: ignore[index]
    return made


def _common_keys(states: Sequence[Any], where: str) -> list[str]:
    """What each of several states has: exp_avg, step, ... Raises ValueError where they differ."""
    if any(state is None or state.keys() != states[0].keys() for state in states):
        found = [sorted(map(str, state)) if state else state for state in states]
        raise ValueError(f"[checkpoint] {where} differs between shards: {found}.")
    return list(states[0])


def _check_equal(values: Sequence[Any], where: str) -> None:
    for value in values:
        if not same(value, values[0]):
            raise ValueError(
                f"[checkpoint] {where} is {values[0]} in one place and {value} in another, and "
                "should be the same. The shards are of different moments."
            )


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, and so all that is in them."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def _check_length(value: Any, length: int, where: str) -> None:
    if not isinstance(value, Tensor) or tuple(value.shape) != (length,):
        found = f"shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"[checkpoint] {where} should be a vector of {length} elements, as the parameters, "
            f"and has {found}. Such an optimizer's state cannot be made whole."
        )
