"""TorchAcc's utilities under their public names; `docs/utils.md` says which there are.

`logger` is the logger itself, not the module of that name.
"""

from torchacc.utils import checkpoint, cpu_offload, decompose, patch, trace, utils
from torchacc.utils.logger import logger

__all__ = [
    "checkpoint",
    "cpu_offload",
    "decompose",
    "logger",
    "patch",
    "trace",
    "utils",
]
