"""Which part of the data each process reads, and the epochs of samplers that know it already."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from torchacc.logger import say_once


class Turns:
    """An iterator over every `count`-th of `elements`, from the element `rank` on.

    Elements from the beginning fill up the last round.
    """

    def __init__(self, elements: Iterator[Any], rank: int, count: int) -> None:
        self.elements = elements
        self._rank = rank
        self._count = count
        self._first: list[Any] = []

    def __iter__(self) -> Turns:
        return self

    def __next__(self) -> Any:
        # After the end, and after an error, nothing is asked any more.
        elements, self.elements = self.elements, iter(())
        turn = list(islice(elements, self._count))
        if len(turn) == self._count:
            self.elements = elements
        if not turn:
            raise StopIteration
        self._first = self._first or turn
        missing = range(self._count - len(turn))
        return (turn + [self._first[index % len(self._first)] for index in missing])[self._rank]


class _Copied:
    """A sampler, and the copy of it that is drawn from: what the program sets on its own becomes
    the copy's, which has generators of its own.
    """

    def __init__(self, own: Any, made: Any) -> None:
        self._own, self._made = own, made
        self._seen = dict(getattr(own, "__dict__", {}))

    def follow(self) -> None:
        own = getattr(self._own, "__dict__", {})
        for name in own.keys() - {"generator", "sampler"}:
            if name not in self._seen or self._seen[name] is not own[name]:
                self._seen[name] = vars(self._made)[name] = own[name]


class Shard:
    """Every `count`-th element of a sampler, from the element `rank` on.

    All shards have the same length: elements from the beginning fill up the last round. The
    sampler has to yield the same on every process. So with a `seed`, where it, or a sampler that
    it draws from, has an attribute `generator`, as torch's random samplers do, that becomes one
    with a seed of the pass: `seed` plus the number of passes before. `copied` are samplers whose
    copies stand in `inner`; before each pass these get what the program has set since.
    """

    def __init__(
        self,
        inner: Iterable[Any],
        rank: int,
        count: int,
        seed: int | None = None,
        copied: Sequence[_Copied] = (),
    ) -> None:
        self._inner = inner
        self._copied = copied
        self._rank = rank
        self._count = count
        self._seed = seed
        self._passes = 0

    def _begin(self) -> Turns:
        for each in self._copied:
            each.follow()
        if self._seed is not None:
            for owner in (self._inner, getattr(self._inner, "sampler", None)):
                if hasattr(owner, "generator"):
                    owner.generator = torch.Generator().manual_seed(self._seed + self._passes)
        self._passes += 1
        return Turns(iter(self._inner), self._rank, self._count)

    def __iter__(self) -> Iterator[Any]:
        # Not before the first element: a DataLoader makes iterators that it does not use.
        yield from self._begin()

    def __len__(self) -> int:
        return -(-len(self._inner) // self._count)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # Copy and pickle ask before there is an object.
        if name.startswith("__") or name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)


class LoaderShard(Shard):
    """The same of the batches of a loader."""

    def __iter__(self) -> Iterator[Any]:
        # At once: worker processes are forked by the thread that asks for the iterator.
        return self._begin()


def shard_loader(loader: Iterable[Any], rank: int, count: int, seed: int) -> Iterable[Any]:
    """A loader of the part of process `rank` of `count`; `loader` itself is not changed.

    Those with the same `rank`, which may be the only one, read the same in the same order, and
    their workers draw the same random numbers. Without workers a data set draws from the generators
    of its process, which are left to the program.

    Of a DataLoader over a map-style data set the samples are divided, so its batches have the size
    that they had; one with a batch sampler of its own has its batches divided. Anything else yields
    every `count`-th of its batches, and has to yield the same ones on every process. What a
    DistributedSampler has divided stays as it is.

    `seed` has to be the same on every process.
    """
    if distributed_sampler(loader) is not None:
        return loader
    if not isinstance(loader, DataLoader):
        return LoaderShard(loader, rank, count)
    made = copy.copy(loader)
    # The loader refuses to have these assigned, since its workers know the old ones: this one has
    # none yet.
    state = made.__dict__
    state["_iterator"] = None
    if isinstance(loader.dataset, IterableDataset):
        return LoaderShard(made, rank, count, seed)
    # Where another device is the default, torch draws on it, and refuses a generator of the CPU.
    if loader.num_workers > 0 and torch.get_default_device().type == "cpu":
        # For the seeds of workers: alike where the same is read, other ones elsewhere.
        state["generator"] = _generator_of(rank, seed)
    if loader.batch_size is not None:  # the batch sampler is the loader's own
        sampler = _shard_of(loader.sampler, rank, count, seed)
        state["sampler"] = sampler
        state["batch_sampler"] = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    elif loader.batch_sampler is not None:
        state["batch_sampler"] = _shard_of(loader.batch_sampler, rank, count, seed)
    else:
        state["sampler"] = _shard_of(loader.sampler, rank, count, seed)
    return made


def _generator_of(rank: int, seed: int) -> torch.Generator:
    """Those of two ranks have nothing to do with each other, nor with one that has the seed."""
    seeded = torch.Generator().manual_seed(seed)
    drawn = torch.randint(1 << 62, (rank + 1,), generator=seeded, device="cpu")
    return torch.Generator().manual_seed(int(drawn[rank]))


def _shard_of(sampler: Any, rank: int, count: int, seed: int) -> Shard:
    """Of a copy, which may be given generators. Warns of one that has no use for them."""
    made = copy.copy(sampler)
    copied = [_Copied(sampler, made)]
    drawn_from = getattr(sampler, "sampler", None)
    if drawn_from is not None:
        made.sampler = copy.copy(drawn_from)
        copied.append(_Copied(drawn_from, made.sampler))
        drawn_from = made.sampler
    owners = (made, drawn_from)
    if not any(hasattr(each, "generator") or type(each) is SequentialSampler for each in owners):
        kind = type(sampler).__name__
        say_once(
            f"sampler {kind}",
            f"[accelerate] {kind} has no attribute `generator` that could be seeded: it has to "
            "yield the same on every process (dataloader.shard).",
        )
    return Shard(made, rank, count, seed, copied)


def is_divided(loader: Iterable[Any]) -> bool:
    """Whether it is, or draws from, a part for one of several processes."""
    if distributed_sampler(loader) is not None:
        return True
    samplers = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    return any(isinstance(each, Shard) for each in (loader, *samplers))


def distributed_sampler(loader: Iterable[Any]) -> DistributedSampler[Any] | None:
    """The DistributedSampler that a loader draws from, if it does."""
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        sampler = getattr(owner, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            return sampler
    return None


class _NotedSetEpoch:
    """In the place of a sampler's `set_epoch`: does the same, and notes that it was called."""

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        self.sampler = sampler
        self.called = False

    def __call__(self, epoch: int) -> None:
        self.called = True
        type(self.sampler).set_epoch(self.sampler, epoch)


def follow_epochs(sampler: DistributedSampler[Any]) -> None:
    """From now on `next_epoch` counts the passes over `sampler`."""
    if not isinstance(sampler.__dict__.get("set_epoch"), _NotedSetEpoch):
        sampler.set_epoch = _NotedSetEpoch(sampler)  # type: ignore[method-assign]


def next_epoch(sampler: DistributedSampler[Any], passes: int) -> None:
    """Begins pass number `passes` (from 0) over `sampler`: it shuffles anew.

    Once the program has called `set_epoch`, that is the program's.
    """
    noted = sampler.__dict__.get("set_epoch")
    if isinstance(noted, _NotedSetEpoch) and not noted.called and passes > 0:
        type(sampler).set_epoch(sampler, sampler.epoch + 1)
