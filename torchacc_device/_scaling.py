"""A GradScaler's step that asks the device nothing.

torch's scaler reads on the host whether a gradient has overflowed, and calls `optimizer.step()` or
not. Here the step is recorded either way, and what it wrote is put back on the device where one
has: no host read, one plan for steps that are taken and those that are skipped.

That is right only for an optimizer all of whose effects are writes of tensors on the device. It is
known of torch's own that can run `capturable`, once their state is there; so an optimizer's first
step, which makes it, is torch's. Every other optimizer keeps torch's read, and `synchronised()`
says which and why.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchacc_device import _C, _boundary, _replaced

_DEVICE = "acc"

# Optimizers all of whose effects are writes of tensors, on the device where they are `capturable`.
_known: set[type[Optimizer]] = {
    optim.ASGD,
    optim.Adadelta,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
}

# Why an optimizer reads on the host, by optimizer.
_reasons: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()

# How often a step has read on the host: because it may be the first one, and for a reason above.
first_steps = 0
later_steps = 0

# The group whose processes hold parts of the same parameters, or stages of the same model: a step
# is taken by all of them or by none. None is the default group, which may be made anew. By modules,
# with the ids of the DTensors among their parameters, in whose place FSDP has others at times:
# torch swaps contents (`module.to`) only where nothing refers to a parameter weakly.
_groups: dict[int, tuple[weakref.ref[nn.Module], frozenset[int], dist.ProcessGroup | None]] = {}


def step_together(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """From now on a gradient in `model` that overflows on one process of `group` does so on all.

    None is the default group. All processes have to unscale gradients of the same optimizers in the
    same order.
    """
    for module in model.modules():
        if not module._parameters:
            continue
        own = module._parameters.values()
        parts = frozenset(id(p) for p in own if p is not None and is_traceable_wrapper_subclass(p))
        key = id(module)
        alive = weakref.ref(module, lambda _, key=key: _groups.pop(key, None))
        _groups[key] = (alive, parts, group)


def with_others(original: Callable[..., dict[torch.device, Tensor]]) -> Callable[..., Any]:
    """`torch.amp.GradScaler._unscale_grads_`, whose found_inf is the largest of all processes'."""

    def _unscale_grads_(
        self: Any, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, *args: Any
    ) -> dict[torch.device, Tensor]:
        _replaced.check(optimizer)  # torch would say that it has found no gradients
        unscale = _unscale_parts if _has_parts(optimizer) else original
        found = unscale(self, optimizer, inv_scale, found_inf, *args)
        for group, kind in _groups_of(optimizer).items():
            # One exchange, also where no parameter has a gradient here: the others wait for it.
            overflow = next(iter(found.values()), found_inf).clone()
            for other in found.values():
                overflow = torch.maximum(overflow, other.to(overflow.device))
            if kind is not None and overflow.device.type != kind:
                overflow = overflow.to(kind)
            dist.all_reduce(overflow, dist.ReduceOp.MAX, group)
            found = {device: overflow.to(device) for device in found or (overflow.device,)}
        return found

    return _unscale_grads_


def _groups_of(optimizer: Optimizer) -> dict[dist.ProcessGroup | None, str | None]:
    """The groups whose processes have to agree, in the order in which all of them have them.

    With the type of the device on which they exchange, or None where that is the gradients'.
    """
    parts = {id(p): p for p in _parameters(optimizer) if is_traceable_wrapper_subclass(p)}
    if not _groups and not parts:
        return {}
    held = {id(p) for p in _parameters(optimizer)}
    found: dict[dist.ProcessGroup | None, str | None] = {}
    covered: set[int] = set()
    for alive, noted, group in list(_groups.values()):
        module = alive()
        if module is None:
            continue
        here = held & {id(parameter) for parameter in module._parameters.values()}
        here |= noted & parts.keys()
        if here:
            found[group] = None
            covered |= here
    for key, part in parts.items():
        mesh = getattr(part, "device_mesh", None)
        if key in covered or mesh is None or mesh.get_coordinate() is None:
            continue
        # Dimensions over which the parameter is whole as well: gradients may be parts of a sum
        # there, and processes without a gradient do not know.
        for dimension in range(mesh.ndim):
            if mesh.size(dimension) > 1:
                found.setdefault(mesh.get_group(dimension), mesh.device_type)
    return found


def _has_parts(optimizer: Optimizer) -> bool:
    return any(is_traceable_wrapper_subclass(p) for p in _parameters(optimizer))


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _unscale_parts(
    self: Any, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
) -> dict[torch.device, Tensor]:
    """As torch does it, but of the parts that are here: torch does not mix DTensors with others."""
    parts: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in _parameters(optimizer):
        gradient = parameter.grad
        if gradient is None:
            continue
        part = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        if part.dtype == torch.float16 and not allow_fp16:
            raise ValueError("Attempting to unscale FP16 gradients.")
        parts.setdefault((part.device, part.dtype), []).append(part)
    found = {device: found_inf.to(device, copy=True) for device, _ in parts}
    with torch.no_grad():
        for (device, _), together in parts.items():
            torch._amp_foreach_non_finite_check_and_unscale_(
                together, found[device], inv_scale.to(device)
            )
    return found


# The scaler that has scaled a loss since its last update.
_last_scaler: weakref.ref[torch.amp.GradScaler] | None = None


def noting_scaler(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.amp.GradScaler.scale`, for `loss_scale`."""

    def scale(self: Any, outputs: Any) -> Any:
        global _last_scaler
        _last_scaler = weakref.ref(self)
        return original(self, outputs)

    return scale


def ending_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.amp.GradScaler.update`, behind which other losses come."""

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _last_scaler
        if _last_scaler is not None and _last_scaler() is self:
            _last_scaler = None
        result = original(self, *args, **kwargs)
        if self.is_enabled():
            _boundary.after_update(self)
        return result

    return update


def loss_scale(device: torch.device) -> Tensor | None:
    """What the gradients of this backward are scaled by, a tensor of one element on `device`; None
    where no loss was scaled since the scaler's last update.
    """
    scaler = None if _last_scaler is None else _last_scaler()
    scale = None if scaler is None or not scaler.is_enabled() else scaler._scale
    return None if scale is None else scale.to(device)


def with_scale(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.amp.GradScaler._check_scale_growth_tracker`, where others scale the loss.

    The last stage of a pipeline does; the scale of all of them begins, and goes on, alike.
    """

    def _check_scale_growth_tracker(self: Any, name: str) -> Any:
        if self._scale is None and self._device == _DEVICE and _groups:
            self._lazy_init_scale_growth_tracker(torch.device(_DEVICE))
        return original(self, name)

    return _check_scale_growth_tracker


def synchronised() -> dict[str, str]:
    """Optimizers whose steps under a GradScaler read on the host, by class, and why."""
    return {type(optimizer).__name__: why for optimizer, why in _reasons.items()}


def keeps_state_on_device(kind: type[Optimizer]) -> None:
    """Steps of optimizers of the class `kind` write floating point tensors and nothing else."""
    _known.add(kind)


def without_read(original: Callable[..., float | None]) -> Callable[..., float | None]:
    """`torch.amp.GradScaler._maybe_opt_step`, for optimizers of tensors on acc."""

    def take(
        self: Any, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        found = optimizer_state["found_inf_per_device"]
        if len(found) == 1 and not args and not kwargs:
            (overflow,) = found.values()
            # torch's scaler of sharded gradients has it as one element of one dimension.
            return step_unless(optimizer, overflow.reshape(()))
        _reasons[optimizer] = (
            "its step() is called with arguments"
            if len(found) == 1
            else f"its gradients lie on {len(found)} devices"
        )
        return original(self, optimizer, optimizer_state, *args, **kwargs)

    def _maybe_opt_step(
        self: Any, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        if all(device.type != _DEVICE for device in optimizer_state["found_inf_per_device"]):
            return original(self, optimizer, optimizer_state, *args, **kwargs)
        try:
            return take(self, optimizer, optimizer_state, *args, **kwargs)
        except BaseException:
            # The gradients are used up, also where the error comes behind the step (strict mode).
            optimizer_state["stage"] = OptState.STEPPED
            raise

    return _maybe_opt_step


def step_unless(
    optimizer: Optimizer, overflow: Tensor, step: Callable[[], float | None] | None = None
) -> float | None:
    """`optimizer.step()` where `overflow`, 0-dim, is 0; reads it on the host only if need be.

    `step` in its place is called by the optimizer's own step, which marks the boundary.
    """
    global first_steps, later_steps
    why = _needs_host(optimizer, overflow.device)
    if why is None:
        _reasons.pop(optimizer, None)
        result = _step_and_take_back(optimizer, overflow, step or optimizer.step)
        if step is None:
            _boundary.after_step(optimizer)
        return result
    if why:
        _reasons[optimizer] = why
        later_steps += 1
    else:
        first_steps += 1
        _C.excuse_step(True)
    if overflow.item():
        return None
    if not why and _counts_on(overflow.device, optimizer):
        # Parameters that join now get counts of steps beside those that are on the device already.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _state_on_device(optimizer.state.get(parameter, {}), parameter.device)
        with _capturable(optimizer):
            return (step or optimizer.step)()
    return (step or optimizer.step)()


def _counts_on(device: torch.device, optimizer: Optimizer) -> bool:
    counts = (state.get("step") for state in optimizer.state.values())
    return any(isinstance(count, Tensor) and count.device == device for count in counts)


@contextmanager
def _capturable(optimizer: Optimizer) -> Iterator[None]:
    """Inside, the optimizer counts its steps on the device, if it can."""
    groups = [group for group in optimizer.param_groups if "capturable" in group]
    before = [group["capturable"] for group in groups]
    try:
        for group in groups:
            group["capturable"] = True
        yield
    finally:
        for group, flag in zip(groups, before, strict=True):
            group["capturable"] = flag


def _needs_host(optimizer: Optimizer, device: torch.device) -> str | None:
    """Why this step needs the host, "" where only this one does; None where it does not."""
    if type(optimizer) not in _known:
        return "it is not known to keep all of its state on the device"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "it has step hooks"
    if _boundary.others_hook():
        return "there are hooks of all optimizers' steps"
    step = vars(optimizer).get("step")
    # A scheduler of the learning rate counts calls, and that is all it does.
    counted = getattr(step, "_wrapped_by_lr_sched", False)
    if step is not None and not (counted and step.__wrapped__ is type(optimizer).step):
        return "its step() was replaced"
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return "it is differentiable"
        if isinstance(group["lr"], Tensor) and group["lr"].device != device:
            return f"its learning rate is a tensor on {group['lr'].device}"
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.device != device:
                return f"it has parameters on {parameter.device}, and found_inf is on {device}"
            if parameter.grad.layout is not torch.strided:
                return "it has sparse gradients"
            if is_traceable_wrapper_subclass(parameter) and not hasattr(parameter, "to_local"):
                return f"its parameters are {type(parameter).__name__}s"
            if not _has_state(optimizer, group, parameter):
                return ""
    return None


def _has_state(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> bool:
    if isinstance(optimizer, optim.SGD):
        momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
        return momentum is not None or group["momentum"] == 0
    return bool(optimizer.state.get(parameter))


def _step_and_take_back(
    optimizer: Optimizer, overflow: Tensor, step: Callable[[], float | None]
) -> float | None:
    """`step()`, of which nothing remains where `overflow` is not 0."""
    written: list[Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                written.append(_part(parameter))
                written += _state_on_device(optimizer.state.get(parameter, {}), parameter.device)
    if not written:
        return step()
    written = [torch.view_as_real(each) if each.is_complex() else each for each in written]
    with torch.no_grad(), _boundary.held():
        before = torch._foreach_mul(written, 1)
        with _capturable(optimizer):
            result = step()
        torch.ops.acc._foreach_where_(written, overflow == 0, before)
    return result


def _state_on_device(state: dict[str, Any], device: torch.device) -> list[Tensor]:
    """The tensors of a parameter's state; those that count steps on the host move to `device`."""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.device != device:
            state[name] = value.to(device)
    return [_part(value) for value in state.values() if isinstance(value, Tensor)]


def _part(tensor: Tensor) -> Tensor:
    """What this process has of it: a DTensor's part, which shares the memory."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
