"""Reading ahead or in the loop: what an AsyncLoader chooses, and that both give the same."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchacc
from torchacc.ahead import Ahead


class Told:
    """In place of Ahead: reads ahead, or in the loop, as it is told for each batch in turn."""

    def __init__(self, *ways):
        self._ways = itertools.cycle(ways)

    @property
    def wanted(self):
        return next(self._ways)

    def took(self, seconds):
        return False


IN_THE_LOOP = [False]
WAYS = [IN_THE_LOOP, [True, False], [True] * 3 + [False] * 5]


def told(loader, ways):
    loader._ahead = Told(*ways)
    return loader


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "AsyncLoader"]


def learnt(seconds, whole=1, others=()):
    """An Ahead that has decided: each batch comes after `seconds` of the way it is read, but the
    numbered ones after those of `others`.
    """
    ahead = Ahead(whole)
    others = dict(others)
    for number in range(400):
        if ahead.took(others.get(number, seconds[ahead.wanted])):
            return ahead, number
    return ahead, None


# --- what is chosen -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead", "in_the_loop", "chosen"),
    [(2.0, 1.0, False), (1.0, 2.0, True), (1.0, 1.0, True), (1.0, 0.99, True), (1.0, 0.97, False)],
)
def test_the_way_that_takes_less_time_is_chosen(ahead, in_the_loop, chosen):
    found, number = learnt({True: ahead, False: in_the_loop})
    assert found.wanted is chosen and number == 95
    assert found.best == pytest.approx({True: ahead, False: in_the_loop})
    assert not found.took(1000.0) and found.wanted is chosen


def test_what_else_the_program_does_does_not_decide():
    """First steps compile, one trial of each way has an evaluation, batches behind a change lie
    there already.
    """
    slow = {**dict.fromkeys(range(16), 50.0), 25: 60.0, 90: 80.0, 36: 9.0, 57: 9.0, 77: 9.0}
    for ahead, in_the_loop in ((1.0, 1.1), (1.1, 1.0)):
        found, _ = learnt({True: ahead, False: in_the_loop}, others=slow)
        assert found.wanted is (ahead < in_the_loop)


def test_a_trial_has_whole_steps():
    """With a step for every 5 batches, only the fifth takes time."""
    ahead = Ahead(5)
    for number in range(400):
        if ahead.took((2.0 if ahead.wanted else 1.0) * (number % 5 == 0)):
            break
    assert ahead.best == pytest.approx({True: 0.4, False: 0.2})


def test_nothing_is_tried_where_runs_should_be_alike():
    torch.use_deterministic_algorithms(True)
    try:
        found, number = learnt({True: 2.0, False: 1.0})
        assert found.wanted and number is None and found.best == {}
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_loader_in_which_reading_ahead_gains_nothing_reads_in_the_loop(device, caplog):
    """The data set computes, with the interpreter, and the loop does nothing."""

    class Computing(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, i):
            return torch.tensor(float(sum(range(2000)) * 0 + i))

    loader = torchacc.AsyncLoader(DataLoader(Computing()), device)
    loader._ahead.took = took = Recording(loader._ahead.took)
    with caplog.at_level(logging.INFO, logger="TorchAcc"):
        for _ in range(4):
            assert [float(x) for x in loader] == list(range(40))
    assert len(took.seconds) == 4 * 39 and all(each > 0 for each in took.seconds)
    best = loader._ahead.best
    assert loader._ahead.wanted is (best[False] >= 0.98 * best[True])
    said = [each for each in caplog.messages if "batches of a DataLoader are read" in each]
    assert len(said) == 1
    assert ("read ahead from" if loader._ahead.wanted else "read in the loop from") in said[0]


class Recording:
    def __init__(self, function):
        self._function, self.seconds = function, []

    def __call__(self, seconds):
        self.seconds.append(seconds)
        return self._function(seconds)


def test_copies_learn_anew(device):
    loader = told(torchacc.AsyncLoader([1, 2], device), IN_THE_LOOP)
    for twin in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert isinstance(twin._ahead, Ahead)


# --- both ways give the same --------------------------------------------------------------------


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_in_order_and_on_the_device(device, workers, ways):
    plain = DataLoader(TensorDataset(torch.arange(41.0)), batch_size=3, num_workers=workers)
    loader = told(torchacc.AsyncLoader(plain, device), ways)
    for _ in range(3):
        found = []
        for (x,) in loader:
            assert x.device.type == device
            found += x.tolist()
        assert found == list(range(41))
        assert threads() == []


@pytest.mark.parametrize("ways", WAYS)
def test_an_error_comes_after_the_batches_before_it_and_ends_the_pass(device, ways):
    def broken():
        yield from (torch.ones(1), torch.ones(1), torch.ones(1))
        raise KeyError("the fourth is broken")

    iterator = iter(told(torchacc.AsyncLoader(broken(), device), ways))
    assert [next(iterator).tolist() for _ in range(3)] == [[1.0]] * 3
    with pytest.raises(KeyError, match="the fourth is broken"):
        next(iterator)
    assert list(iterator) == [] and threads() == []


@pytest.mark.parametrize("ways", WAYS)
def test_leaving_early_ends_thread_and_workers(device, ways):
    plain = DataLoader(TensorDataset(torch.arange(60.0)), batch_size=2, num_workers=1)
    loader = told(torchacc.AsyncLoader(plain, device), ways)
    for _ in range(2):
        for number, _ in enumerate(loader):
            if number == 4:
                break
        assert threads() == [] and torch.multiprocessing.active_children() == []


@pytest.mark.parametrize("ways", WAYS)
def test_several_threads_may_take_from_one_pass(device, ways):
    def counted():
        for number in range(60):
            yield torch.full((1,), float(number))

    iterator = iter(told(torchacc.AsyncLoader(counted(), device, device_prefetch_size=1), ways))
    with ThreadPoolExecutor(6) as pool:
        taken = list(pool.map(lambda _: [float(x) for x in iterator], range(6)))
    assert sorted(itertools.chain(*taken)) == list(range(60))


def test_reading_in_the_loop_keeps_what_the_loop_began_with(device):
    """As the thread does: a loop that is left for a moment's no_grad reads as before."""

    class Scaled(torch.utils.data.Dataset):
        weight = torch.ones(1, requires_grad=True)

        def __len__(self):
            return 4

        def __getitem__(self, i):
            return self.weight * i

    loader = told(torchacc.AsyncLoader(DataLoader(Scaled()), device), IN_THE_LOOP)
    with torch.no_grad():
        assert not any(batch.requires_grad for batch in loader)
    iterator = iter(loader)
    assert next(iterator).requires_grad
    with torch.inference_mode():
        batch = next(iterator)
    assert batch.requires_grad and not batch.is_inference()


def test_an_empty_loader_is_pointed_out(device, caplog):
    from torchacc import logger

    logger.forget_said_for_testing()
    assert list(told(torchacc.AsyncLoader([], device), IN_THE_LOOP)) == []
    assert "gave no batch" in caplog.text
