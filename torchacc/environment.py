"""The environment report of `python -m torchacc env`: read-only, from this machine alone."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Any

import torch

import torchacc_device
from torchacc.device import device_type
from torchacc_device import _C, _build_info, _foreign

Section = dict[str, Any]

# Settings of other projects that decide how this one runs.
_VARIABLES = (
    "USE_TORCHACC",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
)
_PREFIX = "ACC_"


def environment() -> dict[str, Section]:
    """Sections of plain values (str, int, float, bool, list, None), ready for JSON."""
    return {
        "torchacc": _own(),
        "torch": _torch(),
        "device": _device(),
        "machine": _machine(),
        "variables": _variables(),
    }


def render(report: dict[str, Section]) -> str:
    """The report as text, one value per line."""
    lines = []
    for title, section in report.items():
        lines.append(f"{title}:")
        width = max((len(key) for key in section), default=0)
        for key, value in section.items():
            lines.append(f"  {key:<{width}}  {_text(value)}".rstrip())
    return "\n".join(lines)


def size_text(count: int) -> str:
    """Bytes for people: `size_text(14_000)` is "13.7 KiB"."""
    if count < 1 << 10:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 3)
    return f"{count / (1 << 10 * power):.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(item) for item in value) or "-"
    return str(value)


def _own() -> Section:
    foreign = _foreign.find()
    section: Section = {
        "version": _build_info.VERSION,
        "front end": os.path.dirname(os.path.abspath(__file__)),
        "device": os.path.dirname(os.path.abspath(torchacc_device.__file__)),
    }
    for name, value in sorted(vars(_build_info).items()):
        if name.isupper() and name != "VERSION":
            section[f"built: {name.lower()}"] = value
    section["other torchacc"] = None if foreign is None else foreign.message()
    return section


def _torch() -> Section:
    section: Section = {
        "version": torch.__version__,
        "path": os.path.dirname(os.path.abspath(torch.__file__)),
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "autoload": sorted(
            entry.name for entry in importlib.metadata.entry_points(group="torch.backends")
        ),
    }
    try:
        section["torchvision"] = importlib.metadata.version("torchvision")
    except importlib.metadata.PackageNotFoundError:
        section["torchvision"] = None
    return section


def _device() -> Section:
    name = device_type()
    module = torch.get_device_module(name)
    count = module.device_count()
    section: Section = {
        "executor": _C.executor_name(),
        "mode": _C.mode(),
        "cuda in the build": _C.is_cuda_build(),
        "devices": count,
    }
    for index in range(count):
        section[f"{name}:{index}"] = module.get_device_name(index)
    section["nvidia driver"] = _nvidia_driver()
    section["nvidia gpu unusable"] = _C.gpu_problem() or None
    return section


def _nvidia_driver() -> str | None:
    """The version of the loaded kernel module, read without starting CUDA."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8", errors="replace") as file:
            return file.readline().strip() or None
    except OSError:
        return None


def _machine() -> Section:
    return {
        "system": platform.platform(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "c library": " ".join(platform.libc_ver()),
        "processor": _proc("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": os.cpu_count(),
        "cores for this process": len(os.sched_getaffinity(0)),
        "memory": _proc("/proc/meminfo", "MemTotal"),
        "memory available": _proc("/proc/meminfo", "MemAvailable"),
    }


def _proc(path: str, key: str) -> str | None:
    """The value of the first line `key : value` of a file under /proc."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == key:
                    return value.strip()
    except OSError:
        pass
    return None


def _variables() -> Section:
    """What is set, and what begins like one of our names and is none."""
    names = [*_VARIABLES, *sorted(name for name in os.environ if name.startswith(_PREFIX))]
    section: Section = {name: os.environ[name] for name in names if name in os.environ}
    unknown = _C.unknown_environment()
    if unknown:
        section["not known"] = unknown
    return section
