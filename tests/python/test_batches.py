"""On a host, batches that nobody else has go to the device with their memory; others are copied."""

from __future__ import annotations

import itertools
import sys
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

import torchacc
from tests import helpers

Held = list[Any]


@pytest.fixture
def host(acc_only) -> str:
    if helpers.extension().executor_name() != "host":
        pytest.skip("a GPU has memory of its own")
    return acc_only


@pytest.fixture(params=["in the loop", "ahead", "in turns of a batch"])
def way(request, monkeypatch) -> None:
    """How a loader reads."""
    ways = {"in the loop": [False], "ahead": [True]}.get(request.param, [True, False])
    each = itertools.cycle(ways)
    monkeypatch.setattr("torchacc.ahead.Ahead.begin", lambda _: next(each))
    monkeypatch.setattr("torchacc.ahead.Ahead.is_over", lambda _, pace: len(ways) > 1)


def take_over(held: Held) -> bool:
    return helpers.extension().take_over(held, 0)


def address(tensor: Tensor) -> int:
    """Where the contents lie."""
    return helpers.extension().alias(tensor).data_ptr()


def leaves(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (list, tuple, dict, set)):
        for item in batch.values() if isinstance(batch, dict) else batch:
            yield from leaves(item)


def made(value: float = 1.0) -> Tensor:
    return torch.full((4, 3), value)


SOLE: dict[str, Callable[[], Any]] = {
    "tensor": made,
    "list": lambda: [made(), made(2)],
    "tuple": lambda: (made(), 3, "three", made(2)),
    "dict": lambda: {"x": made(), "n": 3, "y": (made(2),)},
    "nested": lambda: [(made(), [{"x": made(2)}], None)],
    "channels last": lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.empty_strided((3, 4), (1, 3)).fill_(1),
    "booleans": lambda: made() > 0,
    "no dimensions": lambda: torch.tensor(2.0),
    "no elements": lambda: torch.ones(0, 3),
}


@pytest.mark.parametrize("kind", SOLE)
def test_what_nobody_else_has_is_taken_over(host, kind):
    wanted = list(leaves(SOLE[kind]()))
    held = [SOLE[kind]()]
    before = [t.data_ptr() for t in leaves(held)]
    assert take_over(held)
    found = list(leaves(held))
    assert [t.device.type for t in found] == [host] * len(wanted)
    if kind != "no elements":
        assert [address(t) for t in found] == before
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine.dtype, mine.stride()) == (theirs.dtype, theirs.stride())
        assert torch.equal(mine.cpu(), theirs)
    assert type(held[0]) is type(wanted[0] if kind == "tensor" else SOLE[kind]())


def _by_name() -> tuple[Held, Any]:
    x = made()
    return [x], x


def _by_its_list() -> tuple[Held, Any]:
    batch = [made(), (made(2),)]
    return [batch], batch


def _deep_inside() -> tuple[Held, Any]:
    inner = {"x": made()}
    return [[(inner,)]], inner


def _by_the_one_who_asks() -> tuple[Held, Any]:
    held = [made()]
    return held, [held[0]]


def _a_view() -> tuple[Held, Any]:
    base = torch.ones(8, 3)
    return [base[:4]], base


def _in_another_shape() -> tuple[Held, Any]:
    base = made()
    return [base.view(3, 4)], base


def _detached() -> tuple[Held, Any]:
    base = made()
    return [base.detach()], base


def _its_storage() -> tuple[Held, Any]:
    x = made()
    return [x], x.untyped_storage()


def _two_views() -> tuple[Held, Any]:
    base = made()
    return [(base[:2], base[2:])], None


def _made_by_numpy() -> tuple[Held, Any]:
    array = np.ones((4, 3), np.float32)
    return [torch.from_numpy(array)], array


def _given_to_numpy() -> tuple[Held, Any]:
    x = made()
    return [x], x.numpy()


def _given_by_dlpack() -> tuple[Held, Any]:
    x = made()
    return [x], torch.from_dlpack(x)


def _shared() -> tuple[Held, Any]:
    return [made().share_memory_()], None


def _lazily_cloned() -> tuple[Held, Any]:
    x = made()
    return [torch._lazy_clone(x)], x


HELD: dict[str, Callable[[], tuple[Held, Any]]] = {
    "by name": _by_name,
    "by its list": _by_its_list,
    "deep inside": _deep_inside,
    "by the one who asks": _by_the_one_who_asks,
    "a view": _a_view,
    "in another shape": _in_another_shape,
    "detached": _detached,
    "its storage": _its_storage,
    "two views of one": _two_views,
    "an array of numpy's": _made_by_numpy,
    "given to numpy": _given_to_numpy,
    "given by DLPack": _given_by_dlpack,
    "shared memory": _shared,
    "not copied yet": _lazily_cloned,
}


@pytest.mark.parametrize("kind", HELD)
def test_what_others_hold_stays_theirs(acc_only, kind):
    held, keeper = HELD[kind]()
    before = list(map(id, leaves(held)))
    assert not take_over(held)
    assert list(map(id, leaves(held))) == before
    assert {t.device.type for t in leaves(held)} == {"cpu"}
    del keeper


class Marked(Tensor):
    """A tensor of the program's own type."""


OTHERS: dict[str, Callable[[], Any]] = {
    "needs a gradient": lambda: made().requires_grad_(),
    "of a graph": lambda: made().requires_grad_() * 2,
    "of another type": lambda: made().as_subclass(Marked),
    "with gaps": lambda: made()[:, :2],
    "expanded": lambda: torch.ones(3).expand(4, 3),
    "not from its beginning": lambda: made()[1:],
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "sparse": lambda: made().to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(made(), 0.1, 0, torch.qint8),
    "in a set": lambda: {made()},
    "in a mapping": lambda: OrderedDict(x=made()),
    "of no device": lambda: torch.ones(3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "the first of many": lambda: torch.randperm(100_000)[:64],
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_a_copy_would_change_stays(acc_only, kind):
    held = [OTHERS[kind]()]
    before = list(map(id, leaves(held)))
    take_over(held)
    assert list(map(id, leaves(held))) == before
    assert all(t.device.type != acc_only for t in leaves(held))


def test_a_mapped_file_stays(acc_only, tmp_path):
    file = tmp_path / "numbers"
    file.write_bytes(np.ones(12, np.float32).tobytes())
    held = [torch.from_file(str(file), size=12)]
    take_over(held)
    assert held[0].device.type == "cpu"


def test_lists_that_are_too_deep_are_an_error(acc_only):
    batch: list[Any] = [made()]
    for _ in range(max(20_000, sys.getrecursionlimit() * 2)):
        batch = [batch]
    held = [batch]
    del batch
    with pytest.raises(RecursionError, match="in a batch"):
        take_over(held)


def test_what_a_data_loader_collates_is_not_copied(host, way):
    places = []

    def collate(rows: list[tuple[Tensor, int]]) -> list[Tensor]:
        batch = default_collate(rows)
        places.extend(t.data_ptr() for t in batch)
        return batch

    loader = DataLoader([(made(i), i) for i in range(8)], batch_size=2, collate_fn=collate)
    found = []
    for images, labels in torchacc.AsyncLoader(loader, host):
        found += [address(images), address(labels)]
        assert images[:, 0, 0].tolist() == labels.tolist()
    assert len(found) == 8
    assert found == places


@pytest.mark.parametrize("workers", [0, 1])
def test_what_the_loop_does_to_a_batch_stays_there(device, way, workers):
    """Batches of the data set's own, which it gives again in every pass."""
    data = [[made(i), {"y": made(-i)}] for i in range(4)]
    loader = DataLoader(data, batch_size=None, num_workers=workers)
    mine = torchacc.AsyncLoader(loader, device)
    for _ in range(2):
        for i, (x, others) in enumerate(mine):
            assert x.device.type == device
            assert torch.equal(x.cpu(), made(i)) and torch.equal(others["y"].cpu(), made(-i))
            x.add_(1)
            others["y"].zero_()
        helpers.flush()
    for i, (x, others) in enumerate(data):
        assert torch.equal(x, made(i)) and torch.equal(others["y"], made(-i))


def test_a_buffer_that_is_filled_again_and_again_is_copied(device, way):
    buffer = torch.empty(4, 3)

    def batches() -> Iterator[Tensor]:
        for i in range(8):
            yield buffer.fill_(i)

    loader = torchacc.AsyncLoader(batches(), device, device_prefetch_size=4)
    seen = [batch.sum() for batch in loader]
    assert [s.item() for s in seen] == [12.0 * i for i in range(8)]
    assert torch.equal(buffer, made(7))


class Refilled(DataLoader):
    """Gives its workers' batches in one buffer."""

    def __iter__(self) -> Iterator[Tensor]:
        buffer = torch.empty(1, 3)
        for batch in super().__iter__():
            yield buffer.copy_(batch)


def test_a_loader_of_the_programs_own_that_has_workers_may_fill_one_buffer(device, way):
    loader = Refilled([torch.full((3,), float(i)) for i in range(8)], num_workers=1)
    mine = torchacc.AsyncLoader(loader, device, device_prefetch_size=4)
    seen = [batch.sum() for batch in mine]
    assert [s.item() for s in seen] == [3.0 * i for i in range(8)]


@pytest.mark.usefixtures("only_this_frees")
def test_memory_that_was_taken_over_is_counted_and_given_back(host):
    torch.acc.synchronize()
    before = torch.acc.memory_allocated()
    held = [torch.ones(1 << 20)]
    take_over(held)
    assert torch.acc.memory_allocated() - before == 4 << 20
    held.clear()
    assert torch.acc.memory_allocated() == before


def test_a_step_on_batches_that_were_taken_over(host, one_thread):
    """The bits of a training on copies."""

    def losses(copies: bool) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        model.to(host)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        found = []
        for step in range(6):
            held = [[torch.randn(4, 3), torch.randint(2, (4,))]]
            if not copies:
                take_over(held)
            x, y = (t.to(host) for t in held.pop())
            x += 1  # its memory is the device's
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
            del x, y, step
        return [loss.item() for loss in found]

    losses(copies=True)  # in whose first steps nothing is fused
    assert losses(copies=False) == losses(copies=True)


class Kept(MutableMapping):
    """Keeps its items in a dict, which a shallow copy of it shares."""

    def __init__(self, items: Any = ()) -> None:
        self._items = dict(items)

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Named(Kept):
    """That cannot be made of items."""

    def __init__(self, *, input_ids: Tensor) -> None:
        super().__init__({"input_ids": input_ids})


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize(
    ("make", "kind"),
    [(Kept, Kept), (lambda items: Named(**items), dict), (UserDict, UserDict), (dict, dict)],
)
def test_a_mapping_of_the_programs_own_is_not_changed(device, make, kind, pads):
    batches = [make({"input_ids": torch.ones(2, 3, dtype=torch.long)}) for _ in range(2)]
    loader = torchacc.AsyncLoader(batches, device=device, buckets=[4] if pads else None)
    for batch in loader:
        assert type(batch) is kind and batch["input_ids"].device.type == device
        assert batch["input_ids"].shape == (2, 4 if pads else 3)
    for batch in batches:
        assert batch["input_ids"].device.type == "cpu" and batch["input_ids"].shape == (2, 3)


CURRENT = """
import torch, torchacc
from torch.utils.data import DataLoader, Dataset

class Where(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        made = torch.ones(1).to("acc"), torch.rand(1, device="acc")
        return torch.acc.current_device(), *(tensor.device.index for tensor in made)

torch.acc.set_device(1)
for way in (True, False):
    loader = torchacc.AsyncLoader(DataLoader(Where(), batch_size=None))
    loader._ahead.begin = lambda: way
    for batch in loader:
        assert tuple(batch) == (1, 1, 1), (way, batch)
"""


def test_a_data_set_uses_the_device_that_is_current_in_the_loop(acc_only):
    helpers.run_python(CURRENT, ACC_HOST_DEVICES="2", ACC_EXECUTOR="host")
