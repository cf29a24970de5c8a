"""A stage of a pipeline as torch runs it, made to take whatever stages of a model hand on."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from torchacc.device import device_type


class Stage(PipelineStage):
    """torch's, which a tensor without a gradient from the next stage does not stop.

    Such are integers, and what the next stage only looks at, its size for example: their gradients
    are sent as zeros. It learns shapes without a trace, and can run forward alone.
    """

    def _shape_inference(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        # It runs the stage on zeros: a batch norm's statistics are those of data alone.
        with torch.no_grad():
            before = [(buffer, buffer.clone()) for buffer in self.submod.buffers()]
        try:
            with torch.random.fork_rng([self.device.index], device_type=device_type()):
                return super()._shape_inference(*args, **kwargs)
        finally:
            with torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        backward, self.has_backward = self.has_backward, False
        try:
            made = super()._prepare_forward_infra(*args, **kwargs)
        finally:
            self.has_backward = backward
        for chunk in self.args_recv_info:
            self._ask_for_gradients(chunk)
        return made

    def _received(self, chunk: int) -> list[torch.Tensor]:
        return [info.buffer for info in self.args_recv_info[chunk] if hasattr(info, "buffer")]

    def _ask_for_gradients(self, chunk: int) -> None:
        for buffer in self._received(chunk):
            differentiable = buffer.is_floating_point() or buffer.is_complex()
            buffer.requires_grad_(self.has_backward and differentiable)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if not self.has_backward:
            return
        # The last stage detaches what it returns, which may be what it has received.
        self._ask_for_gradients(bwd_chunk_id)
        gradients = self.bwd_cache[bwd_chunk_id]
        received = self._received(bwd_chunk_id)
        filled = [
            torch.zeros_like(buffer, requires_grad=False) if gradient is None else gradient
            for gradient, buffer in zip(gradients, received, strict=False)
        ]
        self.bwd_cache[bwd_chunk_id] = (*filled, *gradients[len(filled) :])

    def _validate_fwd_outputs(self, outputs: tuple[torch.Tensor, ...]) -> None:
        # Strides may be others with gradients than without; what is sent arrives without gaps.
        found, expected = (
            [(each.shape, each.dtype) for each in tensors]
            for tensors in (outputs, self.get_outputs_meta())
        )
        if found != expected:
            super()._validate_fwd_outputs(outputs)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)
        elif isinstance(self.submod, FSDPModule):
            # After a forward alone nothing else frees the whole parameters.
            for module in self.submod.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
