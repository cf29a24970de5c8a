"""`torchacc.save`, files that are whole or not there, and what is sent to the device."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import torchacc
from tests.killed import at_each_operation as killed_at_each_operation
from torchacc import files
from torchacc.files import replacing, replacing_all


class Refuses:
    def __reduce__(self):
        raise RuntimeError("cannot be pickled")


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


# --- torchacc.save --------------------------------------------------------------------------------


def test_what_is_saved_lies_on_the_cpu_and_shares_memory_as_before(device, tmp_path):
    layer = nn.Linear(3, 2).to(device)
    layer.note = torch.arange(6.0, device=device).view(2, 3)
    data = {"model": layer.state_dict(), "parts": (layer.note, layer.note[1:].t()), "n": [1, None]}
    torchacc.save({**data, "weight": layer.weight, "whole": layer}, tmp_path / "file")
    found = torch.load(tmp_path / "file", weights_only=False)
    first, second = found["parts"]
    assert first.device.type == second.device.type == "cpu"
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert torch.equal(second, torch.tensor([[3.0], [4.0], [5.0]]))
    assert isinstance(found["weight"], nn.Parameter) and found["weight"].requires_grad
    assert found["weight"].data_ptr() == found["model"]["weight"].data_ptr()
    assert torch.equal(found["weight"], layer.weight.cpu()) and found["n"] == [1, None]
    assert found["whole"].note.device.type == "cpu"  # in an object that is no container
    assert found["model"]._metadata == layer.state_dict()._metadata


def test_the_default_device_does_not_matter(device, tmp_path):
    layer = nn.Linear(3, 2).to(device)
    with torch.device(device):
        torchacc.save(layer.state_dict(), tmp_path / "file")
    found = torch.load(tmp_path / "file")
    assert {tensor.device.type for tensor in found.values()} == {"cpu"}
    assert torch.equal(found["weight"], layer.weight.cpu())


def test_conjugates_and_what_only_the_cpu_has_are_saved_too(device, tmp_path):
    z = torch.tensor([1 + 2j, 3 - 1j])
    data = {"conj": z.to(device).conj(), "cpu": z.conj(), "sparse": torch.eye(2).to_sparse()}
    torchacc.save(data, tmp_path / "file")
    found = torch.load(tmp_path / "file")
    assert torch.equal(found["conj"], z.conj()) and torch.equal(found["cpu"], z.conj())
    assert torch.equal(found["sparse"].to_dense(), torch.eye(2))


@pytest.mark.parametrize(
    ("rank", "local", "options", "written"),
    [
        (0, 0, {}, True),
        (3, 1, {}, False),
        (2, 0, {}, True),  # the first of the second machine
        (2, 0, {"global_master": True}, False),
        (0, 0, {"global_master": True}, True),
        (3, 1, {"master_only": False}, True),
    ],
)
def test_which_processes_write(device, tmp_path, monkeypatch, rank, local, options, written):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local))
    torchacc.save(torch.ones(2, device=device), tmp_path / "file", **options)
    assert (tmp_path / "file").exists() == written


def test_an_open_file_is_written_to(device):
    file = io.BytesIO()
    torchacc.save(torch.ones(2, device=device), file)
    file.seek(0)
    assert torch.equal(torch.load(file), torch.ones(2))


def test_what_cannot_be_saved_leaves_the_file_that_was_there(device, tmp_path):
    torchacc.save(torch.ones(2, device=device), tmp_path / "file")
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        torchacc.save([torch.zeros(1000, device=device), Refuses()], tmp_path / "file")
    assert torch.equal(torch.load(tmp_path / "file"), torch.ones(2))
    assert names_in(tmp_path) == ["file"]


@pytest.fixture
def full_disk():
    """Files may have so many bytes, which is told like a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("count", [12400, 30000])  # the end, and a tensor alone, is too long
def test_a_full_disk_is_an_oserror_and_leaves_the_old_file(tmp_path, full_disk, count):
    target = tmp_path / "file"
    target.write_bytes(b"old")
    with pytest.raises(OSError, match=r"File too large: '.*\.file\..*\.part'"):
        torchacc.save({"a": torch.ones(count)}, target)
    assert target.read_bytes() == b"old" and names_in(tmp_path) == ["file"]
    with pytest.raises(OSError, match="File too large"), open(tmp_path / "other", "wb") as file:
        torchacc.save({"a": torch.ones(count)}, file)
    torchacc.save({"a": torch.ones(10)}, target)
    assert torch.equal(torch.load(target)["a"], torch.ones(10))


# --- replacing ------------------------------------------------------------------------------------


def test_a_process_killed_while_it_writes_leaves_the_old_file_whole(tmp_path):
    target = tmp_path / "rank-0-of-2-model.pth"
    target.write_bytes(b"old" * 1000)
    code = f"""
import importlib.util, os, signal
spec = importlib.util.spec_from_file_location("files", {files.__file__!r})
files = importlib.util.module_from_spec(spec)
spec.loader.exec_module(files)
with files.replacing({str(target)!r}) as path:
    with open(path, "wb") as file:
        file.write(b"new" * 500)
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert target.read_bytes() == b"old" * 1000
    left = [name for name in names_in(tmp_path) if name != target.name]
    assert len(left) == 1 and left[0].startswith(f".{target.name}.") and left[0].endswith(".part")
    assert list(tmp_path.glob("rank*-of-*-model.pth")) == [target]
    with replacing(target) as path:
        path.write_bytes(b"new")
    assert target.read_bytes() == b"new"


def test_the_new_file_is_on_the_disk_before_it_takes_the_place(tmp_path, monkeypatch):
    events = []
    sync, replace = os.fsync, os.replace

    def synced(descriptor):
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def replaced(source, target):
        events.append(("replace", str(source)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    with replacing(tmp_path / "file") as path:
        path.write_bytes(b"new")
        assert not (tmp_path / "file").exists()
    assert events == [("fsync", str(path)), ("replace", str(path)), ("fsync", str(tmp_path))]


def test_links_and_permissions_stay(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "file", tmp_path / "link"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(target)
    with replacing(link) as path:
        path.write_bytes(b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"
    assert target.stat().st_mode & 0o777 == 0o640
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "fresh") as path:
            path.write_bytes(b"new")
    finally:
        os.umask(before)
    assert (tmp_path / "fresh").stat().st_mode & 0o777 == 0o640


def test_a_file_that_is_protected_against_writing_stays():
    """As with `open`, though its folder would let it be replaced."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        target = Path(folder, "best.pth")
        target.write_bytes(b"old")
        target.chmod(0o444)
        user = os.geteuid()
        os.seteuid(user or 65534)  # root may write anywhere
        try:
            with pytest.raises(PermissionError, match="best.pth"):
                torchacc.save({}, target)
            torchacc.save({}, Path(folder, "other"))
        finally:
            os.seteuid(user)
        assert target.read_bytes() == b"old" and names_in(target.parent) == ["best.pth", "other"]


@pytest.mark.parametrize("name", ["n" * 255, "\u4e2d" * 85])
def test_a_name_may_be_as_long_as_it_can_be(tmp_path, name):
    torchacc.save({"a": 1}, tmp_path / name)
    assert names_in(tmp_path) == [name] and torch.load(tmp_path / name) == {"a": 1}


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with replacing(tmp_path / "pipe") as path:
        assert path == tmp_path / "pipe"
    assert names_in(tmp_path) == ["pipe"] and (tmp_path / "pipe").is_fifo()


# --- replacing several ----------------------------------------------------------------------------


def replace(*paths, text="new"):
    with replacing_all(paths) as parts:
        for part in parts:
            part.write_text(text)


def shown(*paths):
    """What the paths show: text, or nothing."""
    return [path.read_text() if path.exists() else None for path in paths]


def test_several_files_change_at_once_wherever_they_are(tmp_path):
    """In two folders, one through a link, one of them not there before."""
    before, now = tmp_path / "before", tmp_path / "now"
    (before / "a").mkdir(parents=True)
    (before / "b").mkdir()
    for name in ("a/one", "b/two"):
        (before / name).write_text("old")
    (before / "link").symlink_to("b/two")
    paths = [now / name for name in ("a/one", "link", "b/three")]
    states = []
    for _ in killed_at_each_operation(before, now, lambda: replace(*paths)):
        states.append(shown(*paths))
        moved = tmp_path / "moved"  # links stay right
        now.rename(moved)
        assert shown(*(moved / path.relative_to(now) for path in paths)) == states[-1]
        moved.rename(now)
        was_link = (now / "b/two").is_symlink()
        replace(paths[1], text="later")
        assert shown(*paths) == [states[-1][0], "later", states[-1][2]]
        assert (now / "link").is_symlink()
        if was_link:  # then the others are put in order before
            assert not any((now / name).is_symlink() for name in ("a/one", "b/two", "b/three"))
        replace(*paths, text="last")
        assert shown(*paths) == ["last"] * 3
        assert not any((now / name).is_symlink() for name in ("a/one", "b/two", "b/three"))
    old, new = ["old", "old", None], ["new"] * 3
    assert states == [old] * states.count(old) + [new] * states.count(new)
    assert states.count(old) > 20 and states.count(new) > 20
    assert names_in(now) == ["a", "b", "link"]
    assert [names_in(now / name) for name in "ab"] == [["one"], ["three", "two"]]


def test_a_save_that_was_killed_may_be_put_in_order_by_one_that_is_killed(tmp_path):
    before, now, then = (tmp_path / name for name in ("before", "now", "then"))
    before.mkdir()
    (before / "one").write_text("old")
    states = []
    for _ in killed_at_each_operation(before, now, lambda: replace(now / "one", now / "two")):
        first = shown(now / "one", now / "two")
        if not any((now / name).is_symlink() for name in ("one", "two")):
            continue
        for _ in killed_at_each_operation(now, then, lambda: replace(then / "one", then / "two")):
            states.append(shown(then / "one", then / "two"))
            assert states[-1] in (first, ["new", "new"])
    assert ["old", None] in states and states.count(["new", "new"]) > 20


@pytest.mark.parametrize("failing", range(4))
def test_several_files_stay_where_a_rename_fails(tmp_path, monkeypatch, failing):
    """The third is that of the moment, and what comes into the places after it is new."""
    (tmp_path / "one").write_text("old")
    rename, calls = os.replace, []

    def fail(source, target):
        calls.append(target)
        if len(calls) == failing + 1:
            raise OSError(5, "Input/output error", str(target))
        rename(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="Input/output error"):
        replace(tmp_path / "one", tmp_path / "two")
    expected = ["new", "new"] if failing == 3 else ["old", None]
    assert shown(tmp_path / "one", tmp_path / "two") == expected
    if failing < 3:
        assert names_in(tmp_path) == ["one"]
    replace(tmp_path / "one", tmp_path / "two", text="later")
    assert shown(tmp_path / "one", tmp_path / "two") == ["later", "later"]
    assert names_in(tmp_path) == ["one", "two"]


def test_several_new_files_are_on_the_disk_before_any_takes_its_place(tmp_path, monkeypatch):
    (tmp_path / "one").write_text("old")
    sync, rename, events = os.fsync, os.replace, []

    def synced(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    def replaced(source, target):
        events.append("replace")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    with replacing_all([tmp_path / "one", tmp_path / "two"]) as parts:
        pass
    files = [event for event in events if event in (str(tmp_path), "replace", *map(str, parts))]
    # Links come into the places, then the moment, then files; and the folder after each of them.
    links = [*map(str, parts), str(tmp_path), "replace", "replace", str(tmp_path)]
    assert files == [*links, "replace", "replace", "replace", str(tmp_path), str(tmp_path)]


@pytest.mark.parametrize("missing", ["symlink", "link"])
def test_without_links_several_files_are_not_replaced(tmp_path, monkeypatch, missing):
    def refuse(*arguments, **keywords):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, missing, refuse)
    replace(tmp_path / "one", tmp_path / "two")
    with pytest.raises(PermissionError, match=r"hard and symbolic links.*a new folder.*one'"):
        replace(tmp_path / "one", tmp_path / "two", text="later")
    assert shown(tmp_path / "one", tmp_path / "two") == ["new", "new"]
    assert names_in(tmp_path) == ["one", "two"]


@pytest.mark.parametrize("name", ["n" * 254, "\U0001f600" * 63], ids=["ascii", "wide"])
def test_several_names_may_be_long_and_begin_alike(tmp_path, name):
    paths = [tmp_path / (name + end) for end in "ab"]
    replace(*paths, text="old")
    replace(*paths)
    assert shown(*paths) == ["new", "new"] and len(names_in(tmp_path)) == 2


# --- several processes ----------------------------------------------------------------------------


def start(do):
    """A process that does it, and exits with 0 then."""
    pid = os.fork()
    if pid == 0:
        try:
            do()
            os._exit(0)
        finally:  # the tests go on in the parent only
            os._exit(1)
    return pid


def exit_status(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def before_rename(number, do):
    """From now on `do` is called before that one of the renames of this process."""
    rename, left = os.replace, [number]

    def replace_now(source, target):
        if left[0] == 0:
            do()
        left[0] -= 1
        rename(source, target)

    os.replace = replace_now


@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("names", [["two", "three"], ["two"]], ids=["several", "one"])
def test_of_two_processes_that_replace_the_same_files_one_waits(tmp_path, number, names):
    """The first is held before each of its renames; the second goes on until it has to wait."""
    paths = [tmp_path / name for name in ("one", "two", "three")]
    replace(*paths, text="old")
    halted, go_on, waits = os.pipe(), os.pipe(), os.pipe()

    def halt():
        os.write(halted[1], b".")
        os.read(go_on[0], 1)

    def first():
        before_rename(number, halt)
        replace(*paths, text="first")

    def second():
        lock = fcntl.flock

        def note(descriptor, how):
            with contextlib.suppress(BlockingIOError):
                lock(descriptor, how | fcntl.LOCK_NB)
                return
            os.write(waits[1], b".")
            lock(descriptor, how)

        fcntl.flock = note
        replace(*(tmp_path / name for name in names), text="second")
        os.write(waits[1], b".")

    one = start(first)
    os.read(halted[0], 1)
    other = start(second)
    os.read(waits[0], 1)
    os.write(go_on[1], b".")
    assert [exit_status(one), exit_status(other)] == [0, 0]
    for descriptor in (*halted, *go_on, *waits):
        os.close(descriptor)
    # A single file takes its place by a rename of its own, and so may come before the others.
    after = ["first", *("second" if path.name in names else "first" for path in paths[1:])]
    assert shown(*paths) == after or (len(names) == 1 and shown(*paths) == ["first"] * 3)
    assert names_in(tmp_path) == ["one", "three", "two"]


@pytest.mark.parametrize("number", range(7))
def test_what_a_process_leaves_that_is_killed_meanwhile_is_put_in_order(tmp_path, number):
    """In a folder, too, that the one that writes meanwhile does not write to."""
    (tmp_path / "other").mkdir()
    paths = [tmp_path / name for name in ("other/one", "two", "three")]
    replace(*paths, text="old")

    def killed():
        before_rename(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
        replace(*paths, text="killed")

    with replacing_all(paths[1:]) as parts:
        assert exit_status(start(killed)) == -signal.SIGKILL
        for part in parts:
            part.write_text("new")
    assert shown(*paths[1:]) == ["new", "new"]
    assert shown(paths[0]) == ["old" if number < 4 else "killed"]
    assert not any(path.is_symlink() for path in paths[1:])


def test_where_there_are_no_locks_files_are_replaced_without(tmp_path, monkeypatch):
    def refuse(descriptor, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    replace(tmp_path / "one", tmp_path / "two")
    assert shown(tmp_path / "one", tmp_path / "two") == ["new", "new"]


def test_a_folder_under_two_names_is_locked_once(tmp_path, monkeypatch):
    """A second lock on the same would never be had."""
    locked, lock = [], fcntl.flock

    def note(descriptor, how):
        locked.append(how)
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", note)
    with files._locked([tmp_path, tmp_path / "." / "..", tmp_path / ".." / tmp_path.name]):
        assert locked == [fcntl.LOCK_EX] * 2
    assert locked == [fcntl.LOCK_EX] * 2 + [fcntl.LOCK_UN] * 2


# --- to the device --------------------------------------------------------------------------------


def test_containers_are_copied_and_their_tensors_sent(device):
    datas = {"x": torch.ones(2), "more": [torch.zeros(1), "text", None]}
    moved = torchacc.send_cpu_data_to_device(datas, device)
    assert moved["x"].device.type == moved["more"][0].device.type == device
    assert moved["more"][1:] == ["text", None]
    assert datas["x"].device.type == datas["more"][0].device.type == "cpu"
    (single,) = torchacc.send_cpu_data_to_device(torch.ones(2), torch.device(device))
    assert single.device.type == device


def test_one_file_under_two_names_is_refused(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    with (
        pytest.raises(ValueError, match="the same file"),
        replacing_all([tmp_path / "file", tmp_path / "link"]),
    ):
        pass
    assert (tmp_path / "file").read_text() == "old" and len(list(tmp_path.iterdir())) == 2


def test_a_folder_of_dcp_is_written_once_and_is_none_before_it_is_whole(
    device, tmp_path, monkeypatch
):
    """As docs/checkpoints.md has it: a save of its own folder each, which is refused otherwise."""

    def write(folder: Path, value: float) -> None:
        writer = dcp.FileSystemWriter(folder, overwrite=False)
        dcp.save({"x": torch.full((4,), value, device=device)}, storage_writer=writer)

    def read(folder: Path) -> list[float]:
        x = torch.zeros(4, device=device)
        dcp.load({"x": x}, checkpoint_id=folder)
        return x.tolist()

    write(tmp_path / "first", 1.0)
    with pytest.raises(CheckpointException, match="already exists"):
        write(tmp_path / "first", 2.0)
    assert read(tmp_path / "first") == [1.0] * 4

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dcp.FileSystemWriter, "finish", killed)  # writes .metadata
    with pytest.raises((KeyboardInterrupt, CheckpointException)):
        write(tmp_path / "second", 2.0)
    with pytest.raises(CheckpointException, match="metadata"):
        read(tmp_path / "second")
    assert read(tmp_path / "first") == [1.0] * 4


def test_a_child_does_not_keep_the_lock_of_a_save(tmp_path):
    """As a worker of a loader that is forked meanwhile, when its parent is killed."""
    with files._locked([tmp_path]):
        (held,) = files._descriptors
        child = os.fork()
        if child == 0:
            try:
                os.fstat(held)
            except OSError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not files._descriptors
