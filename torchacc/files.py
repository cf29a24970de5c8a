"""Files that are whole or not there: what is interrupted leaves the file that was there before."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a new file beside `path` to write to. It takes that place when the block has ended.

    Until then, and if the block raises or the process is killed, what was at `path` stays as it
    was. The new file is on the disk before it takes the place. One that a killed process left
    behind is hidden: `.NAME.PROCESS-RANDOM.part`.

    Something else than a file (a device, a pipe) is given as it is.

    Raises OSError where the folder, or a file that is there, cannot be written to.
    """
    with replacing_all([path]) as parts:
        yield parts[0]


@contextmanager
def replacing_all(paths: Sequence[str | os.PathLike[str]]) -> Iterator[list[Path]]:
    """`replacing` for several files, none of which takes its place before all are on the disk.

    Raises ValueError where two of them are the same.
    """
    targets = [Path(os.path.realpath(path)) for path in paths]  # a link stays one
    if len(set(targets)) < len(targets):
        raise ValueError(
            f"[checkpoint] two of these are the same file: {list(map(str, paths))}. Give each a "
            "name of its own."
        )
    parts: dict[Path, Path] = {}
    try:
        for target in targets:
            if target.is_file():
                # To rename, only the folder has to be writable: this asks the file.
                os.close(os.open(target, os.O_WRONLY))
            if not target.exists() or target.is_file():
                # Names have at most 255 bytes.
                name = f".{target.name[:50]}.{os.getpid()}-{os.urandom(4).hex()}.part"
                part = target.with_name(name)
                os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                parts[target] = part
        yield [parts.get(target, target) for target in targets]
        for target, part in parts.items():
            _to_disk(part)
            if target.exists():
                with contextlib.suppress(PermissionError):  # some file systems have no modes
                    shutil.copymode(target, part)
        for target, part in parts.items():
            os.replace(part, target)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
    for folder in {target.parent for target in parts}:
        with contextlib.suppress(OSError):  # some file systems do not sync folders
            _to_disk(folder)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
