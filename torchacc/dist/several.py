"""What `accelerate` does where several processes train a model together.

What wraps a model is imported only there: see `torchacc.dist`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchacc import launched
from torchacc.dist import group
from torchacc.dist.parallel_module import ParallelModule
from torchacc.follow import follow_device
from torchacc.logger import say_once
from torchacc.sharding import distributed_sampler
from torchacc_device import _C

if TYPE_CHECKING:
    from torchacc.config import Config
    from torchacc.dist.distributed_parallel import DistributedParallel


def prepare(model: nn.Module) -> None:
    """Chooses this process's device and makes the process group, if that was not done yet."""
    if not isinstance(model, ParallelModule):
        group.choose_device()
    group.ensure_group()


def is_one_of_several() -> bool:
    """Whether a launcher started this process and others that train with it."""
    return launched.is_launched() and dist.get_world_size() > 1


def trains_together(model: nn.Module) -> bool:
    """Whether `model` is to be wrapped: there are other processes, and it is not wrapped yet.

    Raises ValueError for a model on the CPU that the program has wrapped by itself.
    """
    if _is_wrapped_by_torch(model):
        if any(parameter.device.type == "cpu" for parameter in model.parameters()):
            raise ValueError(
                f"[accelerate] the model is a {type(model).__name__} on the CPU, which cannot be "
                "moved any more. Pass the model itself: accelerate wraps it."
            )
        return False
    return dist.get_world_size() > 1 and not isinstance(model, ParallelModule)


def _is_wrapped_by_torch(model: nn.Module) -> bool:
    """Whether it exchanges gradients by itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(model, (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)):
        return True
    return isinstance(model, DistributedDataParallel)


def wrap(model: nn.Module, device: torch.device, config: Config) -> DistributedParallel:
    """The model for training by all processes, each with the values of the first."""
    from torchacc.dist.agree import broadcast_from_first, check_same_model
    from torchacc.dist.distributed_parallel import DistributedParallel

    # Before the first step: its kernels have to be the same ones everywhere.
    _C.run_alike()
    check_same_model(model)
    if config.dist.fsdp.size == 1 and config.dist.pp.size == 1:
        model.to(device)
    # Else a process has not memory for the whole model: each unit moves when it is split.
    broadcast_from_first(model, device)
    follow_device(model)
    return DistributedParallel(model, config)


def data_place(config: Config) -> tuple[int, int, int]:
    """Which part of the data this process reads, of how many, and a seed that all have."""
    if dist.get_world_size() == 1:
        return 0, 1, 0
    mesh = config.get_mesh()
    seed = [torch.initial_seed()]
    dist.broadcast_object_list(seed, src=0)
    # Below the largest of torch's seeds, so that passes can be counted up from it.
    return mesh.joint_coordinate("dp", "fsdp"), mesh.joint_num("dp", "fsdp"), seed[0] >> 1


def say_how(model: nn.Module, loader: Iterable[Any] | None, config: Config) -> None:
    """Says once how the processes share the work; only the first process speaks."""
    line = group.torchrun_line()
    if line is not None:
        say_once("torchrun line", line, logging.INFO)
    count = dist.get_world_size()
    if count == 1 or dist.get_rank() != 0:
        return
    if isinstance(model, ParallelModule):
        sizes = {name: getattr(config.dist, name).size for name in ("dp", "fsdp", "pp", "tp", "sp")}
        shown = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        say_once(
            "processes",
            f"{count} processes train together ({shown}). Each starts from process 0's parameters "
            "and buffers.",
            logging.INFO,
        )
    if loader is not None:
        say_once("loader", _how_data_is_read(loader, config, count), logging.INFO)


def _how_data_is_read(loader: Iterable[Any], config: Config, count: int) -> str:
    if distributed_sampler(loader) is not None:
        return (
            "The loader's DistributedSampler divides the data. Its set_epoch is called for each "
            "iteration unless the program calls it."
        )
    if config.dataloader.shard:
        return f"The data is divided over the processes (dataloader.shard): {count} processes."
    return (
        f"Each of the {count} processes iterates the loader as it was made, over all of the data. "
        "config.dataloader.shard = True divides it."
    )
