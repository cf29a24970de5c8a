"""TorchAcc's functions that patch other libraries.

What they were for needs no patch on the lazy device, or is done by `torchacc.patch`.
"""

from __future__ import annotations

import logging

from torchacc.logger import say_once
from torchacc.patch import patch


def patch_amp() -> None:
    """`torchacc.patch()`: torch's own optimizers and scaler are sync-free on the lazy device."""
    patch()


def patch_autocast() -> None:
    """`torchacc.patch()`: autocast for "xla" and "cuda" acts on the lazy device."""
    patch()


def patch_fa() -> None:
    """Patches nothing, and says so: see `_say_what_runs`."""
    _say_what_runs("patch_fa")


def patch_llama(use_flash_attn: bool = True) -> None:
    """Patches nothing, and says so: see `_say_what_runs`."""
    _say_what_runs("patch_llama")


def patch_qwen(use_flash_attn: bool = True) -> None:
    """Patches nothing, and says so: see `_say_what_runs`."""
    _say_what_runs("patch_qwen")


def _say_what_runs(name: str) -> None:
    """TorchAcc put its flash attention into transformers; here torch's own attention is fused."""
    say_once(
        name,
        f"[{name}] nothing is patched: transformers runs on torch's scaled_dot_product_attention. "
        "Load the model with attn_implementation='sdpa', its default.",
        logging.INFO,
    )
