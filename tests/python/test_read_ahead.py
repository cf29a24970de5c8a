"""`read_ahead`: a program decides who reads batches, for what belongs to one thread."""

from __future__ import annotations

import logging
import sqlite3
import threading

import pytest
import torch
from torch.utils.data import DataLoader

import torchacc
from tests.python.turns import in_turns, told


class Stored(torch.utils.data.Dataset):
    """Belongs to the thread that reads first."""

    connection = None

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if self.connection is None:
            self.connection = sqlite3.connect(":memory:")
        return self.connection.execute("select ?", (float(index),)).fetchone()[0]


@pytest.mark.parametrize("ways", [(True, False), (False, True)])
@pytest.mark.parametrize("in_parts", [True, False])
def test_what_belongs_to_one_thread_says_what_to_do(device, in_parts, ways):
    loader = torchacc.AsyncLoader(DataLoader(Stored()), device)
    told(loader, *ways)
    if in_parts:
        in_turns(loader, *[ways[0]] * 5, *[ways[1]] * 5)
    with pytest.raises(sqlite3.ProgrammingError) as caught:
        for _ in range(2):
            for _ in loader:
                pass
    said = str(caught.value)
    assert said.startswith("SQLite objects created in a thread can only be used in that same")
    assert "open once in each (threading.local)" in said and "num_workers = 1" in said
    assert "read_ahead = False" in said


class Read(torch.utils.data.Dataset):
    """Knows the threads that have read it."""

    def __init__(self):
        self.threads = set()

    def __len__(self):
        return 400

    def __getitem__(self, index):
        self.threads.add(threading.current_thread().name)
        return float(index)


@pytest.mark.parametrize("way", [True, False])
@pytest.mark.parametrize("what", ["plain", "autocast", "deterministic", "a stream"])
def test_the_program_decides_who_reads(device, way, what, caplog):
    data = Read()
    # In a stream an iterator reads, and never both threads; left open it is read ahead at first.
    source = (data[i] for i in range(400)) if what == "a stream" else DataLoader(data)
    loader = torchacc.AsyncLoader(source, device, read_ahead=way)
    if what == "deterministic":
        torch.use_deterministic_algorithms(True)
    try:
        with torch.autocast("cpu", enabled=what == "autocast"), caplog.at_level(logging.INFO):
            for _ in range(1 if what == "a stream" else 3):
                assert [float(x) for x in loader] == list(range(400))
    finally:
        torch.use_deterministic_algorithms(False)
    assert data.threads == {"AsyncLoader" if way else "MainThread"}
    assert loader._ahead.chosen is None and "from now on" not in caplog.text


def test_what_belongs_to_one_thread_is_read_by_it(device):
    config = torchacc.Config()
    config.dataloader.read_ahead = False
    _, loader = torchacc.accelerate(torch.nn.Linear(1, 1), DataLoader(Stored()), config)
    for _ in range(3):
        assert [float(x) for x in loader] == list(range(40))
    assert loader.read_ahead is False
    _, same = torchacc.accelerate(torch.nn.Linear(1, 1), loader, torchacc.Config())
    assert same is loader and loader.read_ahead is False
    config.dataloader.read_ahead = True
    torchacc.accelerate(torch.nn.Linear(1, 1), loader, config)
    assert loader.read_ahead is True
    loader.read_ahead = None  # belongs to the AsyncLoader, and not to what it wraps
    assert not hasattr(loader._loader, "read_ahead")


@pytest.mark.parametrize("value", ["yes", 1])
def test_who_reads_is_yes_no_or_open(device, value):
    with pytest.raises(TypeError, match=f"read_ahead = {value!r}: should be of bool type, or None"):
        torchacc.AsyncLoader([1], device, read_ahead=value)
