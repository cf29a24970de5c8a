"""What processes that train one model have to agree on before they start."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from torchacc.dist.mesh import Mesh

# Tensors that are sent together have at most so many bytes, unless one alone has more.
_BYTES_TOGETHER = 64 << 20


def check_same_model(model: nn.Module) -> None:
    """Raises ValueError on every process unless the models of all have the same tensors.

    Compared are the names, shapes, dtypes and requires_grad of parameters and buffers, not their
    values. All processes have to call it.
    """
    _check_same(
        [_line(name, tensor) for name, tensor in _state(model)],
        "[accelerate] the models differ: {}. Build the same model on every process.",
        "tensors",
    )


def check_same_options(options: Mapping[str, object]) -> None:
    """Raises ValueError on every process unless all have these options, names and values.

    They decide which groups are made, so that processes that differ would wait for each other. All
    processes have to call it.
    """
    _check_same(
        [f"{name} = {value!r}" for name, value in options.items()],
        "[config] the processes have other options: {}. Give all the same, in the program or in "
        "the environment that the launcher hands on.",
        "options",
    )


def _check_same(mine: list[str], complaint: str, kind: str) -> None:
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
        (f"{len(first)} {kind}", f"{len(other)} {kind}"),
    )
    raise ValueError(complaint.format(f"process 0 has {here}, and process {rank} has {there}"))


def _lines_of(rank: int, mine: list[str]) -> list[str]:
    lines = [mine]
    dist.broadcast_object_list(lines, src=rank)
    return lines[0]


def broadcast_from_first(model: nn.Module, device: torch.device, mesh: Mesh) -> None:
    """Gives the parameters and buffers of every process the values of process 0.

    A tensor on the CPU passes through `device`. Of one that is split over the dimension `tp` of the
    mesh already (DTensor) each process gets its part from the first process that has the same part.
    One that is split in another way stays as it is. All processes have to call it.
    """
    tensors = [tensor.detach() for _, tensor in _state(model)]
    _broadcast_all([t for t in tensors if not is_split(t)], device, dist.group.WORLD)
    if mesh.num("tp") > 1:
        over_tp = mesh.device_mesh["tp"]
        ours = [t for t in tensors if is_split(t) and t.device_mesh == over_tp]
        whole = [all(placement.is_replicate() for placement in t.placements) for t in ours]
        # torch takes what SequenceParallel replicates as each process has it.
        same = [t.to_local() for t, is_whole in zip(ours, whole, strict=True) if is_whole]
        parts = [t.to_local() for t, is_whole in zip(ours, whole, strict=True) if not is_whole]
        _broadcast_all(same, device, dist.group.WORLD)
        _broadcast_all(parts, device, mesh.joint_group("dp", "fsdp", "pp", "sp"))


def is_split(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    # Where nobody has imported it there is none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _broadcast_all(tensors: list[Tensor], device: torch.device, group: ProcessGroup) -> None:
    together: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if together and (
            size + tensor.nbytes > _BYTES_TOGETHER
            or tensor.dtype != together[0].dtype
            or tensor.device != together[0].device
        ):
            _broadcast(together, device, group)
            together, size = [], 0
        together.append(tensor)
        size += tensor.nbytes
    if together:
        _broadcast(together, device, group)


def _broadcast(tensors: list[Tensor], device: torch.device, group: ProcessGroup) -> None:
    flat = torch.cat([tensor.to(device).reshape(-1) for tensor in tensors])
    dist.broadcast(flat, group=group, group_src=0)
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
