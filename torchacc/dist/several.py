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
from torchacc.config_node import Node
from torchacc.dist import group
from torchacc.dist.parallel_module import ParallelModule
from torchacc.follow import follow_device
from torchacc.logger import logger, say_once
from torchacc.sharding import distributed_sampler, shard_loader
from torchacc_device import _replaced, _scaling

if TYPE_CHECKING:
    from torchacc.config import Config
    from torchacc.dist.distributed_parallel import DistributedParallel


def prepare(model: nn.Module) -> None:
    """Chooses this process's device and makes the process group, if that was not done yet."""
    if not isinstance(model, ParallelModule):
        group.choose_device()
    group.ensure_group()


def is_one_of_several() -> bool:
    """Whether others train with this process: a launcher's, or those of the program's own group."""
    return dist.get_world_size() > 1


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


def check(model: nn.Module, config: Config) -> None:
    """Refuses what `wrap` could not do, on every process, before anything is changed.

    Raises ValueError. All processes have to call it.
    """
    from torchacc.dist.agree import check_same_model, check_same_options
    from torchacc.dist.comm import processes_inside
    from torchacc.dist.distributed_parallel import needs_composable
    from torchacc.dist.units import WHOLE, check_units

    check_same_options(_shared_options(model, config))
    check_same_model(model)
    mesh = config.get_mesh()
    composable = needs_composable(model, mesh)
    if composable:
        from torchacc.dist.composable import check_composable

        check_composable(config, mesh)
    parts = [WHOLE]
    if mesh.num("pp") > 1:
        from torchacc.dist.cut import check_points, parts_of_stages

        check_points(model, config.dist.pp, config.memory)
        parts = parts_of_stages(model, config.dist.pp, config.memory)
    check_units(model, config, composable, parts)
    if config.dist.comm.hierarchical:
        processes_inside(mesh.joint_ranks("dp", "sp"), config.dist.comm.intra_size)


def _shared_options(model: nn.Module, config: Config) -> dict[str, object]:
    """The options that decide what processes exchange, as text that all of them write alike."""
    names = {id(module): name for name, module in model.named_modules()}

    def shown(value: object) -> object:
        if isinstance(value, (set, frozenset)):
            return sorted(value)
        if isinstance(value, list):
            return [shown(each) for each in value]
        return names.get(id(value), type(value)) if isinstance(value, nn.Module) else value

    options = config.dist
    parts = [config.compute, config.memory, *(getattr(options, name) for name in vars(options))]
    nodes = [part for part in parts if isinstance(part, Node)]
    chosen: dict[str, object] = {"dist.topology": options.topology}
    chosen |= {"dataloader.shard": config.dataloader.shard}
    for node in nodes:
        for name, value in vars(node).items():
            chosen[f"{node._path}.{name}"] = shown(value)
    if options.comm.hierarchical and options.comm.intra_size is None:
        chosen["dist.comm.hierarchical: LOCAL_WORLD_SIZE"] = launched.local_world_size(default=0)
    return chosen


def wrap(model: nn.Module, device: torch.device, config: Config) -> DistributedParallel:
    """The model for training by all processes, each with the values of the first."""
    from torchacc.dist.agree import broadcast_from_first
    from torchacc.dist.distributed_parallel import DistributedParallel

    _say_what_has_no_effect(model, config)
    if config.dist.fsdp.size == 1 and config.dist.pp.size == 1:
        model.to(device)
    # Else a process has not memory for the whole model: each unit moves when it is split.
    broadcast_from_first(model, device, config.get_mesh())
    follow_device(model)
    before = _replaced.note(model.named_parameters(remove_duplicate=False))
    wrapped = DistributedParallel(model, config)
    mesh = config.get_mesh()
    after = dict(wrapped.named_parameters(remove_duplicate=False))
    # Those of other stages stay what they were, and may be in this process's optimizer.
    whole = mesh.num("pp") == 1
    here = [p for p, names in before() if whole or not after.keys().isdisjoint(names)]
    _replaced.replace(here, after.values())
    if mesh.num("tp") > 1:
        _draw_alike(mesh.group("tp"), device)
    if max(mesh.num(name) for name in ("fsdp", "pp", "tp")) > 1:
        # Of replicas gradients are the same; parts of them may overflow on one process alone.
        _scaling.step_together(wrapped)
    return wrapped


def _draw_alike(group: dist.ProcessGroup, device: torch.device) -> None:
    """Processes that compute the same layers draw the same numbers in them, whatever they seeded.

    Else dropout would give each other gradients of what they all have, and their copies would
    part. On the CPU they go on drawing their own.
    """
    module = torch.get_device_module(device)
    state = [module.get_rng_state(device)]
    dist.broadcast_object_list(state, group=group, group_src=0)
    module.set_rng_state(state[0], device)


def _say_what_has_no_effect(model: nn.Module, config: Config) -> None:
    """Options that this way of training has no use for; the environment may have set some."""
    from torchacc.dist.distributed_parallel import needs_composable

    options, mesh = config.dist, config.get_mesh()
    by_buckets = mesh.joint_num("dp", "sp") > 1 and mesh.num("fsdp") == 1
    if dist.get_rank() != 0 or (by_buckets and not needs_composable(model, mesh)):
        return
    chosen = [f"dist.comm.{name}" for name in options.comm.changed()]
    if options.dp.find_unused_parameters:
        chosen.append("dist.dp.find_unused_parameters")
    if chosen:
        logger.warning(
            "[config] %s: without effect here. It is for DistributedDataParallel, and no parameter "
            "is trained by it with these sizes.",
            ", ".join(chosen),
        )


def seed_of_shards() -> int | None:
    """The seed of `divided`; None in a process of its own. All processes have to call it."""
    if dist.get_world_size() == 1:
        return None
    seed = [torch.initial_seed()]
    dist.broadcast_object_list(seed, src=0)
    # Below the largest of torch's seeds, so that passes can be counted up from it.
    return seed[0] >> 1


def divided(loader: Iterable[Any], config: Config, seed: int) -> Iterable[Any]:
    """A loader of the part of the data that this process reads; `seed` is the same on all.

    Those that differ along dp and fsdp have other parts; the stages of a pipeline, and what shares
    layers or sequences, read the same batches, in the same order.
    """
    mesh = config.get_mesh()
    rank, count = mesh.joint_coordinate("dp", "fsdp"), mesh.joint_num("dp", "fsdp")
    return shard_loader(loader, rank, count, seed)


def check_sampler(loader: Iterable[Any] | None, config: Config) -> None:
    """Raises ValueError on every process where a DistributedSampler gives some of those that have
    to read the same other parts. All processes have to call it, those without a loader as well.
    """
    read_together = [name for name in ("pp", "tp", "sp") if getattr(config.dist, name).size > 1]
    if not read_together or dist.get_world_size() == 1:
        return
    sampler = None if loader is None else distributed_sampler(loader)
    mesh = config.get_mesh()
    place = mesh.joint_coordinate("dp", "fsdp")
    part = None if sampler is None else (sampler.rank, sampler.num_replicas)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (place, part, loader is not None))
    parts = dict[int, set[Any]]()
    for there, theirs, reads in everyone:
        parts.setdefault(there, set()).update([theirs] if reads else [])
    if any(len(found) > 1 for found in parts.values()):
        shown = ", ".join(f"dist.{name}.size = {mesh.num(name)}" for name in read_together)
        raise ValueError(
            f"[accelerate] with {shown} some processes read the same batches, and the loaders' "
            f"DistributedSamplers have other parts for these: (rank, num_replicas) is {part} here, "
            f"and {[theirs for _, theirs, _ in everyone]} on all processes. This one needs "
            f"{(place, mesh.joint_num('dp', 'fsdp'))}. Pass a sampler with that, or a loader "
            "without such a sampler and config.dataloader.shard = True."
        )


def say_how(model: nn.Module, loader: Iterable[Any] | None, config: Config) -> None:
    """Says once how the processes share the work; only the first process speaks."""
    count = dist.get_world_size()
    line = group.torchrun_line() if count == 1 else None
    if line is not None:
        say_once("torchrun line", line, logging.INFO)
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
        line = _how_data_is_read(loader, config, count)
        say_once(f"loader: {line}", line, logging.INFO)


def _how_data_is_read(loader: Iterable[Any], config: Config, count: int) -> str:
    if distributed_sampler(loader) is not None:
        return (
            "The loader's DistributedSampler divides the data. Its set_epoch is called for each "
            "iteration unless the program calls it."
        )
    parts = (config.dist.dp.size or 1) * config.dist.fsdp.size
    together = count // parts
    if config.dataloader.shard:
        same = f", each for {together} processes, which read the same" if together > 1 else ""
        line = f"The data is divided (dataloader.shard) into {parts} parts{same}."
        if same and getattr(loader, "num_workers", None) == 0:
            line += (
                " What the data set or collate_fn draws at random is each process's own: let "
                "workers read (num_workers), which get the same seeds."
            )
        return line
    return (
        f"Each of the {count} processes iterates the loader as it was made, over all of the data. "
        "config.dataloader.shard = True divides it."
        + (
            f" {together} processes each train on the same batches (dist.pp, .tp, .sp): where it "
            "shuffles, give all the same seed, or set shard, which does."
            if together > 1
            else ""
        )
    )
