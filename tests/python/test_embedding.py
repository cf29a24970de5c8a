"""torchacc.embedding: rows by id, lookups against nn.Embedding and nn.EmbeddingBag, plans."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchacc
from tests import helpers
from torchacc.embedding import (
    DynamicEmbedding,
    embedding_lookup,
    embedding_lookup_sparse,
    get_variable,
)

pytestmark = pytest.mark.usefixtures("acc_only")

LARGE = 2**63 - 1
# Bags of 0 to 4 ids, equal ones in one bag and in several, large and negative ones.
IDS = torch.tensor([7, -3, 7, LARGE, -3, 7, 7, -LARGE - 1, 5, 5])
OFFSETS = torch.tensor([0, 0, 3, 4, 8, 8, 10])
WEIGHTS = torch.tensor([1.0, 2.0, -0.5, 3.0, 0.25, 4.0, 1.5, 1.0, 0.5, 0.75])
COMBINERS = ("sum", "mean", "sqrtn")


@pytest.fixture
def table(device: str) -> DynamicEmbedding:
    torch.manual_seed(0)
    return get_variable("t", 3, capacity=8).to(device)


def rows_of(table: DynamicEmbedding, ids: Tensor) -> Tensor:
    """The row of each id, which has one; on the CPU."""
    known = table.ids.tolist()
    return torch.tensor([known.index(key) for key in ids.flatten().tolist()]).view(ids.shape)


def expected(
    weight: Tensor, rows: Tensor, offsets: Tensor, weights: Tensor | None, combiner: str
) -> Tensor:
    """The combiners as TensorFlow defines them, by nn.EmbeddingBag with divided weights."""
    weights = torch.ones(len(rows)) if weights is None else weights
    divided = []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        part = weights[begin:end]
        by = {"sum": torch.ones(()), "mean": part.sum(), "sqrtn": part.square().sum().sqrt()}
        divided.append(part / by[combiner])
    return nn.functional.embedding_bag(
        rows,
        weight,
        offsets,
        mode="sum",
        include_last_offset=True,
        per_sample_weights=torch.cat(divided),
    )


# --- lookups --------------------------------------------------------------------------------------


def test_the_example_of_tensorflows_documentation(device: str) -> None:
    table = get_variable("t", 2, capacity=4).to(device)
    table.add(torch.arange(4))
    with torch.no_grad():
        table.weight[:4].copy_(torch.arange(1.0, 9).view(4, 2))
    bags = (torch.tensor([0, 1, 3, 2]), torch.tensor([0, 2, 3, 4]))
    found = embedding_lookup_sparse(table, bags, combiner="sum")
    assert found.device.type == device
    assert found.tolist() == [[4, 6], [7, 8], [5, 6]]
    assert embedding_lookup_sparse(table, bags).tolist() == [[2, 3], [7, 8], [5, 6]]
    assert embedding_lookup(table, torch.tensor([[3], [0]])).tolist() == [[[7, 8]], [[1, 2]]]


@pytest.mark.parametrize("shape", [(10,), (2, 5), (5, 1, 2)])
@pytest.mark.parametrize("where", ["cpu", "acc"])
def test_a_lookup_and_its_gradient_are_those_of_an_embedding(
    table: DynamicEmbedding, shape: tuple[int, ...], where: str
) -> None:
    ids = IDS.view(shape)
    found = table(ids.to(where))
    upper = torch.randn(*shape, 3)
    found.backward(upper.to(found.device))
    weight = table.weight.detach().cpu().requires_grad_()
    plain = nn.functional.embedding(rows_of(table, ids), weight)
    plain.backward(upper)
    assert torch.equal(found.cpu(), plain)
    assert table.weight.grad is not None and weight.grad is not None
    torch.testing.assert_close(table.weight.grad.cpu(), weight.grad)


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("where", ["cpu", "acc"])
def test_bags_and_their_gradients_are_those_of_an_embedding_bag(
    table: DynamicEmbedding, combiner: str, weighted: bool, where: str
) -> None:
    weights = WEIGHTS.clone().to(where).requires_grad_() if weighted else None
    found = embedding_lookup_sparse(table, (IDS.to(where), OFFSETS.to(where)), weights, combiner)
    upper = torch.randn(6, 3)
    found.backward(upper.to(found.device))
    weight = table.weight.detach().cpu().requires_grad_()
    same = WEIGHTS.clone().requires_grad_() if weighted else None
    plain = expected(weight, rows_of(table, IDS), OFFSETS, same, combiner)
    plain.backward(upper)
    torch.testing.assert_close(found.cpu(), plain)
    assert table.weight.grad is not None and weight.grad is not None
    torch.testing.assert_close(table.weight.grad.cpu(), weight.grad)
    if weights is not None and same is not None:
        assert weights.grad is not None and same.grad is not None
        torch.testing.assert_close(weights.grad.cpu(), same.grad)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_without_weights_are_those_of_an_embedding_bag_as_it_is(
    table: DynamicEmbedding, mode: str
) -> None:
    found = embedding_lookup_sparse(table, (IDS, OFFSETS), combiner=mode)
    rows, weight = rows_of(table, IDS), table.weight.detach().cpu()
    plain = nn.functional.embedding_bag(rows, weight, OFFSETS, mode=mode, include_last_offset=True)
    torch.testing.assert_close(found.cpu(), plain)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_what_would_be_divided_by_zero_is_zero(table: DynamicEmbedding, combiner: str) -> None:
    weights = torch.tensor([0.0, 0.0, 1.0], requires_grad=True)
    bags = (torch.tensor([1, 2, 3]), torch.tensor([0, 2, 2, 3]))
    found = embedding_lookup_sparse(table, bags, weights, combiner)
    found.sum().backward()
    assert found[:2].tolist() == [[0] * 3] * 2
    assert torch.equal(found[2].cpu(), table(torch.tensor([3]))[0].cpu())
    assert weights.grad is not None and table.weight.grad is not None
    assert weights.grad.isfinite().all() and table.weight.grad.cpu().isfinite().all()


def test_weights_that_add_up_to_zero_have_no_mean(table: DynamicEmbedding) -> None:
    bags = (torch.tensor([1, 2]), torch.tensor([0, 2]))
    assert embedding_lookup_sparse(table, bags, torch.tensor([1.0, -1.0])).tolist() == [[0] * 3]
    root = embedding_lookup_sparse(table, bags, torch.tensor([1.0, -1.0]), "sqrtn").cpu()
    rows = table.weight.detach().cpu()
    torch.testing.assert_close(root[0], (rows[0] - rows[1]) / math.sqrt(2))


def jagged(values: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, OFFSETS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", ["cpu", "acc"])
def test_jagged_tensors_are_bags(table: DynamicEmbedding, where: str) -> None:
    ids, weights = jagged(IDS).to(where), jagged(WEIGHTS).to(where)
    found = embedding_lookup_sparse(table, ids, weights, "sqrtn")
    pair = embedding_lookup_sparse(table, (IDS, OFFSETS), WEIGHTS, "sqrtn")
    assert torch.equal(found.cpu(), pair.cpu())


@pytest.mark.filterwarnings("ignore")
def test_a_jagged_tensor_with_holes_is_its_values(table: DynamicEmbedding) -> None:
    padded = torch.tensor([[1, 2, 9], [3, 9, 9]])
    ids = torch.nested.narrow(padded, 1, torch.tensor([0, 0]), torch.tensor([2, 1]), torch.jagged)
    found = embedding_lookup_sparse(table, ids, combiner="sum")
    assert table.ids.tolist() == [1, 2, 3]
    rows = table.weight.detach().cpu()
    torch.testing.assert_close(found.cpu(), torch.stack([rows[0] + rows[1], rows[2]]))


def test_no_ids_are_no_vectors(table: DynamicEmbedding) -> None:
    nothing = torch.tensor([], dtype=torch.int64)
    assert embedding_lookup(table, nothing.view(0, 2)).shape == (0, 2, 3)
    assert embedding_lookup_sparse(table, (nothing, torch.tensor([0]))).shape == (0, 3)
    bags = embedding_lookup_sparse(table, (nothing, torch.tensor([0, 0])))
    assert bags.tolist() == [[0] * 3]


class Gathered(TorchDispatchMode):
    """How many rows each index_select took."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is torch.ops.aten.index_select.default:
            self.counts.append(len(args[2]))
        return func(*args, **(kwargs or {}))


def test_equal_ids_are_looked_up_once() -> None:
    table = get_variable("t", 3, capacity=8)
    with Gathered() as gathered:
        table(torch.tensor([1, 2, 3] * 100))
    assert gathered.counts == [4, 300]  # three rows and one that is zeros, of which all are taken


def test_vectors_have_the_tables_type_and_are_added_in_float32(device: str) -> None:
    table = get_variable("t", 2, capacity=4, dtype=torch.bfloat16, device=device)
    bags = (torch.tensor([1] * 600), torch.tensor([0, 600]))
    weights = torch.ones(600, dtype=torch.float64)
    for found in (embedding_lookup_sparse(table, bags), table(torch.tensor([1]))):
        assert found.dtype is torch.bfloat16
        torch.testing.assert_close(found.cpu(), table.weight[:1].cpu())
    total = embedding_lookup_sparse(table, bags, weights, "sum")
    torch.testing.assert_close(total.cpu(), 600 * table.weight[:1].cpu())


# --- rows -----------------------------------------------------------------------------------------


def test_ids_get_rows_as_they_are_first_seen(table: DynamicEmbedding) -> None:
    assert table.ids.tolist() == []
    table(torch.tensor([5, 5, 5]))
    table(torch.tensor([[LARGE], [5]], dtype=torch.int64))
    embedding_lookup_sparse(table, (torch.tensor([-1]), torch.tensor([0, 1])))
    table(torch.tensor([9, 8], dtype=torch.int32))
    assert table.ids.tolist() == [5, LARGE, -1, 8, 9]
    assert "'t', dim=3, 5 of 8 rows given" in repr(table)
    found = table(torch.tensor([-1, 5]))
    assert torch.equal(found.cpu(), table.weight[[2, 0]].cpu())


def test_new_ids_are_trained_by_an_optimizer_made_before(table: DynamicEmbedding) -> None:
    optimizer = torch.optim.Adam(table.parameters(), lr=0.1)
    before = table.weight.detach().cpu()
    for key in (3, 4):
        optimizer.zero_grad()
        table(torch.tensor([key])).sum().backward()
        optimizer.step()
    moved = (table.weight.detach().cpu() - before).abs().sum(1)
    assert [bool(row) for row in moved] == [True] * 2 + [False] * 7


def test_after_eval_new_ids_get_no_row(table: DynamicEmbedding) -> None:
    table(torch.tensor([3]))
    table.eval()
    found = table(torch.tensor([4, 3]))
    assert found[0].tolist() == [0] * 3 and found[1].tolist() == table.weight[0].tolist()
    assert table.ids.tolist() == [3]
    table.train()
    assert table(torch.tensor([4])).tolist() == [table.weight[1].tolist()]


def test_a_full_table_refuses_new_ids_and_stays_as_it_is(table: DynamicEmbedding) -> None:
    table(torch.arange(6))
    told = r"\[embedding\] t: 6 of 8 rows are given, and 3 ids are new \(the first is 10\)"
    for lookup in (table, table.add):
        with pytest.raises(ValueError, match=told):
            lookup(torch.tensor([1, 10, 11, 12]))
    assert table.ids.tolist() == list(range(6))
    table(torch.tensor([10, 11]))
    assert table(torch.arange(6)).shape == (6, 3)  # those that it has are found
    assert table.eval()(torch.tensor([12])).tolist() == [[0] * 3]


def test_first_values_are_the_initializers_and_the_last_row_is_zeros() -> None:
    seen = []

    def fill(rows: Tensor) -> None:
        seen.append(tuple(rows.shape))
        nn.init.constant_(rows, 2.0)

    table = get_variable("t", 3, fill, capacity=4)
    assert seen == [(4, 3)] and table.weight[:4].eq(2).all() and table.weight[4].eq(0).all()
    table(torch.tensor([1]))
    table.reset_parameters()
    assert table.ids.tolist() == [] and len(seen) == 2
    torch.manual_seed(0)
    plain = nn.Embedding(4, 3)
    torch.manual_seed(0)
    assert torch.equal(get_variable("t", 3, capacity=4).weight[:4], plain.weight)


def test_a_state_has_the_ids(table: DynamicEmbedding) -> None:
    table.add(torch.tensor([LARGE, 2, -9]))
    file = io.BytesIO()
    torch.save(nn.ModuleDict({"ads": table}).state_dict(), file)
    file.seek(0)
    other = nn.ModuleDict({"ads": get_variable("t", 3, capacity=8)})
    other["ads"](torch.tensor([4, 5]))
    other.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    same = other["ads"]
    assert isinstance(same, DynamicEmbedding) and same.ids.tolist() == [LARGE, 2, -9]
    assert torch.equal(same(torch.tensor([2, -9])), table(torch.tensor([2, -9])).cpu())
    same(torch.tensor([1]))
    assert same.ids.tolist() == [LARGE, 2, -9, 1] and table.ids.tolist() == [LARGE, 2, -9]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_has_rows_of_its_own(copied: Callable[[Any], Any]) -> None:
    table = get_variable("t", 3, capacity=8)
    table(torch.tensor([1]))
    other = copied(table)
    other(torch.tensor([2]))
    assert other.ids.tolist() == [1, 2] and table.ids.tolist() == [1]


# --- what is refused ------------------------------------------------------------------------------

VALUES = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda t: t(VALUES.float()), TypeError, r"t: ids are a tensor of integers, not torch.flo"),
        (lambda t: t([1]), TypeError, "not list"),
        (lambda t: embedding_lookup(t.weight, VALUES), TypeError, "has made, not Parameter"),
        (lambda t: embedding_lookup_sparse(t.weight, (VALUES, VALUES)), TypeError, "has made, not"),
        (lambda t: embedding_lookup_sparse(t, VALUES), TypeError, r"a pair \(values, offsets\)"),
        (
            lambda t: embedding_lookup_sparse(t, (VALUES, torch.tensor([0, 1])), None, "sum"),
            ValueError,
            r"from 0 to the number of ids, 2, which is the last of them.* unlike \[0, 1\]",
        ),
        (
            lambda t: embedding_lookup_sparse(t, (VALUES, torch.tensor([0, 2, 1, 2]))),
            ValueError,
            "and never fall",
        ),
        (
            lambda t: embedding_lookup_sparse(t, (VALUES, torch.tensor([1, 2]))),
            ValueError,
            "offsets should go from 0",
        ),
        (
            lambda t: embedding_lookup_sparse(t, (VALUES[None], torch.tensor([0, 2]))),
            ValueError,
            r"one row, not \(1, 2\)",
        ),
        (
            lambda t: embedding_lookup_sparse(t, (VALUES, torch.tensor([0, 2])), torch.ones(3)),
            ValueError,
            r"there are 2 ids, and sp_weights of the shape \(3,\)",
        ),
        (
            lambda t: embedding_lookup_sparse(t, (VALUES, torch.tensor([0, 2])), None, "max"),
            ValueError,
            "t: combiner should be one of sum, mean, sqrtn, not 'max'",
        ),
        (lambda t: get_variable("u", 0, capacity=1), ValueError, "u: dim should be a whole num"),
        (lambda t: get_variable("u", 1, capacity=2.5), ValueError, "u: capacity should .* 2.5"),
    ],
)
def test_what_is_wrong_is_named(
    table: DynamicEmbedding, call: Callable[[Any], object], kind: Any, words: str
) -> None:
    with pytest.raises(kind, match=words):
        call(table)
    assert table.ids.tolist() == []


# --- what is recorded -----------------------------------------------------------------------------


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = get_variable("t", 4, capacity=500)
        self.last = nn.Linear(4, 1)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.last(embedding_lookup_sparse(self.table, (ids, offsets), combiner="sqrtn"))


def ragged(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of 16 bags with 66 to 126 ids, of which 33 to 63 are distinct."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        count = int(torch.randint(66, 127, (), generator=draw))
        distinct = torch.randperm(500, generator=draw)[: -(-count // 2)]
        cuts = torch.randint(0, count + 1, (15,), generator=draw).sort().values
        ends = torch.tensor([0, *cuts.tolist(), count])
        yield distinct.repeat(2)[:count], ends


@pytest.mark.usefixtures("recording")
def test_batches_of_many_sizes_are_one_plan_and_whole_steps() -> None:
    batches = list(ragged(30))
    assert len({len(ids) for ids, _ in batches}) > 15
    assert {(len(ids.unique()) - 1).bit_length() for ids, _ in batches} == {6}
    model, loader = torchacc.accelerate(Pooled(), batches)
    optimizer = torch.optim.Adam(model.parameters())
    for step, batch in enumerate(loader):
        if step == 3:
            before = torchacc.report()
        optimizer.zero_grad()
        model(*batch).square().mean().backward()
        optimizer.step()
    report = torchacc.report(before)
    assert report.counters.get("plans_built", 0) == 0
    assert report.of("flush_read") == {}
    assert report.counters["flush_step"] == 27


@pytest.mark.usefixtures("recording")
def test_ids_that_the_step_has_computed_are_a_read(table: DynamicEmbedding) -> None:
    ids = torch.arange(4, device="acc")
    helpers.flush()
    before = torchacc.report()
    table(ids)
    table(ids + 1)
    assert sum(torchacc.report(before).of("flush_read").values()) == 1


@pytest.mark.usefixtures("recording")
def test_a_step_with_a_lookup_cannot_be_captured(table: DynamicEmbedding) -> None:
    step = torchacc.capture(lambda ids: table(ids).sum())
    with pytest.raises(RuntimeError, match="it reads a tensor on the host"):
        for _ in range(4):  # three run before it is captured
            step(torch.arange(4))
