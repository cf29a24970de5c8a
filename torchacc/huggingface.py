"""Hugging Face: what makes `Trainer` and `Accelerator` choose the lazy device."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from torch import nn

from torchacc.device import device_type, lazy_device
from torchacc.launched import local_rank
from torchacc.logger import logger

# accelerate's own way to be told a device; transformers reads it, too.
_VARIABLE = "ACCELERATE_TORCH_DEVICE"


def _backend(original: Callable[..., Any]) -> Callable[..., Any]:
    """accelerate knows backends by devices, and trains each process alone where it knows none."""

    def _prepare_backend(
        self: Any, cpu: bool = False, sagemaker_dp: Any = False, backend: str | None = None
    ) -> Any:
        if cpu or os.environ.get("LOCAL_RANK") is None:
            return original(self, cpu, sagemaker_dp, backend)
        kinds = importlib.import_module("accelerate.utils").DistributedType
        return backend or device_type(), kinds.MULTI_GPU

    return _prepare_backend


def _bfloat16(original: Callable[[], bool]) -> Callable[[], bool]:
    """TrainingArguments takes bf16=True from devices of its list only."""

    def is_torch_bf16_gpu_available() -> bool:
        return True

    return is_torch_bf16_gpu_available


# Module, class in it or "", name; and what stands for it.
_Place = tuple[str, str, str]
_WRAPPED: dict[_Place, Callable[[Any], Any]] = {
    ("accelerate.state", "PartialState", "_prepare_backend"): _backend,
    ("transformers.training_args", "", "is_torch_bf16_gpu_available"): _bfloat16,
}
_before: dict[_Place, Any] = {}
_variable_before: str | None = None


def accelerate_hf_trainer(enable: bool = True) -> None:
    """Has Hugging Face's `Trainer` and `Accelerator` train on the lazy device from here on.

    Call it before `TrainingArguments` or an `Accelerator` is made; these ask once which device
    there is. It sets ACCELERATE_TORCH_DEVICE, which is accelerate's own way to be told, and makes
    two functions know the device: one of accelerate that chooses a process group's backend, and one
    of transformers that allows `bf16=True`. What is not installed is left out.

    Args:
        enable: False takes all of it back.

    Raises:
        ImportError: accelerate is not installed, or a package does not have what has to be changed.
        RuntimeError: there is no lazy device for this process.
    """
    global _variable_before
    if not enable:
        _undo()
        return
    device = lazy_device()
    if os.environ.get("LOCAL_RANK"):
        device = type(device)(device.type, local_rank())
    try:
        importlib.import_module("accelerate")
    except ImportError as error:
        raise ImportError(
            f"[accelerate_hf_trainer] accelerate cannot be imported ({error}). "
            "Install it: pip install accelerate"
        ) from error
    originals = _originals()
    if not _before:
        _variable_before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = str(device)
    for place, original in originals.items():
        if place not in _before:
            _before[place] = original
            module, kind, name = place
            setattr(_owner(module, kind), name, _WRAPPED[place](original))
    logger.info("Trainer and Accelerator use %s", device)


def _originals() -> dict[_Place, Any]:
    """What is to be wrapped, of the packages that are installed. Raises ImportError."""
    found = {}
    for module, kind, name in _WRAPPED:
        try:
            found[module, kind, name] = getattr(_owner(module, kind), name)
        except ImportError:
            continue  # transformers may be missing
        except AttributeError as error:
            package = importlib.import_module(module.partition(".")[0])
            raise ImportError(
                f"[accelerate_hf_trainer] {package.__name__} "
                f"{getattr(package, '__version__', 'of an unknown version')} has no "
                f"{'.'.join(filter(None, (module, kind, name)))}. Install a version that has it: "
                "docs/ecosystem.md names the tested ones."
            ) from error
    return found


def _owner(module: str, name: str) -> Any:
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def _undo() -> None:
    global _variable_before
    if not _before:
        return
    for (module, kind, name), original in _before.items():
        setattr(_owner(module, kind), name, original)
    _before.clear()
    if _variable_before is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = _variable_before
    _variable_before = None


def patch_qwen_model(model: nn.Module) -> nn.Module:
    """Returns the model as it is: there is nothing to patch.

    TorchAcc took reads of the device out of the code that came with the first Qwen's weights, which
    current transformers cannot load. Qwen's later models are transformers' own. A read splits a
    step here and is otherwise allowed; `torchacc.report()` names the lines.

    Raises TypeError for anything but a Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"[patch_qwen_model] the model is a {type(model).__name__}, not a torch.nn.Module."
        )
    return model
