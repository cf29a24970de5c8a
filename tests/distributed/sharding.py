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
# In torch 2.11 the first FSDP's offloaded state of a model on the CPU is memory that it has freed:
# to read it is an error, or the end of the process.
ON_ALL_RANKS = StateDictOptions(full_state_dict=True)
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
# torch 2.11's FSDP1 waits for a stream there that cannot be waited for: AttributeError: 'Stream'
# object has no attribute 'synchronize'.
NOT_ON_THE_CPU = ("offload",)


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


def _distributed(
    kind: str, device: torch.device
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, meant over the ranks, norms and the last state."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = KINDS[kind]()(models.made(0), device)
    batches = [
        tuple(models.part(tensor, rank, world).to(device) for tensor in pair)
        for pair in models.data()
    ]
    losses, norms = trained(model, batches, optimizer(model))
    mean = torch.tensor(losses, device=device)
    dist.all_reduce(mean)
    options = ON_ALL_RANKS if device.type == "cpu" else WHOLE
    return (mean / world).tolist(), norms, get_model_state_dict(model, options=options)


def compare(kind: str, device: torch.device) -> dict[str, dict[str, float]]:
    """How far losses, norms and the last state are from one process with the whole batches, and
    from eager's FSDP of that kind on the CPU over Gloo.
    """
    mine = _distributed(kind, device)
    one = models.made(0)
    alone = (*trained(one, models.data(), optimizer(one)), one.state_dict())
    references = {"one process": alone}
    if kind not in NOT_ON_THE_CPU:
        references["eager"] = _distributed(kind, torch.device("cpu"))
    found = {}
    for name, theirs in references.items():
        found[name] = {"losses": _away(mine[0], theirs[0]), "norms": _away(mine[1], theirs[1])}
        if dist.get_rank() == 0:
            assert list(mine[2]) == list(theirs[2])
            found[name]["state"] = models.largest(_away(mine[2][n], theirs[2][n]) for n in mine[2])
    return found
