"""Registration when torch is imported: only where it cannot harm, never raising, undoable."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from tests.helpers import ROOT, run_beside
from torchacc_device import _choice

pytestmark = pytest.mark.usefixtures("acc_only")

STATE = """
import sys
def state():
    import torch
    name = torch._C._get_privateuse1_backend_name()
    return ("on" if name == "acc" and hasattr(torch, "acc") else "off", name)
"""


PACKAGES = ("torchacc_device", "torchacc")


def add_entry_point(folder: Path) -> None:
    """Makes `folder` look like one into which a wheel was installed."""
    info = folder / "acc_torch-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acc-torch\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nacc = torchacc_device:_autoload\n")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with both packages and no entry point."""
    for name in PACKAGES:
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.fixture
def installed(copied: Path) -> Path:
    """A folder with both packages and the entry point."""
    add_entry_point(copied)
    return copied


def run(folder: Path, code: str, **env: str | None) -> subprocess.CompletedProcess[str]:
    unset = {"TORCH_DEVICE_BACKEND_AUTOLOAD": None, "USE_TORCHACC": None}
    return run_beside(folder, STATE + code, **{**unset, **env})


def outcome(folder: Path, code: str = "print(state()[0])", **env: str | None) -> str:
    done = run(folder, code, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_model_moves_without_any_import(installed: Path) -> None:
    """Importing torch has started neither the device nor CUDA."""
    code = """
import torch
print(state()[0], torch.cuda.is_initialized(), torch.acc.is_initialized())
print(torch.nn.Linear(2, 2).to('acc').weight.device)
"""
    assert outcome(installed, code, USE_TORCHACC="1") == "on False False\nacc:0"


def test_the_variables_decide(installed: Path) -> None:
    """That USE_TORCHACC is the last word, either way, is a part of the tests before and behind."""
    assert outcome(installed, TORCH_DEVICE_BACKEND_AUTOLOAD="0", USE_TORCHACC="1") == "off"
    usable = torch.version.cuda is not None and torch.cuda.device_count() > 0
    assert outcome(installed) == ("off" if usable else "on")


def test_nothing_is_registered_without_the_entry_point(copied: Path) -> None:
    assert outcome(copied, USE_TORCHACC="1") == "off"


@pytest.mark.parametrize("package", ["torchacc_device", "torchacc"])
def test_an_explicit_import_registers_whatever_was_decided(installed: Path, package: str) -> None:
    code = f"""
import torch
assert state()[0] == "off" and "torchacc_device" not in sys.modules
import {package}
print(state()[0], (torch.ones(2, device="acc") + 1).tolist())
"""
    assert outcome(installed, code, USE_TORCHACC="0") == "on [2.0, 2.0]"


@pytest.mark.parametrize("package", ["torchacc_device", "torchacc"])
@pytest.mark.parametrize("use", ["0", "1"])
def test_our_import_before_torch_works(installed: Path, package: str, use: str) -> None:
    code = f"""
import os
import {package}
import torch
print(state()[0], os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD"))
"""
    assert outcome(installed, code, USE_TORCHACC=use) == "on None"


def test_a_broken_build_does_not_break_torch(tmp_path: Path) -> None:
    add_entry_point(tmp_path)
    package = tmp_path / "torchacc_device"
    package.mkdir()
    for path in (ROOT / "torchacc_device").glob("*.py"):
        if path.name != "_build_info.py":
            (package / path.name).write_text(path.read_text())
    code = """
import torch
print(torch.ones(1).item(), state()[0])
try:
    import torchacc_device
except ImportError as error:
    print(error)
"""
    done = run(tmp_path, code, USE_TORCHACC="1")
    assert done.returncode == 0, done.stderr
    assert "1.0 off" in done.stdout and "not built: run `make develop`" in done.stdout
    assert "acc is not available in this process" in done.stderr


def test_a_wrong_choice_is_told_and_does_not_break_torch(installed: Path) -> None:
    done = run(installed, "print(state()[0])", USE_TORCHACC="yes")
    assert done.returncode == 0 and done.stdout.strip() == "off"
    assert "USE_TORCHACC=yes is not allowed. Set it to one of: 0, 1" in done.stderr


def test_another_device_in_the_same_place_is_respected(installed: Path) -> None:
    code = """
import torch
torch.utils.rename_privateuse1_backend("other")
try:
    import torchacc_device
except (ImportError, RuntimeError) as error:
    print(error)
print(state())
"""
    text = outcome(installed, code, USE_TORCHACC="0")
    assert "a device named 'other'" in text and "('off', 'other')" in text


# --- the decision itself ----------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Sets what the decision sees: torch's CUDA version, NVML's count, the driver."""

    def set_machine(cuda: str | None, count: int, driver: str | None) -> None:
        monkeypatch.delenv("USE_TORCHACC", raising=False)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: cuda is not None)
        monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: count)
        monkeypatch.setattr(_choice, "driver_version", lambda: driver)

    return set_machine


@pytest.mark.parametrize(
    ("cuda", "count", "driver", "usable"),
    [
        (None, 1, "590.10", False),  # torch without CUDA
        ("13.0", 0, "590.10", False),  # no GPU, or all hidden
        ("13.0", -1, None, False),  # no driver at all
        ("13.0", 2, "590.10", True),
        ("13.0", 2, "550.54.15", False),  # too old for this torch
        ("12.8", 2, "550.54.15", True),
        ("13.0", -1, "590.10", True),  # NVML is missing: in doubt, leave CUDA alone
        ("13.0", 1, None, True),  # no /proc entry (WSL): in doubt, leave CUDA alone
        ("99.0", 1, "590.10", True),
    ],
)
def test_a_usable_gpu_is_recognised(
    machine, cuda: str | None, count: int, driver: str | None, usable: bool
) -> None:
    machine(cuda, count, driver)
    assert _choice.cuda_is_usable() == usable
    assert _choice.wanted()[0] != usable


def test_the_variable_overrides_the_machine(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("13.0", 2, "590.10")
    monkeypatch.setenv("USE_TORCHACC", "1")
    assert _choice.wanted() == (True, "USE_TORCHACC=1")
    machine(None, 0, None)
    monkeypatch.setenv("USE_TORCHACC", "0")
    assert _choice.wanted() == (False, "USE_TORCHACC=0")


def test_the_driver_version_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    monkeypatch.setattr(_choice, "_DRIVER_FILE", str(file))
    assert _choice.driver_version() == "550.54.15"
    monkeypatch.setattr(_choice, "_DRIVER_FILE", str(tmp_path / "absent"))
    assert _choice.driver_version() is None
