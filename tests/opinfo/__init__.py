"""PyTorch's own operator database, run on the device under test and compared with the CPU."""

from torch.testing._internal import common_utils
from torch.testing._internal.opinfo import core

# Whoever draws samples is asked twice, by way of the sources of all that is on the stack, in which
# unittest it runs: in none here, which takes milliseconds to find out, and below pytest half of them
# a second.
for _module in (common_utils, core):
    assert hasattr(_module, "extract_test_fn")
    _module.extract_test_fn = lambda: None
