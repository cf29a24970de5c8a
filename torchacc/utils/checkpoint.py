"""Gradient checkpointing by class name: modules recompute in backward what they did not keep."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class _Checkpointed:
    """The `forward` of one module, run under torch.utils.checkpoint.

    An object and not a closure, so that the module can still be copied and pickled; stored on the
    module and not wrapped around it, so that the names in its state_dict stay as they are.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        # Imported on use: torch.utils.checkpoint is not part of `import torch` in every version.
        from torch.utils.checkpoint import checkpoint

        # By position, what was passed by keyword too: torch looks there only for the devices whose
        # random numbers the second run has to draw again.
        forward, count, names = self.forward, len(args), tuple(kwargs)

        def run(*values: Any) -> Any:
            return forward(*values[:count], **dict(zip(names, values[count:], strict=True)))

        return checkpoint(run, *args, *kwargs.values(), use_reentrant=False)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.forward)


def checkpoint_module(module: nn.Module) -> nn.Module:
    """Checkpoints `module`: in backward its forward runs again, for what it did not keep.

    Random numbers and autocast are those of the first run. Returns `module`, which is changed in
    place; its class, its parameters and the keys of its state_dict are not. A second call changes
    nothing.
    """
    if not is_checkpointed(module):
        module.forward = _Checkpointed(module.forward)  # type: ignore[method-assign]
    return module


def is_checkpointed(module: nn.Module) -> bool:
    """Whether `module` computes again in backward."""
    return isinstance(module.forward, _Checkpointed)


def check_classes(
    model: nn.Module, gc_cls: Iterable[str], said_by: str = "[gradient_checkpoint] gc_cls"
) -> None:
    """Raises ValueError unless `model` has a module of each class of `gc_cls`.

    `said_by`: who asked for them, for the message.
    """
    if said := missing_classes(model, gc_cls):
        raise ValueError(f"{said_by} = {set(gc_cls)!r}: {said}")


def missing_classes(model: nn.Module, names: Iterable[str]) -> str:
    """Which classes of `names` have no module in `model`, and which classes have, for a message.

    Empty where all of them have.
    """
    there = sorted({type(module).__name__ for module in model.modules()})
    said = ""
    for name in sorted(set(names) - set(there)):
        close = difflib.get_close_matches(name, there, n=1, cutoff=0.6)
        said += f"{'Nor' if said else 'the model has no module'} of class {name!r}. "
        said += f"Did you mean {close[0]!r}? " if close else ""
    return f"{said}It has: {', '.join(there)}" if said else ""


def checkpoint_classes(model: nn.Module, gc_cls: Iterable[str], gc_cnt: int | None = None) -> int:
    """Checkpoints the modules of `model` whose class has one of the names in `gc_cls`.

    Args:
        model: changed in place, as by `checkpoint_module`.
        gc_cls: class names without module path, for example {"Bottleneck"}.
        gc_cnt: only the first so many of these modules, in the order of `model.modules()`.

    Returns:
        How many modules are checkpointed now.

    Raises:
        ValueError: no module of `model` has a class of one of the names.
    """
    names = set(gc_cls)
    check_classes(model, names)
    modules = chosen_modules(model, names, gc_cnt)
    for module in modules:
        checkpoint_module(module)
    return len(modules)


def chosen_modules(
    model: nn.Module, gc_cls: Iterable[str], gc_cnt: int | None = None
) -> list[nn.Module]:
    """The modules that `checkpoint_classes` checkpoints."""
    names = set(gc_cls)
    return [module for module in model.modules() if type(module).__name__ in names][:gc_cnt]


def gradient_checkpoint(model: nn.Module, gc_cls: Iterable[str]) -> nn.Module:
    """`model` with all modules checkpointed whose class has one of the names in `gc_cls`.

    As `checkpoint_classes`, under TorchAcc's name and with its result.

    Raises:
        ValueError: no module of `model` has a class of one of the names.
    """
    checkpoint_classes(model, gc_cls)
    return model
