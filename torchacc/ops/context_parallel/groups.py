"""The processes that hold parts of the same sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from torchacc.config_dist import DIMENSIONS
from torchacc.dist.mesh import Mesh, made_meshes, mesh_of_sizes


@dataclass(frozen=True)
class _Groups:
    default: ProcessGroup  # the group that they are parts of
    whole: ProcessGroup
    inter: ProcessGroup
    intra: ProcessGroup


_made: _Groups | None = None


def initialize_context_parallel(
    context_parallel_size: int, intra_parallel_size: int | None = None
) -> None:
    """Makes the groups of processes that share sequences; all processes have to call it.

    Process r of a group has part r of each sequence. They are the groups `sp` of the mesh that
    `torchacc.accelerate` made of `config.dist`, or else of one in which neighbouring ranks share
    sequences: the same as `config.dist.sp.size = context_parallel_size` makes, and will find.

    Args:
        context_parallel_size: how many processes share a sequence.
        intra_parallel_size: how many of them, neighbours, make an inner group: processes of one
            machine, as a rule. None: all.

    Raises:
        RuntimeError: there is no process group.
        ValueError: a size does not divide the number of processes, or of those that share a
            sequence, or the mesh has other groups.
        AssertionError: it was called before, as in TorchAcc.
    """
    global _made
    where = "initialize_context_parallel"
    if not dist.is_initialized():
        raise RuntimeError(
            f"[{where}] there is no process group. Call torchacc.accelerate, or "
            "torch.distributed.init_process_group, first."
        )
    if _present() is not None:
        raise AssertionError(
            f"[{where}] was called before for these processes. Call it once; its groups are in "
            "get_context_parallel_group() and its like."
        )
    processes = dist.get_world_size()
    size = context_parallel_size
    inner = size if intra_parallel_size is None else intra_parallel_size
    if size < 1 or processes % size != 0:
        raise ValueError(
            f"[{where}] context_parallel_size = {size}: should divide the number of processes, "
            f"which is {processes}."
        )
    if inner < 1 or size % inner != 0:
        raise ValueError(
            f"[{where}] intra_parallel_size = {inner}: should divide context_parallel_size, which "
            f"is {size}."
        )
    mesh = _mesh_with(size)
    whole, alone = mesh.group("sp"), mesh.own_group()
    if inner == size:
        inter, intra = alone, whole
    elif inner == 1:
        inter, intra = whole, alone
    else:
        ranks = mesh.rank_groups("sp")
        neighbours = [group[i : i + inner] for group in ranks for i in range(0, size, inner)]
        apart = [group[i::inner] for group in ranks for i in range(inner)]
        intra, _ = dist.new_subgroups_by_enumeration(neighbours)
        inter, _ = dist.new_subgroups_by_enumeration(apart)
    default = dist.group.WORLD
    assert default is not None, "there is one while torch.distributed is initialized"
    _made = _Groups(default, whole, inter, intra)


def get_context_parallel_group() -> ProcessGroup:
    """The processes that share sequences with this one.

    Raises RuntimeError before `initialize_context_parallel`.
    """
    return _groups().whole


def get_intra_cp_process_group() -> ProcessGroup:
    """Those that share sequences with this process in its inner group, over which heads are split.

    Raises RuntimeError before `initialize_context_parallel`.
    """
    return _groups().intra


def get_inter_cp_process_group() -> ProcessGroup:
    """One process of each inner group: those around which keys and values travel.

    Raises RuntimeError before `initialize_context_parallel`.
    """
    return _groups().inter


def _mesh_with(size: int) -> Mesh:
    for mesh in reversed(made_meshes()):
        if mesh.num("sp") == size:
            return mesh
        if mesh.num("sp") > 1:
            raise ValueError(
                f"[initialize_context_parallel] context_parallel_size = {size}, and the processes "
                f"are arranged with config.dist.sp.size = {mesh.num('sp')}. Make them equal."
            )
    sizes = {**dict.fromkeys(DIMENSIONS, 1), "dp": dist.get_world_size() // size, "sp": size}
    return mesh_of_sizes(sizes, DIMENSIONS)


def _present() -> _Groups | None:
    """What was made, unless the processes have been grouped anew since."""
    if _made is None or not dist.is_initialized() or _made.default is not dist.group.WORLD:
        return None
    return _made


def _groups() -> _Groups:
    made = _present()
    if made is None:
        raise RuntimeError(
            "[context_parallel] there are no groups yet. Call initialize_context_parallel in every "
            "process first."
        )
    return made
