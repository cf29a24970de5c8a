"""What a shard's metadata say, and the arithmetic between shards and whole tensors.

A unit of FSDP is one flat vector: its parameters in the order of their memory, one behind the
other, each at its offset. Of `world_size` shards each has ceil(numel / world_size) elements; the
last ones are filled up. `docs/checkpoints.md` describes the files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor

FORMAT = "torchacc.fsdp"
VERSION = 1
METADATA = "shard_metadata"
KINDS = ("model", "optimizer")  # the other key of a shard's file


@dataclass(frozen=True)
class Part:
    """One parameter and where it begins in its unit's vector; numbers are of elements."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def held_by(self, rank: int, length: int) -> tuple[int, int]:
        """Which elements of the parameter lie in shard `rank`, of `length`: from, to."""
        begin, end = rank * length - self.offset, (rank + 1) * length - self.offset
        return max(0, min(begin, self.numel)), max(0, min(end, self.numel))


@dataclass(frozen=True)
class Unit:
    """One flat vector: its length without what fills it up at the end, and what lies in it."""

    numel: int
    dtype: str
    parameters: tuple[Part, ...]

    def shard_numel(self, world_size: int) -> int:
        return -(-self.numel // world_size)

    def whole(self, shards: Sequence[Tensor]) -> dict[str, Tensor]:
        """The parameters, copied out of all shards of the vector."""
        vector = torch.cat(list(shards))
        return {part.name: _view(vector, part).clone() for part in self.parameters}

    def shards(self, whole: Mapping[str, Tensor], world_size: int) -> list[Tensor]:
        """The vector in `world_size` shards of equal length; what lies between parameters is 0."""
        length = self.shard_numel(world_size)
        first = whole[self.parameters[0].name]
        vector = torch.zeros(length * world_size, dtype=first.dtype, device=first.device)
        for part in self.parameters:
            _view(vector, part).copy_(whole[part.name])
        return [shard.clone() for shard in vector.split(length)]


def _view(vector: Tensor, part: Part) -> Tensor:
    return vector.as_strided(part.shape, part.stride, part.offset)


def in_memory_order(tensor: Tensor, part: Part) -> Tensor:
    """The elements of a whole parameter (or of its state) as they lie in the unit's vector."""
    vector = torch.empty(part.numel, dtype=tensor.dtype, device=tensor.device)
    vector.as_strided(part.shape, part.stride).copy_(tensor)
    return vector


def from_memory_order(vector: Tensor, part: Part) -> Tensor:
    """The other way round, copied."""
    return vector.as_strided(part.shape, part.stride).clone()


@dataclass(frozen=True)
class Layout:
    """The metadata of one shard.

    `order` has the names of what an optimizer of all parameters holds, in its order: units, or
    parameters where `flatten_parameters` is off. `shared` has other names of tied parameters.
    `kinds` says which kinds of files have this `save_id`; nothing, where each has its own.
    """

    rank: int
    world_size: int
    units: dict[str, Unit]
    order: tuple[str, ...]
    shared: dict[str, str]
    replica: int = 0
    save_id: str = ""
    kinds: tuple[str, ...] = ()

    def parts(self) -> dict[str, tuple[Part, Unit]]:
        """Every parameter, and the unit in which it lies."""
        return {part.name: (part, unit) for unit in self.units.values() for part in unit.parameters}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a file: dictionaries, lists, strings and integers."""
        return {"format": FORMAT, "version": VERSION, **_plain(asdict(self))}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def read_layout(metadata: Any, where: str) -> Layout:
    """The metadata of the shard that `where` names.

    Raises ValueError for what is not of this format, of a newer version, or incomplete.
    """
    if not isinstance(metadata, Mapping) or metadata.get("format") != FORMAT:
        found = metadata.get("format") if isinstance(metadata, Mapping) else metadata
        _foreign(where, f"the format of its {METADATA} is {_short(found)}, and not {FORMAT!r}")
    version = metadata.get("version")
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise ValueError(
            f"[checkpoint] {where}: its format has version {_short(version)}, and this torchacc "
            f"reads up to {VERSION}. Read it with the torchacc that wrote it, or a newer one."
        )
    try:
        layout = Layout(
            rank=int(metadata["rank"]),
            world_size=int(metadata["world_size"]),
            units={name: _read_unit(unit) for name, unit in metadata["units"].items()},
            order=tuple(metadata["order"]),
            shared=dict(metadata["shared"]),
            replica=int(metadata["replica"]),
            save_id=str(metadata["save_id"]),
            kinds=tuple(map(str, metadata.get("kinds", ()))),
        )
        unnamed = [name for name in layout.order if not isinstance(name, str)]
        if unnamed:
            raise TypeError(f"its order has {_short(unnamed[0])}")
        if len(layout.parts()) < sum(len(unit.parameters) for unit in layout.units.values()):
            raise ValueError("two parameters have one name")
        strangers = [name for name in layout.shared.values() if name not in layout.parts()]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        _foreign(where, f"its {METADATA} are incomplete ({type(error).__name__}: {error})")
    if strangers:
        _foreign(where, f"what it says is shared, {_short(strangers[0])}, is no parameter of it")
    if not 0 <= layout.rank < layout.world_size:
        _foreign(where, f"it says that it is shard {layout.rank} of {layout.world_size}")
    return layout


def _read_unit(unit: Mapping[str, Any]) -> Unit:
    parts = tuple(
        Part(
            str(part["name"]),
            tuple(map(int, part["shape"])),
            tuple(map(int, part["stride"])),
            int(part["offset"]),
        )
        for part in unit["parameters"]
    )
    read = Unit(int(unit["numel"]), str(unit["dtype"]), parts)
    end = max((part.offset + part.numel for part in parts), default=0)
    if end != read.numel:
        raise ValueError(f"a unit of {read.numel} elements has parameters up to {end}")
    for part in parts:
        steps = [(size - 1) * step for size, step in zip(part.shape, part.stride, strict=True)]
        if part.offset < 0 or part.numel and not 0 <= min(steps, default=0) <= sum(steps):
            raise ValueError(f"{part.name} begins before its unit")
        if part.numel and part.offset + sum(steps) >= read.numel:
            raise ValueError(f"{part.name} ends behind its unit")
        reach = 0
        for step, size in sorted(zip(part.stride, part.shape, strict=True)):
            if part.numel and size > 1 and step <= reach:
                raise ValueError(f"{part.name} has elements in one place")
            reach += (size - 1) * step
    return read


def check_shard(checkpoint: Any, where: str) -> Layout:
    """Raises ValueError where a shard's tensors are not what its metadata say.

    `where`: the file, for the message.
    """
    if not isinstance(checkpoint, Mapping) or METADATA not in checkpoint:
        _foreign(where, f"it is a {type(checkpoint).__name__} without {METADATA!r}")
    layout = read_layout(checkpoint[METADATA], where)
    kinds = [kind for kind in KINDS if isinstance(checkpoint.get(kind), Mapping)]
    if not kinds:
        keys = ", ".join(repr(key) for key in checkpoint)
        _foreign(where, f"it has neither 'model' nor 'optimizer', but {keys}")
    for kind in KINDS:
        if kind in checkpoint and kind not in kinds:
            _foreign(where, f"its {kind!r} is a {type(checkpoint[kind]).__name__}")
    if "optimizer" in kinds:
        _check_optimizer(checkpoint["optimizer"], where)
    for name, tensor in checkpoint.get("model", {}).items():
        if name not in layout.units:
            continue
        expected = (layout.units[name].shard_numel(layout.world_size),)
        dtype = layout.units[name].dtype
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != expected:
            found = list(tensor.shape) if isinstance(tensor, Tensor) else _short(tensor)
            _foreign(where, f"{name} should have {expected[0]} elements, and is {found}")
        if str(tensor.dtype) != f"torch.{dtype}":
            _foreign(where, f"{name} should be of {dtype}, and is of {tensor.dtype}")
    return layout


def _check_optimizer(optimizer: Mapping[str, Any], where: str) -> None:
    groups, states = optimizer.get("param_groups"), optimizer.get("state")
    if not isinstance(groups, list) or not isinstance(states, Mapping):
        _foreign(where, "its 'optimizer' has no 'param_groups' and 'state'")
    for group in groups:
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list):
            _foreign(where, "a parameter group of its 'optimizer' has no list 'params'")
        for name in group["params"]:
            if not isinstance(name, (str, int)):
                _foreign(where, f"its 'optimizer' names a parameter {_short(name)}")
    for name, state in states.items():
        if not isinstance(state, Mapping):
            _foreign(where, f"its 'optimizer' has as state of {name} a {type(state).__name__}")


def check_same_job(layouts: Sequence[Layout], names: Sequence[str]) -> None:
    """Raises ValueError unless these are shards of one checkpoint, all of them, one of each.

    `names`: the files, for the messages.
    """
    first = layouts[0]
    for layout, name in zip(layouts, names, strict=True):
        if layout.world_size != first.world_size:
            raise ValueError(
                f"[checkpoint] {name} is one of {layout.world_size} shards, and {names[0]} one of "
                f"{first.world_size}. Name the files of one checkpoint only, by the pattern "
                f"(for instance 'rank*-of-{first.world_size}-*.pth')."
            )
        if (layout.units, layout.order) != (first.units, first.order):
            raise ValueError(
                f"[checkpoint] {name} and {names[0]} are shards of different models: "
                f"{difference(layout, first)}. Name the files of one checkpoint only."
            )
        if layout.save_id != first.save_id:
            raise ValueError(
                f"[checkpoint] {name} and {names[0]} were not saved at the same time (save_id "
                f"{layout.save_id!r} and {first.save_id!r}): a save was interrupted, or saved over "
                "another. Use the last complete checkpoint, and a folder of its own for each."
            )
    ranks = {layout.rank for layout in layouts}
    # Not all of them: a damaged number of shards is any number.
    missing = list(islice((rank for rank in range(first.world_size) if rank not in ranks), 9))
    if missing:
        listed = ", ".join(map(str, missing[:8])) + " and more" * (len(missing) > 8)
        raise ValueError(
            f"[checkpoint] of {first.world_size} shards (says {names[0]}) there is none of rank "
            f"{listed}. Found: {', '.join(names)}."
        )
    seen: dict[tuple[int, int], str] = {}
    for layout, name in zip(layouts, names, strict=True):
        other = seen.setdefault((layout.rank, layout.replica), name)
        if other != name:
            raise ValueError(
                f"[checkpoint] {name} and {other} are both shard {layout.rank} of "
                f"{layout.world_size}. Name the files of one checkpoint only."
            )


def check_same_save(model: Layout, optimizer: Layout, where: str) -> None:
    """Raises ValueError where a model's files say that the optimizer's are of another save."""
    together = set(KINDS) in (set(model.kinds), set(optimizer.kinds))
    if together and model.save_id != optimizer.save_id:
        raise ValueError(
            f"[checkpoint] {where}: the model and the optimizer were not saved at the same time "
            f"(save_id {model.save_id!r} and {optimizer.save_id!r}): one was saved over, or copied "
            "here. Use files of one save, or convert each by itself (--ckpt_type model, optimizer)."
        )


def check_whole(value: Any, part: Part, what: str) -> None:
    """Raises ValueError unless a value is a whole tensor of the parameter's shape."""
    shape = tuple(value.shape) if isinstance(value, Tensor) else None
    if shape != part.shape:
        found = "missing" if shape is None else f"of shape {list(shape)}"
        raise ValueError(
            f"[checkpoint] {what} is {found}, and the shards say {list(part.shape)}: the state is "
            "of another model."
        )


def difference(one: Layout, other: Layout) -> str:
    """Where two layouts differ, for a message."""
    for name in (*one.units, *other.units):
        if name not in one.units or name not in other.units:
            return f"only one of them has {name}"
        first, second = one.units[name], other.units[name]
        if first.numel != second.numel:
            return f"{name} has {first.numel} and {second.numel} elements"
        if first != second:
            return f"{name} holds other parameters, types or offsets"
    return "their optimizers hold parameters in different order"


def _foreign(where: str, what: str) -> NoReturn:
    raise ValueError(
        f"[checkpoint] {where} is no shard of torchacc's, or a damaged one: {what}. "
        "docs/checkpoints.md says what such a file holds."
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
