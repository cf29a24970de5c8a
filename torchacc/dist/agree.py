"""What processes that train one model have to agree on before they start."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Tensors that are sent together have at most so many bytes, unless one alone has more.
_BYTES_TOGETHER = 64 << 20


def check_same_model(model: nn.Module) -> None:
    """Raises ValueError on every process unless the models of all have the same tensors.

    Compared are the names, shapes, dtypes and requires_grad of parameters and buffers, not their
    values. All processes have to call it.
    """
    mine = [_line(name, tensor) for name, tensor in _state(model)]
    digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
    everyone = [digest] * dist.get_world_size()
    dist.all_gather_object(everyone, digest)
    rank = next((rank for rank, other in enumerate(everyone) if other != everyone[0]), None)
    if rank is None:
        return
    # All processes come here, and to the same rank.
    first, other = _lines_of(0, mine), _lines_of(rank, mine)
    here, there = next(
        ((a, b) for a, b in zip(first, other, strict=False) if a != b),
        (f"{len(first)} tensors", f"{len(other)} tensors"),
    )
    raise ValueError(
        f"[accelerate] the models differ: process 0 has {here}, and process {rank} has {there}. "
        "Build the same model on every process."
    )


def _lines_of(rank: int, mine: list[str]) -> list[str]:
    lines = [mine]
    dist.broadcast_object_list(lines, src=rank)
    return lines[0]


def broadcast_from_first(model: nn.Module, device: torch.device) -> None:
    """Gives the parameters and buffers of every process the values of process 0.

    A tensor on the CPU passes through `device`. Parts of tensors that are split over processes
    already (DTensor) stay as they are. All processes have to call it.
    """
    together: list[Tensor] = []
    size = 0
    for _, tensor in _state(model):
        if _is_split(tensor):
            continue
        if together and (
            size + tensor.nbytes > _BYTES_TOGETHER
            or tensor.dtype != together[0].dtype
            or tensor.device != together[0].device
        ):
            _broadcast(together, device)
            together, size = [], 0
        together.append(tensor.detach())
        size += tensor.nbytes
    if together:
        _broadcast(together, device)


def _is_split(tensor: Tensor) -> bool:
    # Where nobody has imported it there is none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _broadcast(tensors: list[Tensor], device: torch.device) -> None:
    flat = torch.cat([tensor.to(device).reshape(-1) for tensor in tensors])
    dist.broadcast(flat, src=0)
    begin = 0
    for tensor in tensors:
        end = begin + tensor.numel()
        tensor.copy_(flat[begin:end].view(tensor.shape))
        begin = end


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _line(name: str, tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    fixed = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ", fixed"
    return f"{name} ({kind} {list(tensor.shape)}{fixed})"
