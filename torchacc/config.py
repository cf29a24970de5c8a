"""The configuration of `torchacc.accelerate`: a tree of dataclasses with TorchAcc's field names.

A name that no field has is refused where it is written, and so is a value of the wrong type. What
is known but not available in this version is refused by `validate()`, which `accelerate` calls: no
field is accepted and then ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchacc import config_file
from torchacc.bucketing import AUTO, contradiction
from torchacc.config_comm import CommConfig
from torchacc.config_dist import (
    DistConfig,
    DPConfig,
    FSDPConfig,
    PPConfig,
    SPConfig,
    TPConfig,
    complete_sizes,
)
from torchacc.config_node import (
    Node,
    child,
    is_bool,
    is_int,
    is_str,
    list_of,
    optional,
    set_of,
    setting,
)
from torchacc.launched import present_world_size

if TYPE_CHECKING:
    from torchacc.dist.mesh import Mesh


def _is_buckets(value: Any) -> bool:
    return value == AUTO if is_str(value) else list_of(is_int)(value)


def _is_pad_values(value: Any) -> bool:
    return isinstance(value, dict) and all(
        is_str(key) and (is_int(pad) or isinstance(pad, float)) for key, pad in value.items()
    )


@dataclass(eq=True)
class ComputeConfig(Node):
    """How operators compute.

    `fp16` and `bf16` concern fully sharded training: parameters travel and compute in this type,
    and forward runs under autocast. Elsewhere the program's own autocast regions say what is
    computed in half precision.

    `acc_scaled_dot_attn` has nothing to switch on: torch's `scaled_dot_product_attention` is
    recorded, and a fused kernel, as it is. `disable_kernel_patches` has nothing to switch off: no
    kernel of another library is patched.
    """

    fp16: bool = setting(False, is_bool, "of bool type")
    bf16: bool = setting(False, is_bool, "of bool type")
    acc_scaled_dot_attn: bool = setting(False, is_bool, "of bool type")
    disable_kernel_patches: bool = setting(False, is_bool, "of bool type")

    _path = "compute"

    def half(self) -> torch.dtype | None:
        """The half type that was chosen, if any."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else None

    def _validate(self) -> None:
        if self.fp16 and self.bf16:
            raise ValueError("[config] compute.fp16 and compute.bf16 cannot both be True.")


@dataclass(eq=True)
class MemoryConfig(Node):
    """What is recomputed in backward instead of kept.

    `gc` with `gc_cls` checkpoints every module whose class has one of the names in `gc_cls`;
    `gc_cnt` limits that to the first so many of them, in the order of `model.modules()`.
    """

    gc: bool = setting(False, is_bool, "of bool type")
    gc_cls: set[str] | None = setting(None, optional(set_of(is_str)), "a set of str, or None")
    gc_cnt: int | None = setting(None, optional(is_int), "of int type, or None")

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
class DataLoaderConfig(Node):
    """Padding of variable lengths to a few buckets, and who reads which part of the data.

    `buckets` lists the lengths. Without it, `max_length` is divided into `num_buckets` (8 if None)
    equal ones; without either nothing is padded. `buckets = "auto"` learns `num_buckets` lengths
    from the data (`torchacc.bucketing.LearntBuckets`), the last of which is `max_length` if that is
    set; not where processes read the same batches (`tp`, `pp`, `sp`). `pad_value_dict` maps the
    keys of a batch to what their padding holds; None is input_ids 0, attention_mask 0, labels -100.

    `shard` gives each process its part of the data, whatever the loader: see
    `torchacc.sharding.shard_loader`. Without it every process iterates the loader as it was made.

    `read_ahead` says whether a thread reads batches ahead of the training, or the loop does; None
    is what takes less time (`torchacc.AsyncLoader`).
    """

    buckets: list[int] | str | None = setting(
        None, optional(_is_buckets), "a list of int, 'auto', or None"
    )
    max_length: int | None = setting(None, optional(is_int), "of int type, or None")
    num_buckets: int | None = setting(None, optional(is_int), "of int type, or None")
    pad_value_dict: dict[str, int] | None = setting(
        None, optional(_is_pad_values), "a dict from str to a number, or None"
    )
    shard: bool = setting(False, is_bool, "of bool type")
    read_ahead: bool | None = setting(None, optional(is_bool), "of bool type, or None")

    _path = "dataloader"

    def pads(self) -> bool:
        """Whether batches are padded."""
        return self.buckets is not None or self.max_length is not None

    def _validate(self) -> None:
        wrong = contradiction(self.buckets, self.max_length, self.num_buckets)
        if wrong is not None:
            name, rule = wrong
            self._bad(name, getattr(self, name), rule)


@dataclass(eq=True)
class Config(Node):
    """The options of `torchacc.accelerate`. A new object has every default; none is shared.

    Raises AttributeError where an option is set that there is not, TypeError for a value of another
    type, ValueError (by `validate`) for one that cannot be.
    """

    backend: str = setting("lazy", is_str, "of str type")
    compute: ComputeConfig = child(ComputeConfig)
    memory: MemoryConfig = child(MemoryConfig)
    dataloader: DataLoaderConfig = child(DataLoaderConfig)
    dist: DistConfig = child(DistConfig)

    def _validate(self) -> None:
        if self.backend not in ("lazy", "eager"):
            self._bad("backend", self.backend, "should be 'lazy' or 'eager'.")
        if self.backend == "eager":
            self._not_available(
                "backend",
                self.backend,
                "ACC_MODE=eager in the environment runs each operator at once on the same device.",
            )
        for name in ("pp", "tp", "sp"):
            size = getattr(self.dist, name).size
            if size > 1 and self.dataloader.buckets == AUTO:
                # How far a loader reads ahead is a matter of time, and counts in learning.
                self.dataloader._bad(
                    "buckets",
                    AUTO,
                    f"the processes of dist.{name}.size = {size} need the same lengths, and after "
                    "a pass that one leaves early each may learn others. List the lengths, or set "
                    "max_length.",
                )

    def validate(self) -> None:
        """Checks this node and all below it, and fills `dist.dp.size` in if it is None.

        Raises TypeError, ValueError, or NotImplementedError for what this version cannot do; the
        message names the field. No other process is asked: all of them raise the same.
        """
        super().validate()

    @classmethod
    def from_file(cls, path: str | Path) -> Config:
        """The configuration in a file of JSON (*.json) or YAML (*.yaml, *.yml).

        Raises:
            OSError: the file cannot be read.
            ValueError: its text is not what its name says, or names an option that there is not.
            TypeError: the value of an option is of another type.
            ImportError: it is YAML, and there is no PyYAML.
        """
        return cls._from(config_file.read(path), str(path))

    def get_mesh(self) -> Mesh:
        """The mesh of processes that the sizes under `dist` describe, made at the first call.

        All processes have to call it, and the process group has to be there.
        """
        from torchacc.dist.mesh import mesh_of_sizes

        dist = self.dist
        names = ("dp", "fsdp", "pp", "tp", "sp")
        sizes = {name: getattr(dist, name).size for name in names}
        return mesh_of_sizes(complete_sizes(sizes, present_world_size()), tuple(dist.topology))

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


__all__ = [
    "CommConfig",
    "ComputeConfig",
    "Config",
    "DPConfig",
    "DataLoaderConfig",
    "DistConfig",
    "FSDPConfig",
    "MemoryConfig",
    "PPConfig",
    "SPConfig",
    "TPConfig",
]
