"""What the worker of a mode runs: a program, built for a setting, and its steps.

torch is imported where programs are built: the driving process needs none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

BATCHES = 4


class Program(Protocol):
    """What a worker runs."""

    def step(self, index: int, read: bool = True) -> float | None:
        """Runs step `index` on input batch index % BATCHES; reads a result on the host, or not."""

    def outputs(self) -> list[torch.Tensor]:
        """The tensors whose values are compared between modes."""


@dataclass(frozen=True)
class Setting:
    """The mode a program is built for: the device, the words of the variant, the precision.

    precision is that of torch.autocast: float32 (without), bfloat16, or float16 (with a scaler).
    """

    device: str
    words: frozenset[str]
    precision: str = "float32"

    def compiled(self, function: Any, kind: str) -> Any:
        """`function` through torch.compile when the variant asks for `kind`, else unchanged.

        `kind` is "model" (the model, or the only function of a case without one) or "step".
        The modes of torch.compile apply to what "model" applies to. So does "aot": AOTAutograd's
        graphs, run as they are.
        """
        import torch

        if kind == "model" and "aot" in self.words:
            from functorch.compile import make_boxed_func
            from torch._dynamo.backends.common import aot_autograd

            return torch.compile(
                function, backend=aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph))
            )

        if kind in self.words:
            return torch.compile(function)
        for mode in ("max-autotune", "reduce-overhead"):
            if kind == "model" and mode in self.words:
                return torch.compile(function, mode=mode)
        return function

    def captured(self, function: Any) -> Any:
        """`function` through torchacc.capture in that mode, else unchanged."""
        if "capture" not in self.words:
            return function
        import torchacc

        return torchacc.capture(function)

    def prepare(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """An optimizer that counts steps computes with numbers of Python, unless told not to."""
        counts_on_device = self.words & {"capture", "graph"}
        for group in optimizer.param_groups if counts_on_device else ():
            if "capturable" in group:
                group["capturable"] = True
        return optimizer


class Training:
    """A training step as users write it: zero_grad, forward, loss, backward, optimizer.

    `batches`: so many different ones come in turn. `parts`: forward and backward go through so many
    parts of a batch, whose gradients add up.
    """

    def __init__(
        self,
        setting: Setting,
        model: torch.nn.Module,
        loss: Callable[..., torch.Tensor],
        make_optimizer: Callable[..., torch.optim.Optimizer] | None,
        make_batch: Callable[[torch.Generator], tuple[torch.Tensor, ...]],
        batches: int = BATCHES,
        parts: int = 1,
    ) -> None:
        import torch

        if "benchmark" in setting.words:
            torch.backends.cudnn.benchmark = True
        self.setting = setting
        layout = {"memory_format": torch.channels_last} if "channels_last" in setting.words else {}
        self.layout = layout
        model = self.placed(model)
        fused = {"fused": True} if "fused" in setting.words else {}
        self.model = model
        self.optimizer = None
        if make_optimizer is not None:
            self.optimizer = setting.prepare(make_optimizer(model.parameters(), **fused))
        self.batches = self.make_batches(make_batch, batches)
        self.parts = parts
        forward = setting.compiled(model, "model")
        optimizer = self.optimizer

        def train_step(*batch: torch.Tensor) -> torch.Tensor:
            if optimizer is None:
                model.zero_grad()
            else:
                optimizer.zero_grad()
            value = self.passes(lambda *part: loss(forward, *part), lambda value: value, batch)
            if optimizer is not None:
                optimizer.step()
            return value

        self.scaler: torch.amp.GradScaler | None = None
        whole = train_step
        if setting.precision != "float32":
            whole = self.in_less_precision(forward, loss)
        self.train_step = setting.captured(setting.compiled(whole, "step"))
        if "graph" in setting.words:
            self.train_step = HandCaptured(self.train_step, self)

    def placed(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model, where and in the layout that the setting says."""
        model = model.to(self.setting.device, **self.layout)
        return data_parallel(model, self.setting) if "ddp" in self.setting.words else model

    def passes(
        self,
        loss: Callable[..., torch.Tensor],
        scale: Callable[[torch.Tensor], torch.Tensor],
        batch: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Forward and backward of a batch; the loss."""
        import torch

        if self.parts == 1:
            value = loss(*batch)
            scale(value).backward()
            return value
        values = []
        for part in zip(*(each.chunk(self.parts) for each in batch), strict=True):
            values.append(loss(*part))
            scale(values[-1] / self.parts).backward()
        return torch.stack(values).mean()

    def make_batches(
        self, make_batch: Callable[[torch.Generator], tuple[torch.Tensor, ...]], count: int
    ) -> list[tuple[torch.Tensor, ...]]:
        """The batches, on the device."""
        import torch

        # Of several processes each has its own.
        rank = int(os.environ.get("RANK", "0")) if "ddp" in self.setting.words else 0
        generator = torch.Generator().manual_seed(1 + rank)
        return [self.on_device(make_batch(generator)) for _ in range(count)]

    def on_device(self, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """A batch whose first part may have a layout."""
        moved = [part.to(self.setting.device) for part in batch]
        if self.layout:
            moved[0] = moved[0].to(**self.layout)
        return tuple(moved)

    def in_less_precision(self, forward: Any, loss: Callable[..., torch.Tensor]) -> Any:
        """The same step under autocast, and with a scaler where gradients would vanish."""
        import torch

        kind, dtype = self.setting.device, getattr(torch, self.setting.precision)
        scaler = torch.amp.GradScaler(kind, enabled=dtype == torch.float16)
        self.scaler = scaler
        optimizer = self.optimizer

        def autocast_loss(*part: torch.Tensor) -> torch.Tensor:
            with torch.autocast(kind, dtype=dtype):
                return loss(forward, *part)

        def train_step(*batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            value = self.passes(autocast_loss, scaler.scale, batch)
            scaler.step(optimizer)
            scaler.update()
            return value

        return train_step

    def batch(self, index: int) -> tuple[torch.Tensor, ...]:
        """The input of a step."""
        return self.batches[index % len(self.batches)]

    def step(self, index: int, read: bool = True) -> float | None:
        value = self.train_step(*self.batch(index))
        return value.item() if read else None

    def outputs(self) -> list[torch.Tensor]:
        if self.optimizer is not None:
            return list(self.model.state_dict().values())
        return [parameter.grad for parameter in self.model.parameters()]


def data_parallel(model: torch.nn.Module, setting: Setting) -> torch.nn.Module:
    """The model in DistributedDataParallel over the processes of torchrun's variables.

    The word "bucketsN" of a variant gives buckets of N MiB, in place of torch's default.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    sizes = [word.removeprefix("buckets") for word in setting.words if word.startswith("buckets")]
    options = {"bucket_cap_mb": float(sizes[0])} if sizes else {}
    dist.init_process_group("gloo" if setting.device == "cpu" else "cpu:gloo,acc:acc")
    return DistributedDataParallel(model, **options)


class Repeated:
    """A dataset of so many examples, which are a few again and again."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor, examples: int) -> None:
        self.inputs, self.labels, self.examples = inputs, labels, examples

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        index %= len(self.inputs)
        return self.inputs[index], self.labels[index]


class FromLoader(Training):
    """Training whose batches a DataLoader with worker processes makes, epoch after epoch.

    Other modes move each batch as the script of a user does, acc by torchacc.accelerate, which with
    a `max_length` pads texts to eight lengths.
    """

    def __init__(
        self,
        setting: Setting,
        model: torch.nn.Module,
        loss: Callable[..., torch.Tensor],
        make_optimizer: Callable[..., torch.optim.Optimizer],
        data: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        max_length: int | None = None,
    ) -> None:
        import torch
        from torch.utils.data import DataLoader

        self.accelerated = setting.device == "acc"
        self.max_length = max_length
        self.loader: Any = DataLoader(
            data,
            batch_size=batch_size,
            shuffle=shuffle,
            num_workers=4,
            generator=torch.Generator().manual_seed(1),
        )
        super().__init__(setting, model, loss, make_optimizer, lambda generator: ())
        self.coming = self.endless()

    def placed(self, model: torch.nn.Module) -> torch.nn.Module:
        if not self.accelerated:
            return super().placed(model)
        import torchacc

        config = torchacc.Config()
        if self.max_length is not None:
            config.dataloader.max_length = self.max_length
            config.dataloader.pad_value_dict = {"input_ids": 0, "labels": -100}
        accelerated, self.loader = torchacc.accelerate(model, self.loader, config)
        return accelerated

    def make_batches(self, make_batch: Any, count: int) -> list[tuple[torch.Tensor, ...]]:
        return []

    def endless(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """The batches of one epoch after another."""
        while True:
            yield from self.loader

    def batch(self, index: int) -> tuple[torch.Tensor, ...]:
        found = next(self.coming)
        batch = tuple(found.values() if isinstance(found, dict) else found)
        return batch if self.accelerated else self.on_device(batch)


class HandCaptured:
    """A step as one CUDA graph, as a user captures it by hand.

    Three steps on a stream of their own, as CUDA graphs want them, come first; what they changed
    is put back, so that this mode begins where the others do.
    """

    def __init__(self, step: Callable[..., torch.Tensor], training: Training) -> None:
        self.eager, self.training = step, training
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[torch.Tensor, ...] = ()
        self.value: torch.Tensor | None = None

    def __call__(self, *batch: torch.Tensor) -> torch.Tensor:
        """The value of a step, in the memory of the graph: the next step overwrites it."""
        if self.graph is None:
            self.capture(batch)
        for mine, given in zip(self.inputs, batch, strict=True):
            mine.copy_(given)
        self.graph.replay()
        return self.value

    def capture(self, batch: tuple[torch.Tensor, ...]) -> None:
        """Records the step, on copies of a batch."""
        import torch

        self.inputs = tuple(part.clone() for part in batch)
        kept = [each.clone() for each in self.training.model.state_dict().values()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.eager(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.training.model.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.value = self.eager(*self.inputs)
        self.put_back(kept)
        self.graph = graph

    def put_back(self, kept: list[torch.Tensor]) -> None:
        """The model as it was; the optimizer's moments and counts, and the scaler, at their begin.

        A momentum of zeros and none at all give the same first step.
        """
        import torch

        with torch.no_grad():
            for present, before in zip(
                self.training.model.state_dict().values(), kept, strict=True
            ):
                present.copy_(before)
            optimizer = self.training.optimizer
            for state in optimizer.state.values() if optimizer is not None else ():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        value.zero_()
            scaler = self.training.scaler
            if scaler is not None and scaler.is_enabled():
                scaler._scale.fill_(scaler._init_scale)
                scaler._growth_tracker.zero_()


class Pointwise:
    """A chain of elementwise operators without grad; reads one element of the result."""

    def __init__(self, setting: Setting) -> None:
        import torch

        from benchmarks import models

        generator = torch.Generator().manual_seed(1)
        self.pairs = [
            tuple(torch.randn(4_000_000, generator=generator).to(setting.device) for _ in "ab")
            for _ in range(BATCHES)
        ]
        self.function = setting.captured(setting.compiled(models.pointwise_chain, "model"))
        self.result: torch.Tensor | None = None

    def step(self, index: int, read: bool = True) -> float | None:
        import torch

        with torch.no_grad():
            self.result = self.function(*self.pairs[index % BATCHES])
            return self.result[-1].item() if read else None

    def outputs(self) -> list[torch.Tensor]:
        return [self.result]


class OptimizerOnly:
    """AdamW on 100 tensors of 10 M parameters in all; the gradients rotate over four sets."""

    def __init__(self, setting: Setting) -> None:
        import torch

        generator = torch.Generator().manual_seed(1)
        # 25 each of four shapes as networks have them: 10,000,000 elements together.
        shapes = [(512, 512), (384, 350), (384, 7), (768,)] * 25

        def draw() -> list[torch.Tensor]:
            return [torch.randn(s, generator=generator).to(setting.device) for s in shapes]

        self.parameters = [torch.nn.Parameter(0.05 * value) for value in draw()]
        self.gradients = [draw() for _ in range(BATCHES)]
        fused = {"fused": True} if "fused" in setting.words else {}
        self.optimizer = setting.prepare(torch.optim.AdamW(self.parameters, lr=1e-4, **fused))
        self.update = setting.captured(setting.compiled(self.optimizer.step, "model"))

    def step(self, index: int, read: bool = True) -> float | None:
        gradients = self.gradients[index % BATCHES]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.update()
        return self.parameters[-1].detach()[-1].item() if read else None

    def outputs(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.parameters]
