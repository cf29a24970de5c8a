"""`torchacc.accelerate`: the one call that puts a model and its loader on the lazy device."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, overload

import torch
from torch import Tensor, nn

from torchacc.boundary import install_hooks
from torchacc.config import Config
from torchacc.context import get_global_context
from torchacc.device import is_lazy_device, lazy_device
from torchacc.dist import several
from torchacc.dist.parallel_module import ParallelModule
from torchacc.dist.units import warn_of_missing
from torchacc.follow import follow_device
from torchacc.launched import is_launched
from torchacc.loader import AsyncLoader, check_iterable
from torchacc.logger import logger, say_once
from torchacc.patch import patch
from torchacc.utils.checkpoint import check_classes, checkpoint_classes

_SAME_ATTENTION = (
    "compute.acc_scaled_dot_attn: torch's scaled_dot_product_attention stays in place, since it is "
    "recorded and runs as a fused kernel on acc as it is."
)


@overload
def accelerate(
    model: nn.Module, loader: None = None, config: Config | None = None
) -> nn.Module: ...


@overload
def accelerate(
    model: nn.Module, loader: Iterable[Any], config: Config | None = None
) -> tuple[nn.Module, AsyncLoader]: ...


@overload
def accelerate(
    model: nn.Module, *, dataloader: Iterable[Any], config: Config | None = None
) -> tuple[nn.Module, AsyncLoader]: ...


def accelerate(
    model: nn.Module,
    loader: Iterable[Any] | None = None,
    config: Config | None = None,
    *,
    dataloader: Iterable[Any] | None = None,
) -> nn.Module | tuple[nn.Module, AsyncLoader]:
    """Prepares a model, and the loader that feeds it, for training on the lazy device.

    The model is moved in place (its Parameters stay the same objects, so an optimizer that was
    built before goes on working) and has an attribute `device` afterwards, which follows its
    parameters. The loader is wrapped in an `AsyncLoader`: its batches arrive on the device. Nothing
    is done twice: a model or a loader that comes from an earlier call, for example with a second
    loader for validation, is taken as it is.

    What the program says of CUDA's autocast, GradScaler and memory acts on the lazy device from
    here on: see `torchacc.patch`.

    Under torchrun each process uses the device of its LOCAL_RANK, and the processes train the model
    together: data parallel, unless `config.dist` says otherwise. The model that is returned is then
    a wrapper that looks like the model; every process starts from the first one's parameters and
    buffers. With `config.dist.fsdp.size` above 1 the parameters become parts of others: build the
    optimizer afterwards (a step of one that was built before is an error). The process group is
    made here, unless the program has made one; without torchrun it is one of this process alone,
    which the program may replace by its own.

    All processes have to call it, with the same model and config. Each iterates the loader as it
    was made, unless `config.dataloader.shard` is set or it has a DistributedSampler.

    Args:
        model: on the CPU, or on a lazy device already.
        loader: an iterable of batches, usually a `torch.utils.data.DataLoader`.
        config: the options; None is `Config()`. Only `dist.dp.size` is filled in, if it is None.
        dataloader: another name of `loader`.

    Returns:
        The model; with a loader the pair (model, loader).

    Raises:
        TypeError: the model is no Module, the loader cannot be iterated, the config is no Config.
        ValueError: a parameter or buffer lies on a device from which it cannot come, the config
            contradicts itself, the number of processes or the loader's DistributedSampler, or the
            processes' models differ.
        RuntimeError: there are more processes than devices, or the launcher's variables are
            incomplete.
        NotImplementedError: the config asks for what this version cannot do; the field is named.
    """
    if dataloader is not None:
        if loader is not None:
            raise TypeError("[accelerate] loader and dataloader are the same: pass one of them.")
        loader = dataloader
    if not isinstance(model, nn.Module):
        swapped = isinstance(loader, nn.Module)
        raise TypeError(
            f"[accelerate] the model is a {type(model).__name__}, not a torch.nn.Module. "
            + ("The model comes first, then the loader." if swapped else "Pass the model itself.")
        )
    if config is None:
        config = Config()
    if not isinstance(config, Config):
        raise TypeError(
            f"[accelerate] config is a {type(config).__name__}, not a torchacc.Config. "
            "Make one with torchacc.Config() and set its fields."
        )
    config.validate()
    several.prepare(model)
    device = _device_of(model)
    # Everything that can be refused is refused before anything is changed.
    together = several.trains_together(model)
    if together:
        several.check(model, config)
        several.check_sampler(loader, config)
    checkpoints = config.memory.gc and not isinstance(model, ParallelModule)
    if not isinstance(model, ParallelModule):
        check_classes(model, config.memory.gc_cls or (), "[config] memory.gc_cls")
        if config.dist.fsdp.size == 1:  # else it is told where the units are made
            warn_of_missing(model, config.dist.fsdp.wrap_layer_cls)
    # Of all processes, those without a loader as well.
    seed = several.seed_of_shards() if config.dataloader.shard else None
    wrapped = None if loader is None else _wrap(loader, device, config, seed)

    get_global_context().config = config
    install_hooks()
    patch()
    if config.compute.acc_scaled_dot_attn:
        say_once("acc_scaled_dot_attn", _SAME_ATTENTION, logging.INFO)
    if checkpoints:
        count = checkpoint_classes(model, config.memory.gc_cls or (), config.memory.gc_cnt)
        logger.info("%d modules are checkpointed", count)
    if not together:
        model.to(device)
        follow_device(model)
    else:
        model = several.wrap(model, device, config)
    several.say_how(model, loader, config)
    return model if wrapped is None else (model, wrapped)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield f"parameter {name}", parameter
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", buffer


def _device_of(model: nn.Module) -> torch.device:
    """The lazy device that the model is on, else the current one. Raises ValueError."""
    device: torch.device | None = None
    for name, tensor in _tensors(model):
        here = tensor.device
        if here.type == "cpu":
            continue
        if here.type == "meta":
            raise ValueError(
                f"[accelerate] {name} is on the meta device and has no values. Give it some first "
                "(model.to_empty(device='cpu') and an initialisation, or load a state_dict)."
            )
        if not is_lazy_device(here):
            raise ValueError(
                f"[accelerate] {name} is on {here}. Leave the model on the CPU, or move it there "
                "(model.cpu()), before calling accelerate."
            )
        if device is not None and here != device:
            raise ValueError(
                f"[accelerate] {name} is on {here}, and other parameters are on {device}. A model "
                "lies on one device: move it (model.cpu()) before calling accelerate."
            )
        device = here
    current = lazy_device()
    if device is not None and device != current and several.is_one_of_several():
        raise ValueError(
            f"[accelerate] the model is on {device}, and this process uses {current}"
            + (f", as the {current.index + 1}. of its machine" if is_launched() else "")
            + f". Leave the model on the CPU, or move it to {device.type!r} without an index after "
            f"torch.{device.type}.set_device."
        )
    return current if device is None else device


def _wrap(
    loader: Iterable[Any], device: torch.device, config: Config, seed: int | None
) -> AsyncLoader:
    """`seed`: of the parts of several processes (config.dataloader.shard)."""
    if isinstance(loader, AsyncLoader):
        if loader.device != device:
            raise ValueError(
                f"[accelerate] the loader already delivers to {loader.device}, and the model goes "
                f"to {device}. Pass the loader that it was made from."
            )
        if config.dataloader.shard and several.is_one_of_several() and not loader.is_divided:
            raise ValueError(
                "[accelerate] config.dataloader.shard is set, and the loader is an AsyncLoader, "
                "which reads ahead and cannot be divided any more. Pass the loader that it was "
                "made from."
            )
        if config.dataloader.pads() and not loader.pads:
            say_once(
                "unpadded loader",
                "[accelerate] config.dataloader has buckets, and the loader is an AsyncLoader that "
                "was made without: its batches are not padded. Give it buckets, or pass the loader "
                "that it was made from.",
            )
        if config.dataloader.read_ahead is not None:
            loader.read_ahead = config.dataloader.read_ahead
        return loader
    check_iterable(loader, "accelerate")
    options = config.dataloader
    return AsyncLoader(
        loader if seed is None else several.divided(loader, config, seed),
        device,
        buckets=options.buckets,
        max_length=options.max_length,
        num_buckets=options.num_buckets,
        pad_value_dict=options.pad_value_dict,
        read_ahead=options.read_ahead,
    )
