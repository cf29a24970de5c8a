"""What TI-ACC has for PyTorch."""

from tiacc_training.torch import tiacc_torch_warp

__all__ = ["tiacc_torch_warp"]
