"""`python -m torchacc cache info` and `cache clear`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import helpers
from torchacc.__main__ import main
from torchacc.environment import size_text

# The digits are what a key looks like; to report and remove files nobody loads them.
KEYS = ["0123456789abcdef" * 2, "fedcba9876543210" * 2]


def run(action: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """One command in a process of its own: the directory is read once in a process."""
    code = f"import sys\nfrom torchacc.__main__ import main\nsys.exit(main(['cache', {action!r}]))"
    return helpers.run_python(code, check=False, **environ)


def field(text: str, name: str) -> str:
    return next(line.split(None, 1)[1] for line in text.splitlines() if line.split()[0] == name)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A directory with one library of 3000 bytes under two names, one of 500, and other files."""
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    (directory / f"{KEYS[0]}.so").write_bytes(bytes(3000))
    os.link(directory / f"{KEYS[0]}.so", directory / f"{KEYS[1]}.so")
    (directory / f"{'0' * 32}.so").write_bytes(bytes(500))
    (directory / "notes.txt").write_text("mine")
    return directory


def test_info_tells_where_the_kernels_are_and_how_many(cache: Path) -> None:
    done = run("info", ACC_CACHE_DIR=str(cache), ACC_CACHE_MB="2048")
    assert done.returncode == 0, done.stderr
    assert field(done.stdout, "directory") == str(cache)
    assert field(done.stdout, "libraries") == "2"
    assert field(done.stdout, "size") == "3.4 KiB"
    assert field(done.stdout, "limit") == "2.0 GiB"
    assert field(done.stdout, "problem") == "-"


def test_clear_says_what_it_freed_and_leaves_what_is_not_ours(cache: Path) -> None:
    done = run("clear", ACC_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{cache}: 2 libraries, 3.4 KiB freed\n"
    assert [path.name for path in cache.iterdir()] == ["notes.txt"]
    again = run("clear", ACC_CACHE_DIR=str(cache))
    assert (again.returncode, again.stdout) == (0, f"{cache}: 0 libraries, 0 B freed\n")


def test_a_directory_that_is_not_there_is_empty_and_not_made(tmp_path: Path) -> None:
    done = run("info", ACC_CACHE_DIR=str(tmp_path / "none"))
    assert done.returncode == 0, done.stderr
    assert field(done.stdout, "libraries") == "0"
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_others_may_write_is_refused_and_left_alone(cache: Path) -> None:
    cache.chmod(0o777)
    before = sorted(cache.iterdir())
    info = run("info", ACC_CACHE_DIR=str(cache))
    assert info.returncode == 1
    assert "may write" in field(info.stdout, "problem")
    clear = run("clear", ACC_CACHE_DIR=str(cache))
    assert (clear.returncode, clear.stdout) == (1, "")
    assert str(cache) in clear.stderr and "may write" in clear.stderr
    assert sorted(cache.iterdir()) == before


@pytest.mark.parametrize("arguments", [["cache"], ["cache", "empty"]])
def test_an_unknown_action_is_refused_with_the_usage(arguments, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m torchacc" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (14_000, "13.7 KiB"),
        (1 << 20, "1.0 MiB"),
        (5 << 29, "2.5 GiB"),
        (1 << 42, "4096.0 GiB"),
    ],
)
def test_sizes_are_written_for_people(count: int, text: str) -> None:
    assert size_text(count) == text
