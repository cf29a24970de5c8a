"""What an exchange costs: a latency, and its bytes over a bandwidth; and buckets that suit it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

# Bytes of the all-reduces that are measured, and how many of each; the fastest counts.
SIZES = (4 << 10, 1 << 20, 4 << 20)
TIMES = 4
LEAST, MOST = 1 << 20, 128 << 20  # bytes of a bucket


@dataclass(frozen=True)
class Cost:
    """An exchange of n bytes takes `latency` + n / `bandwidth` seconds."""

    latency: float
    bandwidth: float

    def seconds(self, size: float) -> float:
        return self.latency + size / self.bandwidth

    def bucket(self, gradients: int) -> int:
        """How many bytes of so many should travel together.

        Of g bytes in buckets of b, each bucket pays the latency, and the last one, whose gradients
        come when the backward ends, travels under no computation: g / b * latency + b / bandwidth
        is least at b = sqrt(g * latency * bandwidth).
        """
        best = math.sqrt(gradients * self.latency * self.bandwidth)
        return round(min(max(best, LEAST), MOST))


def fit(points: Sequence[tuple[float, float]]) -> Cost:
    """The cost that comes nearest to (bytes, seconds), by relative errors.

    Raises ValueError unless two sizes differ.
    """
    # Least squares of (latency + bytes * slope) / seconds = 1.
    a = sum(1 / t**2 for _, t in points)
    b = sum(n / t**2 for n, t in points)
    c = sum((n / t) ** 2 for n, t in points)
    d = sum(1 / t for _, t in points)
    e = sum(n / t for n, t in points)
    whole = a * c - b * b
    if len({n for n, _ in points}) < 2:
        raise ValueError("[dist.cost] a latency and a bandwidth need exchanges of two sizes")
    latency, slope = (c * d - b * e) / whole, (a * e - b * d) / whole
    # Noise may make either negative.
    tiny = min(t for _, t in points) * 1e-3
    return Cost(max(latency, tiny), 1 / max(slope, tiny / max(n for n, _ in points)))


def measured(group: ProcessGroup, device: torch.device) -> Cost:
    """What all-reduces of `group` cost, as its first process has measured it: all have the same.

    Every process of the group has to call it.
    """
    points = [(float(size), _seconds(group, device, size)) for size in SIZES]
    cost = fit(points)
    agreed = torch.tensor([cost.latency, cost.bandwidth], dtype=torch.float64, device=device)
    dist.broadcast(agreed, src=dist.get_process_group_ranks(group)[0], group=group)
    latency, bandwidth = agreed.tolist()
    return Cost(latency, bandwidth)


def _seconds(group: ProcessGroup, device: torch.device, size: int) -> float:
    """The fastest all-reduce of so many bytes, behind one that connects the processes."""
    module = torch.get_device_module(device.type)
    flat = torch.zeros(size // 4, device=device)
    best = math.inf
    for _ in range(1 + TIMES):
        module.synchronize(device)
        begin = time.perf_counter()
        dist.all_reduce(flat, group=group)
        module.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best
