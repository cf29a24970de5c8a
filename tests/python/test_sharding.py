"""Which part of the data each process reads, and the epochs of a DistributedSampler."""

from __future__ import annotations

import copy
import pickle
import random
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
)
from torch.utils.data.distributed import DistributedSampler

import torchacc
from torchacc.sharding import Shard, shard_loader


def dataset(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def read(loader) -> list[list[int]]:
    """The batches of one pass, as lists of numbers."""
    return [batch[0].tolist() for batch in loader]


def parts(make, count: int, seed: int = 5) -> list:
    """The loaders of all processes; each process makes its own loader, with a seed of its own."""
    made = []
    for rank in range(count):
        torch.manual_seed(rank)
        made.append(shard_loader(make(), rank, count, seed))
    return made


# --- the parts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 2, 5, 6, 7])
def test_shards_take_turns_and_have_one_length(length):
    shards = [Shard(list(range(length)), rank, 3) for rank in range(3)]
    taken = [list(each) for each in shards]
    assert {len(each) for each in taken} == {len(shards[0])} == {-(-length // 3)}
    flat = [element for turn in zip(*taken, strict=True) for element in turn]
    assert flat[:length] == list(range(length))
    assert all(extra in range(length) for extra in flat[length:])


def test_samples_are_divided_and_batches_keep_their_size():
    loaders = parts(lambda: DataLoader(dataset(24), batch_size=3), 2)
    assert [len(each) for each in loaders] == [4, 4]
    assert read(loaders[0])[0] == [0, 2, 4] and read(loaders[1])[0] == [1, 3, 5]


def test_a_shuffled_data_set_is_divided_anew_in_every_pass():
    loaders = parts(lambda: DataLoader(dataset(20), batch_size=4, shuffle=True), 4)
    passes = []
    for _ in range(2):
        batches = [read(each) for each in loaders]
        assert sorted(sum(sum(batches, []), [])) == list(range(20))
        passes.append(batches)
    assert passes[0] != passes[1]
    again = parts(lambda: DataLoader(dataset(20), batch_size=4, shuffle=True), 4)
    assert [read(each) for each in again] == passes[0]
    other = parts(lambda: DataLoader(dataset(20), batch_size=4, shuffle=True), 4, seed=6)
    assert [read(each) for each in other] != passes[0]


def test_what_does_not_divide_is_filled_up():
    loaders = parts(lambda: DataLoader(dataset(10), batch_size=2, shuffle=True), 4)
    batches = [read(each) for each in loaders]
    assert {len(each) for each in batches} == {2}  # 3 samples for each process
    assert set(sum(sum(batches, []), [])) == set(range(10))


def test_drop_last_holds_for_the_part():
    loaders = parts(lambda: DataLoader(dataset(10), batch_size=2, drop_last=True), 2)
    assert [[len(batch) for batch in read(each)] for each in loaders] == [[2, 2], [2, 2]]


def test_batches_of_a_batch_sampler_are_divided():
    class Own(BatchSampler):
        pass

    def make():
        sampler = Own(RandomSampler(range(12)), batch_size=3, drop_last=False)
        return DataLoader(dataset(12), batch_sampler=sampler)

    loaders = parts(make, 2)
    batches = [read(each) for each in loaders]
    assert [[len(b) for b in each] for each in batches] == [[3, 3], [3, 3]]
    assert sorted(sum(sum(batches, []), [])) == list(range(12))


def test_samples_without_batches_are_divided():
    loaders = parts(lambda: DataLoader(dataset(6), batch_size=None), 3)
    assert [[int(x[0]) for x in each] for each in loaders] == [[0, 3], [1, 4], [2, 5]]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.tensor([number]) for number in range(8)])


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_a_stream_are_divided(workers):
    loaders = parts(lambda: DataLoader(Stream(), batch_size=2, num_workers=workers), 2)
    taken = [[batch.flatten().tolist() for batch in each] for each in loaders]
    assert taken == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_batches_of_any_iterable_are_divided():
    loaders = parts(lambda: [[0], [1], [2]], 2)
    assert [list(each) for each in loaders] == [[[0], [2]], [[1], [0]]]
    assert [len(each) for each in loaders] == [2, 2]


def test_the_loader_itself_is_not_changed_and_its_workers_are_not_shared():
    loader = DataLoader(
        dataset(8), batch_size=2, num_workers=1, persistent_workers=True, shuffle=True
    )
    sampler, batches = loader.sampler, loader.batch_sampler
    read(loader)
    part = shard_loader(loader, 1, 2, seed=0)
    assert len(sum(read(part), [])) == 4
    assert (loader.sampler, loader.batch_sampler) == (sampler, batches)
    assert sampler.generator is None
    assert sorted(sum(read(loader), [])) == list(range(8))
    assert type(part) is DataLoader and part.dataset is loader.dataset


def test_processes_that_share_a_part_read_the_same():
    """The stages of a pipeline: one part, and the same order on all."""
    made = []
    for seed in range(2):
        torch.manual_seed(seed)
        loader = DataLoader(dataset(8), batch_size=2, shuffle=True)
        made.append(shard_loader(loader, 0, 1, seed=5))
    first, second = (read(each) for each in made)
    assert first == second and sorted(sum(first, [])) == list(range(8))
    assert read(made[0]) == read(made[1]) != first  # the next pass


class Noisy(Dataset):
    """Each sample is its number and what three generators draw."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        drawn = (torch.rand(()).item(), random.random(), np.random.random())
        return torch.tensor([index, *drawn], dtype=torch.float64)


LOADERS = {
    "samples": lambda: DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=1),
    "batches": lambda: DataLoader(
        Noisy(),
        batch_sampler=type("Own", (BatchSampler,), {})(RandomSampler(range(8)), 2, False),
        num_workers=1,
    ),
    "no batches": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True, num_workers=1),
    "its own generator": lambda: DataLoader(
        Noisy(), batch_size=2, num_workers=1, generator=torch.Generator()
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_workers_draw_the_same_where_the_same_is_read(kind):
    made = []
    for process, rank in enumerate((0, 0, 1)):
        torch.manual_seed(process)
        loader = LOADERS[kind]()
        generator = loader.generator
        made.append(shard_loader(loader, rank, 2, seed=5))
        assert loader.generator is generator
    passes = [[torch.stack(list(part)).view(-1, 4).tolist() for part in made] for _ in range(2)]
    for first, same, other in passes:
        assert first == same
        assert {row[0] for row in first} | {row[0] for row in other} == set(range(8))
    noise = [[value for row in part for value in row[1:]] for each in passes for part in each[1:]]
    assert len(set(sum(noise, []))) == 4 * 4 * 3, "two ranks or two passes drew the same"


def test_workers_can_be_asked_for_where_a_device_is_the_default(device):
    data = dataset(8)
    with torch.device(device):
        part = shard_loader(DataLoader(data, batch_size=2, num_workers=1), 1, 2, seed=5)
        assert read(part) == [[1, 3], [5, 7]]


def test_passes_are_counted_alike_with_workers_and_without():
    """torch makes two iterators of a sampler for a pass with workers, and uses one."""
    found = []
    for workers in (0, 1):
        sampler = RandomSampler(range(12))
        loader = DataLoader(dataset(12), batch_size=None, sampler=sampler, num_workers=workers)
        part = shard_loader(loader, 0, 2, seed=5)
        found.append([[int(x[0]) for x in part] for _ in range(2)])
    assert found[0] == found[1]


class Noting(DataLoader):
    """Notes in which threads its iterators are made."""

    threads: list[threading.Thread] = []

    def _get_iterator(self):
        self.threads.append(threading.current_thread())
        return super()._get_iterator()


def test_workers_of_a_divided_stream_are_forked_by_the_loop(device):
    Noting.threads.clear()
    plain = Noting(Stream(), batch_size=2, num_workers=1)
    loader = torchacc.AsyncLoader(shard_loader(plain, 1, 2, seed=0), device)
    for _ in range(2):  # one of them is read by a thread
        iterator = iter(loader)
        assert Noting.threads == [threading.main_thread()]
        Noting.threads.clear()
        assert [batch.flatten().tolist() for batch in iterator] == [[2, 3], [6, 7]]
    assert Noting.threads == []


def test_batches_of_workers_are_known_as_such_when_they_are_divided(device):
    plain = DataLoader(Stream(), batch_size=2, num_workers=1)
    parts = [shard_loader(each, 0, 2, seed=0) for each in (plain, [torch.ones(1)])]
    ways = [iter(torchacc.AsyncLoader(each, device))._moves for each in (plain, *parts)]
    assert ways[0] == ways[1] and not ways[2]


def test_a_part_ends_with_an_error():
    """Whether or not what it is a part of would go on: processes would not be at the same place."""
    numbers = {number: number for number in range(8) if number != 3}
    part = iter(shard_loader(map(numbers.__getitem__, range(8)), 0, 2, seed=0))
    assert next(part) == 0
    with pytest.raises(KeyError):
        next(part)
    assert list(part) == []


def test_loaders_and_samplers_of_the_program_are_not_given_generators():
    stream = DataLoader(Stream(), batch_size=None)
    taken = [int(each) for each in shard_loader(stream, 1, 2, seed=0)]
    assert taken == [1, 3, 5, 7]
    assert stream.generator is None
    sampler = RandomSampler(dataset(8))

    class Own(BatchSampler):
        pass

    loader = DataLoader(dataset(8), batch_sampler=Own(sampler, 2, False))
    part = shard_loader(loader, 0, 2, seed=0)
    assert len(read(part)) == 2
    assert sampler.generator is None and loader.batch_sampler.sampler is sampler


def test_a_sampler_that_cannot_be_seeded_is_told(caplog):
    class Drawn(Sampler):
        def __iter__(self):
            return iter(torch.randperm(8).tolist())

    shard_loader(DataLoader(dataset(8), sampler=Drawn()), 0, 2, seed=0)
    assert "Drawn has no attribute `generator`" in caplog.text
    shard_loader(DataLoader(dataset(8)), 0, 2, seed=0)
    assert "SequentialSampler" not in caplog.text


def test_what_a_program_sets_on_its_sampler_holds_for_the_part():
    class Epochs(Sampler):
        def __init__(self) -> None:
            self.epoch = 0
            self.passes = 0  # its own
            self.generator = None

        def __iter__(self):
            self.passes += 1
            yield from (10 * self.epoch + self.passes + i for i in range(4))

        def __len__(self) -> int:
            return 4

    for wrap in (lambda s: {"sampler": s}, lambda s: {"batch_sampler": BatchSampler(s, 1, False)}):
        sampler = Epochs()
        shard = shard_loader(DataLoader(dataset(100), **wrap(sampler)), 0, 2, seed=0)
        found = [samples(shard)]
        for epoch in (1, 1, 2):
            sampler.epoch = epoch
            found.append(samples(shard))
        assert found == [[1, 3], [12, 14], [13, 15], [24, 26]]


def test_one_process_and_a_divided_loader_are_left_alone():
    loader = DataLoader(dataset(8))
    assert torchacc.accelerate(torch.nn.Linear(1, 1), loader)[1]._loader is loader
    sampler = DistributedSampler(dataset(8), num_replicas=2, rank=0)
    for loader in (
        DataLoader(dataset(8), sampler=sampler),
        DataLoader(dataset(8), batch_sampler=BatchSampler(sampler, 2, False)),
    ):
        assert shard_loader(loader, 0, 2, 0) is loader


def test_a_shard_has_the_attributes_of_what_it_divides():
    shard = Shard(SequentialSampler(range(4)), 0, 2)
    assert shard.data_source == range(4)
    for other in (copy.deepcopy(shard), pickle.loads(pickle.dumps(shard))):
        assert list(other) == [0, 2]
    with pytest.raises(AttributeError, match="nothing"):
        shard.nothing


# --- the epochs of a DistributedSampler ---------------------------------------------------------


def distributed(count: int = 16) -> tuple[DistributedSampler, torchacc.AsyncLoader]:
    sampler = DistributedSampler(dataset(count), num_replicas=2, rank=0, seed=3)
    return sampler, torchacc.AsyncLoader(DataLoader(dataset(count), 4, sampler=sampler))


def expected(epochs: list[int], count: int = 16) -> list[list[int]]:
    sampler = DistributedSampler(dataset(count), num_replicas=2, rank=0, seed=3)
    found = []
    for epoch in epochs:
        sampler.set_epoch(epoch)
        found.append(list(sampler))
    return found


def samples(loader) -> list[int]:
    return sum(read(loader), [])


def test_every_iteration_is_an_epoch(device):
    _, loader = distributed()
    assert [samples(loader) for _ in range(3)] == expected([0, 1, 2])


def test_a_program_that_sets_the_epoch_is_left_to_it(device):
    sampler, loader = distributed()
    found = []
    for epoch in (4, 4, 0, 7):
        sampler.set_epoch(epoch)
        found.append(samples(loader))
    found.append(samples(loader))  # it has its reasons
    assert found == expected([4, 4, 0, 7, 7])


def test_a_program_may_begin_to_set_the_epoch_later(device):
    sampler, loader = distributed()
    found = [samples(loader), samples(loader)]
    sampler.set_epoch(0)
    found.append(samples(loader))
    assert found == expected([0, 1, 0])


def test_a_resumed_program_goes_on_from_its_epoch(device):
    sampler = DistributedSampler(dataset(16), num_replicas=2, rank=0, seed=3)
    sampler.set_epoch(5)
    loader = torchacc.AsyncLoader(DataLoader(dataset(16), 4, sampler=sampler))
    assert [samples(loader), samples(loader)] == expected([5, 6])


def test_an_epoch_that_is_left_early_is_one(device):
    _, loader = distributed()
    for _ in loader:
        break
    assert samples(loader) == expected([1])[0]


def test_the_sampler_can_be_copied(device):
    sampler, loader = distributed()
    other = copy.deepcopy(sampler)
    other.set_epoch(9)
    assert (sampler.epoch, other.epoch) == (0, 9)
    assert [samples(loader), samples(loader)] == expected([0, 1])
