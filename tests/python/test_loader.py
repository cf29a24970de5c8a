"""`torchacc.AsyncLoader`: order, limits, errors, ends, threads, boundaries, and what it wraps.

Padding is in test_bucketing.py.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import gc
import os
import pickle
import sys
import threading
import time
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import torchacc
from tests import helpers
from tests.python.loader_threads import leave_out_earlier, threads, wait_until


@pytest.fixture(autouse=True)
def no_thread_is_left():
    leave_out_earlier()
    yield
    gc.collect()
    assert threads() == []


def numbers(count=10, **options):
    """A loader of batches [x, y] with x = 0, 1, 2, ... as float32 rows and y = 10 x."""
    x = torch.arange(count)
    return DataLoader(TensorDataset(x[:, None].float(), 10 * x), **options)


def values(loader):
    return [[x.cpu().flatten().tolist(), y.cpu().tolist()] for x, y in loader]


class Counting:
    """An iterable of `count` batches that knows how many were taken from it."""

    def __init__(self, count=100, seconds=0.0):
        self.count, self.seconds, self.taken = count, seconds, 0

    def __iter__(self):
        for i in range(self.count):
            self.taken += 1
            time.sleep(self.seconds)
            yield torch.full((2,), float(i))


class Failing(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        if i == 5:
            raise KeyError("sample five is broken")
        return torch.tensor(float(i))


class Numbers(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return iter(range(7) if info is None else range(info.id, 7, info.num_workers))


class Pids(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return os.getpid()


# --- what arrives -------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_in_order_on_the_device(device, workers):
    plain = numbers(10, batch_size=4, num_workers=workers)
    loader = torchacc.AsyncLoader(plain, device)
    for x, y in loader:
        assert x.device.type == y.device.type == device
    assert values(loader) == values(plain)


def test_the_last_batch_may_be_ragged_and_every_epoch_is_whole(device):
    loader = torchacc.AsyncLoader(numbers(10, batch_size=4), device)
    for _ in range(3):
        assert [len(x) for x, _ in loader] == [4, 4, 2]


def test_each_epoch_is_shuffled_as_the_plain_loader_shuffles(device):
    plain = numbers(16, batch_size=4, shuffle=True)
    torch.manual_seed(3)
    expected = [values(plain), values(plain)]
    assert expected[0] != expected[1]
    loader = torchacc.AsyncLoader(plain, device)
    torch.manual_seed(3)
    assert [values(loader), values(loader)] == expected


def test_random_numbers_of_the_training_thread_do_not_move_the_shuffle(device):
    plain = numbers(16, batch_size=4, shuffle=True)
    torch.manual_seed(3)
    iterator = iter(plain)
    drawn = torch.rand(3)
    expected = values(iterator)
    torch.manual_seed(3)
    iterator = iter(torchacc.AsyncLoader(plain, device))
    time.sleep(0.05)  # a thread that started early would have drawn by now
    assert torch.equal(torch.rand(3), drawn)
    assert values(iterator) == expected


Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: str


class Movable:
    """A batch type of its own with a method `to`, as tokenizers have."""

    def __init__(self, data):
        self.data = data

    def to(self, device):
        return Movable(self.data.to(device))


def test_tensors_are_found_in_containers_and_the_rest_passes_through(device):
    t = torch.tensor([1.0, 2.0])
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    batch = {
        "list": [t, 1, None],
        "tuple": (t, "text"),
        "pair": Pair(t, 2.5),
        "nested": {"a": {"b": [t]}},
        "ordered": collections.OrderedDict(z=t, a=t),
        "deque": collections.deque([t]),
        "sample": Sample(t, "seven"),
        "movable": Movable(t),
        "packed": packed,
        "set": {1, 2},
        "bytes": b"x",
        "size": torch.Size([2]),
    }
    (got,) = torchacc.AsyncLoader([batch], device)

    def on_device(tensor):
        return tensor.device.type == device and tensor.tolist() == [1.0, 2.0]

    assert list(got) == list(batch)
    assert on_device(got["list"][0]) and got["list"][1:] == [1, None]
    assert type(got["tuple"]) is tuple and on_device(got["tuple"][0])
    assert got["tuple"][1] == "text"
    assert type(got["pair"]) is Pair and on_device(got["pair"].left) and got["pair"].right == 2.5
    assert on_device(got["nested"]["a"]["b"][0])
    assert type(got["ordered"]) is collections.OrderedDict and list(got["ordered"]) == ["z", "a"]
    assert on_device(got["ordered"]["z"])
    assert type(got["deque"]) is collections.deque and on_device(got["deque"][0])
    assert type(got["sample"]) is Sample and on_device(got["sample"].image)
    assert got["sample"].name == "seven"
    assert on_device(got["movable"].data)
    assert got["packed"].data.device.type == device
    assert got["set"] == {1, 2} and got["bytes"] == b"x" and got["size"] == torch.Size([2])
    # The batch that the loader made is not changed: a data set may keep it.
    assert batch["list"][0] is t and batch["sample"].image is t and batch["ordered"]["z"] is t
    assert t.device.type == "cpu"


def test_pinned_batches_arrive(device):
    plain = numbers(10, batch_size=4)
    pinned = numbers(10, batch_size=4, pin_memory=True, num_workers=1)
    assert values(torchacc.AsyncLoader(pinned, device)) == values(plain)


def test_batches_go_through_pinned_memory_to_a_gpu(acc_only, monkeypatch):
    """Which the host executor has too, and does not need."""
    batches = [(torch.full((2,), float(i)), {"i": torch.tensor(i)}) for i in range(3)]

    def pinned():
        before = torch.acc.host_memory_stats()["num_host_alloc"]
        got = list(torchacc.AsyncLoader(batches, acc_only))
        assert [x.tolist() + [more["i"].item()] for x, more in got] == [[i] * 3 for i in range(3)]
        return torch.acc.host_memory_stats()["num_host_alloc"] - before

    assert pinned() == 0
    monkeypatch.setattr("torchacc.loader.reads_pinned_memory", lambda device: True)
    assert pinned() == 6
    # What is pinned already is not copied once more.
    batches = [(x.pin_memory(), more) for x, more in batches]
    assert pinned() == 3


def test_iterable_data_sets_arrive_whole(device):
    loader = torchacc.AsyncLoader(DataLoader(Numbers(), batch_size=3, num_workers=2), device)
    assert sorted(i for batch in loader for i in batch.tolist()) == list(range(7))
    with pytest.raises(TypeError):
        len(loader)


def test_any_iterable_can_be_wrapped(device):
    source = Counting(3)
    loader = torchacc.AsyncLoader(source, device)
    for _ in range(2):
        assert [batch[0].item() for batch in loader] == [0.0, 1.0, 2.0]
    once = torchacc.AsyncLoader(iter([torch.ones(1), torch.ones(1)]), device)
    assert len(list(once)) == 2
    with pytest.raises(ValueError, match="which can be gone through once"):
        list(once)


def test_a_subset_of_the_batches_can_be_taken_by_hand(device):
    iterator = iter(torchacc.AsyncLoader(Counting(), device))
    assert [next(iterator)[0].item() for _ in range(3)] == [0.0, 1.0, 2.0]
    assert iter(iterator) is iterator


def test_two_passes_over_one_loader_at_once(device):
    loader = torchacc.AsyncLoader(numbers(6, batch_size=2), device)
    pairs = [(a[1].tolist(), b[1].tolist()) for a, b in zip(loader, loader, strict=True)]
    assert pairs == [([0, 10], [0, 10]), ([20, 30], [20, 30]), ([40, 50], [40, 50])]


class Computing(Dataset):
    def __init__(self):
        self.layer = torch.nn.Linear(2, 2)

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return self.layer(torch.ones(2))


def test_a_data_set_that_computes_keeps_no_graph_where_the_loop_has_none(device):
    loader = torchacc.AsyncLoader(DataLoader(Computing()), device)
    assert [batch.requires_grad for batch in loader] == [True, True]
    for without in (torch.no_grad(), torch.inference_mode()):
        with without:
            assert [batch.requires_grad for batch in loader] == [False, False]


# --- the loader that it wraps -------------------------------------------------------------------


def test_the_attributes_of_the_wrapped_loader_are_kept(device):
    plain = numbers(10, batch_size=4, shuffle=True, drop_last=True)
    loader = torchacc.AsyncLoader(plain, device)
    assert loader._loader is plain
    assert loader.dataset is plain.dataset
    assert loader.sampler is plain.sampler
    assert loader.batch_sampler is plain.batch_sampler
    assert loader.batch_size == 4 and loader.drop_last
    assert len(loader) == len(plain) == 2
    assert str(loader.device).startswith(device)
    with pytest.raises(AttributeError, match="no_such_thing"):
        loader.no_such_thing


class Switched:
    """A loader with something to switch, and a `device` of its own."""

    def __init__(self):
        self.factor, self.device = 1, "mine"

    def __iter__(self):
        yield torch.ones(1) * self.factor


def test_what_is_assigned_to_an_attribute_of_the_wrapped_loader_is_its_own(device):
    plain = Switched()
    loader = torchacc.AsyncLoader(plain, device)
    loader.factor = 3
    loader.batches_per_execution = 2
    loader.note = "for me"
    assert plain.factor == 3 and [batch.item() for batch in loader] == [3]
    assert vars(plain) == {"factor": 3, "device": "mine"} and loader.device.type == device
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        torchacc.AsyncLoader(numbers(4), device).batch_size = 2


def test_a_wrapped_iterator_is_true_as_it_is_by_itself(device):
    assert torchacc.AsyncLoader(iter([]), device) and torchacc.AsyncLoader(numbers(4), device)
    assert not torchacc.AsyncLoader([], device)


def test_a_loader_can_be_copied_and_pickled(device):
    loader = torchacc.AsyncLoader(numbers(4, batch_size=2), device)
    iterator = iter(loader)
    next(iterator)
    for other in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert values(other) == values(loader._loader)
    assert len(list(iterator)) == 1


def test_the_device_is_the_lazy_one_by_default(device):
    loader = torchacc.AsyncLoader(numbers(4), None)
    assert loader.device == torchacc.lazy_device()
    assert loader.device.type == device and loader.device.index is not None


@pytest.mark.parametrize("name", ["cuda", "cuda:99", "acc:99", "xpu"])
def test_a_device_that_is_not_there_is_refused_at_once(device, name):
    if name == "cuda" and torch.cuda.is_available():
        # That of this thread; the one that reads has another.
        current = torch.cuda.current_device()
        assert torchacc.AsyncLoader(numbers(4), name).device == torch.device(name, current)
        return
    said = rf"^\[AsyncLoader\] device = '{name}' cannot be used in this process\. .*torch says: ."
    with pytest.raises(RuntimeError, match=said) as caught:
        torchacc.AsyncLoader(numbers(4), name)
    assert caught.value.__cause__ is not None and "\n" not in str(caught.value)


def test_the_name_cuda_means_what_it_meant_when_the_loader_was_made(acc_only):
    torchacc.patch(devices=True)
    try:
        loader = torchacc.AsyncLoader(numbers(4), "cuda")
    finally:
        torchacc.unpatch()
    assert loader.device == torchacc.lazy_device()
    assert {x.device for x, _ in loader} == {loader.device}


def test_it_also_feeds_the_cpu(device, monkeypatch):
    marks = []
    monkeypatch.setattr("torchacc_device._boundary.mark_step", lambda reason: marks.append(reason))
    loader = torchacc.AsyncLoader(numbers(4, batch_size=2), "cpu")
    assert [x.device.type for x, _ in loader] == ["cpu", "cpu"]
    if device != "cpu":
        assert marks == []


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (3, "a int, which cannot be iterated"),
        (None, "NoneType"),
        (TensorDataset(torch.ones(2)), "is a data set: wrap it in a torch.utils.data.DataLoader"),
    ],
)
def test_what_cannot_be_iterated_is_refused(device, loader, text):
    with pytest.raises(TypeError, match=text):
        torchacc.AsyncLoader(loader, device)


@pytest.mark.parametrize("name", ["device_prefetch_size", "batches_per_execution"])
def test_numbers_below_one_are_refused(device, name):
    with pytest.raises(ValueError, match=f"{name} = 0: should be at least 1"):
        torchacc.AsyncLoader([], device, **{name: 0})


_PAD_VALUES = "pad_value_dict = .*: should be a mapping from the keys of a batch to numbers"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"buckets": 128}, "buckets = 128: should be a list of int, or 'auto'"),
        ({"buckets": [4, 8.5]}, r"buckets = \[4, 8.5\]: should be a list of int"),
        ({"max_length": 512.0}, "max_length = 512.0: should be of int type"),
        ({"max_length": 8, "num_buckets": "2"}, "num_buckets = '2': should be of int type"),
        ({"device_prefetch_size": 1.5}, "device_prefetch_size = 1.5: should be of int type"),
        ({"batches_per_execution": "2"}, "batches_per_execution = '2': should be of int type"),
        # what a tokenizer without padding has
        ({"buckets": [4], "pad_value_dict": {"input_ids": None}}, _PAD_VALUES),
        ({"buckets": [4], "pad_value_dict": ["input_ids"]}, _PAD_VALUES),
    ],
)
def test_options_of_another_type_are_refused(device, options, text):
    with pytest.raises(TypeError, match=r"\[AsyncLoader\] .*" + text):
        torchacc.AsyncLoader([], device, **options)


def test_lengths_may_be_numpys(device):
    batches = [{"input_ids": torch.ones(1, n), "attention_mask": torch.ones(1, n)} for n in (3, 5)]
    for options in (
        {"buckets": np.array([4, 8])},
        {"max_length": np.int64(8), "num_buckets": np.int32(2)},
    ):
        loader = torchacc.AsyncLoader(batches, device, **options)
        assert [batch["input_ids"].shape[1] for batch in loader] == [4, 8]


def test_unknown_and_unavailable_options_are_refused(device):
    with pytest.raises(TypeError, match="prefetch"):
        torchacc.AsyncLoader([], device, prefetch=2)
    with pytest.raises(NotImplementedError, match="input_sharding"):
        torchacc.AsyncLoader([], device, input_sharding=object())


def test_the_options_of_the_inner_loader_are_taken(device):
    loader = torchacc.AsyncLoader(
        numbers(4, batch_size=2),
        device,
        batchdim=0,
        loader_prefetch_size=4,
        host_to_device_transfer_threads=2,
    )
    assert len(list(loader)) == 2


# --- how far ahead ------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_it_runs_ahead_and_never_further_than_it_may(device, ahead):
    source = Counting()
    iterator = iter(torchacc.AsyncLoader(source, device, device_prefetch_size=ahead))
    for used in range(1, 8):
        next(iterator)
        wait_until(lambda used=used: source.taken == used + ahead)
        time.sleep(0.02)
        assert source.taken == used + ahead


@pytest.mark.usefixtures("recording")
def test_it_fetches_while_work_runs_and_not_while_it_is_recorded(acc_only):
    """Both need the interpreter; a step that runs does not."""
    source = Counting()
    iterator = iter(torchacc.AsyncLoader(source))
    x = torch.ones(3, device=acc_only)
    for used in range(1, 8):
        next(iterator)
        if used > 3:
            time.sleep(0.02)
            assert source.taken == used + 1
        kept = x * used
        torchacc.mark_step()
        wait_until(lambda: len(iterator._channel._batches) == 2)
        assert source.taken == used + 2
    assert kept.tolist() == [7.0] * 3


def test_batches_are_ordinary_tensors_wherever_they_are_asked_for(device):
    iterator = iter(torchacc.AsyncLoader([torch.ones(2)] * 3, device))
    with torch.inference_mode():
        batch = next(iterator)
    assert not batch.is_inference()
    weight = torch.ones(2, device=device, requires_grad=True)
    (weight * batch).sum().backward()
    assert weight.grad.tolist() == [1.0, 1.0]


def test_a_batch_that_cannot_be_moved_ends_the_pass(device):
    class Stuck:
        def to(self, where):
            raise OSError(f"not to {torch.device(where).type}")

    iterator = iter(torchacc.AsyncLoader([torch.ones(1), Stuck(), torch.ones(1)], device))
    next(iterator)
    with pytest.raises(OSError, match="not to"):
        next(iterator)
    assert list(iterator) == []
    wait_until(lambda: not threads())


def test_several_threads_may_take_from_one_pass(device):
    iterator = iter(torchacc.AsyncLoader(Counting(40), device, device_prefetch_size=1))
    with ThreadPoolExecutor(6) as pool:
        taken = pool.map(lambda _: sum(1 for _ in iterator), range(6))
    assert sum(taken) == 40


def test_nothing_is_fetched_before_the_first_batch_is_asked_for(device):
    source = Counting()
    iterator = iter(torchacc.AsyncLoader(source, device))
    time.sleep(0.05)
    assert source.taken == 0 and threads() == []
    next(iterator)
    assert source.taken > 0


def test_waiting_costs_no_processor_time(device):
    """A thread that polls would use the core that the training needs.

    In a process of its own: in this one there may be threads of other tests.
    """
    code = """
import gc, time
import torchacc
from tests import helpers

gc.collect()
gc.disable()  # nor does a collection count

def batches(seconds):
    for i in range(100):
        time.sleep(seconds)
        yield torch.full((2,), float(i))

iterator = iter(torchacc.AsyncLoader(batches(0.0), DEVICE, device_prefetch_size=2))
next(iterator)
while len(iterator._channel._batches) < 2:
    time.sleep(0.01)
helpers.synchronize()
before = time.process_time()
time.sleep(0.5)  # the producer waits for a slot
assert time.process_time() - before < 0.05
slow = iter(torchacc.AsyncLoader(batches(0.5), DEVICE))
before = time.process_time()
next(slow)  # the consumer waits for a batch
assert time.process_time() - before < 0.1
"""
    helpers.run_python(code)


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_worker_comes_after_the_batches_before_it(device, workers):
    loader = torchacc.AsyncLoader(
        DataLoader(Failing(), batch_size=2, num_workers=workers, collate_fn=torch.stack), device
    )
    seen = []
    with pytest.raises(KeyError, match="sample five is broken") as caught:
        for batch in loader:
            seen.append(batch.tolist())
    assert seen == [[0.0, 1.0], [2.0, 3.0]]
    # Whoever reads the traceback finds the line of the data set.
    text = "".join(traceback.format_exception(caught.value))
    assert "__getitem__" in text and "test_loader.py" in text


def test_the_loader_can_be_used_again_after_an_error(device):
    loader = torchacc.AsyncLoader(DataLoader(Failing(), batch_size=2), device)
    for _ in range(2):
        with pytest.raises(KeyError):
            list(loader)
    iterator = iter(loader)
    with pytest.raises(KeyError):
        list(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_an_error_of_the_copy_is_raised_in_the_loop(device):
    class Unmovable:
        def to(self, device):
            raise RuntimeError(f"cannot go to {device}")

    with pytest.raises(RuntimeError, match=f"cannot go to {device}"):
        list(torchacc.AsyncLoader([Unmovable()], device))


def test_an_error_while_the_iterator_is_made_is_raised_at_once(device):
    class NoIterator:
        def __iter__(self):
            raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        iter(torchacc.AsyncLoader(NoIterator(), device))


# --- ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_leaving_the_loop_early_ends_the_thread_and_the_workers(device, workers_left, workers):
    loader = torchacc.AsyncLoader(numbers(100, batch_size=2, num_workers=workers), device)
    for _ in range(3):
        for i, _ in enumerate(loader):
            if i == 2:
                break
        assert threads() == []
        assert workers_left() == []


def test_an_exception_in_the_loop_ends_the_thread(device):
    loader = torchacc.AsyncLoader(numbers(100, batch_size=2), device)
    with pytest.raises(ZeroDivisionError):
        for _ in loader:
            raise ZeroDivisionError
    gc.collect()
    assert threads() == []


def test_a_thread_that_cannot_start_ends_the_pass(device, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    plain = DataLoader(Pids(), batch_size=1, num_workers=1, persistent_workers=True)
    loader = torchacc.AsyncLoader(plain, device)
    iterator = iter(loader)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="can't start"):
        patched.setattr("torchacc.loader.threading.Thread.start", start)
        next(iterator)
    assert list(iterator) == []
    iterator.close()
    assert list(loader)  # by the same workers
    del loader, plain


def test_no_thread_is_left_when_an_epoch_is_over(device):
    loader = torchacc.AsyncLoader(numbers(4, batch_size=2), device)
    iterator = iter(loader)
    assert len(list(iterator)) == 2
    wait_until(lambda: not threads())


@pytest.mark.parametrize("leave_after", [1, 100])
def test_persistent_workers_serve_every_epoch(device, leave_after):
    plain = DataLoader(Pids(), batch_size=1, num_workers=1, persistent_workers=True)
    loader = torchacc.AsyncLoader(plain, device)
    workers = set()
    for _ in range(3):
        for i, batch in enumerate(loader, 1):
            workers |= set(batch.tolist())
            if i == leave_after:
                break
    assert len(workers) == 1 and workers != {os.getpid()}
    del loader, plain


def test_a_new_epoch_takes_persistent_workers_from_one_that_was_left_behind(device):
    plain = numbers(8, batch_size=2, num_workers=2, persistent_workers=True)
    loader = torchacc.AsyncLoader(plain, device)
    left = iter(loader)
    next(left)
    assert values(loader) == values(plain)
    with pytest.raises(StopIteration):
        next(left)
    assert values(loader) == values(plain)


def test_no_batch_outlives_its_use(device):
    """A frame of the thread that held the last batch would keep it for a whole step."""
    iterator = iter(torchacc.AsyncLoader([Movable(torch.ones(2)) for _ in range(4)], device))
    batch = next(iterator)
    seen = weakref.ref(batch)
    del batch
    assert seen() is None


@pytest.mark.parametrize("workers", [0, 1])
def test_the_process_ends_with_an_epoch_under_way(device, workers):
    code = f"""
import time
import torchacc
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(4096, 64))
loader = torchacc.AsyncLoader(DataLoader(data, batch_size=8, num_workers={workers}), DEVICE)
iterator = iter(loader)
(x,) = next(iterator)
y = x + 1  # recorded, never read
print("end")
"""
    start = time.monotonic()
    done = helpers.run_python(code)
    assert done.stdout.strip().endswith("end")
    assert "Traceback" not in done.stderr and "terminate" not in done.stderr
    assert time.monotonic() - start < 60


def test_an_interrupt_reaches_a_loop_that_waits_for_a_batch(device):
    code = """
import os
import signal
import threading
import time
import torchacc

left, read_on = threading.Event(), []

class Stuck:
    def __iter__(self):
        yield torch.ones(1)
        time.sleep(0.5)  # until the loop waits
        os.kill(os.getpid(), signal.SIGINT)
        left.wait(60)  # there is no second batch before the loop has ended
        read_on.append(1)
        yield torch.ones(1)

try:
    for batch in torchacc.AsyncLoader(Stuck(), DEVICE):
        pass
except KeyboardInterrupt:
    print(f"interrupted {not read_on}")
left.set()
"""
    assert "interrupted True" in helpers.run_python(code).stdout


# --- boundaries ---------------------------------------------------------------------------------


@pytest.fixture
def marks(device, monkeypatch):
    """The step boundaries, as a list that grows."""
    from torchacc_device import _boundary

    marks = []
    monkeypatch.setattr(
        _boundary, "mark_step", lambda reason: marks.append(threading.current_thread())
    )
    return marks


def test_a_boundary_comes_before_each_batch_and_after_the_last(device, marks):
    counts = []
    for _ in torchacc.AsyncLoader(Counting(3), device):
        counts.append(len(marks))
    assert counts == [1, 2, 3]
    assert len(marks) == 4
    assert set(marks) == {threading.current_thread()}


def test_several_batches_can_make_one_step(device, marks):
    counts = []
    for _ in torchacc.AsyncLoader(Counting(5), device, batches_per_execution=2):
        counts.append(len(marks))
    assert counts == [1, 1, 2, 2, 3]
    assert len(marks) == 4


# --- on the device itself -----------------------------------------------------------------------


def test_a_copied_batch_is_there_without_a_flush(acc_only):
    """Copies recorded by another thread would stand elsewhere in the trace of every step."""
    iterator = iter(torchacc.AsyncLoader(Counting(), acc_only, device_prefetch_size=4))
    next(iterator)
    wait_until(lambda: threads() != [])
    time.sleep(0.1)
    helpers.synchronize()
    with helpers.counting() as counted:
        for _ in range(4):
            next(iterator)
    assert counted["nodes"] == 0


def test_copies_beside_a_training_step_disturb_no_number(unfused, device, one_thread):
    """Thread switches every microsecond: the copy meets the recorder at every point of a step."""

    def train(loader, device):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
        )
        model.to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                loss = (model(x.to(device)) - y.to(device)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        return [loss.item() for loss in losses]

    torch.manual_seed(1)
    data = TensorDataset(torch.randn(200, 64), torch.randn(200, 1))
    plain = DataLoader(data, batch_size=6)
    expected = train(plain, "cpu")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        found = train(torchacc.AsyncLoader(plain, device, device_prefetch_size=3), device)
    finally:
        sys.setswitchinterval(interval)
    assert found == expected


def test_ragged_last_batches_make_no_new_plan_each_epoch(acc_only):
    model = torch.nn.Linear(1, 1)
    model, loader = torchacc.accelerate(model, numbers(10, batch_size=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def epoch():
        for x, y in loader:
            optimizer.zero_grad()
            (model(x).flatten() - y).square().mean().backward()
            optimizer.step()

    epoch()
    epoch()
    with helpers.counting() as counted:
        for _ in range(5):
            epoch()
    helpers.synchronize()
    assert counted["plans_built"] == 0
