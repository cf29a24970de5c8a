"""Files that are whole or not there: what is interrupted leaves the files that were there before.

One file takes its place by a rename. Several do by the rename of a symbolic link (`_take_places`):
whenever a process is killed, whoever opens them finds all of the old ones or all of the new ones.
While a save goes on, the moment in which a link gives way to its file may show nothing there.
Processes that replace several at the same time do it one after the other (`_alone`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS}  # what file systems without links say


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a new file beside `path` to write to. It takes that place when the block has ended.

    Until then, and if the block raises or the process is killed, what was at `path` stays as it
    was. The new file is on the disk before it takes the place. One that a killed process left
    behind is hidden: `.NAME.PROCESS-RANDOM-0.part`.

    Something else than a file (a device, a pipe) is given as it is.

    Raises OSError where the folder, or a file that is there, cannot be written to.
    """
    with replacing_all([path]) as parts:
        yield parts[0]


@contextmanager
def replacing_all(paths: Sequence[str | os.PathLike[str]]) -> Iterator[list[Path]]:
    """`replacing` for several files, which take their places at once when all are on the disk.

    A process that is killed meanwhile may leave some of them as symbolic links to hidden files
    (`.NAME.….old`, `.new`, `.set`): all of them to the old ones, or all to the new ones. The next
    one that writes to any of them puts the files themselves in the places first.

    Of several processes that replace the same files each replaces all of them, the last one last:
    where the file system has locks (`flock`), which are held while files take their places, and not
    while they are written.

    Raises ValueError where two of them are the same, and OSError as `replacing`, or where files are
    to be replaced and their file system has no hard or symbolic links.
    """
    _settle_left_behind(paths)
    targets = [_place(path)[0] for path in paths]  # a link stays one
    if len(set(targets)) < len(targets):
        raise ValueError(
            f"[checkpoint] two of these are the same file: {list(map(str, paths))}. Give each a "
            "name of its own."
        )
    save = f"{os.getpid()}-{os.urandom(4).hex()}"
    suffix = "part" if len(targets) == 1 else "new"
    parts: dict[Path, Path] = {}
    with contextlib.ExitStack() as alone:
        try:
            for target in targets:
                if target.is_file():
                    # To rename, only the folder has to be writable: this asks the file.
                    os.close(os.open(target, os.O_WRONLY))
                if not target.exists() or target.is_file():
                    part = _beside(target, save, len(parts), suffix)
                    os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                    parts[target] = part
            yield [parts.get(target, target) for target in targets]
            for target, part in parts.items():
                _to_disk(part)
                if target.exists():
                    with contextlib.suppress(PermissionError):  # some file systems have no modes
                        shutil.copymode(target, part)
            alone.enter_context(_alone(parts))
            made = _prepare(parts, save) if len(parts) > 1 else None
            if made is None:
                for target, part in parts.items():
                    os.replace(part, target)
        except BaseException:
            for part in parts.values():
                part.unlink(missing_ok=True)
            raise
        if made is not None:
            _take_places(made, parts, save)
    _folders_to_disk(target.parent for target in parts)


# --- several files at once ------------------------------------------------------------------------


def _prepare(parts: dict[Path, Path], save: str) -> Path | None:
    """The hidden folder for `_take_places`, other names of the old files, and the links to come.

    None where there are no links, and no old files that could be lost.
    """
    made = _beside(next(iter(parts)), save, 0, "set")
    try:
        for name in ("", "old", "new", "places"):
            (made / name).mkdir()
        os.symlink("old", made / "now")
        os.symlink("new", made / "next")
        for number, place in enumerate(parts):
            old, new, link = (_beside(place, save, number, each) for each in ("old", "new", "link"))
            _link(made / "places" / str(number), place)
            if place.exists():
                os.link(place, old)
                _link(made / "old" / str(number), old)
            _link(made / "new" / str(number), new)
            _link(link, made / "now" / str(number))
    except BaseException as error:
        _settle(made)
        if not isinstance(error, OSError) or error.errno not in _NO_LINKS:
            raise
        for place in parts:
            if place.exists():
                raise OSError(
                    error.errno,
                    "[checkpoint] several files can be replaced at once only where there are hard "
                    f"and symbolic links ({error.strerror}). Save to a new folder. There already",
                    str(place),
                ) from error
        return None
    _folders_to_disk([made, made / "old", made / "new", made / "places"])
    _folders_to_disk(place.parent for place in parts)
    return made


def _take_places(made: Path, places: Iterable[Path], save: str) -> None:
    """Puts new files in their places; at every moment all places show old files, or all new ones.

    First each place becomes a link through the link `now` in the hidden folder, which leads to the
    old files. Then `now` is replaced: that is the moment. Then the files themselves come into the
    places.
    """
    try:
        for number, place in enumerate(places):
            os.replace(_beside(place, save, number, "link"), place)
        _folders_to_disk(place.parent for place in places)
        os.replace(made / "next", made / "now")
        _folders_to_disk([made])
    finally:
        _settle(made)


def _settle(made: Path) -> None:
    """Puts the files that places show through `made` there themselves, and deletes the others.

    It ends what `_take_places` began, in whichever process, and takes back what it could not.
    """
    save = made.name.split(".")[-2].rsplit("-", 1)[0]
    places = {
        int(each.name): Path(os.path.normpath(each.parent / os.readlink(each)))
        for each in made.glob("places/*")
    }
    for number, place in places.items():
        shown = made / "now" / str(number)
        if place.is_symlink() and os.readlink(place) == os.path.relpath(shown, place.parent):
            if shown.exists():
                os.replace(os.path.realpath(shown), place)
            else:
                place.unlink()  # there was no file
    _folders_to_disk(place.parent for place in places.values())
    for number, place in places.items():
        for each in ("old", "new", "link"):
            _beside(place, save, number, each).unlink(missing_ok=True)
    shutil.rmtree(made, ignore_errors=True)


def _settle_left_behind(paths: Iterable[str | os.PathLike[str]]) -> None:
    for path in paths:
        _, made = _place(path)
        if made is not None:
            with _locked([made.parent]):  # one of the folders of the process that made it
                if _place(path)[1] == made:
                    _settle(made)


@contextmanager
def _alone(places: Iterable[Path]) -> Iterator[None]:
    """Inside, no other process has or leaves links in these places, nor puts them in order."""
    while True:
        _settle_left_behind(places)
        with _locked(place.parent for place in places):
            # Another process may have been killed just now, and left some to files of a folder
            # that is not locked here.
            if all(_place(place)[1] is None for place in places):
                yield
                return


@contextmanager
def _locked(folders: Iterable[Path]) -> Iterator[None]:
    """Inside, no other process has a lock on one of them, where their file system has locks."""
    found: dict[tuple[int, int], Path] = {}
    for folder in folders:  # one may have several names
        there = folder.stat()
        found[there.st_dev, there.st_ino] = folder
    with contextlib.ExitStack() as held:
        for _, folder in sorted(found.items()):  # in the order in which all take them
            with contextlib.suppress(OSError):
                descriptor = os.open(folder, os.O_RDONLY)
                _descriptors.add(descriptor)
                held.callback(_close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                # A child that is forked meanwhile may have it for a moment.
                held.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)
        yield


_descriptors: set[int] = set()  # of locks


def _close(descriptor: int) -> None:
    _descriptors.discard(descriptor)
    os.close(descriptor)


def _close_all() -> None:
    """In a forked child, which would hold the locks of its parent as long as it lives."""
    for descriptor in list(_descriptors):
        with contextlib.suppress(OSError):
            _close(descriptor)


os.register_at_fork(after_in_child=_close_all)


def _place(path: str | os.PathLike[str]) -> tuple[Path, Path | None]:
    """The place to which the links at `path` lead, and the hidden folder of the `_take_places` that
    has put a link there: one that another process is at, or an interrupted one.
    """
    path = Path(path)
    for _ in range(40):  # as many links as the system follows
        try:
            link = os.readlink(path)
            to = path.parent / link
            made = to.parent.parent
            if to.parent.name == "now" and made.suffix == ".set":
                if (made / "places").is_dir():
                    return _absolute(path), Path(os.path.realpath(made))
                if os.readlink(path) != link:
                    continue  # it has ended meanwhile, and another one has begun
        except OSError:
            break  # no link, or no longer
        path = to
    return _absolute(path), None


def _absolute(path: Path) -> Path:
    return Path(os.path.realpath(path.parent)) / path.name


def _beside(place: Path, save: str, number: int, suffix: str) -> Path:
    """A hidden name in the same folder. Names have at most 255 bytes."""
    return place.with_name(f".{place.name[:50]}.{save}-{number}.{suffix}")


def _link(link: Path, to: Path) -> None:
    os.symlink(os.path.relpath(to, link.parent), link)  # the folder may be moved


def _folders_to_disk(folders: Iterable[Path]) -> None:
    for folder in set(folders):
        with contextlib.suppress(OSError):  # some file systems do not sync folders
            _to_disk(folder)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
