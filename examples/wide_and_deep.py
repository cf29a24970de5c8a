"""Trains Wide & Deep, or DeepFM, to predict clicks on acc; nothing is downloaded.

    python examples/wide_and_deep.py [--fm] [--tiacc]

What TI-ACC's `wideanddeep/start_all.sh` is for TensorFlow, for PyTorch: `--fm` adds the pairs of
DeepFM's factorization machine, and `--tiacc` takes embeddings of `torchacc.embedding`, whose rows
are given to ids as they come, in place of `nn.EmbeddingBag` and `nn.Embedding`, which have a row
for each id that there may be. The data have the shape of Criteo's, 13 numbers and 26 categories,
and are made up: few ids are frequent, most are rare, and a hidden model of the same kind decides,
with noise, who clicks. What acc needs are the lines marked with an arrow (<--).
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import torchacc  # <--
from torchacc import embedding

NUMBERS = 13
FIELDS = 26
IDS = 1000  # of a field
DIM = 16
BATCH = 512
HELD_OUT = 16  # batches
FIRST_INITIALIZER = functools.partial(nn.init.normal_, std=0.01)


class Clicks:
    """A stream of batches, the same in each pass: numbers (BATCH, NUMBERS) float32, ids (BATCH,
    FIELDS) int64, which differ between the fields, and clicks (BATCH,) float32, 0 or 1.

    `seed` chooses the batches; the hidden model is the same for all.
    """

    def __init__(self, batches: int, seed: int) -> None:
        self.batches, self.seed = batches, seed
        hidden = torch.Generator().manual_seed(0)
        self._of_numbers = torch.randn(NUMBERS, generator=hidden) / 4
        self._of_ids = torch.randn(FIELDS * IDS, generator=hidden) / 3
        self._pairs = torch.randn(FIELDS * IDS, 4, generator=hidden) / 4

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        draw = torch.Generator().manual_seed(self.seed)
        fields = torch.arange(FIELDS) * IDS
        for _ in range(self.batches):
            numbers = torch.randn(BATCH, NUMBERS, generator=draw)
            # The logarithm of an id is uniform: the k-th is about as frequent as 1 / k.
            ids = (float(IDS) ** torch.rand(BATCH, FIELDS, generator=draw)).long() - 1 + fields
            log_odds = numbers @ self._of_numbers + self._of_ids[ids].sum(1)
            log_odds += pairs(self._pairs[ids])
            clicks = torch.rand(BATCH, generator=draw) < torch.sigmoid(log_odds - 1)
            yield numbers, ids, clicks.float()


def pairs(vectors: Tensor) -> Tensor:
    """The sum of the products of all pairs of vectors: (batch, fields, dim) -> (batch,)."""
    return (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2


class WideAndDeep(nn.Module):
    """Log odds of a click: a weight for each id, a network over the embeddings and, with `fm`, the
    products of all pairs of these.
    """

    def __init__(self, fm: bool, tiacc: bool) -> None:
        super().__init__()
        self.fm, self.tiacc = fm, tiacc
        self.deep = nn.Sequential(
            nn.Linear(NUMBERS + FIELDS * DIM, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU()
        )
        self.last = nn.Linear(32, 1)
        self.numbers = nn.Linear(NUMBERS, 1)
        if tiacc:
            variable = functools.partial(embedding.get_variable, capacity=FIELDS * IDS)
            self.wide: Any = variable("wide", 1, nn.init.zeros_)
            self.vectors: Any = variable("vectors", DIM, FIRST_INITIALIZER)
        else:
            self.wide = nn.EmbeddingBag(FIELDS * IDS, 1, mode="sum")
            self.vectors = nn.Embedding(FIELDS * IDS, DIM)
            nn.init.zeros_(self.wide.weight)
            FIRST_INITIALIZER(self.vectors.weight)

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        if self.tiacc:
            ids = ids.cpu()  # once, while nothing is recorded; both lookups need them there
            ends = torch.arange(0, ids.numel() + 1, FIELDS)
            wide = embedding.embedding_lookup_sparse(
                self.wide, (ids.flatten(), ends), combiner="sum"
            )
            vectors = embedding.embedding_lookup(self.vectors, ids)
        else:
            wide, vectors = self.wide(ids), self.vectors(ids)
        deep = self.last(self.deep(torch.cat((numbers, vectors.flatten(1)), 1)))
        log_odds = (self.numbers(numbers) + wide + deep).squeeze(1)
        return log_odds + pairs(vectors) if self.fm else log_odds


def area_under_curve(scores: Tensor, clicks: Tensor) -> float:
    """How probable it is that what was clicked has the higher score of two; 0.5 is chance."""
    others = scores[clicks == 0].sort().values
    clicked = scores[clicks == 1]
    below = torch.searchsorted(others, clicked)
    not_above = torch.searchsorted(others, clicked, right=True)
    return (below + not_above).double().mean().item() / 2 / len(others)


def evaluate(model: nn.Module, held_out: torchacc.AsyncLoader) -> float:
    """The area under the curve of clicks that the model has not been trained on."""
    model.eval()
    with torch.no_grad():
        found = [(model(numbers, ids), clicks) for numbers, ids, clicks in held_out]
    model.train()
    scores, clicks = (torch.cat(part).cpu() for part in zip(*found, strict=True))
    return area_under_curve(scores, clicks)


def train(model: nn.Module, steps: int, evaluations: int = 4) -> dict[str, list[float]]:
    """Trains on `steps` batches; returns the loss of each and the area under the curve, measured
    `evaluations` times, at last behind the last step.
    """
    model, loader = torchacc.accelerate(model, Clicks(steps, seed=1))  # <--
    held_out = torchacc.AsyncLoader(Clicks(HELD_OUT, seed=2), model.device)  # <--
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.BCEWithLogitsLoss()
    losses, areas = [], []
    every = max(1, steps // evaluations)
    start, trained = time.perf_counter(), 0
    for step, (numbers, ids, clicks) in enumerate(loader, 1):
        optimizer.zero_grad()
        loss = criterion(model(numbers, ids), clicks)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step % every == 0:
            loss.item()  # what is measured are steps that have run
            rate = (step - trained) / (time.perf_counter() - start)
            areas.append(evaluate(model, held_out))
            print(f"step {step}  loss {loss:.4f}  AUC {areas[-1]:.4f}  {rate:.0f} steps/s")
            start, trained = time.perf_counter(), step
    return {"losses": torch.stack(losses).tolist(), "areas": areas}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fm", action="store_true", help="DeepFM in place of Wide & Deep")
    parser.add_argument("--tiacc", action="store_true", help="embeddings are torchacc.embedding's")
    parser.add_argument("--steps", type=int, default=800)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = WideAndDeep(options.fm, options.tiacc)
    train(model, options.steps)
    if options.tiacc:
        print(f"ids that were seen: {len(model.vectors.ids)} of {FIELDS * IDS}")
    print(torchacc.report())  # <--


if __name__ == "__main__":
    main()
