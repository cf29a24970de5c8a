"""Activation offload: what backward needs of the first layers waits in the memory of the host.

On the lazy device a copy to the host is a read: it ends what is recorded so far. So what a layer
saved is copied at its end, all of it together, and in backward what is recorded is submitted before
more comes back. Otherwise the whole step would be one plan, in which everything is there at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchacc.device import is_lazy_device, reads_pinned_memory
from torchacc.logger import logger
from torchacc.utils.utils import apply_to_tensors
from torchacc_device import _boundary


class _Block:
    """The memory of one saved tensor or of several: on the device, on the host, or on both."""

    def __init__(self, tensor: Tensor) -> None:
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        self._there: Tensor | None = tensor.detach().as_strided((count,), (1,), 0)
        self._device = tensor.device
        self._host: Tensor | None = None
        self._copied: torch.Event | None = None

    def offload(self) -> int:
        """Copies to the host and lets go of the device's memory. Returns how many bytes."""
        there = self._there
        assert there is not None
        pinned = reads_pinned_memory(self._device)
        host = torch.empty(there.shape, dtype=there.dtype, device="cpu", pin_memory=pinned)
        host.copy_(there, non_blocking=pinned)
        if pinned:
            self._copied = torch.Event(self._device)
            self._copied.record()
        self._host, self._there = host, None
        return host.nbytes

    def reload(self) -> Tensor:
        """The memory on the device, copied there if it is not there."""
        if self._there is None:
            assert self._host is not None
            if self._copied is not None:
                # Copies to the device do not wait for those from it.
                self._copied.synchronize()
            self._there = self._host.to(self._device, non_blocking=self._copied is not None)
        return self._there

    def release(self) -> None:
        """Lets go of the device's memory again, if there is a copy on the host."""
        if self._host is not None:
            self._there = None


class _Saved:
    """What stands in the graph for a saved tensor: the tensor, or where in which block it lies.

    Autograd does not look for changes in place where hooks stand between, so this does.
    """

    def __init__(self, tensor: Tensor, block: _Block | None, forward: _Forward) -> None:
        # Not the tensor, which holds the graph that holds this.
        self._tensor: Tensor | None = tensor.detach()
        self._version = tensor._version
        self._block = block
        self._place = (tensor.shape, tensor.stride(), tensor.storage_offset())
        # With the graph goes what is known of the forward pass that made it.
        self._forward = forward

    def check(self) -> None:
        """Raises RuntimeError if the tensor has been changed since."""
        if self._tensor is not None and self._tensor._version != self._version:
            raise RuntimeError(
                f"[cpu_offload] a tensor of shape {tuple(self._place[0])} that backward needs was "
                f"changed in place: it is at version {self._tensor._version}, not {self._version}. "
                "Use an operator that makes a new tensor."
            )

    def leave(self) -> None:
        """The tensor's memory goes to the host."""
        self.check()
        self._tensor = None

    def get(self) -> Tensor:
        if self._tensor is not None:
            self.check()
            return self._tensor
        assert self._block is not None
        return self._block.reload().as_strided(*self._place)


class _Forward:
    """One forward pass, and its backward: the layers that were gone through, by number."""

    def __init__(self) -> None:
        # Per layer that ended, what of it is offloaded, as long as the graph needs it.
        self.layers: list[list[weakref.ref[_Block]]] = []
        # Of the present layer: the memory, by its identity and type, and what lies in it.
        self.present: dict[tuple[int, torch.dtype], _Block] = {}
        self.leaving: list[weakref.ref[_Saved]] = []
        self.in_backward = False


class _LayerEnd(torch.autograd.Function):
    """Passes a tensor on, and tells in backward that the layer it came from begins."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: _Forward, layer: int, ahead: int) -> Tensor:
        ctx.forward_pass, ctx.layer, ctx.ahead = forward, layer, ahead
        # No view, which the program could not change in place.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layers, layer = ctx.forward_pass.layers, ctx.layer
        ctx.forward_pass.in_backward = True
        for block in _alive(layers[layer + 1 :]):
            block.release()
        wanted = _alive(reversed(layers[max(layer - ctx.ahead, 0) : layer + 1]))
        if wanted:
            # The layers behind this one run, and give back their memory, before more is taken.
            _boundary.mark_step("explicit")
            for block in wanted:
                block.reload()
        return grad, None, None, None


def _alive(layers: Iterable[list[weakref.ref[_Block]]]) -> list[_Block]:
    found = [reference() for layer in layers for reference in layer]
    return [block for block in found if block is not None]


class _Offload:
    """The context that layers run in, and what is called at the end of each."""

    def __init__(self, layers: int, ahead: int, debug: bool) -> None:
        self._layers, self._ahead, self._debug = layers, ahead, debug
        self._hooks: list[AbstractContextManager[Any]] = []
        # The graph owns it: without a backward, a pass is over when its graph is gone.
        self._last: weakref.ref[_Forward] | None = None
        # The pass under way, from the first layer's beginning to its end.
        self._current: _Forward | None = None

    def _forward(self) -> _Forward:
        forward = self._last() if self._last is not None else None
        if forward is None or forward.in_backward:
            forward = _Forward()
            self._last = weakref.ref(forward)
        return forward

    def __enter__(self) -> None:
        forward = self._current = self._forward()
        hooks: AbstractContextManager[Any] = nullcontext()
        if len(forward.layers) < self._layers:
            hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: _pack(forward, tensor), _Saved.get
            )
        hooks.__enter__()
        self._hooks.append(hooks)

    def __exit__(self, *error: Any) -> None:
        self._hooks.pop().__exit__(*error)
        if error[0] is not None:
            self._last = self._current = None

    def end_layer(self, outputs: Any) -> Any:
        forward, self._current = self._current, None
        if forward is None or not torch.is_grad_enabled():
            return outputs
        # A change in place would be copied, and lost sight of.
        for saved in filter(None, (reference() for reference in forward.leaving)):
            saved.leave()
        blocks = list(forward.present.values())
        forward.present.clear()
        forward.leaving.clear()
        bytes_ = sum(block.offload() for block in blocks)
        layer = len(forward.layers)
        forward.layers.append([weakref.ref(block) for block in blocks])
        if self._debug and blocks:
            logger.info("layer %d: %.1f MiB are offloaded", layer, bytes_ / 2**20)
        marked: list[Tensor] = []

        def mark(tensor: Tensor) -> Tensor:
            if marked or not tensor.requires_grad:
                return tensor
            marked.append(_LayerEnd.apply(tensor, forward, layer, self._ahead))
            return marked[0]

        return apply_to_tensors(mark, outputs)


def _pack(forward: _Forward, tensor: Tensor) -> _Saved:
    if not _is_activation(tensor):
        return _Saved(tensor, None, forward)
    key = (tensor.untyped_storage()._cdata, tensor.dtype)
    block = forward.present.get(key)
    if block is None:
        block = forward.present[key] = _Block(tensor)
    saved = _Saved(tensor, block, forward)
    forward.leaving.append(weakref.ref(saved))
    return saved


def _is_activation(tensor: Tensor) -> bool:
    """Whether memory is freed where nothing but the graph holds `tensor`: it is no parameter's."""
    if not is_lazy_device(tensor.device) or tensor.layout != torch.strided:
        return False
    if is_traceable_wrapper_subclass(tensor):  # its memory is that of the tensors in it
        return False
    if tensor.is_conj() or tensor.is_neg():  # their memory alone does not say what they are
        return False
    base = tensor if tensor._base is None else tensor._base
    if base.grad_fn is None and not base.requires_grad and base.numel() > tensor.numel():
        return False  # a piece of a buffer, say, which stays and may be much larger
    return not isinstance(base, nn.Parameter) and not (base.is_leaf and base.requires_grad)


def get_cpu_offload_context(
    num_offload_layers: int = 1,
    num_prefetch_layers: int = 1,
    num_offload_sync_layers: float = 1.0,
    debug: bool = False,
) -> tuple[_Offload, Callable[[Any], Any]]:
    """A context to run layers in, and a function for what each of them returns.

        context, synchronizer = get_cpu_offload_context(num_offload_layers=3)
        for layer in layers:
            with context:
                x = layer(x)
            x = synchronizer(x)

    What the first layers save for their backward, parameters excepted, is in the host's memory from
    the end of the layer, and comes back when backward reaches it. One forward and its backward
    come after another: with several forward passes under way, layers are counted on. What is no
    tensor of the lazy device is left alone.

    Args:
        num_offload_layers: the first so many layers of a forward pass are offloaded.
        num_prefetch_layers: so many layers come back before backward reaches them.
        num_offload_sync_layers: taken for compatibility and without effect: memory that was copied
            is free in the order of the device's work, and nothing waits for that.
        debug: logs how much each layer offloads.

    Raises:
        ValueError: a number is negative.
    """
    numbers = {
        "num_offload_layers": num_offload_layers,
        "num_prefetch_layers": num_prefetch_layers,
        "num_offload_sync_layers": num_offload_sync_layers,
    }
    for name, number in numbers.items():
        if number < 0:
            raise ValueError(f"[cpu_offload] {name} = {number}: should be at least 0.")
    offload = _Offload(num_offload_layers, num_prefetch_layers, debug)
    return offload, offload.end_layer
