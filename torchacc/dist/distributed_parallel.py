"""All ways of training in parallel together, as a configuration asks for them.

What is not asked for is not imported: see `torchacc.dist`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from torchacc.dist.agree import is_split
from torchacc.dist.data_parallel import DataParallel
from torchacc.dist.parallel_module import ParallelModule

if TYPE_CHECKING:
    from torchacc.config import Config
    from torchacc.dist.mesh import Mesh


class DistributedParallel(ParallelModule):
    """Splits a model into stages, shards what remains, and averages the gradients of the rest.

    Each only where its size under `config.dist` is above 1. Tensor parallel layers are split by the
    program, before (`torchacc.dist.tp`).
    """

    def __init__(self, model: nn.Module, config: Config) -> None:
        super().__init__(model, config)
        if self._acc_mesh.num("pp") > 1:
            from torchacc.dist.pipeline import PipelineParallel

            inner: nn.Module = PipelineParallel(model, config, wrap_replicas)
        else:
            inner = wrap_replicas(model, config)
        self._acc_wrap(inner, inner)

    def forward_backward(self, *args: Any, **kwargs: Any) -> Tensor | None:
        if isinstance(self._acc_inner, ParallelModule):
            return self._acc_inner.forward_backward(*args, **kwargs)
        return super().forward_backward(*args, **kwargs)

    def state_dict(
        self, *args: Any, prefix: str = "", keep_vars: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Of layers that are split the whole tensors, so that all processes have to call it."""
        made = super().state_dict(*args, prefix=prefix, keep_vars=keep_vars, **kwargs)
        if self._acc_mesh.num("tp") > 1 and not keep_vars:
            from torchacc.dist.composable import make_whole

            make_whole(made, prefix)
        return made

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self._acc_mesh.num("tp") > 1:
            from torchacc.dist.composable import split_as_held

            found = self._acc_inner
            while isinstance(found, ParallelModule):
                found = found._acc_inner
            state_dict = split_as_held(state_dict, found)
        return super().load_state_dict(state_dict, *args, **kwargs)


def needs_composable(model: nn.Module, mesh: Mesh) -> bool:
    """Whether others train the model too, and it is split: into sharded stages, or its layers."""
    if mesh.num("pp") > 1 and mesh.num("fsdp") > 1:
        return True
    several = mesh.num("fsdp") > 1 or mesh.joint_num("dp", "sp") > 1
    return mesh.num("tp") > 1 and several and any(map(is_split, model.parameters()))


def wrap_replicas(model: nn.Module, config: Config) -> nn.Module:
    """`model` for the processes that train it on other data: sharded, or with gradients averaged.

    One with nothing to train, or that no other process trains, is returned as it is.
    """
    mesh = config.get_mesh()
    if needs_composable(model, mesh):
        from torchacc.dist.composable import Composable

        return Composable(model, config)
    if mesh.num("fsdp") > 1:
        from torchacc.dist.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, config)
    if mesh.joint_num("dp", "sp") > 1 and any(p.requires_grad for p in model.parameters()):
        return DataParallel(model, config)
    return model
