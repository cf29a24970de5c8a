"""The arguments of a sample on one device, and comparisons that helpers.py has no use for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.opinfo.core import ErrorInput, SampleInput

from tests import helpers


@dataclass
class Arguments:
    """A sample's arguments on one device."""

    input: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def all(self) -> tuple[Any, ...]:
        """Every argument as one nested container."""
        return (self.input, self.args, self.kwargs)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return helpers.tensors(self.all())


def arguments(
    sample: SampleInput, device: str, spread: bool = False, input_only: bool = False
) -> Arguments:
    """A deep copy of the sample's arguments on `device`, or with `input_only` of the first alone.

    With `spread` every strided tensor of at least one dimension becomes a non-contiguous view: of
    every second element of a last dimension, with an offset of one.
    """
    source = (sample.input, tuple(sample.args), dict(sample.kwargs))
    if spread:
        source = helpers.tree_map(_spread, source)
    if input_only:
        rest = helpers.copy_tree(source[1:], "cpu")
        return Arguments(helpers.copy_tree(source[0], device), *rest)
    made = helpers.copy_tree(source, device)
    # Some samples name the device that they were made for.
    return Arguments(*helpers.tree_map(lambda leaf: device if _is_cpu(leaf) else leaf, made))


def of_mixed_types(sample: SampleInput, dtype: torch.dtype) -> SampleInput | None:
    """The sample with its floating-point tensors after the first of another type.

    They become float32, or float64 where `dtype`, the first one's, is float32. None when there are
    no others.
    """
    other = torch.float64 if dtype == torch.float32 else torch.float32
    met = 0

    def one(leaf: Any) -> Any:
        nonlocal met
        if not isinstance(leaf, torch.Tensor) or leaf.dtype != dtype:
            return leaf
        met += 1
        if met == 1 or leaf.layout != torch.strided:
            return leaf
        return leaf.detach().to(other).requires_grad_(leaf.requires_grad)

    input_, args, kwargs = helpers.tree_map(
        one, (sample.input, tuple(sample.args), dict(sample.kwargs))
    )
    return SampleInput(input_, args=args, kwargs=kwargs) if met > 1 else None


def of_channels_last(sample: SampleInput) -> SampleInput | None:
    """The sample with its images channels last; None when it has none."""
    met = False

    def one(leaf: Any) -> Any:
        nonlocal met
        if not isinstance(leaf, torch.Tensor) or leaf.dim() not in (4, 5) or leaf.numel() == 0:
            return leaf
        if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_nested:
            return leaf
        met = True
        last = torch.channels_last if leaf.dim() == 4 else torch.channels_last_3d
        return leaf.detach().contiguous(memory_format=last).requires_grad_(leaf.requires_grad)

    input_, args, kwargs = helpers.tree_map(
        one, (sample.input, tuple(sample.args), dict(sample.kwargs))
    )
    return SampleInput(input_, args=args, kwargs=kwargs) if met else None


def of_cpu(given: ErrorInput) -> ErrorInput:
    """An error input that was made for CUDA as one that was made for the CPU."""
    sample = given.sample_input
    source = (sample.input, tuple(sample.args), dict(sample.kwargs))
    input_, args, kwargs = helpers.tree_map(
        lambda leaf: "cpu" if isinstance(leaf, str) and leaf == "cuda" else leaf,
        helpers.copy_tree(source, "cpu"),
    )
    made = SampleInput(input_, args=args, kwargs=kwargs)
    return ErrorInput(made, error_type=given.error_type, error_regex=given.error_regex)


def _is_cpu(leaf: Any) -> bool:
    return isinstance(leaf, str) and leaf == "cpu"


def _spread(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or leaf.numel() == 0:
        return leaf
    if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_nested:
        return leaf
    source = leaf.detach()
    wide = source.new_zeros((*source.shape[:-1], source.shape[-1] * 2 + 1))
    view = wide[..., 1::2]
    view.copy_(source)
    return view.requires_grad_(leaf.requires_grad)


def neutral(message: str) -> str:
    """A message without the names of devices, which rightly differ."""
    for name in ("acc:0", "acc", "cpu", "CPU", "PrivateUse1", "privateuseone"):
        message = message.replace(name, "DEVICE")
    return message


def cotangent(t: torch.Tensor, seed: int) -> torch.Tensor:
    """A cotangent that depends on the shape and the position only; drawn on the CPU."""
    g = torch.Generator().manual_seed(seed)
    kind = (
        t.dtype
        if t.dtype in (torch.float64, torch.complex128)
        else (torch.complex64 if t.is_complex() else torch.float32)
    )
    drawn = torch.randn(t.shape, generator=g, dtype=kind).to(t.dtype)
    if t.layout != torch.strided:
        return drawn.to(t.device).to_sparse(layout=t.layout)
    return drawn.to(t.device)


def _storage(t: torch.Tensor) -> int:
    try:
        return t.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse and opaque tensors have no storage
        return 0


def sharing(result: Any, a: Arguments) -> list[tuple[int, int, int]]:
    """(result, argument, offset) for each result that lies in an argument's storage."""
    owners: dict[int, int] = {}
    for i, t in enumerate(a.tensors()):
        if t.numel():
            owners.setdefault(_storage(t), i)
    owners.pop(0, None)
    found = []
    for i, t in enumerate(helpers.tensors(result)):
        owner = owners.get(_storage(t)) if t.numel() else None
        if owner is not None:
            found.append((i, owner, t.storage_offset()))
    return found


def writable(t: torch.Tensor) -> bool:
    """Whether an in-place write to `t` is allowed: strided, and no element is there twice."""
    if t.layout != torch.strided or t.is_inference():
        return False
    return all(s != 0 or n <= 1 for s, n in zip(t.stride(), t.shape, strict=True))


def distributions(actual: Any, expected: Any, dims: int | None = None) -> list[tuple[str, str]]:
    """Two-sample Kolmogorov-Smirnov test of each pair of results, at one false alarm in a million.

    There is one draw per element, or per index of the first `dims` dimensions. Only results of 20
    draws or more are compared; a NaN on one side only is always told.
    """
    found = []
    for a, e in zip(helpers.tensors(actual), helpers.tensors(expected), strict=True):
        n = math.prod(a.shape[:dims])
        if n < 20 or a.layout != torch.strided:
            continue
        x = helpers.to_cpu(a).resolve_conj()
        y = helpers.to_cpu(e).resolve_conj()
        if x.is_complex():
            x, y = torch.view_as_real(x), torch.view_as_real(y)
        x, y = x.double().flatten(), y.double().flatten()
        if bool(x.isnan().any()) != bool(y.isnan().any()):
            found.append(("distribution", "NaN on one side only"))
            continue
        x, y = x.nan_to_num().sort().values, y.nan_to_num().sort().values
        points = torch.cat([x, y])
        rank = lambda v, p=points: torch.searchsorted(v, p, right=True) / v.numel()  # noqa: E731
        distance = float((rank(x) - rank(y)).abs().max())
        limit = math.sqrt(-math.log(1e-6 / 2) / 2) * math.sqrt(2 / n)
        if distance > limit:
            found.append(
                ("distribution", f"Kolmogorov-Smirnov distance {distance:.2f} of {n} draws")
            )
    return found
