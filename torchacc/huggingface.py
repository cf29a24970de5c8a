"""Hugging Face: what makes Trainer and Accelerate choose the lazy device."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from torch import nn

from torchacc.device import lazy_device
from torchacc.launched import world_size
from torchacc.patch import patch, unpatch

# Read by accelerate's PartialState and by transformers' TrainingArguments, when they are made.
_VARIABLE = "ACCELERATE_TORCH_DEVICE"
