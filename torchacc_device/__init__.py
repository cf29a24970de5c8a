"""The device `acc` for PyTorch.

`import torchacc_device` registers it, after which `torch.device("acc")` and `torch.acc` work.
"""

from __future__ import annotations

import logging
import os
import sys
from types import ModuleType

_AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_registered = False


def _import_torch() -> ModuleType:
    """torch, imported without its loading of devices, which would come back here half-way."""
    if "torch" not in sys.modules:
        before = os.environ.get(_AUTOLOAD_VARIABLE)
        os.environ[_AUTOLOAD_VARIABLE] = "0"
        try:
            import torch
        finally:
            if before is None:
                del os.environ[_AUTOLOAD_VARIABLE]
            else:
                os.environ[_AUTOLOAD_VARIABLE] = before
    import torch

    return torch


def _inside_import_of_torch() -> bool:
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _check_build(torch_version: str) -> None:
    """Refuses, before anything native is loaded, what this build was not made for."""
    try:
        from torchacc_device import _build_info
    except ImportError:
        raise ImportError(
            "[torchacc_device] not built: run `make develop` in the source tree."
        ) from None
    here = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    if here != _build_info.PYTHON_TAG:
        raise ImportError(
            f"[torchacc_device] built for Python {_build_info.PYTHON_TAG}, and this is {here}. "
            "Build it for this interpreter: `make develop PYTHON=...`."
        )
    if torch_version != _build_info.TORCH_VERSION:
        raise ImportError(
            f"[torchacc_device] built against torch {_build_info.TORCH_VERSION}, and this is torch "
            f"{torch_version}. Build it again (`make develop`), or install that torch."
        )


def _register() -> None:
    global _registered
    if _registered:
        return
    torch = _import_torch()
    _check_build(torch.__version__)
    if torch.cuda.is_initialized():
        logging.getLogger("TorchAcc").warning(
            "[torchacc_device] CUDA was used in this process before. From here on acc is the "
            "accelerator, and backward on CUDA tensors fails: use CUDA in another process."
        )

    import atexit

    from torchacc_device import _C, _boundary, _distributed, _patches, acc

    # The name is registered in C++; torch's Python side keeps a copy of it.
    torch.utils.rename_privateuse1_backend("acc")
    if getattr(torch, "acc", None) is not acc:
        torch._register_device_module("acc", acc)
        for name in ("amp", "memory", "random", "streams"):
            sys.modules[f"torch.acc.{name}"] = getattr(acc, name)
    if not hasattr(torch.Tensor, "is_acc"):
        torch.utils.generate_methods_for_privateuse1_backend(
            for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
        )
    here = os.path.dirname(os.path.abspath(__file__))
    # Also of Python itself: copy.deepcopy says no more of the program than torch does.
    packages = (
        os.path.dirname(torch.__file__),
        here,
        f"{os.path.dirname(here)}/torchacc",
        f"{os.path.dirname(here)}/tiacc_training",
        os.path.dirname(os.__file__),
    )
    _C.set_library_folders([f"{package}/" for package in packages])
    _patches.apply()
    _boundary.install()
    _distributed.install()
    atexit.register(_stop)
    _registered = True
    _tell_foreign_front_end()


def _stop() -> None:
    """Submits what is left, while there is an interpreter."""
    from torchacc_device import _C

    problem = _C.stop()
    # After an error that ended the program nobody waits for what was recorded behind it.
    if problem and not hasattr(sys, "last_value"):
        print(
            f"[acc] the last step of this process has failed: {problem.rstrip('.')}. Call "
            "torch.acc.synchronize() at the end of the program to have it raised.",
            file=sys.stderr,
        )


def _tell_foreign_front_end() -> None:
    from torchacc_device import _foreign

    foreign = _foreign.find()
    if foreign is not None:
        logging.getLogger("TorchAcc").warning(foreign.message())


def _forget() -> None:
    """Makes the next `import torchacc_device` begin anew. A native module is loaded only once."""
    native = f"{__name__}._C"
    for name in [n for n in sys.modules if n.split(".")[0] == __name__ and n != native]:
        del sys.modules[name]


def _autoload() -> None:
    """Called by torch at the end of its import; see _choice.py. Never raises."""
    log = logging.getLogger("TorchAcc")
    try:
        from torchacc_device import _choice

        wanted, reason = _choice.wanted()
        if wanted:
            _register()
        else:
            log.debug("[torchacc_device] not registered: %s", reason)
    except Exception as error:
        log.warning("%s The device acc is not available in this process.", error)
    if not _registered:
        _forget()


if not _inside_import_of_torch():
    _register()
