"""The module in which TI-ACC's first generation has its classes; the spelling is theirs."""

from tiacc_training.torch.adaptive_precision import MixedPrecision_TrainingPolicy
from tiacc_training.torch.index_dataset import IndexTFRDataset

__all__ = ["IndexTFRDataset", "MixedPrecision_TrainingPolicy"]
