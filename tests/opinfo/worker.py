"""The process that runs operators: reads requests from stdin, writes results to stdout.

A request is one JSON line {"op", "variant", "dtype", "skip", "limit", "few"}: the operator's
name, the number of samples to leave out at the front, how many to run, and how many to choose (see
`samples_of`). {"prepare": requests} makes the kernels of requests that follow.
Answers are JSON lines: {"failure": [index, category, text]} as each is found, and {"op", "variant",
"dtype", "samples", "random"} at the end. Before each sample its index is written to the shared
progress file, so that the parent can name what a crash was in.

The process loads the database, names the backend, and forks a child that starts the device and
does the work. When the child dies the answer is {"died": how, "at": [request, sample]} and another
one is forked, so that a crash costs a fraction of a second and not the import of the database. A
child also ends where its device is lost: CUDA would refuse all that it is asked later.

`runner.py` starts it; `survey.py` is for calling by hand.
"""

from __future__ import annotations

import importlib
import itertools
import json
import mmap
import os
import random
import signal
import struct
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

# The name comes first: PyTorch's test helpers look at it when imported. The device itself is
# registered after the fork, which it would not survive.
import torch

from tests import helpers

if helpers.ON_ACC:
    torch.utils.rename_privateuse1_backend(helpers.DEVICE)

from tests.opinfo import check, close

Failure = tuple[int, str, str]  # index of the sample, category, text
ALIKE = (check.FORWARD, check.INPLACE, check.VIEW, check.INPLACE_VIEW, check.OUT)
_drawn_last: dict[tuple[str, torch.dtype], list[Any]] = {}  # of one operator
AMONG = 40  # the first samples, that a few are chosen of
PREPARED = 4  # samples of a request whose kernels are made before; they share most
ENDED = 77  # the exit status of a child that has nothing left to do
LOST = 78  # that of one whose device is of no more use to it
RECORD = struct.Struct("<QQ")  # number of the request since the fork, index of the sample


class DeviceLost(Exception):
    """CUDA's context has ended, with a sample that was told."""


class Progress:
    """The shared file in which the worker leaves what it is working on."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self.map = mmap.mmap(file.fileno(), RECORD.size)

    def write(self, request: int, sample: int) -> None:
        """Leaves the number of the request and of the sample that begins now."""
        self.map[: RECORD.size] = RECORD.pack(request, sample)

    def read(self) -> tuple[int, int]:
        """What was left last."""
        return RECORD.unpack(self.map[: RECORD.size])


def load_ops(source: str) -> dict[str, Any]:
    """The operators of a module's `op_db` by full name. ValueError for a name used twice."""
    ops: dict[str, Any] = {}
    database = importlib.import_module(source).op_db
    without_frozen_generators(database)
    for op in database:
        name = check.full_name(op)
        if name in ops:
            raise ValueError(f"two operators are called {name}")
        ops[name] = op
    return ops


def without_frozen_generators(ops: list[Any]) -> None:
    """Lets random operators of the database advance the generators.

    The database wraps them so that the generators' states are put back, which would hide that they
    draw. The seeds are set by `Checker.check`.
    """

    def plain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    frozen = set()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing._internal") and hasattr(module, "wrapper_set_seed"):
            frozen.add(module.wrapper_set_seed)
            module.wrapper_set_seed = plain
    for op in ops:
        if op.gradcheck_wrapper in frozen:
            op.gradcheck_wrapper = plain


def seed() -> None:
    """Seeds every generator that the database's samples draw from."""
    check.seed(0)
    random.seed(0)
    import numpy

    numpy.random.seed(0)


def run(
    op: Any,
    request: dict[str, Any],
    number: int,
    progress: Progress,
    tell: Callable[[Failure], None],
) -> dict[str, Any]:
    """Runs one request; `tell` is called with each failure when it is found.

    Raises DeviceLost behind a sample that ends CUDA's context.
    """
    variant, dtype = request["variant"], getattr(torch, request["dtype"])
    skip, limit = request.get("skip", 0), request.get("limit")
    only = request.get("only")
    count = 0
    checker = checker_of(op, variant, dtype)
    before = on_a_gpu()
    progress.write(number, skip)
    try:
        samples = samples_of(op, request)
    except Exception as error:  # the database itself cannot make the samples
        return {**request, "samples": 0, "random": False, "unmade": str(error)}
    for index, sample in samples:
        if index < skip or (only is not None and index != only):
            continue
        if limit is not None and count >= limit:
            break
        progress.write(number, index)
        seed()
        if variant == check.OUT and not checker.prepare_out(sample):
            continue
        count += 1
        found = checker.check(sample, index)
        for category, text in found:
            tell((index, category, text[:600]))
        # An error that sticks to the device must not be counted against the next sample.
        if found and helpers.device_is_lost():
            raise DeviceLost(f"with sample {index}")
    return {
        **request,
        "samples": count,
        "random": checker.random_seen,
        "fused": [checker.fused, checker.fused_gradients],
        "on_a_gpu": [b - a for a, b in zip(before, on_a_gpu(), strict=True)],
    }


def on_a_gpu() -> list[int]:
    """Calls of kernels of a GPU that were made ready, and plans submitted as captured work."""
    counters = helpers.stats()
    return [counters.get(n, 0) for n in ("kernels/prepared for a device", "captures_submitted")]


def checker_of(op: Any, variant: str, dtype: torch.dtype) -> check.Checker:
    """What checks an operator in a variant."""
    kind = close.CloseChecker if variant in check.CLOSE else check.Checker
    return kind(op, variant, dtype)


def drawn(op: Any, variant: str, dtype: torch.dtype) -> Iterable[Any]:
    """The database's samples. Those of the variants in `ALIKE` are the same, and made once for all.

    Nothing changes a sample: what is called gets copies of its tensors.
    """
    if variant not in ALIKE:
        seed()
        return check.samples(op, variant, dtype)
    key = check.full_name(op), dtype
    if key not in _drawn_last:
        seed()
        made = list(check.samples(op, variant, dtype))
        _drawn_last.clear()
        _drawn_last[key] = made
    return _drawn_last[key]


def samples_of(op: Any, request: dict[str, Any]) -> list[tuple[int, Any]]:
    """The samples of a request, with their indices.

    With "few" so many, the first that have a matrix or more as their input if there are any, or at
    least a number.
    """
    variant, dtype, few = request["variant"], getattr(torch, request["dtype"]), request.get("few")
    made = drawn(op, variant, dtype)
    if few is None:
        return list(enumerate(made))
    found = list(enumerate(itertools.islice(made, AMONG)))
    tensors = [(i, s) for i, s in found if isinstance(s.input, torch.Tensor) and s.input.numel()]
    matrices = [(i, s) for i, s in tensors if s.input.dim() > 1]
    return (matrices or tensors or found)[:few]


def prepare(ops: dict[str, Any], requests: list[dict[str, Any]]) -> None:
    """Makes the kernels of the first samples of requests by one run of the compiler."""
    programs = []
    for request in requests:
        if request["variant"] not in check.CLOSE:
            continue
        op = ops[request["op"]]
        checker = close.CloseChecker(op, request["variant"], getattr(torch, request["dtype"]))
        made = check.attempt(lambda o=op, r=request: samples_of(o, {"few": PREPARED, **r}))
        for _, sample in made.value or ():
            programs += checker.programs(sample)
    check.attempt(lambda: helpers.compile_together(programs))


def serve(ops: dict[str, Any], answers: Any, progress: Progress) -> None:
    """Answers requests until stdin ends; they come one at a time, so nothing is read ahead."""
    helpers.load_device()
    torch.set_num_threads(1)
    for number, line in enumerate(iter(sys.stdin.readline, ""), start=1):
        request = json.loads(line)
        if "prepare" in request:
            prepare(ops, request["prepare"])
            answers.write(json.dumps({"prepared": True}) + "\n")
            continue

        def tell(failure: Failure) -> None:
            answers.write(json.dumps({"failure": failure}) + "\n")

        answers.write(json.dumps(run(ops[request["op"]], request, number, progress, tell)) + "\n")


def main() -> None:
    """Forks children that serve, one after the other, until one ends because stdin did."""
    source, progress_path = sys.argv[1:3]
    # Answers have a channel of their own: operators and libraries may print.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    warnings.simplefilter("ignore")
    progress = Progress(progress_path)
    ops = load_ops(source)
    answers.write(json.dumps({"ready": True}) + "\n")
    while True:
        progress.write(0, 0)
        child = os.fork()
        if child == 0:
            try:
                serve(ops, answers, progress)
            except DeviceLost:
                os._exit(LOST)
            os._exit(ENDED)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == ENDED:
            return
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        how = "the device was lost" if status == LOST else how
        answers.write(json.dumps({"died": how, "at": progress.read()}) + "\n")
