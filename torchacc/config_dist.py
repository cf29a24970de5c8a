"""The part `dist` of the configuration: how training is spread over processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchacc.config_comm import CommConfig
from torchacc.config_node import (
    Node,
    child,
    is_bool,
    is_callable,
    is_int,
    is_str,
    list_of,
    made_setting,
    optional,
    set_of,
    setting,
)
from torchacc.launched import present_world_size

# The widest stride first. Without a place in the topology, `sp` comes last.
DIMENSIONS = ("dp", "fsdp", "pp", "tp")


def _is_split_points(value: Any) -> bool:
    return list_of(is_str)(value) or list_of(lambda v: isinstance(v, torch.nn.Module))(value)


@dataclass(eq=True)
class DPConfig(Node):
    """Data parallel. A `size` of None becomes, in `validate()`, what the other sizes leave over.

    `find_unused_parameters` is for models whose forward does not use every parameter each time.
    """

    size: int | None = setting(None, optional(is_int), "of int type, or None")
    find_unused_parameters: bool = setting(False, is_bool, "of bool type")

    _path = "dist.dp"

    def _validate(self) -> None:
        self._at_least("size", 1)


@dataclass(eq=True)
class TPConfig(Node):
    """Tensor parallel. Which layers are split how is the program's: see `torchacc.dist.tp`."""

    size: int = setting(1, is_int, "of int type")

    _path = "dist.tp"

    def _validate(self) -> None:
        self._at_least("size", 1)


@dataclass(eq=True)
class PPConfig(Node):
    """Pipeline parallel: a stage begins at each of the modules named in `split_points`."""

    size: int = setting(1, is_int, "of int type")
    num_micro_batches: int = setting(1, is_int, "of int type")
    input_names: list[str] | None = setting(
        None, optional(list_of(is_str)), "a list of str, or None"
    )
    split_points: list[str] | list[torch.nn.Module] = made_setting(
        list, _is_split_points, "a list of str or a list of Module"
    )
    broadcast_loss: bool = setting(True, is_bool, "of bool type")

    _path = "dist.pp"

    def _validate(self) -> None:
        self._at_least("size", 1)
        self._at_least("num_micro_batches", 1)
        count = len(self.split_points)
        if count + 1 != self.size:
            self._bad(
                "split_points",
                self.split_points,
                f"{count} split points make {count + 1} stages, and dist.pp.size is {self.size}.",
            )
        names = [point if isinstance(point, str) else id(point) for point in self.split_points]
        if len(set(names)) < count:
            self._bad("split_points", self.split_points, "should name each module once.")


@dataclass(eq=True)
class FSDPConfig(Node):
    """Fully sharded data parallel, by torch's FullyShardedDataParallel.

    Each module of a class of the model with one of the names in `wrap_layer_cls`, or of a subclass,
    is gathered and freed by itself, what remains as one more unit; `accelerate` warns where the
    model has no such class. Modules that share a parameter have to be in the same unit.
    `flatten_parameters` makes each unit one parameter; False keeps the parameters of the model.
    `sync_module_states` has nothing to switch on: every process starts from the first one's
    parameters and buffers.
    """

    size: int = setting(1, is_int, "of int type")
    wrap_layer_cls: set[str] = made_setting(set, set_of(is_str), "a set of str")
    flatten_parameters: bool = setting(True, is_bool, "of bool type")
    sync_module_states: bool = setting(False, is_bool, "of bool type")
    use_spmd: bool = setting(False, is_bool, "of bool type")
    shard_output_callable: Callable[..., None] | None = setting(
        None, optional(is_callable), "a callable, or None"
    )

    _path = "dist.fsdp"

    def _validate(self) -> None:
        self._at_least("size", 1)
        if self.use_spmd:
            self._not_available(
                "use_spmd", True, "Each process runs its own program: leave it False."
            )
        if self.shard_output_callable is not None:
            self._not_available(
                "shard_output_callable",
                self.shard_output_callable,
                "It annotates the output of an SPMD program, and there is none: leave it None.",
            )


@dataclass(eq=True)
class SPConfig(Node):
    """Sequence parallel: processes that hold parts of the same sequences."""

    size: int = setting(1, is_int, "of int type")

    _path = "dist.sp"

    def _validate(self) -> None:
        self._at_least("size", 1)


@dataclass(eq=True)
class DistConfig(Node):
    """How the training is spread over processes.

    `topology` lists the dimensions of the mesh, the widest stride first: neighbouring ranks differ
    in the last one. `sp` may be named too; else it comes last.
    """

    dp: DPConfig = child(DPConfig)
    tp: TPConfig = child(TPConfig)
    pp: PPConfig = child(PPConfig)
    fsdp: FSDPConfig = child(FSDPConfig)
    sp: SPConfig = child(SPConfig)
    comm: CommConfig = child(CommConfig)
    topology: list[str] = made_setting(lambda: list(DIMENSIONS), list_of(is_str), "a list of str")

    _path = "dist"

    def _validate(self) -> None:
        check_topology(self.topology)
        sizes = {name: getattr(self, name).size for name in (*DIMENSIONS, "sp")}
        self.dp.size = complete_sizes(sizes, present_world_size())["dp"]
        if self.fsdp.size > 1 and not self.comm.is_default():
            raise ValueError(
                f"[config] dist.comm changes how data parallel training adds up gradients, and "
                f"dist.fsdp.size = {self.fsdp.size} scatters them. Set one of the two."
            )


def check_topology(topology: list[str]) -> None:
    """Raises ValueError unless every dimension is named once; `sp` may be left out."""
    if sorted(topology) not in (sorted(DIMENSIONS), sorted((*DIMENSIONS, "sp"))):
        raise ValueError(
            f"[config] dist.topology = {topology!r}: should name each of {', '.join(DIMENSIONS)} "
            "once, and may name sp."
        )


def complete_sizes(sizes: dict[str, int | None], processes: int) -> dict[str, int]:
    """The sizes with a `dp` of None replaced by what the others leave over.

    Raises ValueError when `processes` cannot be arranged so. Nothing is asked of other processes:
    all of them raise the same.
    """
    others = {name: size or 1 for name, size in sizes.items() if name != "dp"}
    product = math.prod(others.values())
    dp = sizes.get("dp")
    if dp is None:
        if processes % product == 0:
            return {"dp": processes // product, **others}
    elif dp * product == processes:
        return {"dp": dp, **others}
    named = {**({} if dp is None else {"dp": dp}), **others}
    shown = [f"dist.{name}.size = {size}" for name, size in named.items() if size > 1]
    needed = product * (dp or 1)
    multiple = "a multiple of " if dp is None else ""
    raise ValueError(
        f"[config] {' and '.join(shown) or 'dist.dp.size = 1'} need {multiple}{needed} processes, "
        f"and there {'is' if processes == 1 else 'are'} {processes}. Start with "
        f"`torchrun --nproc_per_node={needed} ...`, or change the sizes."
    )
