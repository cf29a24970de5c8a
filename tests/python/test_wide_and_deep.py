"""examples/wide_and_deep.py: it learns, and both kinds of embeddings train the same model."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only")

PATH = helpers.ROOT / "examples" / "wide_and_deep.py"
STEPS = 100


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("wide_and_deep_example", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trained(example: Any) -> dict[tuple[bool, bool], dict[str, list[float]]]:
    """What the training of each combination of (fm, tiacc) returned.

    The models begin alike: each id has the same vector, whichever row of a table that is.
    """
    found = {}
    for fm in (False, True):
        torch.manual_seed(0)
        plain, rows = example.WideAndDeep(fm, False), example.WideAndDeep(fm, True)
        for name in ("wide", "vectors"):
            table, weight = getattr(rows, name), getattr(plain, name).weight
            ids = torch.randperm(len(weight))
            table.add(ids)
            with torch.no_grad():
                table.weight[: len(ids)] = weight[ids]
        kinds = ("wide.weight", "vectors.weight")
        others = {k: v for k, v in plain.state_dict().items() if k not in kinds}
        rows.load_state_dict(others, strict=False)
        found[fm, False] = example.train(plain, STEPS, evaluations=2)
        found[fm, True] = example.train(rows, STEPS, evaluations=2)
    return found


@pytest.mark.parametrize("fm", [False, True])
@pytest.mark.parametrize("tiacc", [False, True])
def test_it_learns(trained: Any, fm: bool, tiacc: bool) -> None:
    losses, areas = trained[fm, tiacc]["losses"], trained[fm, tiacc]["areas"]
    assert len(losses) == STEPS and len(areas) == 2
    assert 0.6 < areas[0] < areas[1] and areas[1] > 0.68
    assert sum(losses[-20:]) < 0.95 * sum(losses[:20])


@pytest.mark.parametrize("fm", [False, True])
def test_both_kinds_of_embeddings_train_the_same_model(trained: Any, fm: bool) -> None:
    plain, tiacc = trained[fm, False], trained[fm, True]
    # Sums are in another order.
    torch.testing.assert_close(tiacc["losses"], plain["losses"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tiacc["areas"], plain["areas"], rtol=0, atol=1e-3)


def test_the_area_under_the_curve_is_a_share_of_pairs(example: Any) -> None:
    scores = torch.tensor([0.1, 0.4, 0.4, 0.8, 0.2])
    clicks = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0])
    pairs = [(a > b) + (a == b) / 2 for a in scores[clicks == 1] for b in scores[clicks == 0]]
    assert example.area_under_curve(scores, clicks) == pytest.approx(float(sum(pairs)) / len(pairs))
    assert example.area_under_curve(clicks, clicks) == 1.0


def test_the_products_of_pairs(example: Any) -> None:
    vectors = torch.randn(3, 5, 2, dtype=torch.float64)
    each = [vectors[:, i] * vectors[:, j] for i, j in itertools.combinations(range(5), 2)]
    torch.testing.assert_close(example.pairs(vectors), torch.stack(each).sum((0, 2)))


def test_the_stream_is_the_same_in_each_pass_and_its_ids_are_skewed(example: Any) -> None:
    stream = example.Clicks(4, seed=1)
    first, again = list(stream), list(stream)
    assert len(stream) == len(first) == 4
    for batch, same in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(batch, same, strict=True))
    numbers, ids, clicks = (torch.cat(part) for part in zip(*first, strict=True))
    assert numbers.shape == (len(clicks), 13) and ids.shape == (len(clicks), 26)
    assert torch.equal(ids // example.IDS, torch.arange(26).expand(len(clicks), 26))
    frequency = torch.bincount((ids % example.IDS).flatten(), minlength=example.IDS)
    assert frequency[0] > 4 * frequency[9] > 16 * frequency[99] > 0
    assert 0.1 < clicks.mean() < 0.5


def test_it_runs_as_a_program() -> None:
    command = [sys.executable, str(PATH), "--fm", "--tiacc", "--steps", "8"]
    done = subprocess.run(
        command, env=helpers.child_env(), cwd=helpers.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    steps = [line.partition("  ")[0] for line in done.stdout.splitlines()[:4]]
    assert steps == ["step 2", "step 4", "step 6", "step 8"]
    assert "ids that were seen: " in done.stdout and "AUC 0." in done.stdout
