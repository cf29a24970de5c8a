"""What a rank of comm.py's simulated hosts runs: exchanges of one bucket of gradients, timed."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

HIGH = 1 << 62  # bytes: no bucket has so many
TOP_K = 0.01


class Bucket:
    """A bucket of gradients, as torch.distributed.GradBucket shows one to a hook."""

    def __init__(self, number: int, flat: Tensor) -> None:
        self._number, self._flat = number, flat

    def index(self) -> int:
        return self._number

    def is_last(self) -> bool:
        return True

    def buffer(self) -> Tensor:
        return self._flat

    def parameters(self) -> list[Tensor]:
        return [self._flat]


class Exchanges:
    """The policies of torchacc.dist.comm, and plain all-reduces of some of the ranks."""

    def __init__(self, device: str) -> None:
        from torchacc.dist import comm

        dist.init_process_group("cpu:gloo,acc:acc")
        self.device = device
        self.ranks = dist.get_world_size()
        everyone = dist.group.WORLD
        inside = self.ranks // 2
        self.policies: dict[str, Any] = {
            "plain": comm.Plain([everyone]),
            "hierarchical": comm.Hierarchical([everyone], inside, HIGH),
            "fp16": comm.Compressed([everyone], torch.float16),
            "top-k": comm.Largest([everyone], TOP_K, 0, fp16=False),
            "top-k fp16": comm.Largest([everyone], TOP_K, 0, fp16=True),
        }
        ranks = torch.arange(self.ranks).view(2, inside)
        self.groups = {
            "within a host": comm.own_group(ranks.tolist(), everyone),
            "between hosts": comm.own_group(ranks.t().tolist(), everyone),
        }
        self.buckets: dict[int, Bucket] = {}

    def step(self, index: int, read: bool = True) -> float:
        return 0.0

    def outputs(self) -> list[Tensor]:
        return []

    def measure(self, request: dict[str, Any]) -> dict[str, Any]:
        """Seconds of each of `steps` exchanges of `bytes` by the policy or group `way`.

        `seconds` is their sum. `away`: the relative distance of the average from the right one.
        """
        bucket = self._bucket(request["bytes"])
        policy = self.policies.get(request["way"])
        group = self.groups.get(request["way"], dist.group.WORLD)

        def exchange() -> None:
            if policy is None:
                _average(bucket.buffer(), group)
            else:
                policy(bucket).wait()

        right = self._fill(bucket.buffer(), group)
        exchange()
        away = ((bucket.buffer() - right).norm() / right.norm()).item()
        each = []
        for _ in range(request["steps"]):
            self._fill(bucket.buffer(), group)
            dist.barrier()
            begin = time.perf_counter()
            exchange()
            torch.acc.synchronize()
            each.append(time.perf_counter() - begin)
        return {"seconds": sum(each), "each": each, "away": away}

    def _bucket(self, size: int) -> Bucket:
        if size not in self.buckets:
            self.buckets[size] = Bucket(
                len(self.buckets), torch.zeros(size // 4, device=self.device)
            )
        return self.buckets[size]

    def _fill(self, flat: Tensor, group: ProcessGroup) -> Tensor:
        """Gives every rank another multiple of the same numbers; returns the mean of a group's."""
        wave = torch.sin(torch.arange(flat.numel(), device=self.device) * 0.37)
        flat.copy_(wave * (dist.get_rank() + 1))
        ranks = dist.get_process_group_ranks(group)
        mean = wave * (sum(ranks) / len(ranks) + 1)
        torch.acc.synchronize()
        return mean


def _average(flat: Tensor, group: ProcessGroup) -> None:
    flat.div_(group.size())
    dist.all_reduce(flat, group=group)


def build(name: str, device: str, variant: str) -> Exchanges:
    """The program of a rank; there is only one."""
    return Exchanges(device)
