"""PyTorch's own operator database, run on the device under test and compared with the CPU."""

from torch.testing._internal import common_utils
from torch.testing._internal.opinfo import core

# Whoever draws a sample looks twice for the unittest that it runs in, in the sources of all that is
# on the stack. Here is none, and to find that out took half of the time of these tests.
for _module in (common_utils, core):
    assert hasattr(_module, "extract_test_fn")
    _module.extract_test_fn = lambda: None
