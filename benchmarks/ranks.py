"""Several worker processes that exchange tensors: started, asked and watched together."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks import load
from benchmarks.driver import WORKER, Worker
from benchmarks.hosts import Host
from benchmarks.stats import Window


def free_port() -> int:
    """A port of this machine's loopback device that nobody listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


class Ranks:
    """A worker per entry of `cores`, which the rank is pinned to, with torchrun's variables.

    `spec` as for driver.Worker, but for the cores. Of `hosts` each has as many ranks, in order;
    without them all are on this machine. Every request goes to all ranks at the same time.
    """

    def __init__(
        self, spec: Mapping[str, Any], cores: Sequence[int], hosts: Sequence[Host] = ()
    ) -> None:
        self._cores = sorted(set(cores))
        self._threads = ThreadPoolExecutor(len(cores))
        self.workers: list[Worker] = []
        port = 29500 if hosts else free_port()
        with contextlib.ExitStack() as started:
            started.callback(self.close)
            for rank, core in enumerate(cores):
                host = hosts[rank * len(hosts) // len(cores)] if hosts else None
                self.workers.append(
                    Worker(
                        {**spec, "cores": [core], "threads": 1},
                        _command(rank, len(cores), port, host, hosts),
                    )
                )
            started.pop_all()

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """The answers of all ranks, in order. Raises what driver.Worker.ask raises."""
        asked = [self._threads.submit(each.ask, request, timeout_s) for each in self.workers]
        return [each.result() for each in asked]

    def watch(
        self, alternation: int, request: Mapping[str, Any], timeout_s: float
    ) -> tuple[Window, list[dict[str, Any]]]:
        """The answers to a request for `request["steps"]` steps, and how long the slowest took.

        Foreign load is what the cores of all ranks did for others. The kernel counts by hundredths
        of a second, so that a short window's may be some of them too much, or below nothing.
        """
        before = self._read()
        answers = self.ask(request, timeout_s)
        after = self._read()
        window = Window(
            alternation,
            request["steps"],
            max(answer["seconds"] for answer in answers),
            after.tree - before.tree,
            (after.busy - before.busy) - (after.tree - before.tree),
            len(self._cores),
        )
        return window, answers

    def _read(self) -> load.Reading:
        table = load.process_table()
        trees: set[int] = set().union(*(load.tree_of(each.pid, table) for each in self.workers))
        tree = sum(table[pid].cpu_seconds for pid in trees)
        return load.Reading(load.busy_seconds(load.watched_cores(self._cores)), tree)

    def close(self) -> None:
        """Ends all of them."""
        ended = [self._threads.submit(each.close) for each in self.workers]
        self._threads.shutdown()
        for each in ended:
            each.result()


def _command(
    rank: int, ranks: int, port: int, host: Host | None, hosts: Sequence[Host]
) -> list[str]:
    here = max(1, ranks // max(1, len(hosts)))
    values = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank % here,
        "LOCAL_WORLD_SIZE": here,
        "MASTER_ADDR": hosts[0].address if hosts else "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": host.device if host else "lo",
    }
    variables = [f"{name}={value}" for name, value in values.items()]
    return [*(host.command() if host else ()), "env", *variables, sys.executable, str(WORKER)]
