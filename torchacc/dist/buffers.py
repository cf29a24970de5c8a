"""Buffers of replicas: a batch norm's statistics, say, which each changes by its own data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import _unsafe_preserve_version_counter
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torchacc.dist.mesh import Mesh

# Of one exchange, as in DistributedDataParallel.
_MOST_BYTES = 250 << 20


class ReplicaBuffers:
    """Makes the buffers of all replicas those of the first one, as DistributedDataParallel does it.

    For what is wrapped in something else. They are sent before a forward, if a training step may
    have changed them since they were, and so also before the first forward that follows training.

    Args:
        module: its buffers.
        mesh: all processes, which have to make one together.
        names: the dimensions of `mesh` along which the replicas are.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, *names: str) -> None:
        self._module = module
        self._group = mesh.joint_group(*names) if mesh.joint_num(*names) > 1 else None
        self._changed = True

    def share(self, changes: bool) -> None:
        """Called before a forward on all replicas; `changes`: it belongs to a training step."""
        if self._changed and self._group is not None:
            buffers = tuple(
                b.to_local() if isinstance(b, DTensor) else b for b in self._module.buffers()
            )
            # What differs among replicas is statistics, which no backward of training reads: a
            # forward whose backward is still to come may have saved them.
            if buffers:
                with torch.no_grad(), _unsafe_preserve_version_counter(buffers):
                    dist._broadcast_coalesced(self._group, buffers, _MOST_BYTES, 0)
        self._changed = changes
