"""Hugging Face: what makes `Trainer` and `Accelerator` choose the lazy device."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn

from torchacc.device import device_type, is_lazy_device, lazy_device
from torchacc.files import replacing
from torchacc.launched import local_rank
from torchacc.logger import logger
from torchacc.serialization import write

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


def _float16(original: CodeType) -> CodeType:
    """Accelerator takes fp16 from devices of a list only, a constant in its constructor."""

    def longer(constant: Any) -> Any:
        is_list = isinstance(constant, tuple) and {"cuda", "npu", "xpu"}.issubset(constant)
        return (*constant, device_type()) if is_list else constant

    constants = tuple(map(longer, original.co_consts))
    if constants == original.co_consts:
        raise AttributeError("list of devices")
    return original.replace(co_consts=constants)


def take_float16(accelerator: ModuleType) -> None:
    """Has the module `accelerate.accelerator` take fp16 on the lazy device, if it can."""
    with contextlib.suppress(AttributeError):  # its own error says so then
        init = accelerator.Accelerator.__init__
        init.__code__ = _float16(init.__code__)


def _scaler(original: Callable[..., Any]) -> Callable[..., Any]:
    """accelerate chooses a scaler by the packages that are installed, and CUDA's without any."""

    def get_grad_scaler(distributed_type: Any = None, **options: Any) -> torch.amp.GradScaler:
        kinds = importlib.import_module("accelerate.utils").DistributedType
        if distributed_type == kinds.FSDP:
            return original(distributed_type, device=device_type(), **options)
        return torch.amp.GradScaler(device_type(), **options)

    return get_grad_scaler


def _random_file(folder: str | Path, process: int) -> Path:
    return Path(folder, f"rng_state_{device_type()}_{process}.pth")


def _save_random(folder: str | Path, process: int, device: torch.device) -> None:
    """What the device draws next, beside the states that the checkpoint has of others."""
    if is_lazy_device(device):
        state = torch.get_device_module(device).get_rng_state(device)
        with replacing(_random_file(folder, process)) as path:
            write(state, path)


def _load_random(folder: str | Path, process: int, device: torch.device) -> None:
    if not is_lazy_device(device):
        return
    path = _random_file(folder, process)
    if path.exists():
        state = torch.load(path, weights_only=True)
        torch.get_device_module(device).set_rng_state(state, device)
    else:
        logger.info("%s is not there: what is drawn on %s goes on otherwise", path, device)


def _trainer_saves(original: Callable[..., None]) -> Callable[..., None]:
    """Trainer's checkpoints have the random states of devices that it knows."""

    def _save_rng_state(self: Any, output_dir: str) -> None:
        original(self, output_dir)
        _save_random(output_dir, self.args.process_index, self.args.device)

    return _save_rng_state


def _trainer_loads(original: Callable[..., None]) -> Callable[..., None]:
    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        original(self, checkpoint)
        if checkpoint is not None:
            _load_random(checkpoint, self.args.process_index, self.args.device)

    return _load_rng_state


def _accelerator_saves(original: Callable[..., Path]) -> Callable[..., Path]:
    """Accelerator's, too."""

    def save_accelerator_state(*args: Any, **kwargs: Any) -> Path:
        folder = original(*args, **kwargs)
        state = importlib.import_module("accelerate.state").PartialState()
        _save_random(folder, state.process_index, state.device)
        return folder

    return save_accelerator_state


def _accelerator_loads(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_accelerator_state(input_dir: str | Path, *args: Any, **kwargs: Any) -> Any:
        found = original(input_dir, *args, **kwargs)
        state = importlib.import_module("accelerate.state").PartialState()
        _load_random(input_dir, state.process_index, state.device)
        return found

    return load_accelerator_state


# Module, what is in it or "", and the name of what changes there; and what stands for it.
_Place = tuple[str, str, str]
_WRAPPED: dict[_Place, Callable[[Any], Any]] = {
    ("accelerate.state", "PartialState", "_prepare_backend"): _backend,
    ("accelerate.accelerator", "Accelerator.__init__", "__code__"): _float16,
    ("accelerate.accelerator", "", "get_grad_scaler"): _scaler,
    ("accelerate.accelerator", "", "save_accelerator_state"): _accelerator_saves,
    ("accelerate.accelerator", "", "load_accelerator_state"): _accelerator_loads,
    ("transformers.training_args", "", "is_torch_bf16_gpu_available"): _bfloat16,
    ("transformers.trainer", "Trainer", "_save_rng_state"): _trainer_saves,
    ("transformers.trainer", "Trainer", "_load_rng_state"): _trainer_loads,
}
_before: dict[_Place, Any] = {}
_variable_before: str | None = None


def accelerate_hf_trainer(enable: bool = True) -> None:
    """Has Hugging Face's `Trainer` and `Accelerator` train on the lazy device from here on.

    Call it before `TrainingArguments` or an `Accelerator` is made; these ask once which device
    there is. It sets ACCELERATE_TORCH_DEVICE, which is accelerate's own way to be told, and makes
    functions of both packages know the device: those that choose a process group's backend and a
    gradient scaler, those that allow `bf16=True` and `fp16=True`, and those that write random
    states into checkpoints and read them. What is not installed is left out.

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
    if not _before:
        replacements = _replacements()
        _variable_before = os.environ.get(_VARIABLE)
        for place, (original, replacement) in replacements.items():
            _before[place] = original
            _set(place, replacement)
    os.environ[_VARIABLE] = str(device)
    logger.info("Trainer and Accelerator use %s", device)


def _replacements() -> dict[_Place, tuple[Any, Any]]:
    """What changes in the packages that are installed: what was there, and what will be.

    Raises ImportError.
    """
    found = {}
    for place, wrap in _WRAPPED.items():
        module, owner, name = place
        try:
            original = getattr(_owner(module, owner), name)
            found[place] = original, wrap(original)
        except ImportError:
            continue  # transformers may be missing
        except AttributeError as error:
            package = importlib.import_module(module.partition(".")[0])
            raise ImportError(
                f"[accelerate_hf_trainer] {package.__name__} "
                f"{getattr(package, '__version__', 'of an unknown version')} has no "
                f"{'.'.join(filter(None, (module, owner, name)))} as it should be ({error}). "
                "Install a version that has it: docs/ecosystem.md names the tested ones."
            ) from error
    return found


def _owner(module: str, name: str) -> Any:
    found = importlib.import_module(module)
    return attrgetter(name)(found) if name else found


def _set(place: _Place, value: Any) -> None:
    module, owner, name = place
    setattr(_owner(module, owner), name, value)


def _undo() -> None:
    global _variable_before
    if not _before:
        return
    for place, original in _before.items():
        _set(place, original)
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
