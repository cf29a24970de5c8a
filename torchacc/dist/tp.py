"""Tensor parallel training, on torch's DTensor: which layers are split how, the program says.

    from torchacc.dist import tp
    tp.parallelize(block, {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}, config)

before `accelerate`, in every process. The model is on the device afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torchacc.device import device_type
from torchacc.dist.group import init_process_group

if TYPE_CHECKING:
    from torchacc.config import Config


def device_mesh(config: Config) -> DeviceMesh:
    """The processes that share the tensors of this one. Makes the process group if need be.

    Raises ValueError when `config.dist.tp.size` is 1.
    """
    if config.dist.tp.size == 1:
        raise ValueError("[tp] config.dist.tp.size is 1: set how many processes share a tensor.")
    init_process_group(config)
    return config.get_mesh().device_mesh["tp"]


def parallelize(
    model: nn.Module, plan: ParallelStyle | dict[str, ParallelStyle], config: Config
) -> nn.Module:
    """Splits the layers of `model` that `plan` names, in place, and moves it to the device."""
    mesh = device_mesh(config)
    model.to(device_type())
    return parallelize_module(model, mesh, plan)


def mark_sharding(
    module: nn.Module, name: str, partition_spec: tuple[int | None, ...], config: Config
) -> DTensor:
    """Splits the parameter `name` of `module` along one dimension; its new value is returned.

    `partition_spec` has an entry for each dimension of the parameter: 0, the axis of the mesh, for
    the one to split, None for the others.
    """
    mesh = device_mesh(config)
    parameter = module.get_parameter(name)
    split = [dim for dim, axis in enumerate(partition_spec) if axis is not None]
    if len(partition_spec) != parameter.dim() or len(split) > 1:
        raise ValueError(
            f"[tp] partition_spec = {partition_spec} for {name} of shape {list(parameter.shape)}: "
            "should have an entry for each dimension, and one of them at most other than None."
        )
    placement: Placement = Shard(split[0]) if split else Replicate()
    made = nn.Parameter(
        distribute_tensor(parameter.detach().to(torch.device(device_type())), mesh, [placement]),
        requires_grad=parameter.requires_grad,
    )
    owner, _, last = name.rpartition(".")
    module.get_submodule(owner).register_parameter(last, made)
    return made.data


__all__ = [
    "ColwiseParallel",
    "PrepareModuleInput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "device_mesh",
    "mark_sharding",
    "parallelize",
]
