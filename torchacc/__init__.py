"""torchacc: trains unchanged PyTorch programs on the lazy device `acc`.

import torchacc
model, loader = torchacc.accelerate(model, loader)
device = model.device
"""

# What torchacc_device/_foreign.py looks for, to tell this package from others of its name.
__acc_front_end__ = True

import torch  # noqa: F401  (first: the device's libraries link against torch's)

import torchacc_device  # noqa: F401  (registers the device)
from torchacc import amp, core, dist, embedding, import_utils, ops, syncfree, utils
from torchacc.accelerate import accelerate
from torchacc.boundary import install_hooks as _install_hooks
from torchacc.boundary import mark_step, sync
from torchacc.capture import capture
from torchacc.config import Config
from torchacc.context import GlobalContext, get_global_context
from torchacc.device import fetch_gradients, is_lazy_device, is_lazy_tensor, lazy_device
from torchacc.dynamic import mark_dynamic
from torchacc.explain import explain
from torchacc.graph_view import graph, profile_plans
from torchacc.huggingface import accelerate_hf_trainer, patch_qwen_model
from torchacc.loader import AsyncLoader
from torchacc.patch import patch, unpatch
from torchacc.report import report
from torchacc.scopes import eager, step
from torchacc.serialization import save, send_cpu_data_to_device
from torchacc.strict import strict
from torchacc.verify import verify
from torchacc_device._build_info import VERSION as __version__

_install_hooks()

__all__ = [
    "AsyncLoader",
    "Config",
    "GlobalContext",
    "__version__",
    "accelerate",
    "accelerate_hf_trainer",
    "amp",
    "capture",
    "core",
    "dist",
    "eager",
    "embedding",
    "explain",
    "fetch_gradients",
    "get_global_context",
    "graph",
    "import_utils",
    "is_lazy_device",
    "is_lazy_tensor",
    "lazy_device",
    "mark_dynamic",
    "mark_step",
    "ops",
    "patch",
    "patch_qwen_model",
    "profile_plans",
    "report",
    "save",
    "send_cpu_data_to_device",
    "step",
    "strict",
    "sync",
    "syncfree",
    "unpatch",
    "utils",
    "verify",
]
