"""Five small models, each with its batches; the same on every call.

A case gives a module on the CPU in float32 with every dropout at 0, four batches on the CPU, and a
loss: `loss(model, batch) -> scalar`. Four batches, so that addresses of inputs rotate as they do
under a DataLoader.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, ...]


@dataclass
class Case:
    """A model with its data."""

    model: nn.Module
    batches: list[Batch]
    loss: Callable[[nn.Module, Batch], Tensor]


def _images(size: int, batch: int) -> list[Batch]:
    return [(torch.randn(batch, 3, size, size), torch.randint(10, (batch,))) for _ in range(4)]


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the model's classes."""
    return F.cross_entropy(model(batch[0]), batch[1])


def mlp() -> Case:
    """Three hidden layers of 64 units on vectors of 32."""
    layers: list[nn.Module] = []
    for n in (32, 64, 64):
        layers += [nn.Linear(n, 64), nn.ReLU()]
    batches = [(torch.randn(16, 32), torch.randint(10, (16,))) for _ in range(4)]
    return Case(nn.Sequential(*layers, nn.Linear(64, 10)), batches, classify)


def resnet18() -> Case:
    """torchvision's ResNet-18 on 4 images of 32 x 32."""
    from torchvision.models import resnet18 as make

    return Case(make(num_classes=10), _images(32, 4), classify)


class LSTMClassifier(nn.Module):
    """nn.LSTM of two layers with a linear head on its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, 12] -> [batch, 10]."""
        y, _ = self.lstm(x)
        return self.head(y[:, -1])


def lstm() -> Case:
    """The LSTM classifier on 6 sequences of 16 steps."""
    batches = [(torch.randn(6, 16, 12), torch.randint(10, (6,))) for _ in range(4)]
    return Case(LSTMClassifier(), batches, classify)


class Attention(nn.Module):
    """Self-attention of `heads` heads through the fused function."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same."""
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(b, t, w))


class Block(nn.Module):
    """A transformer block with the normalisations in front."""

    def __init__(self, width: int, heads: int, causal: bool, gelu: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(gelu), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small decoder as GPT-2: learned positions, tanh-GELU, tied output weights."""

    def __init__(self, vocabulary: int = 65, width: int = 32, time: int = 24) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(time, width)
        self.blocks = nn.Sequential(*(Block(width, 4, True, "tanh") for _ in range(2)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, time] of int64 -> [batch, time, vocabulary]."""
        place = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(place))))


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of each next token."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def gpt() -> Case:
    """The decoder on 3 rows of 24 tokens."""
    rows = [torch.randint(65, (3, 25)) for _ in range(4)]
    return Case(GPT(), [(r[:, :-1].contiguous(), r[:, 1:].contiguous()) for r in rows], next_token)


class ViT(nn.Module):
    """A vision transformer: patches by a convolution, a class token, erf-GELU."""

    def __init__(self, width: int = 32, patch: int = 8, size: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 4, False, "none") for _ in range(2)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 3, size, size] -> [batch, 10]."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit() -> Case:
    """The vision transformer on 4 images of 32 x 32."""
    return Case(ViT(), _images(32, 4), classify)


MODELS: dict[str, Callable[[], Case]] = {
    "mlp": mlp,
    "resnet18": resnet18,
    "lstm": lstm,
    "gpt": gpt,
    "vit": vit,
}

MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    # Lists of tensors on both sides: the CPU's default, one by one, is another order of operations.
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=5e-4, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.05, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, foreach=True),
}


def make(name: str) -> Case:
    """A case, made from the same seed at every call."""
    torch.manual_seed(1234)
    return MODELS[name]()


def move(batch: Batch, device: str) -> Batch:
    """The batch on `device`."""
    return tuple(t.to(device) for t in batch)
