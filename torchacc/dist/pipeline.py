"""Pipeline parallel training: each process computes a stage of the model, on micro batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from torchacc.device import device_type
from torchacc.dist.group import current_index
from torchacc.dist.norms import scale_gradients_, total_norm
from torchacc.dist.parallel_module import ParallelModule

if TYPE_CHECKING:
    from torchacc.config import Config, PPConfig

Wrap = Callable[[nn.Module, "Config"], nn.Module]


class PipelineParallel(ParallelModule):
    """The stage of a model that belongs to this process; a step is one call of `forward_backward`.

    The model is traced (torch.fx) and split before each of the modules in `config.dist.pp.
    split_points`. The parameters are those of the stage, under the model's names.

    Args:
        model: on the CPU; only the stage moves to the device.
        config: the options.
        wrap: what trains the stage together with the processes that have the same one.
    """

    def __init__(self, model: nn.Module, config: Config, wrap: Wrap | None = None) -> None:
        super().__init__(model, config)
        options = config.dist.pp
        stage_id, stages = self._mesh.get_stage_id(), options.size
        stage, self.__dict__["_inputs"] = split(model, options, stage_id)
        self.__dict__["_tied"] = _tied(model, options, self._mesh)
        # Together these processes hold every parameter once.
        self.__dict__["_whole"] = self._mesh.joint_group("pp", "fsdp")
        device = torch.device(device_type(), current_index())
        stage.to(device)
        inner = stage if wrap is None else wrap(stage, config)
        self.__dict__["_signature"] = inspect.signature(model.forward)
        self.__dict__["_output_fn"] = None
        self._wrap(inner, inner)
        # The stage knows torch's own wrappers, and when they may exchange gradients.
        torch_module = inner._inner if isinstance(inner, ParallelModule) else inner
        self.__dict__["_stage"] = PipelineStage(
            torch_module, stage_id, stages, device, group=self._mesh.get_pp_proc_group()
        )
        micro = options.num_micro_batches
        schedule = Schedule1F1B if micro >= stages else ScheduleGPipe
        self.__dict__["_schedule"] = schedule(self._stage, micro, loss_fn=self._loss)

    @property
    def device(self) -> torch.device:
        """Where this stage is; the parameters of the others stay where they were."""
        return self._stage.device

    def clip_grad_norm_(self, max_grad_norm: float) -> Tensor:
        elsewhere = {p for p, group in self._tied if dist.get_rank(group) != 0}
        grads = [p.grad for p in self.parameters() if p.grad is not None and p not in elsewhere]
        square = total_norm(grads).square().to(self.device)
        dist.all_reduce(square, group=self._whole)
        norm = square.sqrt()
        scale_gradients_(self.parameters(), max_grad_norm, norm)
        return norm

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "[PipelineParallel] this process has one stage of the model. Call "
            "model.forward_backward(...), which runs forward and backward of all stages."
        )

    def forward_backward(
        self, *args: Any, output_fn: Callable[[Any], Tensor] | None = None, **kwargs: Any
    ) -> Tensor | None:
        """Forward and backward of one batch, which is cut into micro batches along dimension 0.

        `output_fn` makes the loss from the model's output, which else is the loss. Every process
        passes the model's arguments; a stage takes those that it uses. Returns the loss, averaged
        over the micro batches: on every process, or, without `config.dist.pp.broadcast_loss`, on
        those of the last stage (None on the others).
        """
        bound = self._signature.bind(*args, **kwargs).arguments
        missing = [name for name in self._inputs if name not in bound]
        if missing:
            raise TypeError(
                f"[forward_backward] this stage uses {', '.join(missing)}, which is not passed. "
                "config.dist.pp.input_names lists the arguments that are passed."
            )
        device = self._stage.device
        used = {name: bound[name].to(device) for name in self._inputs}
        self.__dict__["_output_fn"] = output_fn
        losses: list[Tensor] = []
        first = self._mesh.is_first_stage()
        options = self._config.dist.pp
        self._schedule.step(
            *(used.values() if first else ()),
            # The schedule hands a piece of it to the loss, which needs none.
            target=torch.empty(options.num_micro_batches),
            losses=losses,
            return_outputs=False,
            **({} if first else used),
        )
        for parameter, group in self._tied:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros((), device=device)
        if options.broadcast_loss:
            last = self._mesh.stage_to_global(options.size - 1)
            dist.broadcast(loss, src=last, group=self._mesh.get_pp_proc_group())
        return loss if losses or options.broadcast_loss else None

    def _loss(self, output: Any, target: Tensor) -> Tensor:
        loss = output if self._output_fn is None else self._output_fn(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(
                f"[forward_backward] the loss is a {type(loss).__name__}"
                f"{list(loss.shape) if isinstance(loss, Tensor) else ''}, not a tensor of one "
                "element. Pass output_fn, which makes the loss from the model's output."
            )
        return loss.reshape(())


def split(model: nn.Module, options: PPConfig, stage_id: int) -> tuple[fx.GraphModule, list[str]]:
    """One stage of `model`, and the names of the model's arguments that it takes.

    The first stage takes them by position, the others, after what the stage before hands on, by
    name. What a later stage needs of an earlier one travels through those between.
    """
    graph, stage_of = _traced(model, options)
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    names = []
    for node in _handed_on(graph, stage_of, stage_id):
        copies[node] = made.placeholder(f"from_{node.name}")
    for node in graph.nodes:
        if node.op == "placeholder" and any(stage_of[user] == stage_id for user in node.users):
            names.append(str(node.target))
            copies[node] = made.placeholder(str(node.target))
    for node in graph.nodes:
        if node.op == "get_attr" and any(stage_of[user] == stage_id for user in node.users):
            copies[node] = made.node_copy(node)
        elif stage_of[node] == stage_id and node.op not in ("placeholder", "get_attr", "output"):
            copies[node] = made.node_copy(node, copies.__getitem__)
    if stage_id + 1 == options.size:
        output = next(iter(reversed(graph.nodes)))
        made.output(fx.node.map_arg(output.args[0], copies.__getitem__))
    else:
        handed = [copies[node] for node in _handed_on(graph, stage_of, stage_id + 1)]
        made.output(handed[0] if len(handed) == 1 else tuple(handed))
    made.lint()
    return fx.GraphModule(model, made, type(model).__name__), names


def _traced(model: nn.Module, options: PPConfig) -> tuple[fx.Graph, dict[fx.Node, int]]:
    """The operations of `model`, and the stage of each."""
    points = [_name_of(model, point) for point in options.split_points]
    parameters = inspect.signature(model.forward).parameters
    names = options.input_names
    if names is None:
        names = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty]
    fixed = {n: p.default for n, p in parameters.items() if n not in names}
    graph = fx.Tracer().trace(model, concrete_args=fixed)
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.target not in names:
            _erase(graph, node)
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
    return graph, stage_of


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Takes out an argument that has its default: its value is in the graph, only checks use it."""
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)


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


def _tied(
    model: nn.Module, options: PPConfig, mesh: Any
) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
    """Parameters of this stage that others have too, each with the group of those that do."""
    graph, stage_of = _traced(model, options)
    owners: dict[nn.Parameter, set[int]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            used = list(model.get_submodule(str(node.target)).parameters())
            stages = {stage_of[node]}
        elif node.op == "get_attr":
            owner, _, last = str(node.target).rpartition(".")
            found = getattr(model.get_submodule(owner), last)
            used = [found] if isinstance(found, nn.Parameter) else []
            stages = {stage_of[user] for user in node.users}
        else:
            continue
        for parameter in used:
            owners.setdefault(parameter, set()).update(stages)
    return [
        (
            parameter,
            dist.new_group(
                [mesh.stage_to_global(stage) for stage in sorted(stages)],
                use_local_synchronization=True,
            ),
        )
        for parameter, stages in owners.items()
        if len(stages) > 1 and mesh.get_stage_id() in stages
    ]
