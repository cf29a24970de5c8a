"""The networks of the benchmark, at sizes at which 20 steps in float64 take a second, or at its
own."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import cases, models
from tests.models import zoo


class Chain(nn.Module):
    """The chain of twenty operators between two learned tensors."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(shape)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """shape -> shape."""
        return models.pointwise_chain(x * self.a, self.b)


def _regress(model: nn.Module, batch: zoo.Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _vectors(model: nn.Module, *shape: int) -> zoo.Case:
    batches = [(torch.randn(shape), torch.randn(shape)) for _ in range(4)]
    return zoo.Case(model, batches, _regress)


def _small_images() -> zoo.Case:
    batches = [(torch.randn(4, 3, 8, 8), torch.randint(10, (4,))) for _ in range(4)]
    return zoo.Case(models.resnet18(small_images=True), batches, zoo.classify)


def _gpt() -> zoo.Case:
    rows = [torch.randint(256, (2, 25)) for _ in range(4)]
    batches = [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]
    return zoo.Case(models.Gpt(2, 2, 48, 24), batches, zoo.next_token)


def _sequences(model: nn.Module) -> zoo.Case:
    batches = [(torch.randn(7, 5, 24), torch.randint(10, (5,))) for _ in range(4)]
    return zoo.Case(model, batches, zoo.classify)


MODELS: dict[str, Callable[[], zoo.Case]] = {
    "pointwise": lambda: _vectors(Chain(37, 50), 37, 50),
    "mlp": lambda: _vectors(models.mlp(4, 48), 16, 48),
    "block": lambda: _vectors(models.feed_forward_blocks(), 6, 384),
    # Products so large are oneDNN's on some processors, as they are in the benchmark.
    "block of 256 rows": lambda: _vectors(models.feed_forward_blocks(), 256, 384),
    "gpt": _gpt,
    "lstm": lambda: _sequences(models.Lstm(24)),
    "lstm_unrolled": lambda: _sequences(models.UnrolledLstm(24)),
    "resnet18_cifar": _small_images,  # the case resnet18 is the zoo's
}


# Cases of the benchmark that train a network, and the optimizer for each.
AS_MEASURED = {
    "mlp_small": "adamw",
    "mlp": "adamw",
    "block": "adamw",
    "gpt": "adamw",
    "lstm": "adamw",
    "lstm_unrolled": "adamw",
    "resnet18_cifar": "sgd",
    "resnet18": "sgd",
}


def _mean_square(model: nn.Module, batch: zoo.Batch) -> Tensor:
    return model(batch[0]).square().mean()


def as_measured(name: str) -> zoo.Case:
    """A case of the benchmark at its own size."""
    program = cases.build(name, "cpu", "plain")
    losses = {"gpt": zoo.next_token, "block": _mean_square}
    return zoo.Case(program.model, program.batches, losses.get(name, zoo.classify))


def make(name: str) -> zoo.Case:
    """A case, made from the same seed at every call."""
    torch.manual_seed(1234)
    return MODELS[name]()
