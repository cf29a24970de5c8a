"""How the batches of one pass are read: by a thread, ahead of the loop, or by the loop itself."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch._utils import ExceptionWrapper


class Channel:
    """What the thread of one pass and its consumer share. Every wait sleeps on a condition.

    While the consumer records a step, a thread that computes batches would only take the
    interpreter from it, and give it back, at each operator of both. So where `in_turns` the thread
    begins to fill the free slots when work is submitted, which runs without the interpreter, or
    when the consumer waits, or asks for the next batch without having submitted any.

    Args:
        slots: how many batches may be ahead. With 0 the thread rests, and the loop reads.
        in_turns: whether work is submitted, and `fill` called then.
    """

    def __init__(self, slots: int, in_turns: bool) -> None:
        self._changed = threading.Condition()
        self._slots = slots
        self._in_turns = in_turns
        self._fills = not in_turns
        self._submitted = False  # since the last batch was taken
        self._waiting = 0  # consumers
        self._batches: deque[Any] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._closed = False

    def wait_for_slot(self) -> bool:
        """Waits until another batch may be fetched; False when nobody wants one any more."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or self._ended
                    or self._waiting > len(self._batches)
                    or (self._fills and len(self._batches) < self._slots)
                )
            )
            return not self._closed and not self._ended

    def allow(self, slots: int) -> None:
        """From now on so many batches may be ahead."""
        with self._changed:
            self._slots = slots
            self._changed.notify_all()

    def fill(self) -> None:
        """The consumer submits work."""
        with self._changed:
            # Not left for later: the next slot is free when the consumer records again.
            self._fills = len(self._batches) < self._slots
            self._submitted = True
            self._changed.notify_all()

    def put(self, batch: Any) -> None:
        with self._changed:
            if not self._closed:
                self._batches.append(batch)
                # Who waits for it takes it at once.
                full = len(self._batches) - self._waiting >= self._slots
                self._fills = self._fills and not (self._in_turns and full)
                self._changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        """The batches have ended, for whoever read them, and by `error` if there is one."""
        with self._changed:
            if not self._closed:
                self._error = error
            self._ended = True
            self._changed.notify_all()

    def get(self) -> Any:
        """The next batch; raises what the thread raised, or StopIteration, after the last."""
        with self._changed:
            if not self._submitted:
                self._fills = True
            self._submitted = False
            self._waiting += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._batches or self._ended or self._closed)
            finally:
                self._waiting -= 1
            return self._next()

    def left(self) -> Any:
        """The next batch of those that were read ahead, or None; raises as `get` does."""
        with self._changed:
            return self._next() if self._batches or self._ended or self._closed else None

    def _next(self) -> Any:
        if self._batches:
            batch = self._batches.popleft()
            self._changed.notify_all()
            return batch
        error, self._error = self._error, None
        if error is None:
            raise StopIteration
        try:
            raise error
        finally:
            del error  # its traceback holds this frame

    @property
    def is_closed(self) -> bool:
        """Whether the consumer has given up."""
        return self._closed

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._batches.clear()
            self._error = None
            self._changed.notify_all()


class Reader:
    """Reads the batches of one pass, one after the other, for whoever holds `lock`.

    It, and no frame of a thread, has the iterator: with it end the worker processes of a
    DataLoader.

    Args:
        iterator: over the batches.
        has_workers: whether worker processes make them.
        prepare: what is done to each batch, the only element of a list: nobody else is to hold it.
    """

    def __init__(
        self, iterator: Iterator[Any], has_workers: bool, prepare: Callable[[list[Any]], None]
    ) -> None:
        self.lock = threading.Lock()
        # With gradients, or without: as where the pass began, or as a generator left it.
        self.gradients = True
        self._iterator: Iterator[Any] | None = iterator
        self._has_workers = has_workers
        self._prepare = prepare

    def read(self) -> list[Any]:
        """The next batch, prepared. An Exception, StopIteration among them, ends the pass."""
        if self._iterator is None:
            raise StopIteration
        held: list[Any] = []
        try:
            self.gradients = call_with(self.gradients, self._read, held)
        except Exception as error:
            self.end()  # before the loop learns of it
            _break_reference_cycle(error)
            if not self._has_workers:
                _explain(error)
            raise
        return held

    def _read(self, held: list[Any]) -> None:
        held.append(next(self._iterator))  # type: ignore[arg-type]
        self._prepare(held)

    def end(self) -> None:
        """Nothing is read any more."""
        self._iterator = None


def call_with(gradients: bool, function: Callable[[list[Any]], None], held: list[Any]) -> bool:
    """Calls `function` of `held` with gradients, or without, and as ever outside inference mode,
    whatever this thread is in. Returns whether it left it with gradients.
    """
    outside = torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()
    try:
        with torch.inference_mode(False) if inference else nullcontext():
            if torch.is_grad_enabled() != gradients:
                torch.set_grad_enabled(gradients)
            function(held)
            return torch.is_grad_enabled()
    finally:
        if torch.is_grad_enabled() != outside:
            torch.set_grad_enabled(outside)


def fill(channel: Channel, reader: Reader, device_index: int | None) -> None:
    """The thread: reads batches until they end or nobody wants them.

    `device_index`: what the lazy device's current one is in the loop, where that is on one: each
    thread has a current device of its own.
    """
    if device_index is not None:
        torch.acc.set_device(device_index)
    while channel.wait_for_slot():
        # Until the batch is there for the loop to take: it may be about to read the next itself.
        with reader.lock:
            try:
                held = reader.read()
            except BaseException as error:  # whatever it is, it belongs to the training loop
                reader.end()
                channel.end(None if isinstance(error, StopIteration) else error)
                return
            channel.put(held)
        del held  # a batch that was handed out must not live on in this frame
    reader.end()


def _break_reference_cycle(error: Exception) -> None:
    """Lets an error of a worker process end with the last who has it.

    Torch's frame that raises it here has it as a local. In that cycle the iterator would wait for
    the collector, in whichever thread that runs; by then its queues are closed, and it waits in
    vain, 5 s for each worker, before it kills them.
    """
    at = error.__traceback__
    while at is not None:
        if at.tb_frame.f_code is ExceptionWrapper.reraise.__code__:
            at.tb_frame.clear()
        at = at.tb_next


def _explain(error: Exception) -> None:
    """Adds to what is said of a thread that batches are read by two."""
    said = error.args[0] if error.args else None
    if isinstance(said, str) and "thread" in said:
        error.args = (
            f"{said}\n[AsyncLoader] Batches are read by two threads in turns: the loop's, and one "
            "that reads ahead of it. What belongs to one thread, such as a connection of sqlite3, "
            "open once in each (threading.local); or let the loop alone read, with read_ahead = "
            "False, or a worker process, with num_workers = 1.",
            *error.args[1:],
        )
