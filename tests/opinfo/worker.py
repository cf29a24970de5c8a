"""The process that runs operators: reads requests from stdin, writes results to stdout.

A request is one JSON line {"op", "variant", "dtype", "skip", "limit"}: the operator's name, and the
number of samples to leave out at the front. The answer is one JSON line {"op", "variant", "dtype",
"samples", "failures": [[index, category, text], ...], "random"}. Before each sample its index is
written to the shared progress file, so that the parent can name what a crash was in.

Not for calling by hand: `survey.py` is.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import random
import signal
import struct
import sys
import warnings
from typing import Any

# The device comes first: PyTorch's test helpers look at the backend's name when imported.
import torch

from tests import helpers

helpers.load_device()

from tests.opinfo import check  # noqa: E402

RECORD = struct.Struct("<QQ")  # sequence number of the request, index of the sample


class Progress:
    """The shared file in which the worker leaves what it is working on."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self.map = mmap.mmap(file.fileno(), RECORD.size)

    def write(self, request: int, sample: int) -> None:
        """Leaves the number of the request and of the sample that begins now."""
        self.map[: RECORD.size] = RECORD.pack(request, sample)


def load_ops(source: str) -> dict[str, Any]:
    """The operators of a module's `op_db` by full name. ValueError for a name used twice."""
    ops: dict[str, Any] = {}
    database = importlib.import_module(source).op_db
    without_frozen_generators()
    for op in database:
        name = check.full_name(op)
        if name in ops:
            raise ValueError(f"two operators are called {name}")
        ops[name] = op
    return ops


def without_frozen_generators() -> None:
    """Lets random operators of the database advance the generators.

    The database wraps them so that the generators' states are put back, which would hide that they
    draw. The seeds are set by `Checker.check`.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing._internal") and hasattr(module, "wrapper_set_seed"):
            module.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)


def seed() -> None:
    """Seeds every generator that the database's samples draw from."""
    torch.manual_seed(0)
    random.seed(0)
    import numpy

    numpy.random.seed(0)


def run(op: Any, request: dict[str, Any], number: int, progress: Progress) -> dict[str, Any]:
    """Runs one request."""
    variant, dtype = request["variant"], getattr(torch, request["dtype"])
    skip, limit = request.get("skip", 0), request.get("limit")
    only = request.get("only")
    failures: list[tuple[int, str, str]] = []
    count = 0
    checker = check.Checker(op, variant, dtype)
    progress.write(number, skip)
    seed()
    try:
        samples = list(check.samples(op, variant, dtype))
    except Exception as error:  # the database itself cannot make the samples
        return {**request, "samples": 0, "failures": [], "random": False, "unmade": str(error)}
    for index, sample in enumerate(samples):
        if index < skip or (only is not None and index != only):
            continue
        if limit is not None and count >= limit:
            break
        progress.write(number, index)
        seed()
        if variant == check.OUT and not checker.prepare_out(sample):
            continue
        count += 1
        for category, text in checker.check(sample, index):
            failures.append((index, category, text[:600]))
        if failures and failures[-1][0] == index:
            # An error that sticks to the device must not be counted against the next sample.
            check.attempt(helpers.synchronize)
    return {**request, "samples": count, "failures": failures, "random": checker.random_seen}


def main() -> None:
    """Answers requests until stdin ends."""
    source, progress_path = sys.argv[1:3]
    # Answers have a channel of their own: operators and libraries may print.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    progress = Progress(progress_path)
    ops = load_ops(source)
    answers.write(json.dumps({"ready": True}) + "\n")
    for number, line in enumerate(sys.stdin, start=1):
        request = json.loads(line)
        answers.write(json.dumps(run(ops[request["op"]], request, number, progress)) + "\n")


if __name__ == "__main__":
    main()
