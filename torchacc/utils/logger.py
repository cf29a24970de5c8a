"""The logger, under TorchAcc's name for its module."""

from torchacc.logger import logger

__all__ = ["logger"]
