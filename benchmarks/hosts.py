"""Two simulated hosts on this machine: network namespaces that a slow link joins.

Each has one end of a veth pair, whose token bucket lets the link's rate through in each direction.
What ranks of one host send each other stays on its loopback device, as on a machine of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

BURST, LATENCY = "256kb", "50ms"


class NotAvailable(RuntimeError):
    """Hosts cannot be simulated here; the message says why."""


@dataclass(frozen=True)
class Host:
    """One of the two: its namespace, and the device and address of its end of the link."""

    namespace: str
    device: str
    address: str

    def command(self) -> list[str]:
        """What stands before a command so that it runs on this host."""
        return ["ip", "netns", "exec", self.namespace]


@contextlib.contextmanager
def two_hosts(gigabits: float) -> Iterator[tuple[Host, Host]]:
    """Two hosts, joined by a link of so many Gbit/s in each direction; gone after the block.

    Raises NotAvailable without root, without the programs `ip` and `tc`, or where the kernel
    refuses.
    """
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        raise NotAvailable(f"{' and '.join(missing)} missing: apt-get install iproute2")
    if os.geteuid() != 0:
        raise NotAvailable("network namespaces need root")
    hosts = tuple(
        Host(f"acc-{os.getpid()}-{number}", f"acclink{number}", f"10.199.0.{number + 1}")
        for number in range(2)
    )
    try:
        _join(hosts, gigabits)
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)


def _join(hosts: tuple[Host, ...], gigabits: float) -> None:
    first, second = hosts
    for host in hosts:
        _call("ip", "netns", "add", host.namespace)
    _call(
        *("ip", "link", "add", first.device, "netns", first.namespace, "type", "veth"),
        *("peer", "name", second.device, "netns", second.namespace),
    )
    for host in hosts:
        inside = ("ip", "-n", host.namespace)
        _call(*inside, "addr", "add", f"{host.address}/24", "dev", host.device)
        for device in ("lo", host.device):
            _call(*inside, "link", "set", device, "up")
        _call(
            *("tc", "-n", host.namespace, "qdisc", "add", "dev", host.device, "root", "tbf"),
            *("rate", f"{round(gigabits * 1000)}mbit", "burst", BURST, "latency", LATENCY),
        )


def _call(*arguments: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise NotAvailable(f"`{' '.join(arguments[:4])} ...`: {said[-1] if said else 'fails'}")
