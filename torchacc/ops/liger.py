"""Liger's names. Fusion makes such kernels of what models record, so there is nothing to patch."""

from __future__ import annotations

import logging

from torchacc.logger import say_once

_MESSAGE = (
    "apply_liger_kernel: no module is patched. On acc the model's own rotary embeddings, norms, "
    "SwiGLU and cross entropy are fused as they are. Logits are still written to memory: "
    "fused_linear_cross_entropy does not save it."
)


def apply_liger_kernel() -> None:
    """`apply_liger_kernel_to_llama()` and `apply_liger_kernel_to_qwen2()`. Says so once."""
    apply_liger_kernel_to_llama()
    apply_liger_kernel_to_qwen2()


def apply_liger_kernel_to_llama(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
) -> None:
    """Patches nothing, and says so once: see docs/attention.md.

    Liger's Triton kernels stand in for rotary embeddings, RMS norms, SwiGLU and cross entropy of
    Hugging Face's models. Here the models' own operators are fused into such kernels.

    Raises:
        AssertionError: both `cross_entropy` and `fused_linear_cross_entropy`, as in TorchAcc.
    """
    _apply("apply_liger_kernel_to_llama", cross_entropy, fused_linear_cross_entropy)


def apply_liger_kernel_to_qwen2(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
) -> None:
    """As `apply_liger_kernel_to_llama`.

    Raises:
        AssertionError: both `cross_entropy` and `fused_linear_cross_entropy`, as in TorchAcc.
    """
    _apply("apply_liger_kernel_to_qwen2", cross_entropy, fused_linear_cross_entropy)


def _apply(where: str, cross_entropy: bool, fused_linear_cross_entropy: bool) -> None:
    if cross_entropy and fused_linear_cross_entropy:
        raise AssertionError(
            f"[{where}] cross_entropy and fused_linear_cross_entropy cannot both be True: the "
            "second, True unless it is given, takes the place of the first."
        )
    say_once("liger", _MESSAGE, logging.INFO)
