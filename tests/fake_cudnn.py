"""cuDNN's recurrent layers on the host: what stands for them where there is no GPU.

They hold their weights in an order of their own, with room in between, and their backward spoils
what the forward has left for it, as cuDNN's does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library

LAYERS = (torch.nn.RNN, torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU)  # ReLU, tanh
GAP = 3  # elements between two weights
MARK = 77  # in what is left for the backward
asked: list[tuple[Any, ...]] = []
_registered: list[library.Library] = []


def layer_of(features: int, hidden: int, mode: int, layers: int, both: bool) -> torch.nn.RNNBase:
    options = {"nonlinearity": "relu"} if mode == 0 else {}
    return LAYERS[mode](features, hidden, layers, bidirectional=both, **options)


def places(layer: torch.nn.RNNBase) -> list[int]:
    """Where each parameter begins: the last one first."""
    found, end = [], GAP
    for parameter in reversed(layer._flat_weights):
        found.append(end)
        end += parameter.numel() + GAP
    return [*reversed(found), end]


def layout(
    input_sizes: list[int],
    hidden_size: int,
    mode: int,
    num_layers: int,
    bidirectional: bool,
    train: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> list[int]:
    asked.append((tuple(input_sizes), hidden_size, mode, num_layers, bidirectional, train, dtype))
    if dtype == torch.bfloat16:  # as older versions
        return []
    *offsets, end = places(layer_of(input_sizes[2], hidden_size, mode, num_layers, bidirectional))
    return [input_sizes[0] * 5 if train else 0, end, *offsets]


def in_own_thread(work: Callable[[], list[Tensor]]) -> list[Tensor]:
    """With autograd, which is off where a plan runs. What it makes is copied in this thread: the
    memory of captured work is."""
    made: list[Tensor] = []
    thread = threading.Thread(target=lambda: made.extend(work()))
    thread.start()
    thread.join()
    return [each.clone() for each in made]


def run(
    tensors: list[Tensor], mode: int, layers: int, both: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Results of a layer and what they were computed from, with gradients."""
    x, weights, *first = (t.clone().requires_grad_() for t in tensors)
    layer = layer_of(x.shape[2], first[0].shape[2], mode, layers, both)
    begins = places(layer)
    flat = [
        weights[begin : begin + p.numel()].view(p.shape)
        for begin, p in zip(begins, layer._flat_weights, strict=False)
    ]
    name = {0: "rnn_relu", 1: "rnn_tanh", 2: "lstm", 3: "gru"}[mode]
    hx = first if mode == 2 else first[0]
    results = getattr(torch._VF, name)(x, hx, flat, True, layers, 0.0, True, both, False)
    return list(results), [x, weights, *first]


def forward(input, weights, hx, cx, mode, num_layers, bidirectional, train, reserve_bytes):
    given = [input, weights, hx] + ([] if cx is None else [cx])

    def work() -> list[Tensor]:
        results, _ = run(given, mode, num_layers, bidirectional)
        return [r.detach() for r in results]

    output, hy, *cy = in_own_thread(work)
    reserve = torch.full((reserve_bytes,), MARK, dtype=torch.uint8)
    return output, hy, cy[0] if cy else torch.empty(0, dtype=hx.dtype), reserve


def backward(
    input,
    weights,
    hx,
    cx,
    output,
    grad_output,
    grad_hy,
    grad_cy,
    reserve,
    mode,
    num_layers,
    bidirectional,
):
    assert reserve.numel() == input.shape[0] * 5 and reserve.eq(MARK).all(), "called before"
    reserve.zero_()
    given = [input, weights, hx] + ([] if cx is None else [cx])

    def work() -> list[Tensor]:
        results, leaves = run(given, mode, num_layers, bidirectional)
        pairs = [
            (r, g)
            for r, g in zip(results, (grad_output, grad_hy, grad_cy), strict=False)
            if g is not None
        ]
        ends, grads = zip(*pairs, strict=True)
        return list(torch.autograd.grad(ends, leaves, grads, materialize_grads=True))

    made = in_own_thread(work)
    return (*made, *([torch.empty(0, dtype=hx.dtype)] if cx is None else []))


def install() -> None:
    """From here on; before the device is used for the first time."""
    kernels = library.Library("acc", "IMPL")
    kernels.impl("cudnn_rnn", forward, "CPU")
    kernels.impl("cudnn_rnn_backward", backward, "CPU")
    kernels.impl("cudnn_rnn_layout", layout, "CPU")
    _registered.append(kernels)
