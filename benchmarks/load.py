"""What /proc says: CPU time of cores and process trees, foreign load, memory of processes."""

import ctypes
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MIB = 1024.0 * 1024.0


class LoadError(RuntimeError):
    """The kernel does not tell what the harness must know."""


def choose_cores(count: int) -> list[int]:
    """The `count` cores to pin to: distinct physical cores first, in order.

    Raises LoadError when this process may not use that many.
    """
    usable = sorted(os.sched_getaffinity(0))
    if count < 1 or count > len(usable):
        raise LoadError(
            f"[benchmarks.load] --threads {count}, but this process may use {len(usable)} "
            f"core(s). Choose 1 to {len(usable)}."
        )
    first_of_each, rest, seen = [], [], set()
    for core in usable:
        siblings = frozenset(_siblings(core))
        (rest if siblings in seen else first_of_each).append(core)
        seen.add(siblings)
    return sorted((first_of_each + rest)[:count])


def _siblings(core: int) -> list[int]:
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        return parse_cpu_list(path.read_text())
    except OSError:
        return [core]


def parse_cpu_list(text: str) -> list[int]:
    """The numbers in the kernel's notation for sets of CPUs, such as "0-2,5"."""
    cores: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def watched_cores(cores: list[int]) -> list[int]:
    """The pinned cores and the hardware threads that share a physical core with them."""
    return sorted({sibling for core in cores for sibling in _siblings(core)} | set(cores))


def busy_seconds(cores: list[int], stat: str | None = None) -> float:
    """CPU seconds that `cores` have spent on anything but idling, since boot.

    Time stolen by the hypervisor counts: it was not ours. `stat` is the text of /proc/stat.
    """
    wanted = {f"cpu{core}" for core in cores}
    ticks = 0
    for line in (stat if stat is not None else Path("/proc/stat").read_text()).splitlines():
        name, *fields = line.split()
        if name in wanted:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
            ticks += user + nice + system + irq + softirq + steal
            wanted.remove(name)
    if wanted:
        raise LoadError(f"[benchmarks.load] /proc/stat has no line for {sorted(wanted)}")
    return ticks / _TICKS


@dataclass(frozen=True)
class ProcessStat:
    """What the harness needs of /proc/PID/stat; `cpu_seconds` includes children waited for."""

    parent: int
    session: int
    cpu_seconds: float


def parse_stat(text: str) -> ProcessStat:
    """Parses one /proc/PID/stat; the command in it may hold blanks and parentheses."""
    fields = text[text.rindex(")") + 2 :].split()
    ticks = sum(int(field) for field in fields[11:15])
    return ProcessStat(int(fields[1]), int(fields[3]), ticks / _TICKS)


def process_table() -> dict[int, ProcessStat]:
    """All processes that can be read now."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                table[int(name)] = parse_stat(Path(f"/proc/{name}/stat").read_text())
            except (OSError, ValueError):
                continue
    return table


def tree_of(root: int, table: dict[int, ProcessStat]) -> set[int]:
    """`root` (leader of its own session), its descendants, and orphans of its session."""
    members = {pid for pid, entry in table.items() if pid == root or entry.session == root}
    while True:
        added = {
            pid for pid, entry in table.items() if entry.parent in members and pid not in members
        }
        if not added:
            return members
        members |= added


@dataclass(frozen=True)
class Reading:
    """CPU seconds at one moment: of the watched cores, and of one process tree."""

    busy: float
    tree: float


def read_cpu(root: int, cores: list[int]) -> Reading:
    """Reads both sides of the subtraction that yields foreign load."""
    table = process_table()
    tree = sum(table[pid].cpu_seconds for pid in tree_of(root, table))
    return Reading(busy_seconds(cores), tree)


def foreign_seconds(before: Reading, after: Reading) -> float:
    """CPU seconds between two readings that did not belong to the tree; never negative."""
    return max(0.0, (after.busy - before.busy) - (after.tree - before.tree))


def check_usable(cores: list[int]) -> None:
    """Raises LoadError where /proc/stat does not move, so that foreign load would go unseen."""
    own = sorted(os.sched_getaffinity(0))
    before = busy_seconds(own)
    end = time.perf_counter() + 0.08
    while time.perf_counter() < end:
        pass
    if busy_seconds(own) <= before:
        raise LoadError(
            "[benchmarks.load] /proc/stat does not count the CPU time of this machine (a sandbox "
            "or container that hides it?), so foreign load cannot be told from our own. Run the "
            "benchmarks where /proc/stat works."
        )
    busy_seconds(cores)


def resident_mib(pid: int) -> float:
    """Resident memory of one process in MiB; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE / _MIB
    except (OSError, IndexError):
        return 0.0


def proportional_mib(pid: int) -> float:
    """Proportional set size of one process in MiB (shared pages divided); 0 when it is gone."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024.0
    except OSError:
        pass
    return 0.0


def share_memory(one: int, other: int) -> bool:
    """Whether two processes have one and the same memory (kcmp(2)); False where none can tell.

    So does a child on its way to another program (vfork): to count it would count its parent twice.
    """
    number = {"x86_64": 312, "aarch64": 272}.get(platform.machine())
    return number is not None and ctypes.CDLL(None).syscall(number, one, other, 1, 0, 0) == 0


def tree_mib(root: int) -> float:
    """Memory of a tree now: resident size of the root plus proportional size of the others."""
    others = tree_of(root, process_table()) - {root}
    own = sum(proportional_mib(pid) for pid in others if not share_memory(root, pid))
    return resident_mib(root) + own


def own_memory_mib(field: str) -> float:
    """`VmRSS` or `VmHWM` of this process in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024.0
    raise LoadError(f"[benchmarks.load] /proc/self/status has no {field}")


def reset_own_peak() -> None:
    """Sets VmHWM of this process back to its present resident size."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        raise LoadError(
            f"[benchmarks.load] the peak of resident memory cannot be reset ({error}); the kernel "
            "must allow writing 5 to /proc/self/clear_refs."
        ) from error
