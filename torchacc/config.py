"""The configuration of `torchacc.accelerate`: a tree of dataclasses with TorchAcc's field names.

A name that no field has is refused where it is written, and so is a value of the wrong type. What
is known but not available in this version is refused by `validate()`, which `accelerate` calls: no
field is accepted and then ignored.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

import torch

Check = Callable[[Any], bool]

_TOPOLOGY = ("dp", "fsdp", "pp", "tp")


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


def _is_callable(value: Any) -> bool:
    return callable(value)


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(check(item) for item in value)


def _set_of(check: Check) -> Check:
    return lambda value: isinstance(value, (set, frozenset)) and all(check(v) for v in value)


def _is_pad_values(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_str(key) and (_is_int(pad) or isinstance(pad, float)) for key, pad in value.items()
    )


def _is_split_points(value: Any) -> bool:
    return _list_of(_is_str)(value) or _list_of(lambda v: isinstance(v, torch.nn.Module))(value)


def _setting(default: Any, check: Check, what: str) -> Any:
    """A field with a plain default; `what` completes "should be ..."."""
    return field(default=default, metadata={"check": check, "what": what})


def _made_setting(factory: Callable[[], Any], check: Check, what: str) -> Any:
    """A field whose default is made anew for each object."""
    return field(default_factory=factory, metadata={"check": check, "what": what})


def _child(kind: type) -> Any:
    """A field that holds the next node of the tree."""
    return field(
        default_factory=kind,
        metadata={"check": lambda value: isinstance(value, kind), "what": f"a {kind.__name__}"},
    )


def _shown(value: Any) -> str:
    text = repr(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return f"{text} ({type(value).__name__})"


class _Node:
    """Refuses unknown names and wrong types at the assignment."""

    # How the node is reached from the root, for messages: "dist.fsdp".
    _path = ""

    def __setattr__(self, name: str, value: Any) -> None:
        entry = type(self).__dataclass_fields__.get(name)
        if entry is None:
            raise AttributeError(self._unknown(name))
        self._check(name, value)
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        # Called only for a name that is not there.
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(self._unknown(name))

    @classmethod
    def _where(cls, name: str) -> str:
        return f"{cls._path}.{name}" if cls._path else name

    @classmethod
    def _unknown(cls, name: str) -> str:
        known = [entry.name for entry in fields(cls)]
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        advice = f"Did you mean {cls._where(close[0])}?" if close else "It has: " + ", ".join(known)
        return f"[config] there is no option {cls._where(name)}. {advice}"

    @classmethod
    def _check(cls, name: str, value: Any) -> None:
        metadata = cls.__dataclass_fields__[name].metadata
        if not metadata["check"](value):
            raise TypeError(
                f"[config] {cls._where(name)} should be {metadata['what']}, got {_shown(value)}."
            )

    @classmethod
    def _bad(cls, name: str, value: Any, rule: str) -> NoReturn:
        raise ValueError(f"[config] {cls._where(name)} = {value!r}: {rule}")

    @classmethod
    def _not_available(cls, name: str, value: Any, advice: str) -> NoReturn:
        raise NotImplementedError(
            f"[config] {cls._where(name)} = {value!r} is not available in this version. {advice}"
        )

    def _at_least(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if value is not None and value < low:
            self._bad(name, value, f"should be at least {low}.")

    def _one_only(self, name: str) -> None:
        self._at_least(name, 1)
        value = getattr(self, name)
        if value is not None and value > 1:
            self._not_available(
                name, value, "Training runs in one process on one device: leave it at 1."
            )

    def validate(self) -> None:
        """Checks this node and all below it.

        Raises TypeError, ValueError, or NotImplementedError for what this version cannot do; the
        message names the field.
        """
        for entry in fields(self):
            value = getattr(self, entry.name)
            # Again, because a list or a set can change after it was assigned.
            self._check(entry.name, value)
            if isinstance(value, _Node):
                value.validate()
        self._validate()

    def _validate(self) -> None:
        """The rules of this node beyond the types of its fields."""


@dataclass(eq=True)
class ComputeConfig(_Node):
    """How operators compute.

    `disable_kernel_patches` has nothing to switch off: no kernel of another library is patched.
    """

    fp16: bool = _setting(False, _is_bool, "of bool type")
    bf16: bool = _setting(False, _is_bool, "of bool type")
    acc_scaled_dot_attn: bool = _setting(False, _is_bool, "of bool type")
    disable_kernel_patches: bool = _setting(False, _is_bool, "of bool type")

    _path = "compute"

    def _validate(self) -> None:
        if self.fp16 and self.bf16:
            raise ValueError("[config] compute.fp16 and compute.bf16 cannot both be True.")
        for name in ("fp16", "bf16"):
            if getattr(self, name):
                self._not_available(name, True, "Train in float32: leave it False.")
        if self.acc_scaled_dot_attn:
            self._not_available(
                "acc_scaled_dot_attn", True, "The attention of torch runs as it is: leave it False."
            )


@dataclass(eq=True)
class MemoryConfig(_Node):
    """What is recomputed in backward instead of kept.

    `gc` with `gc_cls` checkpoints every module whose class has one of the names in `gc_cls`;
    `gc_cnt` limits that to the first so many of them, in the order of `model.modules()`.
    """

    gc: bool = _setting(False, _is_bool, "of bool type")
    gc_cls: set[str] | None = _setting(None, _optional(_set_of(_is_str)), "a set of str, or None")
    gc_cnt: int | None = _setting(None, _optional(_is_int), "of int type, or None")

    _path = "memory"

    def _validate(self) -> None:
        self._at_least("gc_cnt", 0)
        if self.gc and not self.gc_cls:
            self._bad(
                "gc",
                True,
                "it needs memory.gc_cls, the class names of the modules to checkpoint, for "
                'example {"Bottleneck"}.',
            )


@dataclass(eq=True)
class DataLoaderConfig(_Node):
    """Padding of variable lengths to a few buckets, so that few different shapes occur.

    `buckets` lists the lengths. Without it, `max_length` is divided into `num_buckets` (8 if None)
    equal ones; without either nothing is padded. `pad_value_dict` maps the keys of a batch to what
    their padding holds; None is input_ids 0, attention_mask 0, labels -100.
    """

    buckets: list[int] | None = _setting(
        None, _optional(_list_of(_is_int)), "a list of int, or None"
    )
    max_length: int | None = _setting(None, _optional(_is_int), "of int type, or None")
    num_buckets: int | None = _setting(None, _optional(_is_int), "of int type, or None")
    pad_value_dict: dict[str, int] | None = _setting(
        None, _optional(_is_pad_values), "a dict from str to a number, or None"
    )

    _path = "dataloader"

    def _validate(self) -> None:
        self._at_least("max_length", 1)
        self._at_least("num_buckets", 1)
        if self.buckets is not None:
            if not self.buckets or min(self.buckets) < 1:
                self._bad("buckets", self.buckets, "should be lengths of at least 1.")
        elif self.num_buckets is not None and self.max_length is None:
            self._bad(
                "num_buckets", self.num_buckets, "it divides dataloader.max_length: set that too."
            )


@dataclass(eq=True)
class DPConfig(_Node):
    """Data parallel; a size of None means what the launcher's WORLD_SIZE asks for."""

    size: int | None = _setting(None, _optional(_is_int), "of int type, or None")

    _path = "dist.dp"

    def _validate(self) -> None:
        size = self.size
        self._one_only("size")
        world = os.environ.get("WORLD_SIZE", "")
        if size is None and world not in ("", "1"):
            raise NotImplementedError(
                f"[config] dist.dp.size: WORLD_SIZE={world} asks for data parallel training over "
                f"{world} processes, which is not available in this version. Start one process."
            )


@dataclass(eq=True)
class TPConfig(_Node):
    """Tensor parallel."""

    size: int = _setting(1, _is_int, "of int type")

    _path = "dist.tp"

    def _validate(self) -> None:
        self._one_only("size")


@dataclass(eq=True)
class PPConfig(_Node):
    """Pipeline parallel."""

    size: int = _setting(1, _is_int, "of int type")
    num_micro_batches: int = _setting(1, _is_int, "of int type")
    input_names: list[str] | None = _setting(
        None, _optional(_list_of(_is_str)), "a list of str, or None"
    )
    split_points: list[str] | list[torch.nn.Module] = _made_setting(
        list, _is_split_points, "a list of str or a list of Module"
    )
    broadcast_loss: bool = _setting(True, _is_bool, "of bool type")

    _path = "dist.pp"

    def _validate(self) -> None:
        self._one_only("size")
        self._at_least("num_micro_batches", 1)
        if len(self.split_points) + 1 != self.size:
            self._bad(
                "split_points",
                self.split_points,
                f"{len(self.split_points)} split points make {len(self.split_points) + 1} stages, "
                f"and dist.pp.size is {self.size}.",
            )


@dataclass(eq=True)
class FSDPConfig(_Node):
    """Fully sharded data parallel."""

    size: int = _setting(1, _is_int, "of int type")
    wrap_layer_cls: set[str] = _made_setting(set, _set_of(_is_str), "a set of str")
    flatten_parameters: bool = _setting(True, _is_bool, "of bool type")
    sync_module_states: bool = _setting(False, _is_bool, "of bool type")
    use_spmd: bool = _setting(False, _is_bool, "of bool type")
    shard_output_callable: Callable[..., None] | None = _setting(
        None, _optional(_is_callable), "a callable, or None"
    )

    _path = "dist.fsdp"

    def _validate(self) -> None:
        self._one_only("size")


@dataclass(eq=True)
class SPConfig(_Node):
    """Sequence parallel."""

    size: int = _setting(1, _is_int, "of int type")

    _path = "dist.sp"

    def _validate(self) -> None:
        self._one_only("size")


@dataclass(eq=True)
class DistConfig(_Node):
    """How the training is spread over processes; `topology` lists the widest stride first."""

    dp: DPConfig = _child(DPConfig)
    tp: TPConfig = _child(TPConfig)
    pp: PPConfig = _child(PPConfig)
    fsdp: FSDPConfig = _child(FSDPConfig)
    sp: SPConfig = _child(SPConfig)
    topology: list[str] = _made_setting(lambda: list(_TOPOLOGY), _list_of(_is_str), "a list of str")

    _path = "dist"

    def _validate(self) -> None:
        if sorted(self.topology) != sorted(_TOPOLOGY):
            self._bad(
                "topology", self.topology, f"should name each of {', '.join(_TOPOLOGY)} once."
            )


@dataclass(eq=True)
class Config(_Node):
    """The options of `torchacc.accelerate`. A new object has every default; none is shared."""

    backend: str = _setting("lazy", _is_str, "of str type")
    compute: ComputeConfig = _child(ComputeConfig)
    memory: MemoryConfig = _child(MemoryConfig)
    dataloader: DataLoaderConfig = _child(DataLoaderConfig)
    dist: DistConfig = _child(DistConfig)

    def _validate(self) -> None:
        if self.backend not in ("lazy", "eager"):
            self._bad("backend", self.backend, "should be 'lazy' or 'eager'.")
        if self.backend == "eager":
            self._not_available(
                "backend",
                self.backend,
                "ACC_MODE=eager in the environment runs each operator at once on the same device.",
            )

    def get_mesh(self) -> NoReturn:
        """The mesh of processes. Raises NotImplementedError: training runs in one process."""
        raise NotImplementedError(
            "[config] Config.get_mesh is not available in this version: training runs in one "
            "process on one device."
        )

    def is_distributed_parallel(self) -> bool:
        """Whether any parallel size is above 1."""
        dist = self.dist
        sizes = (dist.dp.size or 1, dist.tp.size, dist.pp.size, dist.fsdp.size, dist.sp.size)
        return max(sizes) > 1

    def is_tracing_enabled(self) -> bool:
        """Whether the model is traced to be split into pipeline stages."""
        return self.dist.pp.size > 1

    def is_lazy_backend(self) -> bool:
        """Whether operators are recorded and replayed."""
        return self.backend == "lazy"

    def is_eager_backend(self) -> bool:
        """Whether operators run at once."""
        return self.backend == "eager"
