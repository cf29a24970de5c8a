"""Buffers of replicas: a batch norm's statistics, say, which each changes by its own data."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

# Of one exchange, as in DistributedDataParallel.
_MOST_BYTES = 250 << 20


class ReplicaBuffers:
    """Makes the buffers of all replicas those of the first one, as DistributedDataParallel does it.

    For what is wrapped in something else. They are sent before a forward, if a training step may
    have changed them since they were, and so also before the first forward that follows training.

    Args:
        module: its buffers.
        group: the replicas.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup) -> None:
        self._module, self._group = module, group
        self._changed = True

    def share(self, changes: bool) -> None:
        """Called before a forward on all replicas; `changes`: it belongs to a training step."""
        if self._changed:
            buffers = [
                b.to_local() if isinstance(b, DTensor) else b for b in self._module.buffers()
            ]
            if buffers:
                with torch.no_grad():
                    dist._broadcast_coalesced(self._group, buffers, _MOST_BYTES, 0)
        self._changed = changes
