"""The units of a model: the modules whose parameters are sharded and gathered together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchacc.logger import logger
from torchacc.utils.checkpoint import missing_classes

if TYPE_CHECKING:
    from torchacc.config import Config

# What a process holds: the names of modules that are there with all that is inside of them, and
# those of single parameters.
Part = Collection[str]
WHOLE: Part = frozenset(("",))

# A parameter by one of its names, with the unit that it is in: its place, which is empty for the
# model itself, and the module.
Held = tuple[str, nn.Module, str, nn.Parameter]


def wrapped_classes(model: nn.Module, names: set[str]) -> set[type[nn.Module]]:
    """What is a unit of its own: the classes of the model that have one of the names."""
    return {type(module) for module in model.modules() if type(module).__name__ in names}


def check_units(
    model: nn.Module, config: Config, composable: bool, parts: Collection[Part] = (WHOLE,)
) -> None:
    """Raises ValueError where torch could not shard the parameters, or would change the training.

    Warns of classes that are to be units and of which there is no module.

    Args:
        model: before anything of it is sharded.
        config: the options.
        composable: whether that will be by torch's composable functions, which also replicate.
        parts: what the stages hold, where there are several.
    """
    options, in_half = config.dist.fsdp, config.compute.half() is not None
    sharded = config.dist.fsdp.size > 1
    if sharded:
        if dist.get_rank() == 0:
            _warn_of_classes(model, options.wrap_layer_cls, parts)
    for part in parts:
        found = list(_parameters(model, options.wrap_layer_cls, in_half, part))
        if sharded or composable:
            _check_shapes(found, composable)
        if sharded:
            _check_tied(found, composable)
        if sharded and not composable and options.flatten_parameters:
            _check_trained_alike(found)


_SETTING = "[config] dist.fsdp.wrap_layer_cls"


def warn_of_missing(model: nn.Module, names: set[str]) -> None:
    """Warns of classes of `dist.fsdp.wrap_layer_cls` that the model does not have."""
    if missing := missing_classes(model, names):
        logger.warning(
            "%s = %r: %s. What is in no module of these classes is sharded as one unit.",
            _SETTING,
            sorted(names),
            missing,
        )


def _warn_of_classes(model: nn.Module, names: set[str], parts: Collection[Part]) -> None:
    """Warns of classes that the model does not have, and of those that it has and of which no stage
    of a pipeline will have a module.
    """
    warn_of_missing(model, names)
    modules = dict(model.named_modules())
    whole = [modules[name] for part in parts for name in part if name in modules]
    lost = {type(module).__name__ for module in modules.values()} & names
    lost -= {type(inside).__name__ for module in whole for inside in module.modules()}
    if lost:
        logger.warning(
            "%s: no unit of class %s. A stage of a pipeline is a unit, and of modules in it the "
            "layers of torch.nn and those that memory.gc_cls checkpoints can be.",
            _SETTING,
            ", ".join(sorted(lost)),
        )


def _check_shapes(found: Iterable[Held], composable: bool) -> None:
    """torch finds these in the middle of its work, and does not say which parameter it is."""
    for _, _, name, parameter in found:
        if parameter.dim() == 0:
            raise ValueError(
                f"[config] dist.fsdp: {name} is a 0-dimensional parameter, which torch does not "
                "shard. Give it the shape [1]."
            )
        if composable and not parameter.is_contiguous():
            raise ValueError(
                f"[config] dist.fsdp: {name} has the shape {list(parameter.shape)} and the strides "
                f"{list(parameter.stride())}, and where layers or stages are split torch shards "
                "contiguous parameters only. Make it so (nn.Parameter(parameter.contiguous()))."
            )


def _check_tied(found: Iterable[Held], composable: bool) -> None:
    """torch would make a copy in each unit that has the parameter, and train them apart; those that
    are not trained stay equal.

    Flat, a unit that has two places is wrapped in one of them, and not gathered in the other.
    """
    first: dict[nn.Parameter, tuple[str, nn.Module, str]] = {}
    for place, unit, name, parameter in found:
        there, other, before = first.setdefault(parameter, (place, unit, name))
        apart = other is not unit and parameter.requires_grad
        if apart or (other is unit and there != place and not composable):
            raise ValueError(
                f"[config] dist.fsdp.wrap_layer_cls: {before} and {name} are one parameter, and "
                f"would be in two units ({_shown(there, other)}, and {_shown(place, unit)}), which "
                "do not share it. Name classes with all modules that share it, or none of them."
            )


def _check_trained_alike(found: Iterable[Held]) -> None:
    """Flat, the parameters of a unit are one."""
    trained: dict[nn.Module, dict[bool, str]] = {}
    for _, unit, name, parameter in found:
        kinds = trained.setdefault(unit, {})
        kinds.setdefault(parameter.requires_grad, name)
        if len(kinds) > 1:
            raise ValueError(
                f"[config] dist.fsdp.flatten_parameters makes one parameter of {kinds[True]}, "
                f"which is trained, and {kinds[False]}, which is not. "
                "Set it to False, or name a class in dist.fsdp.wrap_layer_cls with only one kind."
            )


def _parameters(model: nn.Module, names: set[str], in_half: bool, part: Part) -> Iterator[Held]:
    """The parameters of a part, by all of their names, each with its unit.

    As torch has it, subclasses of the classes with these names are units too, and in half precision
    so is each batch norm, which stays in float32.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    kinds = tuple(kind for kind in map(type, modules.values()) if kind.__name__ in names)
    kinds += (_BatchNorm,) if in_half else ()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        where, unit, held = "", model, not part.isdisjoint(("", name))
        above = name.split(".")[:-1]
        for depth in range(1, len(above) + 1):
            place = ".".join(above[:depth])
            held = held or place in part
            if held and isinstance(modules[place], kinds):
                where, unit = place, modules[place]
        if held:
            yield where, unit, name, parameter


def _shown(place: str, unit: nn.Module) -> str:
    return f"{place}, a {type(unit).__name__}" if place else "the model itself"
