"""The operations of a model as a torch.fx graph."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable

from torch import fx, nn

from torchacc.utils.checkpoint import is_checkpointed


class _Tracer(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        # Its operations alone would be ordinary ones.
        return is_checkpointed(module) or super().is_leaf_module(module, name)


def trace(model: nn.Module, input_names: Iterable[str] | None) -> fx.GraphModule:
    """Traces `model` with torch.fx. Checkpointed modules are called as a whole.

    Args:
        model: its forward may not branch on the values of tensors.
        input_names: the arguments of forward that are passed; the others have their defaults.

    Returns:
        A module that shares the parameters of `model` and takes the named arguments, and those that
        have no default.

    Raises:
        ValueError: forward has no argument of one of the names.
    """
    names = list(input_names or ())
    parameters = inspect.signature(model.forward).parameters
    unknown = [name for name in names if name not in parameters]
    if unknown:
        raise ValueError(
            f"[trace] the forward of {type(model).__name__} has no argument {', '.join(unknown)}. "
            f"It has: {', '.join(parameters)}"
        )
    required = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty]
    return fx.GraphModule(model, graph_of(model, {*names, *required}), type(model).__name__)


def graph_of(model: nn.Module, names: Collection[str]) -> fx.Graph:
    """The operations of `model` as a function of these arguments; others have their defaults.

    Raises ValueError where forward uses arguments without a name.
    """
    parameters = inspect.signature(model.forward).parameters
    fixed = {n: p.default for n, p in parameters.items() if n not in names}
    graph = _Tracer().trace(model, concrete_args=fixed)
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.target not in names:
            if str(node.target).startswith("*") and node.users:
                raise ValueError(
                    f"[trace] the forward of {type(model).__name__} uses what it gets as "
                    f"{node.target}, which may be any number. Give its arguments names."
                )
            _erase(graph, node)
    return graph


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Takes out an argument that has its default: its value is in the graph, only checks use it."""
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)
