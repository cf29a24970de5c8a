"""`torchacc.utils`: TorchAcc's names, and what they do here."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import weakref

import pytest
import torch
from torch import nn

import torchacc
from torchacc.utils import checkpoint, decompose, patch
from torchacc.utils.trace import trace
from torchacc.utils.utils import apply_to_tensors, partition_balanced


def test_the_logger_is_no_module():
    from torchacc.utils.logger import logger

    assert torchacc.utils.logger is logger is logging.getLogger("TorchAcc")


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: dict


Pair = collections.namedtuple("Pair", "left right")


def test_a_function_is_applied_to_the_tensors_of_all_containers():
    t = torch.ones(2)
    packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    made = apply_to_tensors(
        lambda tensor: tensor + 1,
        {"o": Output(t, {"a": [t]}), "p": Pair(t, "x"), "s": {1, t}, "packed": packed, "n": None},
    )
    assert type(made["o"]) is Output and made["o"].logits.tolist() == [2, 2]
    assert made["o"].extra["a"][0].tolist() == [2, 2]
    assert type(made["p"]) is Pair and made["p"].right == "x" and made["p"].left.tolist() == [2, 2]
    assert sorted(type(item).__name__ for item in made["s"]) == ["Tensor", "int"]
    assert made["packed"].data.tolist() == [2, 2, 2]
    assert made["packed"].batch_sizes.tolist() == packed.batch_sizes.tolist() == [2, 1]
    assert made["n"] is None and t.tolist() == [1, 1]


class Span(tuple):
    """Its constructor takes two things, and it has an attribute."""

    def __new__(cls, first, second):
        made = super().__new__(cls, (first, second))
        made.note = "mine"
        return made


class Both(set):
    def __init__(self, first, second):
        super().__init__((first, second))
        self.note = "mine"


class Named(Pair):
    def __new__(cls, left):
        return super().__new__(cls, left, 1)


@pytest.mark.parametrize(
    "make", [lambda t: Span(t, 1), lambda t: Both(t, 1), Named, lambda t: torch.max(t[None], 0)]
)
def test_types_with_constructors_of_their_own_are_kept(make):
    before = make(torch.ones(2))
    made = apply_to_tensors(lambda tensor: tensor + 1, before)
    assert type(made) is type(before) and getattr(made, "note", None) == getattr(
        before, "note", None
    )
    assert [t.tolist() for t in made if isinstance(t, torch.Tensor)][0] == [2, 2]
    assert len(made) == 2


def test_nothing_holds_the_function_afterwards():
    """A cycle would keep what it refers to until the next collection: memory of the device."""
    fn = lambda tensor: tensor  # noqa: E731
    seen = weakref.ref(fn)
    apply_to_tensors(fn, [{"a": (torch.ones(1),)}])
    del fn
    assert seen() is None


@pytest.mark.parametrize("weights", [[5, 1, 1, 1, 1, 4], [0, 0, 3], [1.5, 0.5, 2.5, 2.0, 0.25]])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_heaviest_part_weighs_as_little_as_it_can(weights, parts):
    bounds = partition_balanced(weights, parts)
    count = len(weights)
    assert bounds[0] == 0 and bounds[-1] == count and bounds == sorted(bounds)

    def heaviest(bounds):
        return max(sum(weights[i:j]) for i, j in itertools.pairwise(bounds))

    cuts = itertools.combinations(range(1, count), parts - 1)
    assert len(bounds) == parts + 1
    assert heaviest(bounds) == min(heaviest([0, *each, count]) for each in cuts)


def test_more_parts_than_layers_leave_some_empty():
    assert partition_balanced([2, 1], 4) == [0, 1, 2, 2, 2]
    assert partition_balanced([], 2) == [0, 0, 0]
    with pytest.raises(ValueError, match="num_parts = 0: should be at least 1"):
        partition_balanced([1], 0)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, scale=None, shift=2.0):
        y = self.linear(x) + shift
        return y if scale is None else y * scale


def test_a_model_is_traced_as_a_function_of_the_named_arguments():
    model, x = Scaled(), torch.ones(2, 3)
    traced = trace(model, ["x"])
    assert isinstance(traced, torch.fx.GraphModule) and traced.linear is model.linear
    assert torch.equal(traced(x), model(x))
    assert torch.equal(trace(model, ["x", "scale"])(x, 3.0), model(x, 3.0))
    assert [n.name for n in trace(model, None).graph.nodes if n.op == "placeholder"] == ["x"]
    with pytest.raises(ValueError, match="has no argument inputs. It has: x, scale, shift"):
        trace(model, ["inputs"])


def test_what_is_checkpointed_stays_so_in_what_is_traced():
    model = checkpoint.gradient_checkpoint(nn.Sequential(nn.Linear(3, 3), Scaled()), {"Scaled"})
    calls = []
    model[1].linear.register_forward_pre_hook(lambda *_: calls.append(1))
    trace(model, ["input"])(torch.ones(1, 3)).sum().backward()
    assert len(calls) == 2


def test_checkpointing_returns_the_model():
    model = nn.Sequential(Scaled(), Scaled())
    assert checkpoint.gradient_checkpoint(model, {"Scaled"}) is model
    block = Scaled()
    assert checkpoint.checkpoint_module(checkpoint.checkpoint_module(block)) is block
    calls = []
    block.linear.register_forward_pre_hook(lambda *_: calls.append(1))
    block(torch.ones(1, 3, requires_grad=True)).sum().backward()
    assert len(calls) == 2, "it was wrapped twice"


def test_what_patches_nothing_says_so(caplog):
    from torchacc import logger

    logger.forget_said_for_testing()
    functions = (
        patch.patch_fa,
        lambda: patch.patch_llama(True),
        lambda: patch.patch_qwen(use_flash_attn=False),
        decompose.replace_decompose,
    )
    with caplog.at_level("INFO", logger="TorchAcc"):
        for function in functions * 2:
            function()
    assert len([r for r in caplog.records if "nothing is" in r.message]) == len(functions)


@pytest.mark.parametrize("name", ["patch_amp", "patch_autocast"])
def test_what_is_patched_can_be_taken_back(acc_only, name):
    torchacc.unpatch()
    getattr(patch, name)()
    with torch.autocast("cuda", torch.float16):
        assert torch.is_autocast_enabled("acc")
    torchacc.unpatch()
