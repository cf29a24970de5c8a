"""Training by several processes: meshes, groups, and the wrappers that `accelerate` uses.

Imported name by name, when first asked for: they need parts of torch that take as long to import as
torch itself, and most programs train in one process.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchacc.dist import state_dict_utils, tp
    from torchacc.dist.data_parallel import DataParallel
    from torchacc.dist.distributed_parallel import DistributedParallel
    from torchacc.dist.fsdp import FullyShardedDataParallel
    from torchacc.dist.group import (
        BACKEND_NAME,
        EAGER_BACKEND_NAME,
        init_nccl_context,
        init_process_group,
        rendezvous,
    )
    from torchacc.dist.mesh import Mesh
    from torchacc.dist.parallel_module import ParallelModule
    from torchacc.dist.pipeline import PipelineParallel
    from torchacc.launched import local_rank, rank, world_size

_MODULES = {
    "BACKEND_NAME": "torchacc.dist.group",
    "EAGER_BACKEND_NAME": "torchacc.dist.group",
    "DataParallel": "torchacc.dist.data_parallel",
    "DistributedParallel": "torchacc.dist.distributed_parallel",
    "FullyShardedDataParallel": "torchacc.dist.fsdp",
    "Mesh": "torchacc.dist.mesh",
    "ParallelModule": "torchacc.dist.parallel_module",
    "PipelineParallel": "torchacc.dist.pipeline",
    "init_nccl_context": "torchacc.dist.group",
    "init_process_group": "torchacc.dist.group",
    "local_rank": "torchacc.launched",
    "rank": "torchacc.launched",
    "rendezvous": "torchacc.dist.group",
    "world_size": "torchacc.launched",
}


def __getattr__(name: str) -> Any:
    if name in ("state_dict_utils", "tp"):
        return importlib.import_module(f"torchacc.dist.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'torchacc.dist' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "BACKEND_NAME",
    "EAGER_BACKEND_NAME",
    "DataParallel",
    "DistributedParallel",
    "FullyShardedDataParallel",
    "Mesh",
    "ParallelModule",
    "PipelineParallel",
    "init_nccl_context",
    "init_process_group",
    "local_rank",
    "rank",
    "rendezvous",
    "state_dict_utils",
    "tp",
    "world_size",
]
