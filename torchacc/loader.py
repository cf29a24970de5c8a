"""AsyncLoader: a thread of its own takes batches from a loader, ahead of the training.

Where that was measured to take longer than reading in the loop, the loop reads (torchacc.ahead).
"""

from __future__ import annotations

import atexit
import numbers
import operator
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch.utils.data
from torch import Tensor
from torch.utils.data import dataloader

from torchacc.ahead import Ahead, Pace
from torchacc.bucketing import AUTO, Bucketing, buckets_of, contradiction
from torchacc.device import device_type, is_lazy_device, lazy_device, reads_pinned_memory
from torchacc.logger import say_once
from torchacc.reading import Channel, Reader, call_with, fill
from torchacc.sharding import Turns, distributed_sampler, follow_epochs, is_divided, next_epoch
from torchacc.utils.utils import apply_to_tensors
from torchacc_device import _C, _boundary

# A thread that waits for a slow data set when the process ends is left behind after so long.
_SECONDS_TO_END = 5.0


def check_iterable(loader: object, where: str) -> None:
    """Raises TypeError, which names `where`, unless `loader` can be iterated batch by batch."""
    if isinstance(loader, Iterable):
        return
    is_dataset = isinstance(loader, torch.utils.data.Dataset)
    raise TypeError(
        f"[{where}] the loader is a {type(loader).__name__}, which "
        + (
            "is a data set: wrap it in a torch.utils.data.DataLoader."
            if is_dataset
            else "cannot be iterated. Pass a DataLoader or another iterable of batches."
        )
    )


def move_to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor in it on `device`; what holds no tensor is passed through.

    Goes into containers (`torchacc.utils.utils.apply_to_tensors`), which are copied, not changed.
    Other objects that have a method `to` (a packed sequence, a tokenizer's batch) are asked.
    """
    pinned = reads_pinned_memory(device)

    def move(tensor: Tensor) -> Tensor:
        if not pinned:
            return tensor.to(device)
        is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
        if not is_plain or tensor.is_pinned():
            # What is pinned is the program's, which may fill it anew as soon as it has been read.
            return tensor.to(device)
        # The blocks come from a cache, and go back there when the device has read them: batches
        # alternate between as many as are under way.
        return tensor.pin_memory().to(device, non_blocking=True)

    def ask(item: Any) -> Any:
        return item.to(device) if callable(getattr(item, "to", None)) else NotImplemented

    return apply_to_tensors(move, batch, ask)


def _thread_would_differ() -> bool:
    """Whether something is in force that holds for this thread and not for one that reads ahead:
    a default device or another mode, or autocast.
    """
    return (
        torch._C._len_torch_function_stack() > 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled(device_type())
    )


def _may_change_threads(iterator: Iterator[Any]) -> bool:
    """Whether a pass may be read now by one thread and now by another: where `iterator` is torch's
    own, over what its passes read by either thread anyway. A stream is an iterator of the program's
    within it, unless it is in worker processes.
    """
    if type(iterator) is dataloader._SingleProcessDataLoaderIter:
        return iterator._dataset_kind == dataloader._DatasetKind.Map
    return type(iterator) is dataloader._MultiProcessingDataLoaderIter


def _empty(loader: Iterable[Any], is_one_shot: bool) -> str:
    """What to say of a pass over `loader` without a batch: what is known of it, and what to do."""
    known = []
    for name in ("batch_size", "drop_last", "num_workers"):
        if hasattr(loader, name):
            known.append(f"{name} = {getattr(loader, name)!r}")
    for name in ("dataset", "sampler", "batch_sampler"):
        part = getattr(loader, name, None)
        if part is not None:
            known.append(f"{name} = a {type(part).__name__}{_length(part)}")
    described = f"a {type(loader).__name__}{_length(loader)}"
    if known:
        described += f" ({', '.join(known)})"
    return f"[AsyncLoader] loader = {described}: a pass over it gave no batch. " + (
        "It is an iterator, which can be gone through once: pass what makes iterators, such as the "
        "DataLoader itself."
        if is_one_shot
        else "Look at its data set and its sampler, and whether drop_last leaves out all there is."
    )


def _length(sized: Any) -> str:
    try:
        return f" of length {len(sized)}"
    except Exception:  # a stream has none, and says so in its own way
        return ""


def _nothing() -> None:
    """Called when work is submitted, in a pass without a thread that waits for it."""


class _Iteration:
    """One pass over the batches. The thread does not refer to it: dropping it ends the thread."""

    def __init__(self, loader: AsyncLoader) -> None:
        self._marks = is_lazy_device(loader.device)
        self._slots = loader.device_prefetch_size
        # Here and not in the thread: this forks the worker processes of a DataLoader, and a fork
        # belongs to the thread that runs the training, at a point where it holds no lock.
        inner: Iterator[Any] = iter(loader._loader)
        self._convert = loader._convert
        # On hosts a copy is computed by the cores, and waits where a step runs: not ahead, unless
        # who gave the batch may change it before it is handed out. Worker processes make each anew.
        whole = inner.elements if isinstance(inner, Turns) else inner
        has_workers = isinstance(whole, dataloader._MultiProcessingDataLoaderIter)
        self._has_workers = has_workers
        self._moves = self._marks and has_workers and not reads_pinned_memory(loader.device)
        prepare = self._convert.pad if self._moves else self._convert
        self._reader = Reader(inner, has_workers, prepare)
        self._read_ahead = loader.read_ahead
        self._takes_turns = self._read_ahead is None and _may_change_threads(whole)
        self._ahead = loader._ahead
        self._channel = Channel(self._slots, in_turns=self._marks)
        self._threads = loader._threads
        self._thread: threading.Thread | None = None
        self._began = False
        self._pace: Pace | None = None  # of the turn, until the loop is left
        self._begin_turn()
        self._device_index = loader.device.index or 0
        self._batches_per_step = loader.batches_per_execution
        self._handed_out = 0
        # An iterator is its own iterator.
        self._is_one_shot = inner is loader._loader
        self._loader = loader._loader
        self._loops: _boundary.Loops | None = None
        self._process = os.getpid()
        _live.add(self)

    def __iter__(self) -> _Iteration:
        return self

    def __next__(self) -> Any:
        if not self._began and not self._channel.is_closed:
            self._begin()
        marked = self._marks and self._handed_out % self._batches_per_step == 0
        if marked:
            # Before the wait for the batch: the step just recorded runs while we wait.
            self._loops = _boundary.loops()
            submits = self._channel.fill if self._reads_ahead else _nothing
            _boundary.loader_batch(self._loops, id(self), self._device_index, submits)
        try:
            held = self._channel.get() if self._reads_ahead else self._read()
            if self._moves:
                self._move(held)
        except StopIteration:
            # Not where it was given up, or an error came in the place of the first batch.
            is_empty = self._handed_out == 0 and self._pace is not None
            self._leave_loop()
            if self._marks and not marked:
                _boundary.mark_step("loader")
            if is_empty:
                raise ValueError(_empty(self._loader, self._is_one_shot)) from None
            raise
        except BaseException:
            self._leave_loop()
            raise
        self._handed_out += 1
        pace = self._pace
        if pace is not None:
            pace.handed_out(time.perf_counter())
            if self._takes_turns and self._ahead.is_over(pace):
                self._ahead.end(self._reads_ahead, pace)
                self._begin_turn()
        return held.pop()

    def _begin_turn(self) -> None:
        """A turn begins, which is the pass, or a part of it that is read one way."""
        ahead = self._chosen_way() if self._read_ahead is None else self._read_ahead
        # What was read ahead before a turn in the loop is handed out first, and the thread rests.
        self._channel.allow(self._slots if ahead else 0)
        if ahead and self._began and self._thread is None:
            self._start_thread()
        self._reads_ahead = ahead
        self._pace = self._ahead.pace()

    def _chosen_way(self) -> bool:
        """Whether the turn is read ahead, where the program leaves that open."""
        # A data set without workers may draw from the generators that the loop draws from.
        if torch.are_deterministic_algorithms_enabled() and not self._has_workers:
            return False
        # A program that reads otherwise in the loop than in a thread is not to see a difference.
        return self._ahead.begin() or _thread_would_differ()

    def _begin(self) -> None:
        with self._reader.lock:
            if self._began:
                return  # another consumer was here
            self._reader.gradients = torch.is_grad_enabled()
            # Not before the first batch is asked for: sampler and data set draw their first random
            # numbers while the training thread waits here, so their order is always the same.
            if self._reads_ahead:
                self._start_thread()
            self._began = True

    def _start_thread(self) -> None:
        current = torch.acc.current_device() if self._marks else None
        self._thread = thread = threading.Thread(
            target=fill,
            args=(self._channel, self._reader, current),
            name="AsyncLoader",
            daemon=True,
        )
        try:
            thread.start()
        except Exception:  # the system has no more of them
            self._thread = None
            self.close()
            raise
        self._threads.append((weakref.ref(self), thread))

    def _read(self) -> list[Any]:
        """The next batch: of those that were read ahead, or read here; where that fails, the end.

        What an interrupt left is read by the next call.
        """
        with self._reader.lock:
            held = self._channel.left()
            if held is None:
                try:
                    held = self._reader.read()
                except Exception:
                    self._channel.end(None)
                    raise
            return held

    def _move(self, held: list[Any]) -> None:
        """Moves a batch to the device; where that fails, the end."""
        try:
            call_with(self._reader.gradients, self._convert.move, held)
        except BaseException:
            self._give_up()
            raise

    def _leave_loop(self) -> None:
        pace, self._pace = self._pace, None
        if pace is not None and self._read_ahead is None:
            self._ahead.end(self._reads_ahead, pace)
        # Once: where the interpreter ends, the function is gone before the last iteration.
        loops, self._loops = self._loops, None
        if loops is not None:
            _boundary.loader_end(loops, id(self))

    def _give_up(self) -> None:
        self._channel.close()
        if self._thread is None:
            self._reader.end()

    def close(self, seconds: float | None = None) -> None:
        """Ends the thread and waits for it, at most `seconds`; no batch comes after this."""
        self._give_up()
        self._leave_loop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)

    def __del__(self) -> None:
        # A constructor that raised leaves no thread, and a forked process has none: there the lock
        # of the channel may be held for ever.
        if getattr(self, "_process", None) == os.getpid():
            self.close(_SECONDS_TO_END)


_live: weakref.WeakSet[_Iteration] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    # A daemon thread that is still copying when the interpreter goes away brings the process down.
    for iteration in list(_live):
        iteration.close(_SECONDS_TO_END)


# The attributes of an AsyncLoader; others are those of what it wraps.
_OWN = frozenset(
    (
        "_ahead",
        "_convert",
        "_last",
        "_loader",
        "_passes",
        "_sampler",
        "_threads",
        "batches_per_execution",
        "device",
        "device_prefetch_size",
        "read_ahead",
    )
)


class AsyncLoader:
    """Wraps a loader: its batches arrive on `device`, fetched ahead by a background thread.

    Handing out a batch is the boundary between two training steps. A new iteration begins with
    every `iter()`; leaving one early (`break`, an exception) ends its thread. What a worker raises
    is raised in the training loop with the worker's traceback. Attributes that are not listed here
    are those of the wrapped loader (`dataset`, `sampler`, `batch_size`, ...). A pass that gives no
    batch ends with a ValueError: nothing would be trained.

    The thread computes while steps run, and hardly while they are recorded, which needs the
    interpreter too. To a GPU it copies batches through pinned memory. On hosts the tensors of a
    batch that nobody else has are not copied but taken over, with their memory, and those of worker
    processes are copied when they are handed out. Reading ahead has to be worth it: at first every
    second turn is read in the loop, and later ones the way that took less time per batch, until
    both are tried again. A turn is a part of a pass over a DataLoader, and a pass over anything
    else, or over a data set that is a stream and has no workers: such iterators meet one thread.
    Where a default device or autocast is in force around the loop, which threads do not see, all is
    read ahead. With
    deterministic algorithms on a loader with worker processes is read ahead, and any other in the
    loop. The log has both times. `read_ahead` decides all of that beforehand.

    Random numbers that a sampler draws, or a data set without worker processes, are drawn ahead of
    the training where it is read ahead; who leaves an epoch early has drawn more than was used. A
    wrapped one-shot iterator then loses the at most `device_prefetch_size` batches that were
    fetched ahead.

    A DistributedSampler shuffles anew in every iteration: its `set_epoch` is called here, until the
    program calls it itself.

    Args:
        loader: anything that can be iterated; usually a `torch.utils.data.DataLoader`.
        device: where the tensors go; None is the lazy device.
        buckets: lengths to pad to, or "auto", which learns them from the first batches
            (`torchacc.bucketing.LearntBuckets`). Batches are mappings; what of them is padded says
            `torchacc.bucketing.Bucketing`.
        max_length: without `buckets`, pads to `num_buckets` equal lengths up to this; with "auto"
            it is the last bucket.
        num_buckets: with `max_length` or "auto", how many buckets there are at most; 8 if None.
        pad_value_dict: what the padding of each key holds; None is input_ids 0, attention_mask 0,
            labels -100.
        device_prefetch_size: how many batches may be ahead of the one in use, at least 1.
        batches_per_execution: one step boundary for so many batches (gradient accumulation).
        read_ahead: True reads all batches ahead, by a thread; False reads all in the loop, for what
            belongs to one thread, such as a connection to a data base; None does what takes less
            time. An assignment later holds from the next pass on.
        loader_prefetch_size, host_to_device_transfer_threads, batchdim: taken for compatibility and
            without effect: one thread fetches and copies, in order.
        input_sharding: not available in this version.

    Raises:
        TypeError: `loader` cannot be iterated, or an option is of another type.
        ValueError: a number is too small, or buckets, max_length and num_buckets contradict each
            other.
        RuntimeError: the process has no such device.
        NotImplementedError: `input_sharding` is given.
    """

    _loader: Iterable[Any]  # what was wrapped: programs read it

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str | int | None = None,
        buckets: Sequence[int] | str | None = None,
        max_length: int | None = None,
        num_buckets: int | None = None,
        pad_value_dict: Mapping[str, float] | None = None,
        *,
        device_prefetch_size: int = 2,
        batches_per_execution: int = 1,
        read_ahead: bool | None = None,
        loader_prefetch_size: int = 8,
        host_to_device_transfer_threads: int = 1,
        batchdim: int = 0,
        input_sharding: object = None,
    ) -> None:
        check_iterable(loader, "AsyncLoader")
        if input_sharding is not None:
            raise NotImplementedError(
                "[AsyncLoader] input_sharding is not available in this version. Leave it None."
            )
        sizes = {
            "device_prefetch_size": device_prefetch_size,
            "batches_per_execution": batches_per_execution,
        }
        for name, size in sizes.items():
            if _whole_number(name, size) < 1:
                raise ValueError(f"[AsyncLoader] {name} = {size}: should be at least 1.")
        if read_ahead is not None and not isinstance(read_ahead, bool):
            raise TypeError(
                f"[AsyncLoader] read_ahead = {read_ahead!r}: should be of bool type, or None."
            )
        max_length = None if max_length is None else _whole_number("max_length", max_length)
        num_buckets = None if num_buckets is None else _whole_number("num_buckets", num_buckets)
        buckets = buckets if buckets is None or isinstance(buckets, str) else _lengths(buckets)
        _check_pad_values(pad_value_dict)
        lengths = {"buckets": buckets, "max_length": max_length, "num_buckets": num_buckets}
        wrong = contradiction(buckets, max_length, num_buckets)
        if wrong is not None:
            name, rule = wrong
            raise ValueError(f"[AsyncLoader] {name} = {lengths[name]!r}: {rule}")
        self._loader = loader
        self.device = lazy_device() if device is None else _with_index(torch.device(device))
        self.device_prefetch_size = device_prefetch_size
        self.batches_per_execution = batches_per_execution
        self.read_ahead = read_ahead
        padded_to = buckets_of(buckets, max_length, num_buckets)
        if padded_to is None and pad_value_dict is not None:
            say_once(
                "pad values without buckets",
                "[AsyncLoader] pad_value_dict has no effect without buckets or max_length: nothing "
                "is padded. Give it one of these.",
            )
        self._convert = _Convert(
            self.device, None if padded_to is None else Bucketing(padded_to, pad_value_dict)
        )
        self._ahead = self._new_ahead()
        self._last: weakref.ref[_Iteration] | None = None
        # Of passes that have begun: they may live on, in the middle of a batch.
        self._threads: list[tuple[weakref.ref[_Iteration], threading.Thread]] = []
        self._passes = 0
        self._sampler = distributed_sampler(loader)
        if self._sampler is not None:
            follow_epochs(self._sampler)

    def _new_ahead(self) -> Ahead:
        kind = type(self._loader).__name__
        return Ahead(kind, self.batches_per_execution, self.device_prefetch_size)

    @property
    def is_divided(self) -> bool:
        """Whether it reads a part of the data, and other processes read the others."""
        return is_divided(self._loader)

    @property
    def pads(self) -> bool:
        """Whether it pads batches to buckets."""
        return self._convert.pads

    def __iter__(self) -> Iterator[Any]:
        last = self._last() if self._last is not None else None
        if last is not None and getattr(self._loader, "persistent_workers", False):
            # The loader will start over with the same workers; two threads must not ask them.
            last.close()
        self._wait_for_passes_that_were_left()
        if self._sampler is not None:
            next_epoch(self._sampler, self._passes)
        self._passes += 1
        iteration = _Iteration(self)
        self._last = weakref.ref(iteration)
        return iteration

    def _wait_for_passes_that_were_left(self) -> None:
        """Whoever left a pass has waited a while for the batch that its thread was fetching. Where
        a data set or its workers would be asked by two threads, this waits for as long as it takes.
        """
        persistent = getattr(self._loader, "persistent_workers", False)
        shared = persistent or getattr(self._loader, "num_workers", None) == 0
        for iteration, thread in self._threads:
            if shared and iteration() is None:
                thread.join()
        self._threads[:] = [each for each in self._threads if each[1].is_alive()]

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self._loader)  # by `len()` there would be none of an iterator

    def __getattr__(self, name: str) -> Any:
        # Copy and pickle ask before there is an object.
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # What a program switches (`loader.mixup_enabled = False`) is the wrapped loader's, too.
        loader = None if name in _OWN else self.__dict__.get("_loader")
        if loader is not None and hasattr(loader, name):
            setattr(loader, name, value)
        else:
            super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None, "_threads": [], "_ahead": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._ahead = self._new_ahead()

    def __repr__(self) -> str:
        return f"AsyncLoader({self._loader!r}, device={str(self.device)!r})"


class _Convert:
    """What is done to each batch, the only element of a list: nobody else is to hold it."""

    def __init__(self, device: torch.device, bucketing: Bucketing | None) -> None:
        self._device = device
        self._is_lazy = is_lazy_device(device)
        self._bucketing = bucketing

    @property
    def pads(self) -> bool:
        return self._bucketing is not None

    def __call__(self, held: list[Any]) -> None:
        self.pad(held)
        self.move(held)

    def pad(self, held: list[Any]) -> None:
        if self._bucketing is not None:
            held.append(self._bucketing.pad(held.pop()))

    def move(self, held: list[Any]) -> None:
        if not self._is_lazy or not _C.take_over(held, self._device.index):
            held.append(move_to_device(held.pop(), self._device))


def _whole_number(name: str, value: Any) -> int:
    """`value` as an int: it may be NumPy's. Raises TypeError."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"[AsyncLoader] {name} = {value!r}: should be of int type.") from None


def _lengths(buckets: Any) -> list[int]:
    try:
        return list(map(operator.index, buckets))
    except TypeError:
        raise TypeError(
            f"[AsyncLoader] buckets = {buckets!r}: should be a list of int, or {AUTO!r}."
        ) from None


def _check_pad_values(values: Any) -> None:
    """Raises TypeError: a tokenizer without padding, for instance, says None, which would be 0."""
    if values is None:
        return
    held = values.values() if isinstance(values, Mapping) else [None]
    if not all(isinstance(each, numbers.Number) for each in held):
        raise TypeError(
            f"[AsyncLoader] pad_value_dict = {values!r}: should be a mapping from the keys of a "
            "batch to numbers."
        )


def _with_index(device: torch.device) -> torch.device:
    """A device without an index means the current one, and each thread has its own current one.

    Raises RuntimeError, here and not in the middle of a pass, where there is no such device.
    """
    if is_lazy_device(device) and device.index is None:
        return lazy_device()
    try:
        return torch.empty(0, device=device).device
    except Exception as error:
        said, _, _ = str(error).partition("\n")
        raise RuntimeError(
            f"[AsyncLoader] device = {str(device)!r} cannot be used in this process. Give one that "
            f"it has, or none, for {device_type()}. torch says: {said}"
        ) from error
