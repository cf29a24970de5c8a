"""The networks of the benchmark cases, written as a user of PyTorch writes them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(layers: int, width: int) -> nn.Module:
    """`layers` linear layers of `width` with ReLU between them; (N, width) -> (N, width)."""
    modules: list[nn.Module] = []
    for index in range(layers):
        if index:
            modules.append(nn.ReLU())
        modules.append(nn.Linear(width, width))
    return nn.Sequential(*modules)


def _torchvision() -> Any:
    """The models of torchvision. Raises RuntimeError where it is missing."""
    try:
        from torchvision import models
    except ImportError as error:
        raise RuntimeError(
            "[benchmarks.models] this case needs torchvision, which is not installed. Install the "
            "torchvision that matches this torch, or name other cases with --case."
        ) from error
    return models


def resnet50(classes: int) -> nn.Module:
    """torchvision's ResNet-50."""
    return _torchvision().resnet50(num_classes=classes)


def swin_tiny(classes: int) -> nn.Module:
    """torchvision's Swin-T without stochastic depth."""
    return _torchvision().SwinTransformer(
        patch_size=[4, 4],
        embed_dim=96,
        depths=[2, 2, 6, 2],
        num_heads=[3, 6, 12, 24],
        window_size=[7, 7],
        stochastic_depth_prob=0.0,
        num_classes=classes,
    )


def small_network(classes: int) -> nn.Module:
    """Two convolutions, in place of a network that a host takes minutes for."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, classes),
    )


def resnet18(small_images: bool) -> nn.Module:
    """torchvision's ResNet-18, 10 classes; for 32x32 images with a 3x3 stem and no max-pool."""
    model = _torchvision().resnet18(num_classes=10)
    if small_images:
        model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model


class CausalBlock(nn.Module):
    """A pre-norm transformer block with causal attention; (B, T, width) -> (B, T, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).split(width, dim=2)
        shape = (batch, tokens, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """A GPT-2-like decoder, no dropout; int64 (B, T) -> float (B, T, vocabulary)."""

    def __init__(
        self,
        layers: int = 6,
        heads: int = 6,
        width: int = 384,
        tokens: int = 256,
        vocabulary: int = 256,  # bytes
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(CausalBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt2() -> Gpt:
    """GPT-2 of 124 million parameters, its vocabulary rounded up to a multiple of 64."""
    model = Gpt(12, 12, 768, 1024, vocabulary=50304)
    model.head.weight = model.token.weight
    return model


class Lstm(nn.Module):
    """nn.LSTM of two layers and a head on the last step; (T, B, width) -> (B, 10)."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.lstm(x)
        return self.head(output[-1])


class UnrolledLstm(nn.Module):
    """The same network with the recurrence written by hand, step by step."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.width = width
        self.inputs = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.recurrent = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        sequence = list(x.unbind(0))
        for from_input, from_hidden in zip(self.inputs, self.recurrent, strict=True):
            hidden = x.new_zeros(x.shape[1], self.width)
            cell = x.new_zeros(x.shape[1], self.width)
            for index, value in enumerate(sequence):
                gates = from_input(value) + from_hidden(hidden)
                enter, forget, candidate, leave = gates.chunk(4, dim=1)
                cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(candidate)
                hidden = torch.sigmoid(leave) * torch.tanh(cell)
                sequence[index] = hidden
        return self.head(sequence[-1])


def feed_forward_blocks() -> nn.Module:
    """Two times (LayerNorm, 384 -> 1536 -> 384 with GELU); (N, 384) -> (N, 384)."""
    modules: list[nn.Module] = []
    for _ in range(2):
        modules += [nn.LayerNorm(384), nn.Linear(384, 1536), nn.GELU(), nn.Linear(1536, 384)]
    return nn.Sequential(*modules)


def pointwise_chain(a: Tensor, b: Tensor) -> Tensor:
    """Twenty elementwise operators, seven of them transcendental, on two equal shapes."""
    x = a * b
    y = a + b
    x = torch.tanh(x)
    y = torch.exp(-torch.abs(y))
    z = x * y
    w = torch.sin(z)
    z = torch.erf(w)
    z = z + x
    u = torch.sigmoid(z)
    u = u * b
    v = torch.log1p(torch.abs(u))
    v = v - y
    w = torch.cos(v)
    w = torch.clamp(w, -0.9, 0.9)
    return torch.sqrt(w * w + 1.0)
