"""Reading ahead or in the loop: what an AsyncLoader chooses, and that both give the same."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchacc
from torchacc import loader as loader_module
from torchacc.ahead import Ahead, Pace


def told(loader, *ways):
    """The loader, whose passes are read ahead or in the loop as `ways` say in turn."""
    each = itertools.cycle(ways)
    loader._ahead.begin = lambda: next(each)
    return loader


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "AsyncLoader"]


def passed(ahead, seconds, batches=20, others=()):
    """A pass whose batches come after `seconds` by way, but the numbered ones after `others`."""
    others = dict(others)
    way, pace, now = ahead.begin(), ahead.pace(), 100.0
    for number in range(batches):
        now += others.get(number, seconds[way])
        pace.handed_out(now)
    ahead.end(way, pace)
    return way


# --- what is chosen -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead", "in_the_loop", "chosen", "trials"),
    [
        (2.0, 1.0, False, 1),
        (1.0, 2.0, True, 4),
        (1.0, 1.0, False, 1),
        (0.98, 1.0, False, 4),
        (0.96, 1.0, True, 4),
    ],
)
def test_the_way_that_takes_less_time_is_chosen(ahead, in_the_loop, chosen, trials, caplog):
    found = Ahead("list", 1, 2)
    seconds = {True: ahead, False: in_the_loop}
    with caplog.at_level(logging.INFO, logger="TorchAcc"):
        ways = [passed(found, seconds) for _ in range(12)]
    # In the first pass steps compile.
    assert ways == [True, *[True, False] * trials, *[chosen] * (11 - 2 * trials)]
    assert len(caplog.messages) == 1
    assert f"of a list are read {'ahead' if chosen else 'in the loop'} from" in caplog.text
    for value in (ahead, in_the_loop):
        assert f"{value * 1e3:.3g} ms" in caplog.text


def test_what_else_the_program_does_does_not_decide():
    """First steps compile, every second pass has a pause, and every first batches that wait."""
    for ahead, in_the_loop in ((1.0, 1.1), (1.1, 1.0)):
        found = Ahead("list", 1, 2)
        for number in range(9):
            slow = dict.fromkeys(range(16 if number == 0 else 3), 50.0)
            pause = {30: 400.0} if number in (1, 4, 5, 8) else {}
            passed(found, {True: ahead, False: in_the_loop}, 60, {**slow, **pause})
        assert found.begin() is (ahead < in_the_loop) and found.chosen is (ahead < in_the_loop)


@pytest.mark.parametrize("number", range(1, 9))
def test_a_gain_that_one_trial_does_not_show_is_none(number):
    found = Ahead("list", 1, 2)
    for each in range(9):
        # A trial of reading ahead that is slow, or one of reading in the loop that is fast.
        other = each == number and found.chosen is None
        passed(found, {True: 1.0 if other else 0.6, False: 0.6 if other else 1.0})
    assert found.begin() is False and found.chosen is False


def test_a_choice_is_looked_at_again_less_and_less_often(caplog):
    found = Ahead("list", 1, 2)
    seconds = {True: 1.0, False: 0.8}
    with caplog.at_level(logging.INFO, logger="TorchAcc"):
        ways = [passed(found, seconds) for _ in range(3 + 16 + 2 + 32 + 2)]
        assert ways == [*[True, True, False], *[False] * 16, True, *[False] * 33, True, False]
        assert len(caplog.messages) == 1
        # From now on it is the other way round.
        ways = [passed(found, {True: 0.8, False: 1.0}) for _ in range(64 + 8 + 128)]
        assert ways == [*[False] * 64, *[True, False] * 4, *[True] * 128]
        assert len(caplog.messages) == 2


def test_one_trial_does_not_take_a_gain_away_that_all_have_shown():
    found = Ahead("list", 1, 2)
    seconds = {True: 0.8, False: 1.0}
    assert [passed(found, seconds) for _ in range(9 + 16)][-16:] == [True] * 16
    for number in range(8):
        passed(found, {True: 1.1, False: 1.0} if number == 4 else seconds)
    assert [passed(found, seconds) for _ in range(32)] == [True] * 32
    ways = [passed(found, {True: 1.0, False: 1.0}) for _ in range(8 + 64)]
    assert ways == [*[True, False] * 4, *[False] * 64]


def test_short_passes_are_put_together():
    found = Ahead("list", 1, 2)
    ways = [passed(found, {True: 2.0, False: 1.0}, 12) for _ in range(8)]
    assert ways == [True, *[True] * 2, *[False] * 2, *[False] * 3]
    found = Ahead("list", 1, 2)
    assert all(passed(found, {True: 2.0, False: 1.0}, 11) for _ in range(12))  # too short


def test_a_run_has_whole_steps():
    """With a step for every 5 batches, only the fifth takes time."""
    pace = Ahead("list", 5, 2).pace()
    now = 0.0
    for number in range(60):
        now += float(number % 5 == 0)
        pace.handed_out(now)
    assert pace.runs == pytest.approx([0.2] * 4)


def test_batches_that_may_be_ahead_are_not_measured():
    assert Ahead("list", 1, 30).pace()._unmeasured == 31


def test_other_steps_are_compared_anew():
    found = Ahead("list", 1, 2)
    for _ in range(6):
        passed(found, {True: 1.0, False: 0.5})
    assert found.chosen is False
    passed(found, {True: 1.0, False: 0.9})
    assert found.begin() is False and found.chosen is False
    passed(found, {True: 1.0, False: 1.1})  # more than twice as long
    for _ in range(8):
        passed(found, {True: 1.0, False: 1.1})
    assert found.begin() is True and found.chosen is True


def test_nothing_is_tried_where_runs_should_be_alike():
    found = Ahead("list", 1, 2)
    torch.use_deterministic_algorithms(True)
    try:
        assert all(passed(found, {True: 2.0, False: 1.0}) for _ in range(9))
        assert found.chosen is None
    finally:
        torch.use_deterministic_algorithms(False)


def test_of_several_consumers_nothing_is_learnt():
    pace = Pace(2, 0)
    for second in range(9):
        pace.handed_out(float(second))
    assert len(pace.runs) == 4
    with ThreadPoolExecutor(1) as pool:
        pool.submit(pace.handed_out, 9.0).result()
    for second in range(9):
        pace.handed_out(float(second))
    assert pace.runs == []


def test_a_loader_that_is_faster_in_the_loop_is_read_there(device, monkeypatch, caplog):
    """By a clock for which a batch takes longer while a thread of the loader runs."""

    class Clock:
        now = 0.0

        def perf_counter(self):
            self.now += 2.0 if threads() else 1.0
            return self.now

    monkeypatch.setattr(loader_module, "time", Clock())
    # Longer than what is read ahead: the thread is there for as long as the loop.
    endless = DataLoader(TensorDataset(torch.arange(40.0)))
    loader = torchacc.AsyncLoader(endless, device)
    ways = []
    with caplog.at_level(logging.INFO, logger="TorchAcc"):
        for _ in range(7):
            iterator = iter(loader)
            assert [float(next(iterator)[0]) for _ in range(25)] == list(range(25))
            ways.append(bool(threads()))
            iterator.close()
    assert ways == [True, True, *[False] * 5]
    assert "of a DataLoader are read in the loop from now on: one in 1e+03 ms" in caplog.text


@pytest.mark.parametrize("surrounding", ["device", "autocast", "mode"])
def test_what_a_thread_does_not_see_is_not_tried(device, surrounding):
    """A shuffle by a default device would be refused, and a data set would compute otherwise."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    scopes = {
        "device": torch.device(device),
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "mode": Mode(),
    }
    x = torch.arange(6.0)
    loader = told(torchacc.AsyncLoader(DataLoader(TensorDataset(x), shuffle=True), device), False)
    with scopes[surrounding]:
        iterator = iter(loader)
        found = [float(next(iterator)[0])]
        assert threads()
        found += [float(each) for (each,) in iterator]
    assert sorted(found) == x.tolist()
    next(iter(loader))
    assert threads() == []


def test_copies_learn_anew(device):
    loader = torchacc.AsyncLoader([1, 2], device)
    for _ in range(6):
        passed(loader._ahead, {True: 2.0, False: 1.0})
    assert loader._ahead.begin() is False
    for twin in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert twin._ahead.begin() is True


# --- both ways give the same --------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_in_order_and_on_the_device(device, workers):
    plain = DataLoader(TensorDataset(torch.arange(41.0)), batch_size=3, num_workers=workers)
    loader = told(torchacc.AsyncLoader(plain, device), False, True, False)
    for _ in range(4):
        found = []
        for (x,) in loader:
            assert x.device.type == device
            found += x.tolist()
        assert found == list(range(41))
        assert threads() == []


def test_an_error_comes_after_the_batches_before_it_and_ends_the_pass(device):
    def broken():
        yield from (torch.ones(1), torch.ones(1), torch.ones(1))
        raise KeyError("the fourth is broken")

    iterator = iter(told(torchacc.AsyncLoader(broken(), device), False))
    assert [next(iterator).tolist() for _ in range(3)] == [[1.0]] * 3
    with pytest.raises(KeyError, match="the fourth is broken"):
        next(iterator)
    assert list(iterator) == [] and threads() == []


def test_leaving_early_ends_the_workers(device):
    plain = DataLoader(TensorDataset(torch.arange(60.0)), batch_size=2, num_workers=1)
    loader = told(torchacc.AsyncLoader(plain, device), False, True)
    for _ in range(2):
        for number, _ in enumerate(loader):
            if number == 4:
                break
        assert threads() == [] and torch.multiprocessing.active_children() == []
    for _ in range(2):
        iterator = iter(loader)
        next(iterator)
        iterator.close()
        assert threads() == [] and torch.multiprocessing.active_children() == []
        assert list(iterator) == []


def test_an_interrupt_leaves_the_pass_where_it_was(device):
    class Interrupted(torch.utils.data.Dataset):
        interrupts = True

        def __len__(self):
            return 4

        def __getitem__(self, i):
            if i == 1 and Interrupted.interrupts:
                Interrupted.interrupts = False
                raise KeyboardInterrupt
            return float(i)

    iterator = iter(told(torchacc.AsyncLoader(DataLoader(Interrupted()), device), False))
    assert float(next(iterator)) == 0
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert [float(x) for x in iterator] == [2.0, 3.0]


def test_several_threads_may_take_from_one_pass(device):
    def counted():
        for number in range(60):
            yield torch.full((1,), float(number))

    iterator = iter(told(torchacc.AsyncLoader(counted(), device, device_prefetch_size=1), False))
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

    loader = told(torchacc.AsyncLoader(DataLoader(Scaled()), device), False)
    with torch.no_grad():
        assert not any(batch.requires_grad for batch in loader)
    iterator = iter(loader)
    assert next(iterator).requires_grad
    with torch.inference_mode():
        batch = next(iterator)
    assert batch.requires_grad and not batch.is_inference()


def test_a_scope_of_a_generator_is_its_own(device):
    def batches():
        weight = torch.ones(1, requires_grad=True)
        with torch.no_grad():
            yield weight * 1
            yield weight * 2
        yield weight * 3

    iterator = iter(told(torchacc.AsyncLoader(batches(), device), False))
    found = []
    for batch in iterator:
        assert torch.is_grad_enabled()
        found.append(batch.requires_grad)
    assert found == [False, False, True]


def test_an_empty_loader_is_pointed_out(device, caplog):
    from torchacc import logger

    logger.forget_said_for_testing()
    assert list(told(torchacc.AsyncLoader([], device), False)) == []
    assert "gave no batch" in caplog.text


def test_what_a_thread_would_draw_in_another_order_is_read_in_the_loop(device):
    class Drawn(torch.utils.data.Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, index):
            return torch.rand(())

    def run():
        torch.manual_seed(0)
        found = []
        for batch in torchacc.AsyncLoader(DataLoader(Drawn(), 2), device):
            assert threads() == []
            found.append((batch.tolist(), torch.rand(()).item()))
        return found

    torch.use_deterministic_algorithms(True)
    try:
        first = run()
        assert run() == first
        workers = iter(torchacc.AsyncLoader(DataLoader(Drawn(), 2, num_workers=1), device))
        next(workers)
        assert threads() != []
        workers.close()
    finally:
        torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    expected = []
    for batch in DataLoader(Drawn(), 2):
        expected.append((batch.tolist(), torch.rand(()).item()))
    assert first == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_that_was_left_ends_before_the_next_one_begins(device, monkeypatch, workers):
    """Also where its batch takes longer than whoever leaves it waits."""
    monkeypatch.setattr(loader_module, "_SECONDS_TO_END", 0.05)

    class Slow(torch.utils.data.Dataset):
        inside = 0

        def __len__(self):
            return 6

        def __getitem__(self, index):
            Slow.inside += 1
            assert Slow.inside == 1
            time.sleep(0.3)
            Slow.inside -= 1
            return float(index)

    plain = DataLoader(Slow(), num_workers=workers, persistent_workers=workers > 0)
    loader = told(torchacc.AsyncLoader(plain, device, device_prefetch_size=1), True, True)
    for x in loader:
        assert float(x) == 0.0
        break
    del x
    assert [float(x) for x in loader] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
