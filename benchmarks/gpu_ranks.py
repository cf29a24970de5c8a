"""Collectives in captured work, on one device. Prints rows as gpu_probe.py does.

    python benchmarks/gpu_ranks.py ddp|between|fsdp|shards [--small]

A process group of one process has a transport as others have: NCCL's kernels on a GPU, on a stream
of their own that captured work forks and joins; Gloo on a host. `between`: DDP's collectives
are called between the pieces of captured work, as those of several processes are (docs/gpu.md).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.gpu_probe import device, row

STEPS, ROWS, WIDTH = 20, 16, 64
# How far parameters may be from those of the CPU after STEPS steps, in float32.
TOLERANCE = 1e-4


def network() -> nn.Module:
    """With parameters for several buckets, and for several units."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 8))


def ddp(model: nn.Module) -> nn.Module:
    """Buckets so small that there are several."""
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)


def fsdp(model: nn.Module) -> nn.Module:
    """Each layer is gathered by itself."""
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


class Gathered(torch.autograd.Function):
    """A weight of which each process has a part; of its gradient, too."""

    @staticmethod
    def forward(ctx: object, part: Tensor) -> Tensor:
        made = part.new_empty(dist.get_world_size() * len(part), *part.shape[1:])
        dist.all_gather_into_tensor(made, part)
        return made

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        made = torch.empty_like(gradient[: len(gradient) // dist.get_world_size()])
        dist.reduce_scatter_tensor(made, gradient.contiguous())
        return made


def shards(model: nn.Module) -> nn.Module:
    """Each weight is gathered where it is used: fully_shard gathers nothing in one process."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.of = model

        def forward(self, x: Tensor) -> Tensor:
            parts = {name: Gathered.apply(part) for name, part in self.of.named_parameters()}
            return torch.func.functional_call(self.of, parts, (x,))

    return Parts()


def whole(tensor: Tensor) -> Tensor:
    """Of a sharded one, all of it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Training:
    """A model that learns from the same batches wherever it is."""

    def __init__(self, model: nn.Module, where: str) -> None:
        self.model, self.where = model, where
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.generator = torch.Generator().manual_seed(1)

    def steps(self, count: int) -> None:
        for _ in range(count):
            x = torch.randn(ROWS, WIDTH, generator=self.generator).to(self.where)
            y = torch.randint(0, 8, (ROWS,), generator=self.generator).to(self.where)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()


def call_between(extension: Any) -> None:
    """No all-reduce is captured from now on."""
    if extension.executor_name() == "host":  # which captures those of several processes, too
        extension.refuse_captures("acc::all_reduce_")
    else:
        extension.run_alike()


def ranks(name: str, wrap: Callable[[nn.Module], nn.Module], small: bool) -> None:
    """Steps beside eager's on the CPU, and what is submitted for one of them."""
    extension = device()
    between = name == "between"
    if between:
        call_between(extension)
    if small:
        extension.capture_plans(True)
        torch.use_deterministic_algorithms(True)  # no trials of kernels first
    dist.init_process_group("acc", store=dist.HashStore(), rank=0, world_size=1)
    plain = network()
    mine = Training(wrap(copy.deepcopy(plain).to("acc")), "acc")
    mine.steps(STEPS // 2)
    before = dict(extension.stats())
    mine.steps(STEPS // 2)
    torch.acc.synchronize()
    after = dict(extension.stats())
    changed = {key: after[key] - before.get(key, 0) for key in after}
    theirs = Training(plain, "cpu")
    theirs.steps(STEPS)
    pairs = zip(mine.model.parameters(), plain.parameters(), strict=True)
    error = max((whole(a).detach().cpu() - b.detach()).abs().max().item() for a, b in pairs)
    row(f"{name}: {STEPS} steps", "ok" if error <= TOLERANCE else "BAD", f"off by {error:.1e}")
    count = STEPS // 2
    told = {
        "captured submissions": "captures_submitted",
        "launches": "captured_launches",
        "transfers": "transfers",
        "transfers cut short": "transfers_cut_short/end of a piece",
    }
    numbers = {text: changed.get(key, 0) / count for text, key in told.items()}
    said = ", ".join(f"{number:g} {text}" for text, number in numbers.items())
    right = numbers["captured submissions"] == 1 and numbers["transfers cut short"] == 0
    if between:
        right &= numbers["launches"] > 1 and numbers["transfers"] > 0
    else:
        right &= numbers["launches"] == 1
    row(f"{name}: a step", "ok" if right else "BAD", said)
    begun = before.get("transfers", 0)  # later ones may be in captured work, which counts none
    missing = not begun and wrap is not fsdp
    row(f"{name}: transfers", "BAD" if missing else "ok", f"{begun} begun before the last steps")
    dist.destroy_process_group()


def main() -> None:
    """The command line."""
    small = "--small" in sys.argv
    (name,) = (word for word in sys.argv[1:] if word != "--small")
    wrappers = {"ddp": ddp, "between": ddp, "fsdp": fsdp, "shards": shards}
    ranks(name, wrappers[name], small)


if __name__ == "__main__":
    main()
