"""Operators are compared with the CPU's bit by bit, so without generated kernels.

test_close.py, tests/python/test_formulas.py and tests/fuzz compare the kernels.
"""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _bit_by_bit(unfused: None) -> None:
    """For the tests that run in this process; the workers are told in their environment."""
