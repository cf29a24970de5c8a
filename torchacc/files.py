"""Files that are whole or not there: what is interrupted leaves the file that was there before."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a new file beside `path` to write to. It takes that place when the block has ended.

    Until then, and if the block raises or the process is killed, what was at `path` stays as it
    was. The new file is on the disk before it takes the place. One that a killed process left
    behind is hidden: `.NAME.PROCESS-RANDOM.part`.

    Something else than a file (a device, a pipe) is given as it is.

    Raises OSError where the folder cannot be written to.
    """
    target = Path(os.path.realpath(path))  # a link stays one
    if target.exists() and not target.is_file():
        yield target
        return
    part = target.with_name(f".{target.name}.{os.getpid()}-{os.urandom(4).hex()}.part")
    os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield part
        _to_disk(part)
        if target.exists():
            with contextlib.suppress(PermissionError):  # some file systems have no modes
                shutil.copymode(target, part)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # some file systems do not sync folders
        _to_disk(target.parent)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
