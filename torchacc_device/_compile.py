"""`torch.compile` on acc: Dynamo's graph is run as it is, and so recorded like any other code.

What compiles is acc: the operators of the graph, those of its backward and of everything around it
are one trace, fused with one another. So there is nothing for AOTAutograd to do beforehand: it
would trace the backward ahead of time, into a graph of other operators, for a compiler that needs
it. Without it the operators are the same as without `torch.compile`, and so are the numbers.

The backend's name is "acc". "inductor", the default, is it too for graphs with tensors on acc; its
modes and options say how Inductor is to compile, and have no effect there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_DEVICE = "acc"


def acc(graph: torch.fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """The backend: what Dynamo is to call instead of the code that it made `graph` of.

    `mode` and `options` are Inductor's and have no effect.
    """
    _checkpoint(graph)
    return graph.forward


def _checkpoint(graph: torch.fx.GraphModule) -> None:
    """Has what the program checkpoints be computed again in backward.

    Dynamo leaves that to AOTAutograd: called as it is, its operator only marks nodes for it, and
    everything would be kept.
    """
    operator = torch.ops.higher_order.tag_activation_checkpoint
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            found = module.graph.find_nodes(op="call_function", target=operator)
            for node in found:
                node.target = _checkpointed
            if found:
                module.recompile()


def _checkpointed(body: torch.fx.GraphModule, *args: Any, **options: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    kept, _ = torch.ops.higher_order.tag_activation_checkpoint.divide_kwargs(options)
    # What Dynamo found in the body's closure are arguments, and may be anything.
    kept["use_reentrant"] = False
    if "_checkpoint_context_fn" in body.meta:
        kept["context_fn"] = body.meta["_checkpoint_context_fn"]
    return checkpoint(body, *args, **kept)


def register() -> None:
    """Makes the backend known to Dynamo, which takes seconds to import; twice does nothing."""
    from torch._dynamo.backends import registry

    if _DEVICE not in registry._COMPILER_FNS:
        registry.register_backend(acc, name=_DEVICE)


def registering(original: Callable[..., None]) -> Callable[..., None]:
    """torch.compile has been given the name of a backend."""

    def __init__(self: Any, backend: Any, *args: Any, **options: Any) -> None:
        if backend == _DEVICE:
            register()
        original(self, backend, *args, **options)

    return __init__


def instead_of_inductor(original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: Any, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if _has_acc_tensors(graph, inputs):
            return acc(graph, inputs)
        return original(self, graph, inputs)

    return __call__


def _has_acc_tensors(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether the graph reads, makes or holds one. It may run on several devices."""
    values = [*inputs, *(node.meta.get("example_value") for node in graph.graph.nodes)]
    values += [*graph.parameters(), *graph.buffers()]
    found: list[torch.Tensor] = []
    torch.utils._pytree.tree_map_only(torch.Tensor, found.append, values)
    return any(tensor.device.type == _DEVICE for tensor in found)
