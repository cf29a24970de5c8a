"""Attention under TorchAcc's names: whole, padded, packed, and split over processes.

Imported name by name, when first asked for, so that `import torchacc` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchacc.ops import context_parallel
    from torchacc.ops.attention import flash_attn_xla, scaled_dot_product_attention
    from torchacc.ops.liger import (
        apply_liger_kernel,
        apply_liger_kernel_to_llama,
        apply_liger_kernel_to_qwen2,
    )
    from torchacc.ops.varlen import (
        flash_attn_varlen_position_ids_xla,
        flash_attn_varlen_qkvpacked_xla,
        flash_attn_varlen_xla,
        spmd_flash_attn_varlen_xla,
    )

_MODULES = {
    "apply_liger_kernel": "torchacc.ops.liger",
    "apply_liger_kernel_to_llama": "torchacc.ops.liger",
    "apply_liger_kernel_to_qwen2": "torchacc.ops.liger",
    "flash_attn_varlen_position_ids_xla": "torchacc.ops.varlen",
    "flash_attn_varlen_qkvpacked_xla": "torchacc.ops.varlen",
    "flash_attn_varlen_xla": "torchacc.ops.varlen",
    "flash_attn_xla": "torchacc.ops.attention",
    "scaled_dot_product_attention": "torchacc.ops.attention",
    "spmd_flash_attn_varlen_xla": "torchacc.ops.varlen",
}


def __getattr__(name: str) -> Any:
    if name == "context_parallel":
        return importlib.import_module("torchacc.ops.context_parallel")
    if name not in _MODULES:
        raise AttributeError(f"module 'torchacc.ops' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "apply_liger_kernel",
    "apply_liger_kernel_to_llama",
    "apply_liger_kernel_to_qwen2",
    "context_parallel",
    "flash_attn_varlen_position_ids_xla",
    "flash_attn_varlen_qkvpacked_xla",
    "flash_attn_varlen_xla",
    "flash_attn_xla",
    "scaled_dot_product_attention",
    "spmd_flash_attn_varlen_xla",
]
