"""Pipeline parallel training: each process computes a stage of the model, on micro batches."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor import DTensor

from torchacc.device import device_type
from torchacc.dist.buffers import ReplicaBuffers
from torchacc.dist.cut import ARGUMENT, as_returned, inputs, split_in_modes, tied, traced
from torchacc.dist.group import current_index
from torchacc.dist.norms import scale_gradients_, total_norm
from torchacc.dist.parallel_module import ParallelModule, with_versions
from torchacc.dist.stage import Stage

if TYPE_CHECKING:
    from torchacc.config import Config

Wrap = Callable[[nn.Module, "Config"], nn.Module]


# Kinds of batches for which what was prepared is kept, with gradients and without;
# each has buffers for what it receives.
KEPT = 4


@dataclass
class _Prepared:
    stage: Stage
    schedule: PipelineScheduleSingle
    loss_type: torch.dtype | None = None  # the first step's, which all processes know from then on


class PipelineParallel(ParallelModule):
    """The stage of a model that belongs to this process; a step is one call of `forward_backward`.

    The model is traced (torch.fx) and split before each of the modules in `config.dist.pp.
    split_points`. The parameters are those of the stage, under the model's names.

    Args:
        model: on the CPU; only the stage moves to the device.
        config: the options.
        wrap: what trains the stage together with the processes that have the same one.

    Raises:
        ValueError: the model cannot be split before `split_points`, or its forward does not take
            `input_names` (`config.dist.pp`).
        RuntimeError: in a call, since only `forward_backward` runs all stages.
    """

    def __init__(self, model: nn.Module, config: Config, wrap: Wrap | None = None) -> None:
        super().__init__(model, config)
        # What the program says later is for later models: each stage would hear it in another step.
        options = self._acc_options = copy.copy(config.dist.pp)
        stage_id = self._acc_mesh.get_stage_id()
        cut = traced(model, options)
        stage, self._acc_ways = split_in_modes(model, options, stage_id, cut)
        self._acc_stage = stage
        self._acc_every_input = inputs(model, options)
        shared = tied(model, cut, self._acc_mesh)
        device = torch.device(device_type(), current_index())
        stage.to(device)
        inner = stage if wrap is None else wrap(stage, config)
        self._acc_signature = inspect.signature(model.forward)
        self._acc_output_fn: Callable[[Any], Tensor] | None = None
        self._acc_wrap(inner, inner)
        # By names: what shards the stage has put other parameters in their places.
        held = dict(self.named_parameters(remove_duplicate=False))
        self._acc_tied = [(held[name], group) for name, group in shared]
        self._acc_device = device
        self._acc_buffers_of_all = ReplicaBuffers(stage, self._acc_mesh, "dp", "fsdp", "sp")
        self._acc_prepared: dict[bool, dict[Any, _Prepared]] = {True: {}, False: {}}
        self._acc_failed: str | None = None

    def _acc_prepared_for(self, shapes: dict[str, Any]) -> _Prepared:
        """What runs micro batches of such arguments, forward alone where no gradients are wanted.

        A stage learns in its first step what it receives; for others it begins anew, on all
        processes of the pipeline alike, since all are given all arguments.
        """
        kind = device_type()
        half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        asked = (half, self._acc_stage.training, *shapes.items())
        kept = self._acc_prepared[torch.is_grad_enabled()]
        found = kept.pop(asked, None) or self._acc_prepare()
        kept[asked] = found  # behind the others: the one used last
        if len(kept) > KEPT:
            del kept[next(iter(kept))]
        return found

    def _acc_prepare(self) -> _Prepared:
        options, inner = self._acc_options, self._acc_inner
        stage = Stage(
            # The stage knows torch's own wrappers, and when they may exchange gradients.
            inner._acc_inner if isinstance(inner, ParallelModule) else inner,
            self._acc_mesh.get_stage_id(),
            options.size,
            self._acc_device,
            group=self._acc_mesh.get_pp_proc_group(),
        )
        micro = options.num_micro_batches
        schedule = Schedule1F1B if micro >= options.size else ScheduleGPipe
        # Not torch's scale_grads: it divides what earlier steps have added up, too.
        return _Prepared(stage, schedule(stage, micro, loss_fn=self._acc_loss, scale_grads=False))

    def _acc_checked(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Shapes and types of the arguments that stages take. Raises the same on all processes."""
        if self._acc_stage.training not in self._acc_ways:
            now, then = ("train", "eval") if self._acc_stage.training else ("eval", "train")
            raise RuntimeError(
                f"[forward_backward] the model is in {now} mode, and its forward could be traced "
                f"and split in {then} mode only. Call model.{then}(), or make forward traceable."
            )
        micro, names = self._acc_options.num_micro_batches, self._acc_every_input
        missing = [name for name in names if name not in arguments]
        if missing:
            raise TypeError(
                f"[forward_backward] stages use {', '.join(missing)}, which is not passed. "
                "config.dist.pp.input_names lists the arguments that are passed."
            )
        ignored = [
            name
            for name, value in arguments.items()
            if name not in names and not self._acc_is_default(name, value)
        ]
        if ignored:
            raise TypeError(
                f"[forward_backward] {', '.join(ignored)} would be ignored: the stages have the "
                "default in them. Name all arguments that are passed in config.dist.pp.input_names."
            )
        for name in names:
            value = arguments[name]
            if not isinstance(value, Tensor) or value.dim() == 0:
                shown = (
                    "0-dimensional tensor" if isinstance(value, Tensor) else type(value).__name__
                )
                raise TypeError(
                    f"[forward_backward] {name} is a {shown}, which cannot be cut into micro "
                    "batches. Pass a tensor with a row for each sample, or leave it out of "
                    "config.dist.pp.input_names, which makes its default part of the stages."
                )
        rows = {name: arguments[name].shape[0] for name in names}
        if any(count % micro or not count for count in rows.values()):
            shown = ", ".join(f"{name} has {count}" for name, count in rows.items())
            raise ValueError(
                f"[forward_backward] a batch is cut along dimension 0 into "
                f"dist.pp.num_micro_batches = {micro} parts of one size: {shown} rows. Leave out a "
                "last batch that is smaller (DataLoader(drop_last=True))."
            )
        return {name: (arguments[name].shape, arguments[name].dtype) for name in names}

    def _acc_is_default(self, name: str, value: Any) -> bool:
        parameter = self._acc_signature.parameters[name]
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return not value
        default = parameter.default
        same = isinstance(value, (bool, int, float, str)) and type(value) is type(default)
        return value is default or (same and value == default)

    @property
    def device(self) -> torch.device:
        """Where this stage is; the parameters of the others stay where they were."""
        return self._acc_device

    def no_sync(self) -> AbstractContextManager[None]:
        # A step of a pipeline is a whole one: its schedule says which backward is the last.
        return nullcontext()

    def clip_grad_norm_(self, max_grad_norm: float) -> Tensor:
        elsewhere = {p for p, group in self._acc_tied if dist.get_rank(group) != 0}
        grads = [p.grad for p in self.parameters() if p.grad is not None and p not in elsewhere]
        square = total_norm(grads).square().to(self.device)
        # Of parts of a parameter the norm is the whole one's; each stage has its own parameters.
        dist.all_reduce(square, group=self._acc_mesh.get_pp_proc_group())
        norm = square.sqrt()
        scale_gradients_(self.parameters(), max_grad_norm, norm)
        return norm

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Takes the stage's state, or the whole model's, of which the rest is left out."""
        elsewhere = self._acc_user.state_dict().keys() - self._acc_stage.state_dict().keys()
        mine = OrderedDict(
            (name, value) for name, value in state_dict.items() if name not in elsewhere
        )
        return super().load_state_dict(with_versions(mine, state_dict), *args, **kwargs)

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
        passes the model's arguments, whose shapes have to be the same on all; a stage takes those
        that it uses. Returns the loss, averaged over the micro batches: on every process, in the
        type of the first loss of such a batch, or, without `config.dist.pp.broadcast_loss`, on
        those of the last stage (None on the others). Under `torch.no_grad()` there is no backward.

        After an error in the middle of a step, in `output_fn` for example, there is no next step.

        Raises:
            TypeError: on every process for arguments that are missing, would be ignored or cannot
                be cut; or the loss is not a tensor of one element.
            ValueError: on every process for a batch that cannot be cut into
                `config.dist.pp.num_micro_batches` parts of one size.
            RuntimeError: an earlier step failed, or forward could be split in the other of the
                modes train and eval only.
        """
        if self._acc_failed is not None:
            raise RuntimeError(
                f"[forward_backward] an earlier step failed ({self._acc_failed}), and the stages "
                "no longer agree on what they send. Start the processes again."
            )
        bound = self._acc_signature.bind(*args, **kwargs).arguments
        prepared = self._acc_prepared_for(self._acc_checked(bound))
        names, _ = self._acc_ways[self._acc_stage.training]
        used = {name: bound[name].to(self._acc_device) for name in names}
        self._acc_output_fn = output_fn
        gradients = torch.is_grad_enabled()
        # Once: of several micro batches none went backward when the next goes forward.
        self._acc_buffers_of_all.share(changes=gradients)
        try:
            # What is made in inference mode, FSDP could not use in a later step.
            with torch.inference_mode(False), torch.set_grad_enabled(gradients):
                with self._acc_shared_gradients() if gradients else nullcontext():
                    losses = self._acc_run(prepared.schedule, used)
        except BaseException as error:
            cause = error.__cause__ or error  # the program's own, inside of torch's
            self._acc_failed = f"{type(cause).__name__}: {cause}"
            raise
        # Else what the micro batches were, and became, stays until such a step comes again.
        prepared.stage.clear_runtime_states()
        loss = torch.stack(losses).sum().detach() if losses else None
        return self._acc_told(loss, prepared) if self._acc_options.broadcast_loss else loss

    def _acc_run(self, schedule: PipelineScheduleSingle, used: dict[str, Tensor]) -> list[Tensor]:
        """The losses of the micro batches, divided by their number, where they are computed."""
        losses: list[Tensor] = []
        first = self._acc_mesh.is_first_stage()
        run = schedule.step if torch.is_grad_enabled() else schedule.eval
        run(
            *(used.values() if first else ()),
            # The schedule hands a piece of it to the loss, which needs none.
            target=torch.empty(self._acc_options.num_micro_batches),
            losses=losses,
            return_outputs=False,
            **({} if first else {ARGUMENT + name: value for name, value in used.items()}),
        )
        return losses

    def _acc_told(self, loss: Tensor | None, prepared: _Prepared) -> Tensor:
        """The loss that the last stage has, on every process."""
        group = self._acc_mesh.get_pp_proc_group()
        last = self._acc_mesh.stage_to_global(self._acc_options.size - 1)
        if prepared.loss_type is None:
            said = [None if loss is None else loss.dtype]
            dist.broadcast_object_list(said, src=last, group=group)
            prepared.loss_type = said[0]
        if loss is None:
            loss = torch.zeros((), device=self._acc_device)
        loss = loss.to(prepared.loss_type)  # another output_fn may make another type
        dist.broadcast(loss, src=last, group=group)
        return loss

    def _acc_loss(self, output: Any, target: Tensor) -> Tensor:
        _, structure = self._acc_ways[self._acc_stage.training]
        output = as_returned(output, structure)
        loss = output if self._acc_output_fn is None else self._acc_output_fn(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(
                f"[forward_backward] the loss is a {type(loss).__name__}"
                f"{list(loss.shape) if isinstance(loss, Tensor) else ''}, not a tensor of one "
                "element. Pass output_fn, which makes the loss from the model's output."
            )
        # Gradients add up over the micro batches, and the loss is their mean.
        return loss.reshape(()) / self._acc_options.num_micro_batches

    @contextmanager
    def _acc_shared_gradients(self) -> Iterator[None]:
        """Adds up what the stages that share a parameter make of its gradient inside.

        The gradients from before are whole already, and are added afterwards.
        """
        shared = [(p, group, p.grad) for p, group in self._acc_tied if p.requires_grad]
        for parameter, _, _ in shared:
            parameter.grad = None
        try:
            yield
            for parameter, group, before in shared:
                if parameter.grad is None:  # unused here: the others wait all the same
                    parameter.grad = torch.zeros_like(parameter)
                if isinstance(parameter, DTensor):
                    # An embedding's is not yet added up, or divided, as a head's is.
                    parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
                made = _local(parameter.grad)
                dist.all_reduce(made, group=group)
                if before is not None:
                    _local(before).add_(made)
        finally:
            # After an error too: what other steps have added up stays.
            for parameter, _, before in shared:
                if before is not None:
                    parameter.grad = before


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
