"""Reading ahead or in the loop: what an AsyncLoader chooses, and that both give the same."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import pickle
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchacc
from tests.python.loader_threads import leave_out_earlier, threads
from tests.python.turns import in_turns, told
from torchacc import loader as loader_module
from torchacc.ahead import Ahead, Pace
from torchacc.logger import forget_said_for_testing


@pytest.fixture(autouse=True)
def forget_said():
    forget_said_for_testing()


@pytest.fixture(autouse=True)
def threads_before():
    leave_out_earlier()


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


def test_loaders_of_one_kind_say_a_choice_once(caplog):
    """As those that a program makes for each of its evaluations."""
    with caplog.at_level(logging.DEBUG, logger="TorchAcc"):
        for kind, ahead in (("list", 2.0), ("list", 2.0), ("list", 0.5), ("tuple", 2.0)):
            found = Ahead(kind, 1, 2)
            for _ in range(12):
                passed(found, {True: ahead, False: 1.0})
    said = [(each.levelname, each.message.partition(" from now on")[0]) for each in caplog.records]
    start = "[AsyncLoader] batches of a"
    assert said == [
        ("INFO", f"{start} list are read in the loop"),
        ("DEBUG", f"{start} list are read in the loop"),
        ("INFO", f"{start} list are read ahead"),
        ("INFO", f"{start} tuple are read in the loop"),
    ]


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


def one_pass(ahead, seconds, batches):
    """Whether each batch of a pass was read ahead, where the pass is read in turns."""
    ways, now = [], 100.0
    way, pace = ahead.begin(), ahead.pace()
    for _ in range(batches):
        now += seconds[way]
        ways.append(way)
        pace.handed_out(now)
        if ahead.is_over(pace):
            ahead.end(way, pace)
            way, pace = ahead.begin(), ahead.pace()
    ahead.end(way, pace)
    return ways


def test_parts_of_a_pass_take_turns_like_passes():
    found = Ahead("list", 1, 2)
    # Not measured are 16 batches, in which steps compile, and 3 that were ahead; then three runs.
    first, turn = 17 + 24, 4 + 24
    expected = [True] * first + [False] * turn
    assert one_pass(found, {True: 1.2, False: 1.0}, 1000) == expected + [False] * (1000 - 69)
    found = Ahead("list", 1, 2)
    ways = one_pass(found, {True: 0.8, False: 1.0}, 1000)
    expected += ([True] * turn + [False] * turn) * 3
    assert ways == expected + [True] * (1000 - len(expected))
    assert found.chosen is True


def test_a_pause_in_a_part_of_a_pass_does_not_decide():
    found = Ahead("list", 1, 2)
    way, pace, now = found.begin(), found.pace(), 0.0
    for number in range(600):
        now += {True: 0.8, False: 1.0}[way] + 50.0 * (number % 100 == 30)
        pace.handed_out(now)
        if found.is_over(pace):
            found.end(way, pace)
            way, pace = found.begin(), found.pace()
    assert way is True and found.chosen is True


def test_a_choice_within_a_pass_is_looked_at_again():
    found = Ahead("list", 1, 2)
    turns = 16 * (4 + 64 * 8)
    ways = one_pass(found, {True: 1.2, False: 1.0}, 69 + turns + 100)
    assert not any(ways[41 : 69 + turns])
    assert ways[69 + turns :] == [True] * 28 + [False] * 72
    # Steps that take twice as long are others.
    assert one_pass(found, {True: 2.2, False: 2.4}, 1000)[-20:] == [True] * 20


def test_a_loader_that_is_faster_in_the_loop_is_read_there_in_its_only_pass(device, monkeypatch):
    """By a clock for which a batch takes longer while a thread reads it."""
    readers = []

    class Noted(torch.utils.data.Dataset):
        def __len__(self):
            return 200

        def __getitem__(self, index):
            readers.append(threading.current_thread())
            return float(index)

    class Clock:
        now = 0.0

        def perf_counter(self):
            self.now += 1.0 if readers[-1] is threading.main_thread() else 2.0
            return self.now

    monkeypatch.setattr(loader_module, "time", Clock())
    loader = torchacc.AsyncLoader(DataLoader(Noted()), device)
    assert [float(x) for x in loader] == list(range(200))
    loop = [reader is threading.main_thread() for reader in readers]
    # Two more may be ahead, and one under way, when the turn is over.
    begins = loop.index(True)
    assert 41 <= begins <= 44 and all(loop[begins:]) and loader._ahead.chosen is False
    assert threads() == []


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


def test_leaving_early_ends_the_workers(device, workers_left):
    plain = DataLoader(TensorDataset(torch.arange(60.0)), batch_size=2, num_workers=1)
    loader = told(torchacc.AsyncLoader(plain, device), False, True)
    for _ in range(2):
        for number, _ in enumerate(loader):
            if number == 4:
                break
        assert threads() == [] and workers_left() == []
    for _ in range(2):
        iterator = iter(loader)
        next(iterator)
        iterator.close()
        assert threads() == [] and workers_left() == []
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


class Scaled(torch.utils.data.Dataset):
    """Its elements require gradients, where they are made with gradients."""

    weight = torch.ones(1, requires_grad=True)

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return self.weight * i


def test_reading_in_the_loop_keeps_what_the_loop_began_with(device):
    """As the thread does: a loop that is left for a moment's no_grad reads as before."""

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


# --- a pass in turns ----------------------------------------------------------------------------

WAYS = [(True, False), (True, True, False), (False, False, True), (True, True, True, False, False)]


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("ahead", [1, 5])
@pytest.mark.parametrize("workers", [0, 2])
def test_no_batch_is_lost_or_comes_twice_where_readers_change(
    device, workers_left, workers, ahead, ways
):
    x = torch.arange(41.0)
    plain = DataLoader(TensorDataset(x), batch_size=3, num_workers=workers, shuffle=True)
    torch.manual_seed(3)
    expected = [[x.tolist() for (x,) in plain] for _ in range(2)]
    loader = torchacc.AsyncLoader(plain, device, device_prefetch_size=ahead)
    in_turns(loader, *ways)
    torch.manual_seed(3)
    for each in expected:
        found = []
        for (x,) in loader:
            assert x.device.type == device
            found.append(x.tolist())
        assert found == each
        assert workers_left() == []


def test_a_data_set_meets_both_readers_and_never_at_once(device):
    class Noted(torch.utils.data.Dataset):
        inside = threading.Lock()
        readers = set()

        def __len__(self):
            return 40

        def __getitem__(self, index):
            assert self.inside.acquire(blocking=False)
            time.sleep(0.001)
            self.readers.add(threading.current_thread())
            self.inside.release()
            return float(index)

    loader = torchacc.AsyncLoader(DataLoader(Noted()), device)
    in_turns(loader, True, *[False] * 4)
    assert [float(x) for x in loader] == list(range(40))
    assert threading.main_thread() in Noted.readers and len(Noted.readers) == 2


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("broken", [1, 2, 3, 6])
def test_an_error_keeps_its_place_where_readers_change(device, broken, workers, ways):
    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 9

        def __getitem__(self, index):
            if index == broken:
                raise KeyError(f"sample {index} is broken")
            return float(index)

    plain = DataLoader(Broken(), num_workers=workers)
    iterator = iter(in_turns(torchacc.AsyncLoader(plain, device), *ways))
    assert [float(next(iterator)) for _ in range(broken)] == list(range(broken))
    with pytest.raises(KeyError, match="is broken"):
        next(iterator)
    assert list(iterator) == []
    iterator.close()
    assert threads() == []


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_this_process_keeps_its_frames(device, workers):
    """A debugger shows them; a generator among them goes on where it stopped."""

    class Broken(torch.utils.data.Sampler):
        def __len__(self):
            return 9

        def __iter__(self):
            known = 17
            raise ValueError(f"{known} is no index")
            yield

    loader = DataLoader(TensorDataset(torch.arange(9.0)), sampler=Broken(), num_workers=workers)
    try:
        next(iter(torchacc.AsyncLoader(loader, device)))
    except ValueError as error:
        (*_, (frame, _)) = traceback.walk_tb(error.__traceback__)
        assert frame.f_locals["known"] == 17
        del frame  # no circle that holds the workers
    else:
        raise AssertionError("the sampler did not fail")


@pytest.mark.parametrize("ahead", [False, True])
def test_an_error_of_a_worker_leaves_the_workers_to_nobody(device, workers_left, ahead):
    """Not to the collector, which would wait in vain for their end, in whichever thread it runs."""

    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 9

        def __getitem__(self, index):
            raise KeyError("broken")

    gc.collect()
    gc.disable()
    try:
        loader = DataLoader(Broken(), num_workers=2)
        iterator = iter(torchacc.AsyncLoader(loader, device, read_ahead=ahead))
        with pytest.raises(KeyError, match="broken"):
            next(iterator)
        iterator.close()
        assert workers_left() == []
    finally:
        gc.enable()


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_in_turns_may_be_left_anywhere(device, workers_left, workers, ways):
    plain = DataLoader(TensorDataset(torch.arange(60.0)), batch_size=2, num_workers=workers)
    loader = in_turns(torchacc.AsyncLoader(plain, device), *ways)
    for left in range(6):
        for number, (x,) in enumerate(loader):
            assert x.tolist() == [2 * number, 2 * number + 1]
            if number == left:
                break
        assert threads() == [] and workers_left() == []


def test_what_was_read_ahead_comes_first_and_then_the_thread_rests(device):
    taken = []

    class Noted(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            taken.append(threading.current_thread() is threading.main_thread())
            return float(index)

    loader = torchacc.AsyncLoader(DataLoader(Noted()), device)
    iterator = iter(in_turns(loader, *[True] * 6, *[False] * 6, *[True] * 40))
    assert [float(next(iterator)) for _ in range(11)] == list(range(11))
    assert len(taken) == 11 and taken[-2:] == [True] * 2 and not any(taken[:6])
    assert [float(x) for x in iterator] == list(range(11, 40))
    assert not any(taken[12:])


@pytest.mark.parametrize("ahead", [1, 3])
def test_several_threads_may_take_from_one_pass_in_turns(device, ahead):
    plain = DataLoader(TensorDataset(torch.arange(300.0)))
    loader = torchacc.AsyncLoader(plain, device, device_prefetch_size=ahead)
    iterator = iter(in_turns(loader, True, False, False))
    with ThreadPoolExecutor(6) as pool:
        taken = list(pool.map(lambda _: [float(x) for (x,) in iterator], range(6)))
    assert sorted(itertools.chain(*taken)) == list(range(300))


def test_an_interrupt_leaves_a_pass_in_turns_where_it_was(device):
    class Interrupted(torch.utils.data.Dataset):
        interrupts = True

        def __len__(self):
            return 8

        def __getitem__(self, index):
            if threading.current_thread() is threading.main_thread() and self.interrupts:
                Interrupted.interrupts = False
                raise KeyboardInterrupt
            return float(index)

    loader = torchacc.AsyncLoader(DataLoader(Interrupted()), device)
    iterator = iter(in_turns(loader, True, *[False] * 4))
    found = []
    with pytest.raises(KeyboardInterrupt):
        for x in iterator:
            found.append(float(x))
    lost = len(found)
    found += [float(x) for x in iterator]
    assert found == [number for number in range(8) if number != lost]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_of_the_programs_own_meets_one_thread(device, workers):
    """Also where a DataLoader hands it through; in a worker process it is the worker's."""
    readers = []

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            for number in range(12):
                readers.append(threading.current_thread())
                yield float(number)

    sources = [Stream(), DataLoader(Stream()), DataLoader(Stream(), num_workers=workers)]
    for source in sources:
        for way in (True, False):
            loader = torchacc.AsyncLoader(source, device)
            iterator = iter(in_turns(loader, way, not way))
            assert [float(x) for x in iterator] == list(range(12))
            assert len(set(readers)) <= 1
            assert iterator._takes_turns is (getattr(source, "num_workers", 0) == 1)
            readers.clear()


def test_other_errors_say_what_they_said(device):
    error = KeyError("no such sample")
    with pytest.raises(KeyError) as caught:
        list(torchacc.AsyncLoader(map({}.__getitem__, [error]), device))
    assert caught.value.args == (error,)


def test_a_pass_in_turns_keeps_what_the_loop_began_with(device):
    loader = in_turns(torchacc.AsyncLoader(DataLoader(Scaled()), device), True, False)
    with torch.no_grad():
        iterator = iter(loader)
        found = [next(iterator)]
    found += iterator
    assert len(found) == 12 and not any(batch.requires_grad for batch in found)
    iterator = iter(loader)
    found = [next(iterator)]
    with torch.no_grad():
        found += iterator
    assert len(found) == 12 and all(batch.requires_grad for batch in found)


def test_a_thread_that_cannot_start_within_a_pass_ends_it(device, workers_left, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    plain = DataLoader(TensorDataset(torch.arange(8.0)), num_workers=1)
    iterator = iter(in_turns(torchacc.AsyncLoader(plain, device), False, False, True))
    next(iterator)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="can't start"):
        patched.setattr("torchacc.loader.threading.Thread.start", start)
        next(iterator)
    assert list(iterator) == [] and workers_left() == []


def test_two_loops_over_one_loader_in_threads_of_their_own(device):
    loader = in_turns(
        torchacc.AsyncLoader(DataLoader(TensorDataset(torch.arange(100.0))), device), True, False
    )
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: [float(x) for (x,) in loader], range(2)))
    assert found == [list(range(100))] * 2
