"""The training programs of the benchmark cases: network, optimizer, loss and batches.

Those of the cases for GPUs take `small`: a little network and little data then, for a host.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import models
from benchmarks.programs import BATCHES, FromLoader, Program, Repeated, Setting, Training

Optimizer = Callable[..., torch.optim.Optimizer]


def adamw(parameters: Any, lr: float = 1e-4, **options: Any) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(parameters, lr=lr, **options)


def sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """SGD with momentum and weight decay."""
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, weight_decay=5e-4, **options)


def plain_sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """SGD without a state."""
    return torch.optim.SGD(parameters, lr=1e-2, **options)


def classify(forward: Callable, inputs: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of classes."""
    return F.cross_entropy(forward(inputs), labels)


def classification(
    setting: Setting,
    model: nn.Module,
    optimizer: Optimizer,
    shape: tuple[int, ...],
    rows: int,
    classes: int,
) -> Training:
    """Inputs of a shape, as many labels as rows."""

    def make_batch(generator: torch.Generator) -> tuple[Tensor, ...]:
        inputs = torch.randn(shape, generator=generator)
        return inputs, torch.randint(classes, (rows,), generator=generator)

    return Training(setting, model, classify, optimizer, make_batch)


def next_token(forward: Callable, tokens: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of the token behind each one; a target of -100 counts for nothing."""
    return F.cross_entropy(forward(tokens).flatten(0, 1), targets.flatten())


def language(
    setting: Setting, model: nn.Module, *shapes: tuple[int, int], parts: int = 1
) -> Training:
    """Batches of so many rows and tokens, of one shape after another."""
    coming = itertools.cycle(shapes)

    def text(generator: torch.Generator) -> tuple[Tensor, ...]:
        rows, tokens = next(coming)
        drawn = torch.randint(model.vocabulary, (rows, tokens + 1), generator=generator)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    count = max(BATCHES, len(shapes))
    return Training(setting, model, next_token, adamw, text, batches=count, parts=parts)


# --- cases for GPUs -----------------------------------------------------------------------------

# Of each network how it is made, in little too, and its optimizer.
IMAGES = {
    "resnet50": (models.resnet50, models.small_resnet, sgd),
    "swin_tiny": (models.swin_tiny, models.small_swin, adamw),
    "vit_base": (models.vit_base, models.small_vit, adamw),
}
TEXTS = {
    "gpt2": (models.gpt2, lambda: models.Gpt(2, 2, 32, 64, vocabulary=64)),
    "gpt2_dropout": (
        functools.partial(models.gpt2, dropout=0.1),
        lambda: models.Gpt(2, 2, 32, 64, vocabulary=64, dropout=0.1),
    ),
    "llama_160m": (models.llama_160m, lambda: models.Llama(2, 2, 2, 32, 64, 64, 64)),
    "llama_1b": (models.llama_1b, lambda: models.Llama(2, 4, 2, 32, 64, 64, 64, tied=True)),
    "bert_base": (models.bert_base, lambda: models.Bert(2, 2, 32, vocabulary=64)),
    "bert_large": (models.bert_large, lambda: models.Bert(3, 4, 32, vocabulary=64)),
}


def begun(model: nn.Module) -> nn.Module:
    """The model, whose parameters of zeros begin a little beside them.

    What 20 steps make of zeros is all that modes could be compared by, and in half precision mostly
    rounding: of a ResNet's biases acc and eager are both 70 % away from float32's.
    """
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    return model


def seed(setting: Setting, small: bool) -> Program:
    """What the documents that this project answers train, see `tests/seeds`: epochs of a hundred
    batches. Ten are drawn: a worker of each mode has them in memory, and waits for them first."""
    rows, classes, size, batches, drawn = (4, 100, 16, 3, 2) if small else (64, 100, 224, 100, 10)
    model = begun((models.small_network if small else models.resnet50)(classes))
    generator = torch.Generator().manual_seed(1)
    images = torch.randn((drawn * rows, 3, size, size), generator=generator)
    labels = torch.randint(classes, (drawn * rows,), generator=generator)
    data = Repeated(images, labels, batches * rows)
    # Of gradients that are nothing but rounding AdamW makes whole steps: these are small.
    return FromLoader(setting, model, classify, functools.partial(adamw, lr=1e-6), data, rows)


def images(setting: Setting, small: bool, network: str, rows: int) -> Program:
    """A thousand classes of images."""
    make, in_little, optimizer = IMAGES[network]
    rows, size, classes = (8, 32, 10) if small else (rows, 224, 1000)
    model = begun((in_little if small else make)(classes))
    return classification(setting, model, optimizer, (rows, 3, size, size), rows, classes)


def layers(setting: Setting, small: bool, count: int, width: int, rows: int) -> Program:
    """So many linear layers of one width."""
    count, width, rows = (2, 16, 4) if small else (count, width, rows)
    return classification(setting, models.mlp(count, width), adamw, (rows, width), rows, width)


def little_images(setting: Setting, small: bool, rows: int) -> Program:
    """Ten classes of images of 32 by 32."""
    rows, model = (8, models.small_network(10)) if small else (rows, models.resnet18(True))
    return classification(setting, model, sgd, (rows, 3, 32, 32), rows, 10)


def text_model(network: str, small: bool) -> nn.Module:
    """One of TEXTS."""
    return begun(TEXTS[network][small]())


def text(
    setting: Setting, small: bool, network: str, rows: int, tokens: int, parts: int = 1
) -> Program:
    """Decoders, a step of so many parts, whose gradients add up."""
    shape = (2, 16) if small else (rows, tokens)
    return language(setting, text_model(network, small), (parts * shape[0], shape[1]), parts=parts)


def masked_text(setting: Setting, small: bool, network: str, rows: int, tokens: int) -> Program:
    """Encoders, of 15 % of the words."""
    model = text_model(network, small)
    rows, tokens = (2, 16) if small else (rows, tokens)
    masked = -(-15 * tokens // 100)

    def make_batch(generator: torch.Generator) -> tuple[Tensor, ...]:
        words = torch.randint(model.vocabulary, (rows, tokens), generator=generator)
        order = torch.rand((rows, tokens), generator=generator).argsort(1)
        targets = torch.randint(model.vocabulary, (rows, masked), generator=generator)
        return words, order[:, :masked].sort(1).values, targets

    def loss(forward: Callable, words: Tensor, places: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(forward(words, places).flatten(0, 1), targets.flatten())

    return Training(setting, model, loss, adamw, make_batch)


def recommendations(setting: Setting, small: bool, tables: int, rows: int) -> Program:
    """Four ids of each feature, and thirteen numbers."""
    tables, rows = (3, 16) if small else (tables, rows)
    model = models.Dlrm(tables, 50, 8) if small else models.Dlrm(tables)

    def make_batch(generator: torch.Generator) -> tuple[Tensor, ...]:
        numbers = torch.randn((rows, 13), generator=generator)
        ids = torch.randint(model.rows, (tables, rows, 4), generator=generator)
        return numbers, ids, torch.randint(2, (rows,), generator=generator).float()

    def loss(forward: Callable, numbers: Tensor, ids: Tensor, clicked: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(forward(numbers, ids), clicked)

    return Training(setting, model, loss, plain_sgd, make_batch)


def lengths_of(count: int, small: bool) -> list[int]:
    """So many lengths, the longest first, up to 512."""
    longest, apart = (40, 1) if small else (512, 13)
    return [longest - apart * (32 // count) * (5 * index % count) for index in range(count)]


def varied_text(setting: Setting, small: bool, count: int) -> Program:
    """So many lengths of text, each another shape."""
    rows = 2 if small else 4
    shapes = [(rows, length) for length in lengths_of(count, small)]
    return language(setting, text_model("gpt2", small), *shapes)


def short_batches(setting: Setting, small: bool) -> Program:
    """Eight batches, of which the last has one row."""
    rows, tokens = (2, 16) if small else (4, 512)
    return language(setting, text_model("gpt2", small), *[(rows, tokens)] * 7, (1, tokens))


class Texts:
    """A dataset whose batches have one length after another."""

    def __init__(self, vocabulary: int, lengths: Sequence[int], rows: int, batches: int) -> None:
        generator = torch.Generator().manual_seed(1)
        shape = (rows * len(lengths), max(lengths) + 1)
        self.drawn = torch.randint(vocabulary, shape, generator=generator)
        self.lengths, self.rows, self.batches = lengths, rows, batches

    def __len__(self) -> int:
        return self.batches * self.rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = self.lengths[index // self.rows % len(self.lengths)]
        row = self.drawn[index % len(self.drawn)]
        return {"input_ids": row[:length], "labels": row[1 : length + 1]}


def padded_text(setting: Setting, small: bool, count: int) -> Program:
    """The same lengths from a loader, whose batches acc pads to eight."""
    lengths = lengths_of(count, small)
    model = text_model("gpt2", small)
    rows = 2 if small else 4
    data = Texts(model.vocabulary, lengths, rows, 10 * count)
    return FromLoader(
        setting, model, next_token, adamw, data, rows, shuffle=False, max_length=max(lengths)
    )
