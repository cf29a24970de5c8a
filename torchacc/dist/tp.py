"""Tensor parallel training, on torch's DTensor: which layers are split how, the program says.

    from torchacc.dist import tp
    tp.parallelize(block, {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}, config)

before `accelerate`, in every process. The model is on the device afterwards.
"""

from __future__ import annotations

from fnmatch import fnmatch
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
from torchacc_device import _replaced

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
    """Splits the layers of `model` that `plan` names, in place, and moves it to the device.

    Names may have `*` in them, as in torch. Parameters that layers share they go on sharing.

    Raises TypeError or ValueError, before anything is changed, for names that match nothing, layers
    that cannot be split, and shared parameters that would be split in different ways.
    """
    mesh = device_mesh(config)
    styles = _styles(model, plan)
    _check_sizes(model, styles, config.dist.tp.size)
    shared = _shared(model, styles)
    before = _replaced.note(model.named_parameters())
    trained = {n: p.requires_grad for n, p in model.named_parameters(remove_duplicate=False)}
    model.to(device_type())
    made = parallelize_module(model, mesh, plan)
    for name, is_trained in trained.items():
        # SequenceParallel forgets it.
        made.get_parameter(name).requires_grad_(is_trained)
    for first, *others in shared:
        parameter = made.get_parameter(first)
        for name in others:
            owner, _, last = name.rpartition(".")
            made.get_submodule(owner).register_parameter(last, parameter)
    _replaced.replace((parameter for parameter, _ in before()), made.parameters())
    return made


def _styles(
    model: nn.Module, plan: ParallelStyle | dict[str, ParallelStyle]
) -> dict[str, ParallelStyle]:
    """The modules that `plan` names whose parameters are split, or replicated, and how."""
    found: dict[str, ParallelStyle] = {}
    for pattern, style in (plan if isinstance(plan, dict) else {"": plan}).items():
        if not isinstance(style, ParallelStyle):
            raise TypeError(
                f"[tp] the plan has {style!r} for {pattern!r}: should be a style, for example "
                "tp.ColwiseParallel()."
            )
        everything = model.named_modules(remove_duplicate=False)
        names = [name for name, _ in everything if _matches(name, pattern)]
        if not names:
            children = ", ".join(name for name, _ in model.named_children())
            raise ValueError(
                f"[tp] the plan names {pattern}, and the model has no such module. Its largest "
                f"parts are: {children}"
            )
        for name in names:
            module = model.get_submodule(name)
            split = isinstance(style, (ColwiseParallel, RowwiseParallel))
            if split and not isinstance(module, (nn.Linear, nn.Embedding)):
                raise ValueError(
                    f"[tp] {type(style).__name__} splits Linear and Embedding, and "
                    f"{name or 'this'} is a {type(module).__name__}. Name the layers inside of it."
                )
            if not isinstance(style, (PrepareModuleInput, PrepareModuleOutput)):
                found[name] = style
    return found


def _check_sizes(model: nn.Module, styles: dict[str, ParallelStyle], processes: int) -> None:
    """Raises ValueError where torch would take parts of different sizes for equal ones."""
    for name, style in styles.items():
        module = model.get_submodule(name)
        if not (isinstance(style, RowwiseParallel) and isinstance(module, nn.Linear)):
            continue
        if module.in_features % processes and style.input_layouts[0].is_shard():
            raise ValueError(
                f"[tp] {name or 'the layer'} has {module.in_features} inputs, which "
                f"dist.tp.size = {processes} does not divide. Change its size, or pass whole "
                "inputs: tp.RowwiseParallel(input_layouts=Replicate())."
            )


def _matches(name: str, pattern: str) -> bool:
    """As torch compares them: part by part."""
    parts, patterns = (text.split(".") if text else [] for text in (name, pattern))
    return len(parts) == len(patterns) and all(map(fnmatch, parts, patterns))


def _shared(model: nn.Module, styles: dict[str, ParallelStyle]) -> list[list[str]]:
    """The names of each parameter that has several, where it is split: torch would copy it."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    found = []
    for several in names.values():
        ways = {name: _way(model, name, styles) for name in several}
        if len(several) == 1 or not any(ways.values()):
            continue
        if len(set(ways.values())) > 1:
            shown = ", ".join(f"{name} {way or 'not at all'}" for name, way in ways.items())
            raise ValueError(
                f"[tp] one parameter has several names, and the plan splits {shown}. Split all of "
                "them along the same dimension (an Embedding with RowwiseParallel and a Linear "
                "with ColwiseParallel), or none."
            )
        found.append(several)
    return found


def _way(model: nn.Module, name: str, styles: dict[str, ParallelStyle]) -> str:
    """How the parameter `name` is split, in words; nothing where it is not."""
    owner = name.rpartition(".")[0]
    # A style is for all parameters inside of the module that it is given.
    inside = [each for each in styles if f"{owner}.".startswith(f"{each}." if each else "")]
    if not inside:
        return ""
    style = styles[max(inside, key=len)]
    columns = isinstance(style, ColwiseParallel)
    if not columns and not isinstance(style, RowwiseParallel):
        return f"by {type(style).__name__}"
    linear = isinstance(model.get_submodule(owner), nn.Linear)
    return f"along {0 if columns == linear else 1}"


def mark_sharding(
    module: nn.Module, name: str, partition_spec: tuple[int | None, ...], config: Config
) -> DTensor:
    """Splits the parameter `name` of `module` along one dimension; its new value is returned.

    Layers inside of `module` that share it go on sharing it.

    `partition_spec` has an entry for each dimension of the parameter: 0, the axis of the mesh, for
    the one to split, None for the others.

    Raises:
        AttributeError: the module has no such parameter.
        ValueError: `partition_spec` has more or fewer entries than the parameter dimensions, or
            splits several; or `config.dist.tp.size` is 1.
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
    for each, held in list(module.named_parameters(remove_duplicate=False)):
        if held is parameter:
            owner, _, last = each.rpartition(".")
            module.get_submodule(owner).register_parameter(last, made)
    _replaced.replace([parameter], [made])
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
