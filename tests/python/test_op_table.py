"""The reviewed facts about operators against the torch that is installed."""

from __future__ import annotations

import re
import sys
import warnings

import pytest
import torch

from tests.helpers import ROOT, extension

sys.path.insert(0, str(ROOT / "scripts"))
import op_table

pytestmark = pytest.mark.usefixtures("acc_only")

SOURCE = ROOT / "lazy" / "graph" / "op_table.cpp"


def named_in_the_table() -> set[str]:
    """The operators that the table names one by one."""
    lists = SOURCE.read_text().split("bool runs_directly")[0]
    return set(re.findall(r'"(aten::\w+)"', lists))


def test_every_operator_of_the_table_exists() -> None:
    """A name that no torch operator has would be a rule that never applies."""
    existing = {schema.name for schema in torch._C._jit_get_all_schemas()}
    named = named_in_the_table()
    assert len(named) > 100
    text = f"gone from torch {op_table.version()}: {sorted(named - existing)}"
    if op_table.version() == op_table.reviewed()[0]:
        assert not named - existing, text
    elif named - existing:
        warnings.warn(text, stacklevel=1)


def test_the_recorded_operators_are_the_reviewed_ones() -> None:
    """Under the version of the list nothing differs; under another one the difference is shown."""
    if extension().executor_name() != "host":
        pytest.skip("the list is that of the host executor")
    version, lines = op_table.reviewed()
    assert len(lines) > 1500
    found = "\n".join(op_table.difference())
    if op_table.version() == version:
        assert not found, f"review, then run `python scripts/op_table.py --write`:\n{found}"
    elif found:
        text = f"recorded under torch {op_table.version()}, not as reviewed under {version}:"
        warnings.warn(f"{text}\n{found}", stacklevel=1)
        print(text, found, sep="\n")


def test_a_difference_is_found(monkeypatch) -> None:
    """The comparison tells an operator that came, one that went and one that changed."""
    _, lines = op_table.reviewed()
    there = op_table.described()
    changed = next(line for line in there if "~" in line)
    now = [line for line in there if line not in (there[3], changed)]
    now += ["aten::new_one(self)", changed.replace("~", "", 1)]
    monkeypatch.setattr(op_table, "described", lambda: now)
    monkeypatch.setattr(op_table, "reviewed", lambda: ("0", there))
    assert set(op_table.difference()) == {
        f"- {there[3]}",
        f"- {changed}",
        "+ aten::new_one(self)",
        f"+ {changed.replace('~', '', 1)}",
    }
    assert lines


def outs_of(name: str) -> list[str]:
    """The overloads of an operator that may take its result's memory."""
    base, _, overload = name.partition(".")
    existing = {str(s.overload_name) for s in torch._C._jit_get_schemas_for_operator(base)}
    found = [f"{overload}_out" if overload else "out", "out"]
    return [f"{base}.{each}" for each in found if each in existing]


def copies(out: str) -> bool:
    """Whether the overload runs the one without `out` and copies, as torchgen makes it then."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(out, "CompositeExplicitAutograd") and not has_kernel(out, "CPU")


def test_no_step_calls_an_out_overload_that_copies() -> None:
    """Convolutions, norms and RNNs have only such: their results are adopted instead."""
    if extension().executor_name() != "host":
        pytest.skip("the table is that of the host executor")
    lines = op_table.described()
    into = {line.split("(")[0] for line in lines if " into" in line.rpartition(")")[2]}
    all_outs = {name: outs_of(name) for name in (line.split("(")[0] for line in lines)}
    copying = {name for name, outs in all_outs.items() if outs and all(map(copies, outs))}
    assert {
        "aten::convolution",
        "aten::convolution_backward",
        "aten::native_batch_norm_backward",
        "aten::native_layer_norm",
        "aten::native_group_norm",
        "aten::mkldnn_rnn_layer",
        "aten::mkldnn_rnn_layer_backward",
    } <= copying
    assert {"aten::mm", "aten::addmm", "aten::bmm", "aten::cat"} <= into
    assert not into & copying
