"""The model, the data and the training loop that several tests share; run in the processes too."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed import rpc

STEPS, ROWS = 8, 8  # rows of one batch over all processes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Without batch normalisation: the joined batch gives the mean of the parts' gradients."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.head = nn.Linear(6, 2)
        self.register_buffer("scale", torch.rand(()) + 0.5)
        self.note = "mine"

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.first(x))) * self.scale


def made(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = (STEPS, ROWS)
    x, y = (torch.randn(*shape, n, generator=generator) for n in (4, 2))
    return list(zip(x, y, strict=True))


def part(batch: Tensor, rank: int, count: int) -> Tensor:
    return batch.chunk(count)[rank]


def trained(model: nn.Module, batches: list[tuple[Tensor, Tensor]], **options) -> list[float]:
    """The losses of a training loop with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, **options)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def largest(values: Iterable[float]) -> float:
    """NaN if any is: Python's max forgets one that is not the first."""
    return float(torch.tensor(list(values), dtype=torch.float64).max())


def alone(seed: int = 0) -> tuple[list[float], dict[str, list]]:
    """What one process on the CPU comes to: losses and the final state."""
    model = made(seed)
    losses = trained(model, data())
    return losses, {name: value.tolist() for name, value in model.state_dict().items()}


class Remote:
    """A layer of its owner, called by others over RPC: tensors of acc stay where they are."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3).to(device)
        self.device = device

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.to(self.device)).cpu()

    def parameters(self) -> list[rpc.RRef]:
        return [rpc.RRef(parameter) for parameter in self.layer.parameters()]

    def total(self) -> float:
        return float(self.layer.weight.detach().sum())
