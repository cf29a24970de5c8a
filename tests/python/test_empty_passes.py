"""A pass over an `AsyncLoader` that gives no batch is an error that says what is known of it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import torchacc


def numbers(count, **options):
    return DataLoader(TensorDataset(torch.arange(count)), **options)


class NoNumbers(IterableDataset):
    def __iter__(self):
        return iter([])


class First(IterableDataset):
    def __iter__(self):
        return iter(range(torch.utils.data.get_worker_info().id == 0))


@pytest.mark.parametrize("way", [True, False])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (list, "loader = a list of length 0: a pass over it gave no batch. Look at"),
        (lambda: iter([]), "loader = a list_iterator: .* an iterator, which can be gone through"),
        (lambda: numbers(0), "batch_size = 1, .*dataset = a TensorDataset of length 0"),
        (
            lambda: numbers(3, batch_size=4, drop_last=True, num_workers=1),
            r"a DataLoader of length 0 \(batch_size = 4, drop_last = True, num_workers = 1, "
            "dataset = a TensorDataset of length 3, sampler = a SequentialSampler of length 3,",
        ),
        (lambda: numbers(3, sampler=[]), "sampler = a list of length 0"),
        (lambda: DataLoader(NoNumbers(), num_workers=2), "dataset = a NoNumbers, sampler"),
    ],
)
def test_a_pass_without_a_batch_is_an_error(device, monkeypatch, make, text, way):
    monkeypatch.setattr("torchacc.ahead.Ahead.begin", lambda _: way)
    loader = torchacc.AsyncLoader(make(), device)
    for _ in range(2):
        iterator = iter(loader)
        with pytest.raises(ValueError, match=r"\[AsyncLoader\] .*" + text):
            next(iterator)
        assert list(iterator) == []


def test_a_pass_that_was_given_up_is_not_called_empty(device):
    iterator = iter(torchacc.AsyncLoader(numbers(4), device))
    iterator.close()
    assert list(iterator) == []


@pytest.mark.parametrize("way", [True, False])
def test_a_pass_that_failed_at_its_first_batch_is_not_called_empty(device, monkeypatch, way):
    monkeypatch.setattr("torchacc.ahead.Ahead.begin", lambda _: way)
    iterator = iter(torchacc.AsyncLoader(map({}.__getitem__, [1]), device))
    with pytest.raises(KeyError):
        next(iterator)
    assert list(iterator) == []


def test_a_stream_of_which_one_worker_has_nothing_is_not_empty(device):
    loader = torchacc.AsyncLoader(DataLoader(First(), batch_size=None, num_workers=2), device)
    assert [int(number) for number in loader] == [0]
