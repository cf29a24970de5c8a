"""Parameters in whose place a model has others now: an optimizer that holds them trains nothing.

Whoever puts others in their place says so (`replace`). From then on a step of such an optimizer is
an error; without that the loss would stand still, and nothing would say why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

# They are freed, and leave, where the program builds its optimizer afterwards.
_gone: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# That of the hook, once there was something to look for.
handle: Any = None


def note(parameters: Iterable[tuple[str, Tensor]]) -> Callable[[], list[tuple[Tensor, list[str]]]]:
    """Returns a function of those that are alive when it is called, with their names.

    They may be freed meanwhile: where units are sharded one by one there is not memory for all.
    DTensors are kept, since torch swaps their contents only where nothing refers to them weakly.
    """
    weakly: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
    kept: dict[int, tuple[Tensor, list[str]]] = {}
    for name, parameter in parameters:
        if is_traceable_wrapper_subclass(parameter):
            kept.setdefault(id(parameter), (parameter, []))[1].append(name)
        else:
            weakly.setdefault(parameter, []).append(name)
    return lambda: [*kept.values(), *weakly.items()]


def replace(before: Iterable[Tensor], after: Iterable[Tensor]) -> None:
    """The parameters `before` that are not among those `after` are no model's any more."""
    global handle
    kept = {id(parameter) for parameter in after}
    for parameter in before:
        if id(parameter) not in kept:
            _gone[parameter] = None
    if _gone and handle is None:
        handle = register_optimizer_step_pre_hook(_before_step)


def check(optimizer: Optimizer) -> None:
    """Raises RuntimeError where `optimizer` holds parameters that were replaced."""
    if not _gone:
        return
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # One that has a gradient is trained by the program, in another place.
    gone = sum(p.requires_grad and p.grad is None and p in _gone for p in held)
    if gone:
        raise RuntimeError(
            f"[accelerate] {gone} of the {len(held)} parameters of this "
            f"{type(optimizer).__name__} are no longer the model's: sharding or splitting it has "
            "put others in their place, so that these get no gradients and a step would train "
            "nothing. Build the optimizer after torchacc.accelerate(...), with the parameters() of "
            "the model that it returns."
        )


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    check(optimizer)


# As in _boundary.py: a step that is compiled is left here.
_before_step._torchdynamo_disable = True  # type: ignore[attr-defined]
