"""What test_sharding.py runs on each rank: options of FSDP on acc, beside eager's on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.distributed import models

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
LARGEST = 0.5  # norm of the gradients
HALF = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
Wrap = Callable[[nn.Module, torch.device], nn.Module]


def _flat(**options: Any) -> Wrap:
    def wrap(model: nn.Module, device: torch.device) -> nn.Module:
        if options.pop("mesh", False):
            shape = (2, dist.get_world_size() // 2)
            options["device_mesh"] = init_device_mesh(
                device.type, shape, mesh_dim_names=("replicate", "shard")
            )
        return FullyShardedDataParallel(
            model,
            device_id=device,
            auto_wrap_policy=ModuleWrapPolicy({models.Block}),
            **{"use_orig_params": True, **options},
        )

    return wrap


def _units(hybrid: bool = False, **options: Any) -> Wrap:
    def wrap(model: nn.Module, device: torch.device) -> nn.Module:
        world = dist.get_world_size()
        shape = (2, world // 2) if hybrid else (world,)
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        for module in model.modules():
            if isinstance(module, models.Block):
                fully_shard(module, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    return wrap


FLAT: dict[str, Callable[[], Wrap]] = {
    "no_shard": lambda: _flat(sharding_strategy=ShardingStrategy.NO_SHARD),
    "flat_parameters": lambda: _flat(use_orig_params=False),
    "precision": lambda: _flat(mixed_precision=MixedPrecision(**HALF)),
    "half_buffers": lambda: _flat(
        mixed_precision=MixedPrecision(
            **HALF, buffer_dtype=torch.bfloat16, cast_root_forward_inputs=True
        )
    ),
    "offload": lambda: _flat(cpu_offload=CPUOffload(offload_params=True)),
    "prefetch": lambda: _flat(
        backward_prefetch=BackwardPrefetch.BACKWARD_POST, forward_prefetch=True
    ),
    "unlimited": lambda: _flat(limit_all_gathers=False),
}
FLAT_OF_FOUR: dict[str, Callable[[], Wrap]] = {
    "hybrid": lambda: _flat(sharding_strategy=ShardingStrategy.HYBRID_SHARD, mesh=True),
    "hybrid_grad_op": lambda: _flat(
        sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2, mesh=True
    ),
    "hybrid_precision": lambda: _flat(
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        mesh=True,
        mixed_precision=MixedPrecision(**HALF),
    ),
}
UNITS: dict[str, Callable[[], Wrap]] = {
    "units_precision": lambda: _units(mp_policy=MixedPrecisionPolicy(**HALF)),
    "units_kept": lambda: _units(reshard_after_forward=False),
    "units_offload": lambda: _units(offload_policy=CPUOffloadPolicy()),
}
UNITS_OF_FOUR: dict[str, Callable[[], Wrap]] = {
    "units_resharded": lambda: _units(reshard_after_forward=2),
    "units_hybrid": lambda: _units(hybrid=True),
    "units_hybrid_precision": lambda: _units(hybrid=True, mp_policy=MixedPrecisionPolicy(**HALF)),
}
KINDS = FLAT | FLAT_OF_FOUR | UNITS | UNITS_OF_FOUR


def trained(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], optimizer: torch.optim.Optimizer
) -> tuple[list[float], list[float]]:
    """Losses and norms of gradients, which are clipped, of a training loop."""
    losses, norms = [], []
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).float(), y)
        loss.backward()
        norms.append(_clipped(model))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def _clipped(model: nn.Module) -> float:
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(LARGEST).item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), LARGEST)
    return (norm.full_tensor() if isinstance(model, FSDPModule) else norm).item()


def _away(mine: Any, theirs: Any) -> float:
    mine, theirs = (torch.as_tensor(value).double() for value in (mine, theirs))
    return float((mine - theirs).norm() / theirs.norm())


def compare(kind: str, device: torch.device) -> dict[str, float]:
    """How far losses, norms and the last state are from one process with the whole batches.

    Eager's own FSDP is no reference: on the CPU over Gloo torch 2.11's first one
    ends in a segmentation fault.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    one = models.made(0)
    expected = trained(one, models.data(), optimizer(one))
    model = KINDS[kind]()(models.made(0), device)
    mine = [
        tuple(models.part(tensor, rank, world).to(device) for tensor in pair)
        for pair in models.data()
    ]
    losses, norms = trained(model, mine, optimizer(model))
    mean = torch.tensor(losses, device=device)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    state, wanted = get_model_state_dict(model, options=WHOLE), one.state_dict()
    found = {"losses": _away(mean.cpu(), expected[0]), "norms": _away(norms, expected[1])}
    if rank == 0:
        assert list(state) == list(wanted)
        found["state"] = models.largest(_away(state[name], wanted[name]) for name in wanted)
    return found
