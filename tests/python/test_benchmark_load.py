"""What the benchmarks ask the system: whose time of the processor it was, and whose memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from benchmarks import load


def test_cpu_lists_and_the_statistics_of_cores():
    assert load.parse_cpu_list("0-2,5\n") == [0, 1, 2, 5]
    text = "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 100 1 20 7000 900 3 4 5 50 0\ncpu1 1 0 0 9 0 0 0 0 0 0\n"
    hertz = os.sysconf("SC_CLK_TCK")
    assert load.busy_seconds([0], text) == pytest.approx(133 / hertz)
    assert load.busy_seconds([0, 1], text) == pytest.approx(134 / hertz)
    with pytest.raises(load.LoadError, match="cpu7"):
        load.busy_seconds([7], text)


def test_a_process_line_with_parentheses_in_its_command():
    hertz = os.sysconf("SC_CLK_TCK")
    text = "42 (a) b (c)) S 7 42 41 0 -1 4194304 1 2 3 4 50 25 20 5 20 0 1 0 100 1 1"
    assert load.parse_stat(text) == load.ProcessStat(7, 41, 100 / hertz)


def test_a_tree_holds_descendants_and_orphans_of_the_session():
    table = {
        10: load.ProcessStat(1, 10, 0.0),
        11: load.ProcessStat(10, 10, 0.0),
        12: load.ProcessStat(11, 12, 0.0),  # a grandchild in a session of its own
        13: load.ProcessStat(1, 10, 0.0),  # its parent is gone
        20: load.ProcessStat(1, 20, 0.0),
        21: load.ProcessStat(20, 20, 0.0),
    }
    assert load.tree_of(10, table) == {10, 11, 12, 13}


def test_foreign_load_is_what_the_tree_did_not_use():
    assert load.foreign_seconds(load.Reading(5.0, 2.0), load.Reading(7.0, 3.5)) == 0.5
    assert load.foreign_seconds(load.Reading(5.0, 2.0), load.Reading(6.0, 3.1)) == 0.0


def test_children_are_load_of_the_mode():
    burn = "import time\nend = time.process_time() + 0.25\nwhile time.process_time() < end: pass"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])\ninput()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        cores = load.choose_cores(1)
        seen = 0.0
        for _ in range(600):
            seen = max(seen, load.read_cpu(process.pid, cores).tree)
            if seen >= 0.25 or process.poll() is not None:
                break
            time.sleep(0.05)
        assert seen >= 0.25
    finally:
        process.communicate(b"\n")


def test_a_process_is_not_counted_twice_while_it_starts_another():
    """A child of vfork has its parent's memory, as a thread has; one of fork a copy."""
    if not load.share_memory(os.getpid(), os.getpid()):
        pytest.skip("kcmp is refused here")
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        assert not load.share_memory(os.getpid(), child)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert load.share_memory(os.getpid(), thread.native_id)
    finally:
        done.set()
        thread.join()


def test_more_cores_than_there_are_is_refused():
    with pytest.raises(load.LoadError, match="--threads 100000"):
        load.choose_cores(100_000)
    assert load.choose_cores(1)[0] in os.sched_getaffinity(0)


def test_a_machine_that_hides_its_load_is_refused(monkeypatch):
    load.check_usable(load.choose_cores(1))
    monkeypatch.setattr(load, "busy_seconds", lambda cores: 1.0)
    with pytest.raises(load.LoadError, match="does not count the CPU time"):
        load.check_usable([0])
