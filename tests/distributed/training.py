"""What test_training.py runs on each rank: training on acc beside eager's on the CPU over Gloo."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.models import largest
from tests.models import accuracy, zoo

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
ON_ALL_RANKS = StateDictOptions(full_state_dict=True)  # of eager's: see sharding.py
BLOCKS = (zoo.Block, nn.Linear)


def _sharded(model: nn.Module, device: torch.device) -> nn.Module:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in list(model.modules()):
        # a weight that two modules share stays with the root
        if isinstance(module, zoo.Block) or type(module).__name__ == "BasicBlock":
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _flat(model: nn.Module, device: torch.device, **options: Any) -> nn.Module:
    policy = ModuleWrapPolicy({zoo.Block})
    return FullyShardedDataParallel(
        model, device_id=device, auto_wrap_policy=policy, use_orig_params=True, **options
    )


def wrap(kind: str, model: nn.Module, device: torch.device) -> nn.Module:
    """The model as `kind` distributes it."""
    options: dict[str, dict[str, Any]] = {
        "ddp": {},
        "ddp_buckets": {"bucket_cap_mb": 0.01},
        "ddp_views": {"gradient_as_bucket_view": True},
        "ddp_unused": {"find_unused_parameters": True},
        "ddp_static": {"static_graph": True},
    }
    if kind in options:
        return DistributedDataParallel(model, **options[kind])
    if kind == "fsdp1":
        return _flat(model, device)
    if kind == "fsdp1_grad_op":
        return _flat(model, device, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    assert kind == "fsdp2"
    return _sharded(model, device)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)


def _plain(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name.removeprefix("module."): value for name, value in state.items()}


def _distance(mine: dict[str, Tensor], theirs: dict[str, Tensor], names: list[str]) -> float:
    """Relative L2 over all parameters together."""
    away = sum((mine[n].cpu().double() - theirs[n].double()).square().sum() for n in names)
    norm = sum(theirs[n].double().square().sum() for n in names)
    return float((away / norm).sqrt())


def steps_from_equal_states(
    kind: str, name: str, device: torch.device, steps: int
) -> dict[str, Any]:
    """Relative differences of losses and parameters after single steps, the largest ones."""
    rank, world = dist.get_rank(), dist.get_world_size()
    case, copy = zoo.make(name), zoo.make(name)
    names = [n for n, _ in case.model.named_parameters()]  # wrapping puts its own into them
    # every rank begins elsewhere: wrapping makes them equal
    reference = wrap(kind, case.model, torch.device("cpu"))
    mine = wrap(kind, copy.model.to(device), device)
    optimizers = _optimizer(reference), _optimizer(mine)
    losses, parameters = [], []
    for step in range(steps):
        if dist.get_world_size() > 1 or step == 0:
            whole = get_model_state_dict(reference, options=ON_ALL_RANKS)
            set_model_state_dict(mine, whole, options=WHOLE)
            if step > 0:
                state = get_optimizer_state_dict(reference, optimizers[0], options=ON_ALL_RANKS)
                set_optimizer_state_dict(mine, optimizers[1], state, options=WHOLE)
        batch = case.batches[(step * world + rank) % len(case.batches)]
        found = []
        for model, optimizer, where in zip(
            (reference, mine), optimizers, ("cpu", device), strict=True
        ):
            optimizer.zero_grad()
            loss = case.loss(model, zoo.move(batch, where))
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(abs(found[1] - found[0]) / abs(found[0]))
        after = _plain(get_model_state_dict(mine, options=WHOLE))
        wanted = _plain(get_model_state_dict(reference, options=ON_ALL_RANKS))
        if rank == 0:
            parameters.append(_distance(after, wanted, names))
    return {
        "losses": largest(losses),
        "parameters": largest(parameters) if rank == 0 else 0.0,
    }


class Replica(accuracy.Trainee):
    """What one rank has of a trainee. Steps tell what is alike on all ranks, and the mean loss: so
    all of them find the same steps doubtful, and repeat those together.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.model = DistributedDataParallel(self.model)

    def step(self, *arguments: Any, **options: Any) -> accuracy.Step:
        values = super().step(*arguments, **options).values
        alike = {n: v for n, v in values.items() if n.startswith(("gradient", "update"))}
        loss = accuracy.wide(values["loss"]).clone()
        dist.all_reduce(loss)
        return accuracy.Step({"loss": loss, **alike})


class ScaledReplica(Replica):
    """The device's gradients are wrong by 1e-5."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        for p in self.model.parameters() if self.device != "cpu" else ():
            p.register_hook(lambda gradient: gradient * (1 + 1e-5))


def inaccuracies(
    name: str, device: torch.device, replica: type[accuracy.Trainee], steps: int
) -> list[str]:
    """What of steps in DDP is further from float64 than eager's over Gloo may be twice."""
    accuracy.Trainee = replica  # of this process
    case, rank = zoo.make(name), dist.get_rank()
    case.batches = case.batches[rank:] + case.batches[:rank]
    how = case, zoo.OPTIMIZERS["sgd"], str(device)
    return accuracy.failures(*how, accuracy.measure(*how, steps))[1]


class Branched(nn.Module):
    """Three layers, of which the second is used at times and the third never, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor, more: bool) -> Tensor:
        """[batch, 6] -> [batch, 6]."""
        x = self.norm(self.first(x))
        return self.second(x) if more else x


# What of DDP's options the kinds of `wrap` do not try, and whether ranks have as many steps.
OPTIONS: dict[str, tuple[dict[str, Any], bool]] = {
    "unused": ({"find_unused_parameters": True}, True),
    "unused views": ({"find_unused_parameters": True, "gradient_as_bucket_view": True}, True),
    "own buffers": ({"find_unused_parameters": True, "broadcast_buffers": False}, True),
    "uneven": ({"find_unused_parameters": True}, False),
}


def state_after(option: str, device: torch.device) -> dict[str, Tensor]:
    """Parameters and buffers of this rank after some steps of DDP with an option."""
    options, even = OPTIONS[option]
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Branched().to(device), **options)
    optimizer = _optimizer(model)
    generator = torch.Generator().manual_seed(rank)
    with contextlib.nullcontext() if even else model.join():
        for step in range(6 if even else 4 + 3 * rank):
            x = torch.randn(8, 6, generator=generator).to(device)
            loss = (model(x, (step + rank) % 2 == 1) - x.sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {name: value.cpu() for name, value in _plain(model.state_dict()).items()}


def joined(kind: str, name: str, device: torch.device, steps: int) -> dict[str, Any]:
    """Mean losses of the ranks, and the losses of one process with all their batches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    case, one = zoo.make(name), zoo.make(name)
    mine = wrap(kind, case.model.to(device), device)
    optimizer = _optimizer(mine)
    alone = _optimizer(one.model)
    found, expected = [], []
    for step in range(steps):
        batches = [case.batches[(step * world + r) % len(case.batches)] for r in range(world)]
        optimizer.zero_grad()
        loss = case.loss(mine, zoo.move(batches[rank], device))
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        found.append(mean.item())
        alone.zero_grad()
        whole = case.loss(
            one.model, tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
        )
        whole.backward()
        alone.step()
        expected.append(whole.item())
    return {"found": found, "expected": expected}


def synchronised(device: torch.device, steps: int) -> dict[str, Any]:
    """A network with SyncBatchNorm on all ranks, and one with BatchNorm on all their batches."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def network() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)
        )

    mine = nn.SyncBatchNorm.convert_sync_batchnorm(network()).to(device)
    mine, alone = DistributedDataParallel(mine), network()
    optimizers = _optimizer(mine), _optimizer(alone)
    found, expected = [], []
    for step in range(steps):
        torch.manual_seed(step)
        # parts of unequal sizes
        images = torch.randn(sum(range(2, world + 2)), 3, 8, 8)
        parts = images.split(list(range(2, world + 2)))
        for optimizer in optimizers:
            optimizer.zero_grad()
        # the mean over ranks of what is scaled so is the sum over all images
        loss = mine(parts[rank].to(device)).square().sum() * world / 1000
        loss.backward()
        whole = alone(images).square().sum() / 1000
        whole.backward()
        for optimizer in optimizers:
            optimizer.step()
        total = loss.detach() / world
        dist.all_reduce(total)
        found.append(total.item())
        expected.append(whole.item())
    ours, theirs = mine.module.state_dict(), alone.state_dict()
    away = {name: float((ours[name].cpu() - theirs[name]).abs().max()) for name in theirs}
    return {"found": found, "expected": expected, "away": largest(away.values())}
