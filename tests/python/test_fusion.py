"""Generated kernels: every geometry, writes in order, optimizers, grouping, what compiles when.

Operators are those of which both sides round alike, so that results are compared bit by bit; the
operators themselves are in test_formulas.py.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "one_thread", "recording")

Program = Callable[[str], Any]


def check(program: Program, launches: int | None = None) -> None:
    """Runs a program on the CPU and three times on the device; equal results, from kernels.

    `launches`: how many there must be in the last run; at least one without.
    """
    expected = program("cpu")
    for _ in range(3):
        helpers.synchronize()
        with helpers.counting() as counted:
            helpers.assert_same(program(helpers.DEVICE), expected)
    if launches is None:
        assert counted["kernel_launches"] > 0, "no kernel ran"
    else:
        assert counted["kernel_launches"] == launches


def on(device: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values on a device, as new memory whose copy is no part of what follows."""
    made = helpers.drawn(*shape, device="cpu", seed=seed)
    made = (made * 4).to(dtype).to(device)
    helpers.flush()
    return made


# --- copies between layouts -------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "fused"), [(64, 1), (2048, 2)])
def test_large_transposing_copies_stay_atens(rows, fused):
    """`fused`: steps of the plan."""

    def program(device: str) -> Tensor:
        x = on(device, rows, 50)
        return (x.t().contiguous() + 1).relu()

    check(program, launches=1)
    plan = helpers.extension().plan_data(torch.acc.current_device())
    assert len(plan["steps"]) == fused


# --- integers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_integers_wrap_around(dtype):
    """Compilers take it that integers with a sign do not, and that x + 1 > x."""

    def program(device: str) -> list[Tensor]:
        x, y = (on("cpu", 999, dtype=dtype, seed=seed) for seed in (0, 1))
        for each, ends in ((x, torch.iinfo(dtype)), (y, torch.iinfo(dtype))):
            each[::3], each[1::3] = ends.max, ends.min
        x, y = x.to(device), y.roll(5).to(device)
        helpers.flush()
        compared = [x + 1 > x, x - y < x, -x <= 0, x.abs() >= 0, x * y > x]
        return [
            *compared,
            x * y,
            torch.add(x, y, alpha=3),
            (x + y).sum(),
            (x * 2).view(27, 37).sum(0),
        ]

    check(program)


def test_integers_that_the_type_cannot_hold():
    """What ATen says of them, in steps that had kernels with numbers it can."""
    for dtype in (torch.int32, torch.uint8):
        values = torch.arange(250).to(dtype)
        x = values.to(helpers.DEVICE)

        def clamped(number: int, x: Tensor = x) -> list[int]:
            return ((x.to(torch.int32) + 1) * x.clamp(max=number)).tolist()

        for number in (10, 11, 12, 13):
            assert max(clamped(number)) == 250 * number
        for number in (1 << 40, (1 << 40) + 5, 1 << 40):
            with pytest.raises(RuntimeError, match="cannot be converted to type .* overflow"):
                clamped(number)
        assert max(clamped(14)) == 250 * 14
        with helpers.counting() as counted:
            for number in range(2, 8):  # a plan each, but no kernel
                for _ in range(3):
                    wide = torch.zeros_like(x, dtype=torch.int64).fill_(number << 40)
                    assert ((wide + 1) * 2)[0].item() == (number << 41) + 2
        assert counted["jit/compiled"] <= 1
        for list_of in ([x, x + 1], [x.float(), x.float() + 1]):
            for number in (3, 1 << 33, 1 << 40, -(1 << 40)):
                for _ in range(3):
                    found = torch._foreach_add(torch._foreach_mul(list_of, number), 5)
                on_cpu = [each.cpu() for each in list_of]
                expected = torch._foreach_add(torch._foreach_mul(on_cpu, number), 5)
                helpers.assert_same(found, expected)
        for number in (1, 2, 3, 300, -300, 1 << 31, (1 << 40) + 5, -(1 << 62)):
            for program in (
                lambda x, k: (x + k) * 2,
                lambda x, k: (x * 2 < k) ^ (x > k),
                lambda x, k: (x * k - 1) == k,
            ):
                helpers.assert_same(program(x, number), program(values, number))


def test_a_counter_beside_floats_may_pass_32_bits():
    """A count of tokens: no plan and no kernel for each."""
    x = on(helpers.DEVICE, 999)
    for step in range(6):
        with helpers.counting() as counted:
            count = (1 << 31) + 4096 * (step - 2)
            y = (x * 2).clamp(max=count)
            (z,) = torch._foreach_mul([y], count)
            assert torch.equal(z.cpu(), x.cpu() * 2 * count)
    assert counted["plans_built"] == 0 and counted["jit/compiled"] == 0
    assert counted["kernel_launches"] == 1


# --- geometry ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_every_length(dtype):
    def program(device: str) -> list[Tensor]:
        results = []
        for n in range(1, 71):
            a, b = on(device, n, dtype=dtype), on(device, n, seed=1, dtype=dtype)
            results.append(-(torch.maximum(a, b)).abs())
            helpers.flush()
        return results

    check(program)


ROWS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.bool)


@pytest.mark.parametrize("dtype", ROWS, ids=str)
def test_rows_are_written_to_their_end_and_no_further(dtype):
    def program(device: str) -> list[Tensor]:
        results = []
        for n in range(1, 71):
            drawn = (on(device, 3, n + 5), on(device, 3, n, seed=1))
            whole, other = (t > 0 if dtype == torch.bool else t.to(dtype) for t in drawn)
            helpers.flush()
            part = whole[:, 2 : n + 2]
            part.copy_(torch.maximum(part, other) if dtype.is_floating_point else part ^ other)
            results.append(whole)
            helpers.flush()
        return results

    check(program)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16], ids=str)
def test_rows_of_small_integers_are_read(dtype):
    def program(device: str) -> list[Tensor]:
        results = []
        for n in range(1, 71):
            results.append(on(device, 3, n + 5, dtype=dtype)[:, 2 : n + 2].float() * 0.5 - 1)
            helpers.flush()
        return results

    check(program)


BROADCASTS = [
    ((5, 7), (7,)),
    ((5, 7), (5, 1)),
    ((5, 7), (1, 7)),
    ((5, 7), (1, 1)),
    ((5, 7), ()),
    ((), (5, 7)),
    ((5, 1), (1, 7)),
    ((3, 1, 5), (1, 4, 1)),
    ((3, 4, 5), (4, 1)),
    ((1,), (9,)),
    ((2, 1, 3, 1), (5, 1, 4)),
    ((), ()),
    ((1, 1), (1,)),
    ((2, 3, 2, 3, 2), (3, 1, 3, 1)),
    ((33, 65), (33, 1)),
]


@pytest.mark.parametrize("shapes", BROADCASTS, ids=str)
def test_broadcast(shapes):
    def program(device: str) -> list[Tensor]:
        a, b = (on(device, *shape, seed=i) for i, shape in enumerate(shapes))
        c = a + b
        d = c * b - a
        return [c, d, torch.maximum(d, b)]

    check(program)


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(-1, -2)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": _transposed,
    "last dimension first": lambda t: t.movedim(-1, 0),
    "reversed": lambda t: t.permute(3, 2, 1, 0),
    "channels last": lambda t: t.to(memory_format=torch.channels_last),
    "rows": lambda t: t[:, 1:3],
    "every second": lambda t: t[..., ::2],
    "every second row": lambda t: t[:, :, ::2, 1:],
    "one column": lambda t: t[..., 3],
    "offset": lambda t: t.flatten()[5:68],
    "diagonal": lambda t: t.diagonal(0, -1, -2),
    "unfolded": lambda t: t.unfold(-1, 2, 2),
    "expanded": lambda t: t[:, :1].expand(-1, 3, -1, -1),
    "expanded from one": lambda t: t[0, 0, 0, :1].expand(6, 5),
    "size one": lambda t: t[:1, :, :1],
    "as_strided": lambda t: t.as_strided((3, 2, 4), (1, 40, 7), 2),
    "split": lambda t: t.split(2, dim=1)[1],
    "chunked": lambda t: t.chunk(3, dim=2)[-1],
    "squeezed": lambda t: t[:, :1].squeeze(1).unsqueeze(-1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_reads_through_a_view(name):
    view = VIEWS[name]

    def program(device: str) -> list[Tensor]:
        a, b = on(device, 2, 4, 6, 8), on(device, 2, 4, 6, 8, seed=1)
        x = view(a) * 2 - view(b)
        y = x + view(a)
        z = torch.maximum(y, -x)
        return [x, y, z, z.amax()]

    check(program)


@pytest.mark.parametrize("name", VIEWS)
def test_operands_of_two_geometries(name):
    view = VIEWS[name]

    def program(device: str) -> list[Tensor]:
        a = view(on(device, 2, 4, 6, 8))
        dense = on(device, *a.shape, seed=1)
        return [(a + dense) * 3, dense - a * dense]

    check(program)


@pytest.mark.parametrize("name", [n for n in VIEWS if not n.startswith("expanded")])
def test_writes_through_a_view(name):
    view = VIEWS[name]

    def program(device: str) -> list[Tensor]:
        a, b = on(device, 2, 4, 6, 8), on(device, 2, 4, 6, 8, seed=1)
        seen = a * 2
        part = view(a)
        part.mul_(3).add_(view(b))
        part.neg_()
        return [a, part, seen, a + b]

    check(program)


# --- writes and reads in order ----------------------------------------------------------------


def _reads_around_a_write(device: str) -> list[Tensor]:
    x = on(device, 40)
    before = x * 2
    x.add_(1)
    after = x * 2
    x.mul_(before)
    return [before, after, x, before + after]


def _overwritten(device: str) -> list[Tensor]:
    x, y = on(device, 40), on(device, 40, seed=1)
    kept = x + y
    x.copy_(y)
    y.zero_()
    return [kept, x, y, x - kept]


def _partial_writes(device: str) -> list[Tensor]:
    x = on(device, 6, 8)
    x[1:3] = x[3:5] * 2
    x[:, 2:4] -= 1
    x[0, 0] = 7
    y = x * x
    x[5] = y[0] - y[1]
    return [x, y]


def _two_views_of_one_storage(device: str) -> list[Tensor]:
    base = on(device, 20)
    even, odd, middle = base[::2], base[1::2], base[5:15]
    even.mul_(2)
    odd.add_(even)
    middle.neg_()
    total = even + odd
    twice = -(total * 2)
    even.copy_(odd)
    return [base, total, twice, middle * 2, even, odd]


def _shifted_onto_itself(device: str) -> list[Tensor]:
    x = on(device, 50)
    y = x[:-1] - x[1:]
    x[1:] = y
    x[:-1].add_(y * 2)
    return [x, y]


def _transposed_onto_itself(device: str) -> list[Tensor]:
    x = on(device, 7, 7)
    y = x + x.t()
    x.add_(y.t())
    x.copy_((x * 2).t())
    return [x, y]


def _written_twice_read_between(device: str) -> list[Tensor]:
    x = on(device, 33)
    y = torch.empty_like(x)
    y.copy_(x)
    first = y + 1
    y.fill_(3)
    second = y * x
    y.copy_(first)
    return [first, second, y]


def _dropped_in_the_middle(device: str) -> list[Tensor]:
    x = on(device, 33)
    y = -(((x + 1) * 2 - 3).abs())
    z = y.t() if y.dim() == 2 else y
    del y
    return [z * 2]


def _reduction_between(device: str) -> list[Tensor]:
    x = on(device, 9, 12)
    y = x * 2 + 1
    m = y.amax(dim=1, keepdim=True)
    z = (y - m) * 0.5
    return [y, m, z, z.amin(), (z + m).view(-1)[::3] * 2]


def _two_sizes_interleaved(device: str) -> list[Tensor]:
    x, y = on(device, 30), on(device, 4, 5)
    results = []
    for _ in range(3):
        x, y = -x + 1, y * 2 - 1
        results += [x, y]
    x.view(5, 6).t().mul_(2)
    return [*results, x * 2]


def _types_mixed(device: str) -> list[Tensor]:
    x, i = on(device, 37), on(device, 37, seed=1, dtype=torch.int64)
    mask = x > 0
    y = torch.where(mask, x, -x) + i
    small = (x * 2).to(torch.bfloat16)
    return [mask, y, small, mask & (i > 1), (i * 2 + mask), small.float() - x, i.to(torch.float64)]


def _out_of_order(device: str) -> list[Tensor]:
    x = on(device, 20)
    a = x + 1
    b = x * 2
    c = a * b
    mid = b.clone()
    b.zero_()
    return [c + b, mid, b, (a - c)]


ORDERS: list[Program] = [
    _reads_around_a_write,
    _overwritten,
    _partial_writes,
    _two_views_of_one_storage,
    _shifted_onto_itself,
    _transposed_onto_itself,
    _written_twice_read_between,
    _dropped_in_the_middle,
    _reduction_between,
    _two_sizes_interleaved,
    _types_mixed,
    _out_of_order,
]


@pytest.mark.parametrize("program", ORDERS, ids=lambda p: p.__name__.strip("_"))
def test_order_of_reads_and_writes(program):
    check(program)


def _given_results(device: str) -> list[Tensor]:
    a, b = on(device, 6, 5), on(device, 5, seed=1)
    i = on(device, 6, 5, seed=2, dtype=torch.int64)
    y, wide, mask = a * 0, a.double(), a > 0
    rows = on(device, 12, 5, seed=3)
    torch.maximum(a, b, out=y)
    torch.mul(y, a, out=y)
    torch.add(i, i, alpha=1 << 30, out=wide)  # in integers, which float64 then holds
    torch.add(a, b, out=wide)
    torch.lt(y, b, out=mask)
    torch.where(mask, y, a, out=rows[::2])
    return [y, wide, mask, rows, -y + a]


def test_results_in_given_tensors():
    check(_given_results)


def test_a_given_tensor_may_not_overlap_what_is_read():
    for device in ("cpu", helpers.DEVICE):
        x = on(device, 10)
        with pytest.raises(RuntimeError, match="single memory location"):
            torch.maximum(x[1:], x[1:], out=x[:-1])
            x.cpu()


def test_more_elements_than_one_thread_takes():
    def program(device: str) -> list[Tensor]:
        a, b = on(device, 301, 1003), on(device, 1003, seed=1)
        return [(a + b) * a - b, (a.t() * 2 - b[:, None]).t()]

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check(program)
    finally:
        torch.set_num_threads(before)


# --- grouping ---------------------------------------------------------------------------------


def test_a_chain_of_twenty_is_one_launch():
    def program(device: str) -> Tensor:
        x = on(device, 100)
        for i in range(10):
            x = -(x + i)
        return x

    check(program, launches=1)


def test_independent_chains_of_one_kind_are_one_step():
    tensors = [on(helpers.DEVICE, 5 + i, seed=i) for i in range(30)]
    for _ in range(3):
        helpers.synchronize()
        with helpers.counting() as counted:
            results = [-(t * 2 + 1) for t in tensors]
            helpers.flush()
    # On a GPU they are the blocks of one launch.
    assert counted["kernel_launches"] == (1 if helpers.kernels_of_a_gpu() else len(tensors))
    assert counted["steps"] == 1
    helpers.assert_same(results, [-(t.cpu() * 2 + 1) for t in tensors])


def test_an_optimizer_over_many_tensors_takes_few_steps():
    parameters = [torch.nn.Parameter(on(helpers.DEVICE, 3 + i % 7, 5, seed=i)) for i in range(40)]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=True)
    for step in range(5):
        for i, p in enumerate(parameters):
            p.grad = on(helpers.DEVICE, *p.shape, seed=100 * step + i)
        helpers.synchronize()
        with helpers.counting() as counted:
            optimizer.step()
            helpers.flush()
    if helpers.kernels_of_a_gpu():
        assert 0 < counted["kernel_launches"] <= counted["steps"]
    else:
        assert counted["kernel_launches"] >= len(parameters)
    assert 0 < counted["steps"] <= 12


# --- what compiles when -----------------------------------------------------------------------


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "nesterov": True},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "AdamW": {"lr": 1e-2},
    "Adamax": {"lr": 1e-2},
    "NAdam": {"lr": 1e-2},
    "RAdam": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-2, "momentum": 0.5, "centered": True},
    "Adagrad": {"lr": 1e-2, "lr_decay": 1e-3},
    "Adadelta": {"lr": 0.5},
    "ASGD": {"lr": 1e-2},
    "Rprop": {"lr": 1e-2},
    "Adafactor": {"lr": 1e-2},
    "SparseAdam": {},
    "LBFGS": {},
    "Muon": {},
}

# Without a multi-tensor form, or with requirements of its own that have nothing to do with kernels.
OTHERS = {"SparseAdam", "LBFGS", "Muon"}


# The step after which nothing is new. RAdam takes other operators from its sixth step on, when its
# variance is defined; that plan is fused when it comes again.
SETTLED = {"RAdam": 7}


def test_every_optimizer_is_here():
    there = {
        name
        for name in vars(torch.optim)
        if isinstance(getattr(torch.optim, name), type)
        and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
    }
    assert there - {"Optimizer"} == set(OPTIMIZERS)


def _train(device: str, name: str, foreach: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Ten steps with a schedule; parameters at the end, new kernels and launches by step."""
    parameters = [
        torch.nn.Parameter(on(device, *shape, seed=i))
        for i, shape in enumerate([(7, 5), (5,), (3, 2, 4), (), (40,)])
    ]
    optimizer = getattr(torch.optim, name)(parameters, foreach=foreach, **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    new, launched = [], []
    known: set[str] = set()
    for step in range(10):
        for i, p in enumerate(parameters):
            p.grad = on(device, *p.shape, seed=100 + 10 * step + i) * 0.1
        helpers.flush()
        before = helpers.stats()
        optimizer.step()
        schedule.step()
        if device != "cpu":
            helpers.flush()
            helpers.synchronize()
            after = helpers.stats()
            launched.append(after["kernel_launches"] - before["kernel_launches"])
            kernels = helpers.extension().plan_data(torch.acc.current_device())["kernels"]
            names = {kernel["name"] for kernel in kernels}
            new.append(len(names - known))
            known |= names
    values = [p.detach().cpu().flatten().tolist() for p in parameters]
    return {"values": values, "new": new, "launched": launched}


def train_all(names: list[str]) -> dict[str, Any]:
    """The runs of optimizers on both devices, by name and form."""
    torch.set_num_threads(1)
    return {
        f"{name} {form}": {
            device: _train(device, name, form == "foreach", OPTIMIZERS[name])
            for device in ("cpu", helpers.DEVICE)
        }
        for name in names
        for form in ("foreach", "single")
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, Any]:
    """Runs of all optimizers in a process that finds no kernel on the disk."""
    names = [name for name in OPTIMIZERS if name not in OTHERS]
    code = (
        "import json\nfrom tests.python.test_fusion import train_all\n"
        f"print(json.dumps(train_all({names!r})))\n"
    )
    folder = tmp_path_factory.mktemp("kernels")
    # Deterministic: a slow compiler is waited for, so that kernels are launched from their step on.
    done = helpers.run_python(
        code, timeout=400, ACC_CACHE_DIR=str(folder), ACC_MODE="full", ACC_DETERMINISTIC="1"
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("form", ["foreach", "single"])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in OTHERS])
def test_optimizer(trained, name, form):
    run = trained[f"{name} {form}"]
    mine, theirs = run[helpers.DEVICE], run["cpu"]
    for a, b in zip(mine["values"], theirs["values"], strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-5, atol=1e-6)
    assert sum(mine["new"][SETTLED.get(name, 4) :]) == 0, f"new kernels by step: {mine['new']}"
    assert min(mine["launched"][SETTLED.get(name, 4) :]) > 0, (
        f"kernels launched by step: {mine['launched']}"
    )


def _child(folder: Path, body: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a program that finds no kernel on the disk."""
    folder.chmod(0o700)
    return helpers.run_python(
        "import json\nfrom tests import helpers\n" + body,
        ACC_CACHE_DIR=str(folder),
        ACC_MODE="full",
        **env,
    )


def _in_a_fresh_process(folder: Path, body: str, **env: str) -> Any:
    """What the program prints last, as JSON."""
    return json.loads(_child(folder, body, **env).stdout.splitlines()[-1])


def test_numbers_that_change_compile_nothing(tmp_path):
    body = """
x = torch.arange(100.0, device=DEVICE)
compiled = []
for k in range(8):
    y = (x * (k + 0.5) + k).clamp(-k - 1.0, 50.0 - k) - k
    helpers.flush(); helpers.synchronize()
    compiled.append(helpers.stats().get("jit/compiled", 0))
    expected = (torch.arange(100.0) * (k + 0.5) + k).clamp(-k - 1.0, 50.0 - k) - k
    assert torch.equal(y.cpu(), expected), k
print(json.dumps(compiled))
"""
    compiled = _in_a_fresh_process(tmp_path, body)
    # The first run makes x too; the plan of the others comes a second time in the third.
    assert compiled[3] > 0
    assert compiled[3:] == compiled[3:4] * 5, compiled


def test_the_second_run_of_a_training_step_is_fused(tmp_path):
    body = """
net = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.GELU(), torch.nn.Linear(30, 1))
net = net.to(DEVICE)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
x = torch.randn(16, 20).to(DEVICE)
helpers.synchronize()
launched = []
for step in range(4):
    opt.zero_grad()
    loss = (net(x) ** 2).mean()
    loss.backward()
    opt.step()
    helpers.synchronize()
    launched.append(helpers.stats()["kernel_launches"])
print(json.dumps(launched))
"""
    first, second, third, fourth = _in_a_fresh_process(tmp_path, body)
    assert first == 0 < second
    assert third - second == fourth - third == second


def test_dropout_compiles_nothing_with_other_seeds(tmp_path):
    body = """
torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Dropout(0.3),
                          torch.nn.Linear(30, 1)).to(DEVICE)
opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
x = torch.randn(16, 20).to(DEVICE)
compiled, losses = [], []
for step in range(10):
    torch.manual_seed(step)
    opt.zero_grad()
    loss = (net(x) ** 2).mean()
    loss.backward()
    opt.step()
    losses.append(loss.item())
    compiled.append(helpers.stats().get("jit/compiled", 0))
print(json.dumps([compiled, losses, helpers.stats()["kernel_launches"]]))
"""
    compiled, losses, launches = _in_a_fresh_process(tmp_path, body)
    assert compiled[3] > 0 and launches > 0
    assert compiled[3:] == compiled[3:4] * 7, compiled
    assert len(set(losses)) == len(losses)


def test_two_hundred_steps_compile_nothing_after_the_third(tmp_path):
    body = """
torch.manual_seed(1)
drop = torch.nn.Dropout(0.1)
net = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.GELU(), torch.nn.LayerNorm(30), drop,
                          torch.nn.Linear(30, 1)).to(DEVICE)
opt = torch.optim.AdamW(net.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=200)
scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0, growth_interval=9)
batches = torch.randn(4, 16, 20).to(DEVICE)
compiled, scales, rates = [], set(), set()
for step in range(200):
    drop.p = 0.1 + 0.002 * step
    loss = (net(batches[step % 4]) ** 2).mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0 + step)
    scaler.step(opt)
    scaler.update()
    schedule.step()
    compiled.append(helpers.stats().get("jit/compiled", 0))
    scales.add(scaler.get_scale())
    rates.add(opt.param_groups[0]["lr"])
print(json.dumps([compiled, len(scales), len(rates), helpers.stats()["kernel_launches"]]))
"""
    compiled, scales, rates, launches = _in_a_fresh_process(tmp_path, body)
    assert compiled[2] > 0 and launches > 200
    assert scales > 20 and rates > 190
    late = [step + 1 for step in range(3, 200) if compiled[step] > compiled[step - 1]]
    assert not late, f"kernels compiled in steps {late}"


def test_numbers_that_decide_a_kernel_are_not_in_its_text(device):
    """An exponent that changes makes a plan each time, and no kernel (2 would be a product)."""
    x = torch.rand(300, generator=torch.Generator().manual_seed(1)) + 0.5
    mine = x.to(device)
    counts = []
    for exponent in (2.25, 2.5, 2.75, 4.5):
        for _ in range(3):
            y = (mine**exponent * mine + 1.0).cpu()
        torch.testing.assert_close(y, x**exponent * x + 1.0)
        stats = helpers.stats()
        counts.append((stats["plans_built"], stats.get("jit/compiled", 0)))
    assert counts[0][0] < counts[1][0] < counts[3][0]
    assert len({compiled for _, compiled in counts}) == 1


# --- settings ---------------------------------------------------------------------------------

HALF_CHAIN = """
results = {}
for dtype in (torch.bfloat16, torch.float16):
    for device in ("cpu", DEVICE):
        g = torch.Generator().manual_seed(3)
        a, b = ((torch.randn(333, generator=g) * 3).to(dtype) for _ in range(2))
        a, b = a.to(device), b.to(device)
        s = torch.tensor(1.2345678).to(device)
        i = torch.arange(1000, 1333).to(device)
        for _ in range(3):
            helpers.flush()
            before = helpers.stats()["kernel_launches"]
            x = a * b + a
            y = (x - b) * 0.3 / (a.abs() + 1)
            z = torch.maximum(y, x * y) - y * 1.7
            y = s - (s + y.neg()) * s + 0.1
            z = (1.1 - z - 0.3 * y).add(z, alpha=0.7)
            x.mul_(z).sub_(b).add_(i)
            helpers.flush()
            launched = helpers.stats()["kernel_launches"] - before
        results[f"{dtype} {device}"] = [t.cpu().double().tolist() for t in (x, y, z)]
        results[f"{dtype} {device} launched"] = launched
same = [results[f"{d} cpu"] == results[f"{d} {DEVICE}"] for d in (torch.bfloat16, torch.float16)]
launched = [results[f"{d} {DEVICE} launched"] for d in (torch.bfloat16, torch.float16)]
print(json.dumps([same, launched]))
"""


@pytest.mark.parametrize("exact", [True, False])
def test_exact_rounds_after_each_operator_as_eager_does(tmp_path, exact):
    same, launched = _in_a_fresh_process(tmp_path, HALF_CHAIN, ACC_EXACT=str(int(exact)))
    assert min(launched) > 0
    # Without it float32 is kept between operators: if this were equal, the test could not fail.
    assert same == [exact, exact]
