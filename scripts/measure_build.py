"""Measures the build, for the table in docs/build.md. Works on a copy, without ccache.

measure_build.py [SOURCE.cpp ...]     the sources whose change is timed (default: three)
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import native

SOURCES = ("lazy/plan/memory.cpp", "lazy/record/recorder.cpp", "torchacc_device/csrc/module.cpp")
IMPORT = """
import time, torch
began = time.perf_counter()
import torchacc
print(time.perf_counter() - began)
"""


def timed(command: list[str], folder: Path, environ: dict[str, str]) -> float:
    """Seconds of a command that must succeed."""
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    return time.perf_counter() - began


def main(argv: list[str]) -> int:
    environ = {**os.environ, "CCACHE_DISABLE": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    environ.pop("PYTHONPATH", None)
    skipped = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", "*.so", ".*_cache")
    with tempfile.TemporaryDirectory(prefix="acc-build-") as temporary:
        tree = Path(temporary) / "tree"
        shutil.copytree(native.ROOT, tree, ignore=skipped)
        develop = [sys.executable, "scripts/native.py", "develop"]
        ready = [sys.executable, "-c", "import torch, torchacc_device"]
        print(f"cores: {len(os.sched_getaffinity(0))}, jobs: {native.jobs(dict(os.environ))}")
        print(f"clean build: {timed(develop, tree, environ):.0f} s", flush=True)
        print(f"nothing changed: {timed(develop, tree, environ):.1f} s", flush=True)
        for source in argv or SOURCES:
            with open(tree / source, "a") as file:
                file.write("\nstatic_assert(sizeof(int) == 4);\n")
            seconds = timed(develop, tree, environ) + timed(ready, tree, environ)
            print(f"{source} changed, built and imported: {seconds:.1f} s", flush=True)
        imports = []
        for _ in range(7):
            done = subprocess.run(
                [sys.executable, "-c", IMPORT],
                cwd=tree,
                env=environ,
                capture_output=True,
                text=True,
            )
            imports.append(float(done.stdout))
        print(f"import above `import torch`: {statistics.median(imports):.3f} s (median of 7)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
