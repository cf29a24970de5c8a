"""`torchacc.mark_dynamic` and `patch_qwen_model`: names of TorchAcc's with nothing left to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchacc

X = torch.ones(4, 6)


@pytest.mark.parametrize(
    ("dims", "bounds"), [(0, 4), (-1, 8), ([0, 1], [4, 9]), ((0,), (5,)), ([], [])]
)
def test_dimensions_and_their_bounds_are_taken(dims: Any, bounds: Any) -> None:
    before = repr((dims, bounds))
    assert torchacc.mark_dynamic(X, dims, bounds) is None
    assert repr((dims, bounds)) == before  # TorchAcc made negative ones positive, in the list


@pytest.mark.parametrize(
    ("x", "dims", "bounds", "kind", "words"),
    [
        ([1], 0, 4, AssertionError, r"x should be a Tensor, not \[1\] \(list\)"),
        (X, "0", 4, AssertionError, r"dims should be an int or a list of int, not '0' \(str\)"),
        (X, [0.0], [4], AssertionError, "dims should be an int"),
        (X, True, 4, AssertionError, "dims should be an int"),
        (X, 0, 4.0, AssertionError, "bounds should be an int"),
        (X, [0, 1], [8], AssertionError, "there are 2 dims and 1 bounds"),
        (X, 2, 4, ValueError, r"Dimension out of range .*range of \[-2, 1\], but got 2\)"),
        (X, -3, 4, ValueError, "Dimension out of range .*but got -3"),
        (X, 1, 5, ValueError, "The upper bound of the shape size 5 is below the size 6"),
        (X, [1, -1], [8, 8], ValueError, "dimension 1 is named twice"),
        (torch.tensor(1), 0, 1, ValueError, "0 dimensions"),
    ],
)
def test_what_is_wrong_is_named(x: Any, dims: Any, bounds: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        torchacc.mark_dynamic(x, dims, bounds)


def test_a_qwen_model_stays_as_it_is() -> None:
    model = nn.Linear(2, 2)
    assert torchacc.patch_qwen_model(model) is model
    with pytest.raises(TypeError, match=r"the model is a str, not a torch\.nn\.Module"):
        torchacc.patch_qwen_model("qwen")  # type: ignore[arg-type]
