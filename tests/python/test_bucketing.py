"""Batches of variable length are padded to a few lengths: given, equal, or learnt."""

from __future__ import annotations

import itertools
import pickle
import random
import re
import types

import pytest
import torch

import torchacc
from torchacc.bucketing import LEARNING_BATCHES, least_padding


@pytest.fixture
def forget_said():
    from torchacc import logger

    logger.forget_said_for_testing()


def texts(*lengths, **more):
    return [
        {
            "input_ids": torch.full((2, n), 7),
            "attention_mask": torch.ones(2, n, dtype=torch.long),
            "labels": torch.full((2, n), 3),
            **{key: make(n) for key, make in more.items()},
        }
        for n in lengths
    ]


def lengths(loader, key="input_ids"):
    return [batch[key].shape[-1] for batch in loader]


def test_batches_are_padded_to_the_next_bucket(device):
    loader = torchacc.AsyncLoader(texts(3, 4, 5, 8), device, buckets=[8, 4])
    assert lengths(loader) == [4, 4, 8, 8]
    first = next(iter(loader))
    assert first["input_ids"].tolist() == [[7, 7, 7, 0]] * 2
    assert first["attention_mask"].tolist() == [[1, 1, 1, 0]] * 2
    assert first["labels"].tolist() == [[3, 3, 3, -100]] * 2
    assert first["labels"].device.type == device


@pytest.mark.parametrize(
    ("max_length", "num_buckets", "expected"),
    [(64, 4, [16, 32, 48, 64]), (10, 4, [3, 5, 8, 10]), (3, 8, [1, 2, 3]), (16, None, [2, 16])],
)
def test_equal_buckets_reach_up_to_the_longest(device, max_length, num_buckets, expected):
    loader = torchacc.AsyncLoader(
        texts(*range(1, max_length + 1)), device, max_length=max_length, num_buckets=num_buckets
    )
    found = sorted(set(lengths(loader)))
    assert found == expected if num_buckets else (found[0], found[-1], len(found)) == (2, 16, 8)


def test_a_batch_longer_than_every_bucket_is_kept_and_said_once(device, caplog, forget_said):
    loader = torchacc.AsyncLoader(texts(3, 9, 11, 9, 5, 4), device, buckets=[4])
    assert lengths(loader) == [4, 9, 11, 9, 5, 4]
    said = [r for r in caplog.records if "longer than the largest bucket (4)" in r.message]
    assert len(said) == 1


def test_other_keys_get_other_values(device):
    batches = [{"tokens": torch.ones(1, 2), "score": torch.ones(1, 2), "id": torch.ones(1)}]
    loader = torchacc.AsyncLoader(
        batches, device, buckets=[4], pad_value_dict={"tokens": 9, "score": -1.5, "absent": 0}
    )
    (batch,) = loader
    assert batch["tokens"].tolist() == [[1, 1, 9, 9]]
    assert batch["score"].tolist() == [[1, 1, -1.5, -1.5]]
    assert batch["id"].tolist() == [1]


@pytest.mark.parametrize(
    ("make", "value", "length", "text"),
    [
        (torch.int64, 0.5, 8, "to 8 with 0.5 (dataloader.pad_value_dict): it holds whole numbers."),
        (torch.int64, float("nan"), 8, "to 8 with nan (dataloader.pad_value_dict): it holds whole"),
        (torch.uint8, -100, 8, "torch.uint8 and shape [2, 5] cannot be padded to 8 with -100"),
        (torch.float32, 1j, 8, "to 8 with 1j"),
        (torch.float32, 0, 10**30, f"to {10**30} with 0"),
        (torch.float32, 0, 10**14, f"to {10**14} with 0"),
    ],
)
def test_what_a_tensor_cannot_hold_is_named(device, make, value, length, text):
    batch = {"x": torch.ones(2, 5, dtype=make)}
    loader = torchacc.AsyncLoader([batch], buckets=[length], pad_value_dict={"x": value})
    with pytest.raises(ValueError, match=re.escape("[bucketing] batch['x'] of torch.")) as caught:
        list(loader)
    assert text in str(caught.value) and "\n" not in str(caught.value)


def test_keys_may_be_of_any_type(device, caplog, forget_said):
    loader = torchacc.AsyncLoader([{"y": 1}], buckets=[8], pad_value_dict={"x": 0, 3: 0})
    assert list(loader) == [{"y": 1}]
    assert "no tensor to pad under one of ['3', 'x']" in caplog.text


def test_labels_of_another_shape_are_left_alone(device):
    batch = {"input_ids": torch.ones(2, 3), "labels": torch.tensor([1, 0])}
    (got,) = torchacc.AsyncLoader([batch], device, buckets=[4])
    assert got["input_ids"].shape == (2, 4) and got["labels"].tolist() == [1, 0]


@pytest.mark.parametrize("columns", [1, 3])
def test_labels_that_are_no_tokens_are_padded_only_by_request(device, caplog, forget_said, columns):
    labels = torch.full((2, columns), 0.5)
    batch = {"input_ids": torch.ones(2, 3), "labels": labels}
    (got,) = torchacc.AsyncLoader([batch], device, buckets=[4])
    assert got["input_ids"].shape == (2, 4) and got["labels"].tolist() == labels.tolist()
    assert ("'labels' is as long as" in caplog.text) == (columns == 3)
    values = {"input_ids": 0, "labels": -1}
    (got,) = torchacc.AsyncLoader([batch], device, buckets=[4], pad_value_dict=values)
    assert got["labels"].tolist() == [[0.5] * columns + [-1] * (4 - columns)] * 2


def test_tokens_padded_without_a_mask_are_pointed_out_unless_asked_for(device, caplog, forget_said):
    batches = [{"input_ids": torch.ones(2, 3)}] * 2
    list(torchacc.AsyncLoader(batches, device, buckets=[4], pad_value_dict={"input_ids": 0}))
    list(torchacc.AsyncLoader(batches, device, buckets=[3]))
    list(torchacc.AsyncLoader(texts(3), device, buckets=[4]))
    assert "attention_mask" not in caplog.text
    list(torchacc.AsyncLoader(batches, device, buckets=[4]))
    assert caplog.text.count("has no 'attention_mask'") == 1


def test_a_tensor_as_long_that_nobody_named_is_pointed_out(device, caplog, forget_said):
    batches = texts(3, 3, token_type_ids=lambda n: torch.zeros(2, n))
    assert lengths(torchacc.AsyncLoader(batches, device, buckets=[4]), "token_type_ids") == [3, 3]
    said = [r for r in caplog.records if "'token_type_ids' is as long as" in r.message]
    assert len(said) == 1


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ([torch.ones(2, 3)], "only mappings can be padded"),
        ({"x": torch.ones(2)}, "has no tensor to pad under"),
    ],
)
def test_what_cannot_be_padded_passes_and_is_said_once(device, caplog, forget_said, batch, text):
    assert len(list(torchacc.AsyncLoader([batch, batch], device, buckets=[4]))) == 2
    assert len([r for r in caplog.records if text in r.message]) == 1


def test_the_padded_batch_is_a_new_one(device):
    batches = texts(3)
    list(torchacc.AsyncLoader(batches, device, buckets=[4]))
    assert batches[0]["input_ids"].shape == (2, 3)


def test_the_padding_is_told_at_level_debug(device, caplog):
    with caplog.at_level("DEBUG", logger="TorchAcc"):
        list(torchacc.AsyncLoader(texts(3), device, buckets=[4]))
    assert "original length: 3, bucket length: 4, padding length: 1" in caplog.text


def test_a_batch_that_cannot_be_written_is_padded_as_a_dict(device):
    batch = types.MappingProxyType(texts(3)[0])
    (got,) = torchacc.AsyncLoader([batch], device, buckets=[4])
    assert got["labels"].shape == (2, 4) and batch["labels"].shape == (2, 3)


def test_each_tensor_has_its_own_length_and_equal_ones_are_padded_alike(device):
    batches = [
        {"source": torch.ones(2, 3), "mask": torch.ones(2, 1, 3), "target": torch.ones(2, 6)},
        {"source": torch.ones(2, 6), "mask": torch.ones(2, 1, 6), "target": torch.ones(2, 8)},
    ]
    values = {"source": 0, "mask": 0, "target": 7}
    loader = torchacc.AsyncLoader(batches, device, buckets=[4, 8], pad_value_dict=values)
    first, second = loader
    assert [first[key].shape[-1] for key in values] == [4, 4, 8]
    assert first["target"][0].tolist() == [1] * 6 + [7] * 2
    assert [second[key].shape[-1] for key in values] == [8, 8, 8]
    assert second["target"].unique().tolist() == [1]


def test_a_batch_that_is_one_sequence_is_padded(device):
    batch = {"input_ids": torch.ones(3), "labels": torch.ones(3, dtype=torch.long)}
    (got,) = torchacc.AsyncLoader([batch], device, buckets=[4])
    assert got["labels"].tolist() == [1, 1, 1, -100]


def test_keys_that_are_not_padded_may_come_and_go(device):
    first, second, third = texts(3, 3, 3)
    second["labels"] = None
    second["id"] = torch.ones(2)
    third["name"] = "third"
    got = list(torchacc.AsyncLoader([first, second, third], device, buckets=[4]))
    assert [sorted(batch) for batch in got] == [sorted(each) for each in (first, second, third)]
    assert got[1]["input_ids"].shape == (2, 4) and got[1]["labels"] is None


@pytest.mark.parametrize(
    ("without", "text"),
    [
        (({}, {"labels"}), "'labels' missing; the first batch of the loader had ['input_ids', "),
        (({"labels"}, {}), "'labels' new; the first batch of the loader had ['input_ids', 'att"),
        (({"labels"}, {"input_ids"}), "'input_ids' missing and 'labels' new; the first"),
        (({}, {"input_ids", "attention_mask", "labels"}), "'attention_mask', 'input_ids', 'labels"),
    ],
)
def test_batches_whose_padded_keys_differ_are_an_error(device, without, text):
    batches = [
        {key: value for key, value in batch.items() if key not in keys} | {"id": 1}
        for batch, keys in zip(texts(3, 3), without, strict=True)
    ]
    loader = torchacc.AsyncLoader(batches, device, buckets=[4])
    iterator = iter(loader)
    assert list(next(iterator)) == list(batches[0])
    said = re.escape(f"[bucketing] batch.keys() = {list(batches[1])!r}: of what is padded, {text}")
    with pytest.raises(ValueError, match=said + ".*dataloader.pad_value_dict only those"):
        next(iterator)
    assert list(iterator) == []
    # What all batches have can be padded.
    names = dict.fromkeys(set(batches[0]) & set(batches[1]), 0)
    assert len(list(torchacc.AsyncLoader(batches, device, [4], pad_value_dict=names))) == 2


# --- learnt from the data -----------------------------------------------------------------------


def drawn_lengths(count, longest=200, seed=0):
    drawn = random.Random(seed)
    return [min(longest, 1 + int(drawn.expovariate(1 / 40))) for _ in range(count)]


def rows_of(*lengths):
    """Batches of one row; cheaper than `texts`."""
    return [{"input_ids": torch.ones(1, length)} for length in lengths]


def test_the_buckets_that_are_learnt_pad_the_least():
    drawn = random.Random(1)
    for _ in range(20):
        rows = {drawn.randint(1, 60): drawn.randint(0, 9) for _ in range(drawn.randint(1, 8))}
        count = drawn.randint(1, 4)

        def elements(buckets, rows=rows):
            return sum(n * min(b for b in buckets if b >= length) for length, n in rows.items())

        others = itertools.combinations(sorted(rows), min(count, len(rows)))
        best = min(elements(each) for each in others if each[-1] == max(rows))
        found = least_padding(rows, count)
        assert found == sorted(found) and len(found) <= count and elements(found) == best


@pytest.mark.parametrize("max_length", [None, 300])
def test_buckets_are_learnt_once_and_stay(device, caplog, max_length):
    seen = drawn_lengths(LEARNING_BATCHES)
    later = drawn_lengths(100, max(seen), seed=1)
    options = {"buckets": "auto", "num_buckets": 3, "max_length": max_length}
    loader = torchacc.AsyncLoader(rows_of(*seen, *later), device, **options)
    with caplog.at_level("INFO", logger="TorchAcc"):
        found = lengths(loader)
    assert len([r for r in caplog.records if "buckets learnt" in r.message]) == 1
    for length, padded in zip(seen[:-1], found, strict=False):
        assert padded == next(p for p in (1 << k for k in range(9)) if p >= length)
    settled = sorted(set(found[LEARNING_BATCHES - 1 :]) | {max_length or max(seen)})
    assert len(settled) == 3 and settled[-1] == (max_length or max(seen))
    for length, padded in zip(seen[-1:] + later, found[LEARNING_BATCHES - 1 :], strict=True):
        assert padded == min(b for b in settled if b >= length)
    # The next pass, and another loader of the same batches.
    learnt = set(lengths(loader))
    assert learnt <= set(settled)
    other = torchacc.AsyncLoader(rows_of(*seen, *later), device, **options)
    assert lengths(other) == found
    assert set(lengths(pickle.loads(pickle.dumps(other)))) == learnt


def test_longer_lengths_than_were_learnt_get_few_buckets(device, caplog, forget_said):
    batches = rows_of(*[10] * LEARNING_BATCHES, 11, 16, 17, 30, 10)
    loader = torchacc.AsyncLoader(batches, device, buckets="auto")
    assert lengths(loader)[LEARNING_BATCHES:] == [16, 16, 32, 32, 10]
    assert "longer than" not in caplog.text


def test_no_length_is_padded_beyond_the_maximum(device, caplog, forget_said):
    batches = rows_of(9, 12, 13, 15, *[10] * LEARNING_BATCHES, 11, 14, 13)
    loader = torchacc.AsyncLoader(batches, device, buckets="auto", num_buckets=2, max_length=12)
    found = lengths(loader)
    assert found[:4] == [12, 12, 13, 15]
    assert found[LEARNING_BATCHES:] == [10] * 4 + [12, 14, 13]
    assert "longer than the largest bucket (12)" in caplog.text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"buckets": []}, r"buckets = \[\]: should be lengths of at least 1"),
        ({"buckets": [8, 0]}, r"buckets = \[8, 0\]: should be lengths"),
        ({"max_length": 0}, "max_length = 0: should be at least 1"),
        ({"max_length": 8, "num_buckets": 0}, "num_buckets = 0: should be at least 1"),
        ({"num_buckets": 4}, "num_buckets = 4: it divides max_length: set that too"),
        ({"buckets": [8], "max_length": 8}, r"max_length = 8: buckets = \[8\] names all lengths"),
        ({"buckets": [8], "num_buckets": 2}, "num_buckets = 2: .* Leave one of them None"),
    ],
)
def test_options_that_contradict_each_other_are_refused(device, options, text):
    with pytest.raises(ValueError, match=r"\[AsyncLoader\] " + text):
        torchacc.AsyncLoader([], device, **options)
    config = torchacc.Config()
    for name, value in options.items():
        setattr(config.dataloader, name, value)
    with pytest.raises(ValueError, match=r"\[config\] dataloader\." + text):
        config.validate()


def test_a_word_that_is_no_way_of_choosing_buckets(device):
    with pytest.raises(ValueError, match="buckets = 'learn': should be a list of int, or 'auto'"):
        torchacc.AsyncLoader([], device, buckets="learn")
    with pytest.raises(TypeError, match="'auto', or None, got 'learn'"):
        torchacc.Config().dataloader.buckets = "learn"


def test_a_mask_that_is_added_to_scores_is_left_alone(device, caplog, forget_said):
    """0 would let tokens of the padding be attended to."""
    batch = {
        "input_ids": torch.ones(2, 5, dtype=torch.long),
        "attention_mask": torch.zeros(2, 1, 1, 5),
    }
    (found,) = torchacc.AsyncLoader([batch], device, max_length=8, num_buckets=1)
    assert found["input_ids"].shape == (2, 8)
    assert found["attention_mask"].shape == (2, 1, 1, 5)
    assert "'attention_mask' is as long as the padded tensors (5)" in caplog.text
    batch["attention_mask"] = torch.ones(2, 5)
    (found,) = torchacc.AsyncLoader([batch], device, max_length=8, num_buckets=1)
    assert found["attention_mask"].tolist() == [[1.0] * 5 + [0.0] * 3] * 2


def test_values_of_padding_without_a_length_to_pad_to_are_told(device, caplog, forget_said):
    torchacc.AsyncLoader([], device, pad_value_dict={"x": 1})
    assert "pad_value_dict has no effect without buckets or max_length" in caplog.text
