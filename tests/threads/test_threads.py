"""Recorder and executor under the thread sanitizer: programs of this folder, in processes.

The module is built a second time, for the host, with every access of our code watched. torch and
Python are not; what follows from that stands in suppressions.txt.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PROGRAMS = sorted(path.name for path in HERE.glob("*.py") if path.name[:4] not in ("test", "__in"))
# Many accesses: of two at the very same time the sanitizer may see neither.
RACE = """
#include <thread>
volatile int shared = 0;
void count() {
  for (int i = 0; i < 1000; ++i) shared = shared + 1;
}
int main() {
  std::thread other(count);
  count();
  other.join();
}
"""


def run(command: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs a program under the sanitizer, without the address spread that confuses it."""
    plain = shutil.which("setarch") and not subprocess.call(
        ["setarch", "-R", "true"], stderr=subprocess.DEVNULL
    )
    options = f"suppressions={HERE / 'suppressions.txt'} exitcode=66 report_signal_unsafe=0"
    return subprocess.run(
        [*(["setarch", "-R"] if plain else []), *command],
        env={**os.environ, "TSAN_OPTIONS": options, **environ},
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.fixture(scope="module")
def runtime() -> str:
    """The sanitizer's runtime library, to be loaded before Python."""
    gxx = os.environ.get("CXX", "g++").split()
    found = subprocess.run(
        [*gxx, "-print-file-name=libtsan.so"], capture_output=True, text=True
    ).stdout.strip()
    if not os.path.isabs(found):
        pytest.skip(f"{gxx[0]} brings no libtsan.so that Python could preload")
    return found


@pytest.fixture(scope="module")
def site(runtime: str) -> Path:
    """A folder with the instrumented module."""
    spec = importlib.util.spec_from_file_location("native", ROOT / "scripts" / "native.py")
    assert spec is not None and spec.loader is not None
    native = sys.modules["native"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    return native.build_thread_sanitized() / "site"


# The compilers that a program starts do without the runtime; the module has to be the watched one.
START = """
import os, runpy, sys
del os.environ["LD_PRELOAD"]
sys.path[0] = os.path.dirname(sys.argv[1])
runpy.run_path(sys.argv[1], run_name="__main__")
assert sys.modules["torchacc_device"].__file__.startswith(os.environ["PYTHONPATH"])
"""


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_race(program: str, runtime: str, site: Path) -> None:
    result = run(
        [sys.executable, "-c", START, str(HERE / program)],
        LD_PRELOAD=runtime,
        PYTHONPATH=str(site),
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-12000:]


def test_the_module_is_watched(site: Path) -> None:
    """A module built without the sanitizer would pass everything."""
    (module,) = (site / "torchacc_device").glob("_C*.so")
    assert b"__tsan_write8" in module.read_bytes()


def test_a_race_would_be_reported(runtime: str, tmp_path: Path) -> None:
    """The options and suppressions of this file still let a plain race through."""
    source = tmp_path / "race.cpp"
    source.write_text(RACE)
    gxx = os.environ.get("CXX", "g++").split()
    program = str(tmp_path / "race")
    subprocess.run([*gxx, "-g", "-fsanitize=thread", str(source), "-o", program], check=True)
    result = run([program])
    assert result.returncode == 66 and "data race" in result.stderr
