"""`torchacc.mark_dynamic`: TorchAcc's way to say which dimensions vary. Nothing depends on it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def mark_dynamic(x: Tensor, dims: int | Sequence[int], bounds: int | Sequence[int]) -> None:
    """Checks its arguments, and does nothing else: sizes need not be announced.

    TorchAcc compiled a graph for each size unless it was told which vary, and up to where. Here a
    new size costs a plan, and no compilation: generated kernels take sizes as arguments. Batches of
    many different lengths are better padded to a few: `config.dataloader.buckets`.

    Args:
        x: a tensor on any device.
        dims: the dimension that varies, or a list of them; negative ones count from the end. A list
            stays as it is.
        bounds: the largest size of each.

    Raises:
        AssertionError: an argument has another type, or there are not as many bounds as dims.
        ValueError: a dimension that `x` does not have, twice the same one, or a bound below its
            size.
    """
    if not isinstance(x, Tensor):
        raise AssertionError(f"[mark_dynamic] x should be a Tensor, not {_kind(x)}.")
    dims, bounds = _integers("dims", dims), _integers("bounds", bounds)
    if len(dims) != len(bounds):
        raise AssertionError(
            f"[mark_dynamic] there are {len(dims)} dims and {len(bounds)} bounds. "
            "Give the largest size of each dimension."
        )
    count = x.dim()
    if dims and not count:
        raise ValueError(f"[mark_dynamic] x has 0 dimensions, and dims names {dims}.")
    seen: set[int] = set()
    for dim, bound in zip(dims, bounds, strict=True):
        if not -count <= dim < count:
            raise ValueError(
                "[mark_dynamic] Dimension out of range "
                f"(expected to be in range of [{-count}, {count - 1}], but got {dim})."
            )
        if dim % count in seen:
            raise ValueError(f"[mark_dynamic] dimension {dim % count} is named twice in {dims}.")
        seen.add(dim % count)
        if bound < x.shape[dim]:
            raise ValueError(
                f"[mark_dynamic] The upper bound of the shape size {bound} is below the size "
                f"{x.shape[dim]} of dimension {dim}. Give the largest size that can come."
            )


def _integers(name: str, value: int | Sequence[int]) -> list[int]:
    values = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
        raise AssertionError(
            f"[mark_dynamic] {name} should be an int or a list of int, not {_kind(value)}."
        )
    return list(values)


def _kind(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"
