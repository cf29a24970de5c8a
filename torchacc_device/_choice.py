"""Whether the device registers by itself when torch is imported.

torch calls the entry point of the group `torch.backends` at the end of its own import. Registering
makes acc the accelerator of the process, and backward on CUDA tensors then fails; so it happens
only where no CUDA GPU is usable, or where the user asks for it:

    USE_TORCHACC=1   always      USE_TORCHACC=0   never      (TORCH_DEVICE_BACKEND_AUTOLOAD=0: nor
                                                              any other device)

Nothing here may raise, start CUDA or be slow: it runs inside every `import torch`.
"""

from __future__ import annotations

import os
import re

import torch

_VARIABLE = "USE_TORCHACC"
_DRIVER_FILE = "/proc/driver/nvidia/version"
# The oldest driver (its major version) for programs built with a major version of CUDA.
_OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}


def wanted() -> tuple[bool, str]:
    """Whether to register, and why or why not.

    Raises ValueError when USE_TORCHACC is neither 0 nor 1.
    """
    choice = os.environ.get(_VARIABLE, "")
    if choice not in ("", "0", "1"):
        raise ValueError(
            f"[env] {_VARIABLE}={choice} is not allowed. Set it to one of: 0, 1, or unset it."
        )
    if choice == "1":
        return True, f"{_VARIABLE}=1"
    if choice == "0":
        return False, f"{_VARIABLE}=0"
    other = torch._C._get_privateuse1_backend_name()
    if other not in ("privateuseone", "acc"):
        return False, f"this process has the device {other!r} already."
    if cuda_is_usable():
        return False, f"this machine has a usable CUDA GPU. Import torchacc, or set {_VARIABLE}=1."
    return True, "no CUDA GPU is usable"


def cuda_is_usable() -> bool:
    """Whether torch can use a CUDA GPU, found out without starting CUDA; in doubt, yes."""
    if torch.version.cuda is None or not torch.backends.cuda.is_built():
        return False
    # NVML counts the GPUs that CUDA_VISIBLE_DEVICES shows and leaves the process able to fork.
    count = getattr(torch.cuda, "_device_count_nvml", lambda: -1)()
    if count == 0:
        return False
    driver = driver_version()
    if count < 0 and driver is None:
        return False
    oldest = _OLDEST_DRIVER.get(torch.version.cuda.split(".")[0], 0)
    return driver is None or int(driver.split(".")[0]) >= oldest


def driver_version() -> str | None:
    """The version of the loaded NVIDIA driver, for example "580.65.06"; None when there is none."""
    try:
        with open(_DRIVER_FILE, encoding="utf-8", errors="replace") as file:
            found = re.search(r"\b(\d+\.[\d.]+)\b", file.readline())
    except OSError:
        return None
    return found[1] if found else None
