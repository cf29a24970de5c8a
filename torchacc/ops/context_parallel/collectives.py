"""How parts of sequences are exchanged: differentiable collectives, recorded like operators."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.nn.functional import all_to_all_single

_SCALES = (None, "up", "down")


def split_forward_gather_backward(
    tensor: Tensor,
    seq_dim: int,
    process_group: ProcessGroup | None,
    grad_scale: str | None = None,
) -> Tensor:
    """This process's part of a tensor that all have; its gradient is put together of all parts'.

    Args:
        tensor: the same in all processes of the group.
        seq_dim: the dimension to split. Its size is a multiple of the group's.
        process_group: None is the default group.
        grad_scale: "up" multiplies the gradient by the number of processes, "down" divides it. Data
            parallel training takes the mean over the processes that share a sequence, too; see
            docs/attention.md.

    Raises:
        ValueError: the dimension cannot be split, or grad_scale is another word.
    """
    dim = _dimension("split_forward_gather_backward", tensor, seq_dim, grad_scale)
    size = dist.get_world_size(process_group)
    if tensor.shape[dim] % size != 0:
        raise ValueError(
            f"[split_forward_gather_backward] {tensor.shape[dim]} elements along dimension "
            f"{seq_dim} and {size} processes: pad to a multiple."
        )
    return _Split.apply(tensor, dim, process_group, _factor(grad_scale, size))


def gather_forward_split_backward(
    tensor: Tensor,
    seq_dim: int,
    process_group: ProcessGroup | None,
    grad_scale: str | None = None,
) -> Tensor:
    """All parts of a tensor, one behind the other; the gradient is this process's part of it.

    Args:
        tensor: the part of this process; all are of one size.
        seq_dim: the dimension along which they are parts.
        process_group: None is the default group.
        grad_scale: as for `split_forward_gather_backward`.

    Raises:
        ValueError: grad_scale is another word, or there is no such dimension.
    """
    dim = _dimension("gather_forward_split_backward", tensor, seq_dim, grad_scale)
    size = dist.get_world_size(process_group)
    return _Gather.apply(tensor, dim, process_group, _factor(grad_scale, size))


def all_to_all(
    tensor: Tensor, scatter_dim: int, gather_dim: int, group: ProcessGroup | None
) -> Tensor:
    """Splits the tensor along one dimension, and puts what arrives together along another.

    The parts arrive in the order of the processes. Dimensions are not negative, and the group's
    size divides the first.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return tensor
    parts = tensor.unflatten(scatter_dim, (size, -1)).movedim(scatter_dim, 0).contiguous()
    arrived = all_to_all_single(torch.empty_like(parts), parts, group=group)
    return arrived.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1)


def passed_on(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """What the process before this one in the group has; it has no gradient.

    One collective, in which all take part, and not a send and a receive: those are not recorded.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    given, taken = [0] * size, [0] * size
    given[(rank + 1) % size] = taken[(rank - 1) % size] = 1
    sent = tensor.contiguous()[None]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, taken, given, group=group)
    return received[0]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, dim: int, group: ProcessGroup | None, factor: float
    ) -> Tensor:
        ctx.how = dim, group, factor
        return _part(tensor, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dim, group, factor = ctx.how
        return _all_parts(_scaled(grad, factor), dim, group), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, dim: int, group: ProcessGroup | None, factor: float
    ) -> Tensor:
        ctx.how = dim, group, factor
        return _all_parts(tensor, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dim, group, factor = ctx.how
        return _scaled(_part(grad, dim, group), factor), None, None, None


def _part(tensor: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    # A copy: what a Function gives must not be a view of its argument.
    return tensor.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].clone()


def _all_parts(tensor: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    parts = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    dist.all_gather_into_tensor(parts, tensor.contiguous(), group=group)
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def _scaled(grad: Tensor, factor: float) -> Tensor:
    return grad if factor == 1 else grad * factor


def _factor(grad_scale: str | None, size: int) -> float:
    return {None: 1.0, "up": float(size), "down": 1.0 / size}[grad_scale]


def _dimension(where: str, tensor: Tensor, dim: int, grad_scale: str | None) -> int:
    """The dimension counted from the first."""
    if grad_scale not in _SCALES:
        raise ValueError(f"[{where}] grad_scale = {grad_scale!r}: should be None, 'up' or 'down'.")
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"[{where}] seq_dim = {dim}: the tensor has {tensor.dim()} dimensions.")
    return dim % tensor.dim()
