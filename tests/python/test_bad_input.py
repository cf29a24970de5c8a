"""Wrong calls: a clear error at the line that made it, and everything else usable afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests import helpers

WRONG: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "broadcast": lambda a, b: a + b,
    "product": lambda a, b: a @ a,
    "batched product": lambda a, b: torch.bmm(a[None], a[None]),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "view": lambda a, b: a.view(5),
    "expand": lambda a, b: a.expand(5, 7),
    "copy": lambda a, b: a.copy_(b),
    "in-place broadcast": lambda a, b: b.add_(a[:, :1] + b),
    "write to expanded": lambda a, b: a.expand(3, 2, 3).add_(1),
    "overlap": lambda a, b: b[1:].add_(b[:-1]),
    "dimension": lambda a, b: a.sum(4),
    "select": lambda a, b: a[5],
    "index dimension": lambda a, b: a.index_select(2, torch.zeros(1).long().to(a.device)),
    "index count": lambda a, b: a[:, 0, 0],
    "product dtype": lambda a, b: a @ a.t().long(),
    "cast": lambda a, b: a.long().add_(1.5),
    "bitwise": lambda a, b: a & 1,
    "mean of ints": lambda a, b: a.long().mean(),
    "embedding of floats": lambda a, b: F.embedding(a, a),
    "cross entropy": lambda a, b: F.cross_entropy(a, b),
    "target dtype": lambda a, b: F.nll_loss(a, b[:2]),
    "convolution": lambda a, b: F.conv2d(a, b),
    "convolution channels": lambda a, b: F.conv1d(a[None], torch.ones(4, 9, 1).to(a.device)),
    "layer norm": lambda a, b: F.layer_norm(a, (7,)),
    "batch norm": lambda a, b: F.batch_norm(a, b, b),
    "linear": lambda a, b: F.linear(a, b[None]),
    "attention": lambda a, b: F.scaled_dot_product_attention(a, b, b),
    "out dtype": lambda a, b: torch.add(a, 1, out=a.long()),
    "argmax's out dtype": lambda a, b: torch.argmax(a, 0, out=torch.empty(3).to(a.device)),
    "gather's out dtype": lambda a, b: torch.gather(
        a, 0, torch.zeros(1, 3).long().to(a.device), out=torch.empty(1, 3).double().to(a.device)
    ),
    "cumsum's in-place dtype": lambda a, b: torch.cumsum(
        a, 0, dtype=torch.float64, out=torch.empty(2, 3).to(a.device)
    ),
    "positive weights": lambda a, b: F.binary_cross_entropy_with_logits(a, a, pos_weight=b),
    "stack of two devices": lambda a, b: torch.stack([b[0], b[:1]]),
    "arange's sign": lambda a, b: torch.arange(3, 1).to(a.device),
    "roll's dimension": lambda a, b: a.roll(1, 5),
    "flip twice": lambda a, b: a.flip(0, 0),
    "groups of channels": lambda a, b: torch.native_group_norm(
        a[None], None, None, 1, 2, 3, 7, 1e-5
    ),
    "negative size": lambda a, b: torch.zeros(-3).to(a.device),
    "topk": lambda a, b: b.topk(9),
    "gather": lambda a, b: a.gather(1, b.long()),
    "scatter dtype": lambda a, b: a.scatter_(1, a, a),
    "boolean of many": lambda a, b: bool(a),
    "cholesky": lambda a, b: torch.linalg.cholesky(a),
    "max pool": lambda a, b: F.max_pool2d(a[None], 9),
    "max pool of bytes, channels last": lambda a, b: F.max_pool2d(
        torch.zeros(1, 12, 12, 2).char().to(a.device).permute(0, 3, 1, 2), 2
    ),
    "out= that is read": lambda a, b: (lambda c: torch.add(c, a, out=c))(b[:3]),
    "sort dimension": lambda a, b: b.sort(2),
    "index of two dimensions": lambda a, b: a.index_select(
        0, torch.zeros(1, 1).long().to(a.device)
    ),
    "float index": lambda a, b: a.index_select(0, b),
    "copy of another shape": lambda a, b: a.index_copy_(0, torch.zeros(1).long().to(a.device), a),
    "fill at floats": lambda a, b: a.index_fill_(0, b, 1.0),
    "put too few": lambda a, b: a.put_(torch.zeros(2).long().to(a.device), b),
    "maximum of nothing": lambda a, b: a[:0].max(0),
    "maximum of all of nothing": lambda a, b: a[:0].max(),
    "quotient of ints": lambda a, b: a.long().div_(2),
    "product of bools": lambda a, b: (a > 0).mul_(a.long()),
    "boolean alpha": lambda a, b: torch.add(a, a, alpha=True),
    "float alpha": lambda a, b: torch.add(a.long(), a.long(), alpha=1.5),
    "mask of floats": lambda a, b: a.masked_fill_(a, 0.0),
    "deviation of ints": lambda a, b: a.long().std(),
    "negative power of ints": lambda a, b: a.long() ** -1,
    "difference of bools": lambda a, b: (a > 0) - (a > 0),
    "difference of a bool": lambda a, b: True - a,
    "relu of bools": lambda a, b: (a > 0).relu(),
    "mixed heaviside": lambda a, b: torch.heaviside(a, a.double()),
    "gelu of a kind": lambda a, b: F.gelu(a, approximate="tan"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_at_its_line_with_the_words_of_the_cpu(device, name):
    def refusal(where):
        a, b = torch.ones(2, 3, device=where), torch.ones(4, device=where)
        with pytest.raises(Exception) as caught:
            WRONG[name](a, b)
        assert a.tolist() == [[1.0] * 3] * 2 and b.tolist() == [1.0] * 4
        text = str(caught.value).splitlines()[0]
        for word in ("acc:0", "acc", "PrivateUse1", "cpu", "CPU"):
            text = text.replace(word, "DEVICE")
        return caught.type, text

    (kind, text), (cpu_kind, cpu_text) = refusal(device), refusal("cpu")
    assert kind is cpu_kind, f"{kind.__name__}: {text}\ninstead of {cpu_kind.__name__}: {cpu_text}"
    assert text == cpu_text


def test_an_index_error_in_a_replayed_plan(device):
    # The plan was good for five steps; the sixth has a bad index, the seventh is good again.
    table = torch.arange(10.0, device=device)
    count = torch.zeros(3, device=device)
    bystander = table * 3
    for step in range(9):
        index = torch.tensor([0, 1, 99 if step == 5 else 2], device=device)
        count_before = count.clone().tolist()
        try:
            picked = table.index_select(0, index)
            count.add_(1)
            value = picked.sum().item()
        except (IndexError, RuntimeError) as error:
            assert step == 5, f"step {step}: {error}"
            assert "index" in str(error).lower()
        else:
            assert step != 5, "a bad index went unnoticed"
            assert value == 3.0
        try:
            seen = count.tolist()
        except RuntimeError:  # poisoned: said so; from here on a new tensor
            assert step == 5
            count = torch.tensor(count_before, device=device)
            continue
        # Exactly one update or none, never two.
        assert seen in ([c + 1 for c in count_before], count_before), (step, seen, count_before)
        if step != 5:
            assert seen == [c + 1 for c in count_before]
    assert bystander.tolist() == [3.0 * k for k in range(10)]


@pytest.mark.usefixtures("recording")
def test_what_no_algorithm_solves_raises_as_on_the_cpu(device):
    matrix = torch.full((3, 3), float("nan"), device=device)
    with pytest.raises(torch.linalg.LinAlgError, match="failed to converge"):
        torch.linalg.svd(matrix).S.sum().item()


def test_more_memory_than_there_is_is_refused_at_the_line(acc_only):
    kept = torch.ones(4, device=acc_only)
    # ACC_MODE=eager: what the CPU's kernels raise.
    error = RuntimeError if helpers.extension().mode() == "eager" else torch.OutOfMemoryError
    with pytest.raises(torch.OutOfMemoryError, match=r"67108864 MiB.*Use a smaller size"):
        torch.empty(1 << 46, dtype=torch.uint8, device=acc_only)
    with pytest.raises(error):
        kept[:1].expand(1 << 46) + 1
    with pytest.raises(error):
        torch.add(kept[:1].expand(1 << 46), 1, out=torch.empty(0, device=acc_only))
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(0, device=acc_only).resize_(1 << 46)
    assert (kept + 1).tolist() == [2.0] * 4


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize(
    "make",
    [lambda a: a @ a.t(), lambda a: a + a.t(), lambda a: a.expand(-1, 1 << 22).exp()],
    ids=["product", "broadcast", "expanded"],
)
def test_a_result_larger_than_the_memory_leaves_the_rest_as_it_was(acc_only, make):
    x = torch.ones(4, device=acc_only)
    a = torch.zeros(1 << 22, 1, device=acc_only)
    y = x + 1
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate"):
        make(a)
    assert (y + x).tolist() == [3.0] * 4


@pytest.mark.usefixtures("recording")
def test_an_error_in_a_replayed_step_says_where_the_step_was_first_recorded(acc_only):
    table, good = torch.arange(4.0, device=acc_only), torch.tensor([1, 2], device=acc_only)
    bad = torch.tensor([1, 9], device=acc_only)
    helpers.synchronize()

    def pick(index):
        return table[index] * 2

    for _ in range(3):
        assert pick(good).tolist() == [2.0, 4.0]
    with pytest.raises(
        IndexError, match=r"failed, first recorded at .*test_bad_input\.py:\d+ in pick"
    ):
        pick(bad).tolist()


def test_a_request_for_too_much_memory(device):
    kept = torch.arange(4.0, device=device) * 2
    with pytest.raises(RuntimeError, match="(?i)memory|alloc|bytes"):
        huge = torch.empty(1 << 46, device=device)
        huge.add_(1)
        helpers.synchronize()
    huge = None
    gc.collect()
    assert kept.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert (kept + 1).sum().item() == 16.0


def test_tensors_of_different_devices_are_refused(acc_only):
    a, b = torch.ones(3, device=acc_only), torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        a + b
    with pytest.raises(RuntimeError, match="same device|Expected all tensors"):
        torch.mm(a[None], b[:, None])
    assert (a + torch.tensor(2.0)).tolist() == [3.0] * 3
    assert a.sum().item() == 3.0


def test_a_call_that_finds_no_room_for_its_result_leaves_nothing_behind(acc_only):
    # Results have addresses of their own before they have memory; here there is none to be had.
    code = """
import resource
x = torch.empty(0, device=DEVICE)
for limited in (True, False):
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + (600 << 20) if limited else -1
    resource.setrlimit(resource.RLIMIT_AS, (limit, -1))
    try:
        print(x.sum().item())
    except RuntimeError as error:
        print("address space" in str(error))
print((torch.empty(3, device=DEVICE).fill_(5) + 1).tolist())
"""
    told = helpers.run_python(code).stdout
    assert told.splitlines() == ["True", "0.0", "[6.0, 6.0, 6.0]"]
