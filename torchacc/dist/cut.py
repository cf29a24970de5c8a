"""How a model is cut into the stages of a pipeline: its operations, and whose each is."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import fx, nn
from torch.fx.graph_module import _copy_attr

from torchacc.utils.checkpoint import chosen_modules
from torchacc.utils.trace import graph_of
from torchacc_device._distributed import default_timeout

if TYPE_CHECKING:
    from torchacc.config import MemoryConfig, PPConfig
    from torchacc.dist.mesh import Mesh


# Before the names of the model's arguments: `target` or `losses` are those of torch's schedules.
ARGUMENT = "argument_"


# The operations of a model, and the stage of each.
Cut = tuple[fx.Graph, dict[fx.Node, int]]


def split(
    model: nn.Module, options: PPConfig, stage_id: int, cut: Cut | None = None
) -> tuple[fx.GraphModule, list[str]]:
    """One stage of `model`, and the names of the model's arguments that it takes.

    The first stage takes them by position, the others, after what the stage before hands on, by
    name, with `ARGUMENT` before it. What a later stage needs of an earlier one travels through
    those between. `cut` is `traced`'s result for the model in its present mode, if it is there.
    """
    graph, stage_of = traced(model, options) if cut is None else cut
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    names = []
    overwrites = any(
        stage_of[node] == stage_id and _overwrites(model, node) for node in graph.nodes
    )
    for node in _handed_on(graph, stage_of, stage_id):
        copies[node] = made.placeholder(f"from_{node.name}")
    for node in copies if overwrites else ():
        # torch refuses to write into what a gradient is asked for, or into a view of it.
        copies[node] = made.call_method("clone", (copies[node],))
    for node in graph.nodes:
        if node.op == "placeholder" and any(stage_of[user] == stage_id for user in node.users):
            names.append(str(node.target))
            copies[node] = made.placeholder(f"{ARGUMENT}{node.target}")
    for node in graph.nodes:
        if node.op == "get_attr" and any(stage_of[user] == stage_id for user in node.users):
            copies[node] = made.node_copy(node)
        elif stage_of[node] == stage_id and node.op not in ("placeholder", "get_attr", "output"):
            copies[node] = made.node_copy(node, copies.__getitem__)
    if stage_id + 1 == options.size:
        output = next(iter(reversed(graph.nodes)))
        returned = output.args[0]
        found = [returned] if isinstance(returned, fx.Node) else list(_nodes_in(returned))
        handed = [copies[node] for node in found]
    else:
        returned = None
        handed = [copies[node] for node in _handed_on(graph, stage_of, stage_id + 1)]
    # Also what forward returns, whatever it is, leaves the last stage as tensors.
    made.output(handed[0] if len(handed) == 1 else tuple(handed))
    made.lint()
    stage = fx.GraphModule(model, made, type(model).__name__)
    _keep_names(model, stage, made)
    stage.meta["returned"] = returned
    return stage, names


def _keep_names(model: nn.Module, stage: nn.Module, graph: fx.Graph) -> None:
    """Has the state of the stage no names that the model's has not.

    fx makes persistent buffers of all tensors that forward reads from the model.
    """
    names = model.state_dict(keep_vars=True).keys()
    for node in graph.nodes:
        owner, _, last = str(node.target).rpartition(".")
        if node.op == "get_attr" and str(node.target) not in names:
            module = stage.get_submodule(owner)
            if last in module._buffers:
                module._non_persistent_buffers_set.add(last)


def _overwrites(model: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        inside = model.get_submodule(str(node.target)).modules()
        return any(getattr(module, "inplace", False) for module in inside)
    if node.op == "call_function" and len(node.args) > 1 and _inplace_by_place(node):
        return True
    name = str(getattr(node.target, "__name__", node.target))
    of_operator = getattr(node.target, "__module__", None) == "_operator" and name.startswith("i")
    method = name.endswith("_") and not name.endswith("__")
    return method or of_operator or bool(node.kwargs.get("inplace"))


def _inplace_by_place(node: fx.Node) -> bool:
    """`F.relu(x, True)`."""
    try:
        names = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # functions of C have none
        return False
    given = dict(zip(names, node.args, strict=False))
    return given.get("inplace") is True


def _nodes_in(structure: Any) -> dict[fx.Node, None]:
    found: dict[fx.Node, None] = {}
    fx.node.map_arg(structure, found.setdefault)
    return found


def as_returned(values: Any, structure: Any) -> Any:
    """What forward returns, of what the last stage does; `structure` is its `meta["returned"]`."""
    if isinstance(structure, fx.Node):
        return values
    nodes = _nodes_in(structure)
    by_node = dict(zip(nodes, values if len(nodes) > 1 else (values,), strict=True))
    return fx.node.map_arg(structure, by_node.__getitem__)


def split_in_modes(
    model: nn.Module, options: PPConfig, stage_id: int, cut: Cut
) -> tuple[fx.GraphModule, dict[bool, tuple[list[str], Any]]]:
    """`split` for both values of the stage's `training`: names, and what the last stage returns.

    A trace has in it what forward does in the mode that the model is in. One mode alone is there
    if forward cannot be traced and split in the other. `cut` is of the mode that the model is in.
    """
    stage, names = split(model, options, stage_id, cut)
    ways = {stage.training: (names, stage.meta["returned"])}
    other_mode = not stage.training
    before = [(module, module.training) for module in model.modules()]
    try:
        model.train(other_mode)
        other, other_names = split(model, options, stage_id)
    except Exception:  # whatever the program's forward raises
        return stage, ways
    finally:
        for module, mode in before:
            module.training = mode
    ways[other_mode] = (other_names, other.meta["returned"])
    if other.code != stage.code:
        for node in other.graph.nodes:
            if node.op in ("call_module", "get_attr"):
                _copy_attr(model, stage, str(node.target))
        _keep_names(model, stage, other.graph)
        functions = {stage.training: type(stage).forward, other_mode: type(other).forward}

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return functions[self.training](self, *args, **kwargs)

        # Each GraphModule has a class of its own.
        type(stage).forward = forward
    return stage, ways


def inputs(model: nn.Module, options: PPConfig) -> list[str]:
    """The arguments that are passed: `dist.pp.input_names`, or those that have no default.

    Raises ValueError for names that are none of forward's arguments, or leave one out that has to
    be passed.
    """
    empty = inspect.Parameter.empty
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters
    single = [name for name, p in parameters.items() if p.kind not in several]
    required = [name for name in single if parameters[name].default is empty]
    if options.input_names is None:
        return required
    for said, names in (
        ("names what is no argument of forward", set(options.input_names) - set(single)),
        ("leaves out what has no default", set(required) - set(options.input_names)),
    ):
        if names:
            raise ValueError(
                f"[config] dist.pp.input_names = {options.input_names} {said}: "
                f"{', '.join(sorted(names))}. The arguments are: {', '.join(single)}."
            )
    return list(options.input_names)


def traced(model: nn.Module, options: PPConfig) -> Cut:
    """The operations of `model`, and the stage of each.

    Raises ValueError for split points that are none, in another order than in forward, or with
    nothing between them, and for a forward that returns a size: stages hand on tensors.
    """
    points = [_name_of(model, point) for point in options.split_points]
    graph = graph_of(model, inputs(model, options))
    stage, stage_of, reached = 0, {}, set()
    for node in graph.nodes:
        here = [str(node.target)] if node.op == "call_module" else []
        here += node.meta.get("nn_module_stack", {})
        for point in points:
            if point not in reached and any(f"{name}.".startswith(f"{point}.") for name in here):
                reached.add(point)
                stage += 1
                if points[stage - 1] != point:
                    raise ValueError(
                        f"[config] dist.pp.split_points = {points}: {point} comes before "
                        f"{points[stage - 1]} in forward. Name them in this order."
                    )
        stage_of[node] = stage
    missing = [point for point in points if point not in reached]
    if missing:
        raise ValueError(
            f"[config] dist.pp.split_points: forward does not call {', '.join(missing)}. Name "
            "modules that it calls, for example those of model.named_children()."
        )
    busy = {stage for node, stage in stage_of.items() if node.op.startswith("call_")}
    for empty in sorted(set(range(len(points) + 1)) - busy):
        before = f" before {points[empty]}" if empty < len(points) else ""
        raise ValueError(
            f"[config] dist.pp.split_points = {points}: stage {empty} would have nothing to do, "
            f"since forward computes nothing there{before}. Name a module that it calls later."
        )
    sizes = _sizes(graph)
    for node in _nodes_in(next(iter(reversed(graph.nodes))).args):
        if node in sizes:
            raise ValueError(
                f"[config] dist.pp: the forward of {type(model).__name__} returns {node.name}, "
                "which is a size and no tensor. Leave it out."
            )
    _repeat_sizes(graph, sizes, stage_of)
    return graph, stage_of


# What is no tensor cannot travel, and costs nothing.
_SIZES = frozenset(("dim", "ndimension", "nelement", "numel", "size"))
_KINDS = frozenset(("device", "dtype", "ndim", "shape"))


def _is_size(node: fx.Node, sizes: Collection[fx.Node]) -> bool:
    """Whether it asks a tensor for its size or kind, or computes with such answers alone."""
    if node.op == "call_method":
        return node.target in _SIZES
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in _KINDS
    own = getattr(node.target, "__module__", None) in ("_operator", "builtins", "math")
    return own and bool(node.all_input_nodes) and all(n in sizes for n in node.all_input_nodes)


def _sizes(graph: fx.Graph) -> dict[fx.Node, None]:
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if _is_size(node, found):
            found[node] = None
    return found


def _repeat_sizes(
    graph: fx.Graph, sizes: Collection[fx.Node], stage_of: dict[fx.Node, int]
) -> None:
    """Lets each stage ask for the sizes that it uses by itself."""
    for node in reversed(list(sizes)):
        for stage in sorted({stage_of[user] for user in node.users} - {stage_of[node]}):
            with graph.inserting_after(node):
                copy = graph.node_copy(node)
            stage_of[copy] = stage
            node.replace_all_uses_with(copy, lambda user, stage=stage: stage_of[user] == stage)


def _checkpointed(model: nn.Module, memory: MemoryConfig) -> dict[str, nn.Module]:
    """The modules that will be checkpointed, by their names."""
    if not memory.gc:
        return {}
    names = {module: name for name, module in model.named_modules()}
    chosen = chosen_modules(model, memory.gc_cls or (), memory.gc_cnt)
    return {names[module]: module for module in chosen}


def check_points(model: nn.Module, options: PPConfig, memory: MemoryConfig) -> None:
    """Raises ValueError for a split point inside of a module that will be checkpointed.

    Such a module is computed as a whole, twice.
    """
    for name, module in _checkpointed(model, memory).items():
        inside = f"{name}." if name else ""
        for point in options.split_points:
            if _name_of(model, point).startswith(inside):
                raise ValueError(
                    f"[config] dist.pp.split_points has {_name_of(model, point)}, which is inside "
                    f"of {name or 'the model itself'}, a {type(module).__name__} that "
                    "memory.gc_cls checkpoints as a whole. Split before such a module, or "
                    "checkpoint smaller ones."
                )


def parts_of_stages(model: nn.Module, options: PPConfig, memory: MemoryConfig) -> list[set[str]]:
    """What each stage will hold: the names of modules that stay whole, and of parameters.

    Modules that will be checkpointed stay whole, and those of torch.nn; of others the operations
    alone. Raises ValueError as `traced` does.
    """
    graph, stage_of = traced(model, options)
    whole = _checkpointed(model, memory).keys()
    parts: list[set[str]] = [set() for _ in range(options.size)]
    for node in graph.nodes:
        parts[stage_of[node]] |= whole & node.meta.get("nn_module_stack", {}).keys()
        if node.op == "call_module":
            parts[stage_of[node]].add(str(node.target))
        elif node.op == "get_attr":
            for user in node.users:
                parts[stage_of[user]].add(str(node.target))
    return parts


def _handed_on(graph: fx.Graph, stage_of: dict[fx.Node, int], stage_id: int) -> list[fx.Node]:
    """What stages before `stage_id` compute for it and those after it."""
    return [
        node
        for node in graph.nodes
        if stage_of[node] < stage_id
        and node.op not in ("placeholder", "get_attr")
        and any(stage_of[user] >= stage_id for user in node.users)
    ]


def _name_of(model: nn.Module, point: str | nn.Module) -> str:
    for name, module in model.named_modules():
        if name and point in (name, module):
            return name
    shown = point if isinstance(point, str) else f"a {type(point).__name__}"
    children = ", ".join(name for name, _ in model.named_children())
    raise ValueError(
        f"[config] dist.pp.split_points: the model has no module {shown}. Its largest parts are: "
        f"{children}"
    )


def tied(model: nn.Module, cut: Cut, mesh: Mesh) -> list[tuple[str, dist.ProcessGroup]]:
    """Parameters of this stage that others have too, each with the group of those that do.

    The names are the stage's. All processes have to call it: each makes all groups.
    """
    graph, stage_of = cut
    # By the parameter: what each stage that has it calls it.
    owners: dict[nn.Parameter, dict[int, str]] = {}
    for node in graph.nodes:
        target = str(node.target)
        if node.op == "call_module":
            found = model.get_submodule(target).named_parameters(target)
            stages = {stage_of[node]}
        elif node.op == "get_attr":
            owner, _, last = target.rpartition(".")
            value = getattr(model.get_submodule(owner), last)
            found = iter([(target, value)] if isinstance(value, nn.Parameter) else [])
            stages = {stage_of[user] for user in node.users}
        else:
            continue
        for name, parameter in found:
            for stage in stages:
                owners.setdefault(parameter, {}).setdefault(stage, name)
    mine = mesh.get_stage_id()
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    found_here = []
    for names in owners.values():
        stages_of = tuple(sorted(names))
        if len(stages_of) == 1:
            continue
        if stages_of not in groups:
            for ranks in mesh.rank_groups("pp"):
                group = dist.new_group([ranks[stage] for stage in stages_of], default_timeout())
                if dist.get_rank() in ranks:
                    groups[stages_of] = group
        if mine in names:
            found_here.append((names[mine], groups[stages_of]))
    return found_here
