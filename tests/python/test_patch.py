"""`torchacc.patch()`: what a program says of CUDA acts on acc, however it was imported."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast, custom_bwd, custom_fwd

import torchacc
from tests import helpers
from torchacc_device import _patches

pytestmark = pytest.mark.usefixtures("acc_only")

ACC = "acc"


@pytest.fixture
def patched() -> Iterator[None]:
    torchacc.patch()
    yield
    torchacc.unpatch()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """torch.cuda.amp's names are deprecated, and say so at each use."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def product() -> torch.dtype:
    x = torch.ones(2, 2, device=ACC)
    return (x @ x).dtype


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(
    ("region", "dtype"),
    [
        (lambda: autocast(), torch.float16),
        (lambda: autocast(dtype=torch.bfloat16), torch.bfloat16),
        (lambda: torch.cuda.amp.autocast(enabled=False), torch.float32),
        (lambda: torch.autocast("cuda"), torch.float16),
        (lambda: torch.autocast(device_type="cuda", dtype=torch.bfloat16), torch.bfloat16),
        (lambda: torch.autocast("xla"), torch.float16),
        (lambda: torch.amp.autocast("cuda"), torch.float16),
        (lambda: torch.autocast("acc"), torch.float16),
        (lambda: torch.acc.amp.autocast(dtype=torch.bfloat16), torch.bfloat16),
        (lambda: torchacc.amp.autocast(), torch.float16),
    ],
)
def test_regions_of_every_name_act_on_acc(region, dtype: torch.dtype) -> None:
    with region():
        assert product() == dtype
        assert torch.is_autocast_enabled() == (dtype != torch.float32)
        assert torch.is_autocast_enabled(ACC) == (dtype != torch.float32)
        if dtype != torch.float32:
            assert torch.get_autocast_dtype("cuda") == torch.get_autocast_dtype(ACC) == dtype
    assert product() == torch.float32
    assert not torch.is_autocast_enabled() and not torch.is_autocast_enabled(ACC)


@pytest.fixture
def defaults() -> Iterator[None]:
    before = {kind: torch.get_autocast_dtype(kind) for kind in ("cuda", ACC)}
    yield
    for kind, dtype in before.items():
        torch.set_autocast_dtype(kind, dtype)


@pytest.mark.usefixtures("patched", "defaults")
@pytest.mark.parametrize("old", [False, True])
def test_regions_take_the_dtype_that_was_set_for_cuda(old: bool) -> None:
    half = torch.bfloat16
    if old:
        with pytest.warns(DeprecationWarning):
            torch.set_autocast_gpu_dtype(half)
    else:
        torch.set_autocast_dtype("cuda", half)
    for region, dtype in (
        (lambda: torch.autocast("cuda"), half),
        (lambda: torch.autocast(device_type="cuda", enabled=True), half),
        (lambda: torch.autocast("cuda", torch.float16), torch.float16),
        (lambda: torch.autocast(ACC), torch.float16),
    ):
        with region():
            assert product() == dtype
            with torch.autocast("cuda"):  # as outside
                assert product() == dtype
            torch.set_autocast_dtype("cuda", torch.float16)
            with torch.autocast("cuda"):
                assert product() == torch.float16
        assert torch.get_autocast_dtype("cuda") == half
        assert torch.get_autocast_dtype(ACC) == torch.float16


@pytest.mark.usefixtures("patched", "defaults")
def test_regions_take_the_dtype_that_was_set_for_acc() -> None:
    torch.set_autocast_dtype(ACC, torch.bfloat16)
    with torch.autocast("cuda"):
        assert product() == torch.bfloat16


@pytest.mark.usefixtures("patched")
def test_regions_nest_and_decorate() -> None:
    @autocast()
    def inside() -> torch.dtype:
        return product()

    with torch.autocast("cuda", dtype=torch.bfloat16):
        with autocast(enabled=False):
            assert product() == torch.float32
            assert not torch.is_autocast_enabled()
            assert inside() == torch.float16
        assert product() == torch.bfloat16
        assert torch.is_autocast_enabled()
    with pytest.raises(ZeroDivisionError), autocast():
        1 / 0
    assert not torch.is_autocast_enabled()


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("cast", [None, torch.float32])
def test_functions_with_their_own_backward(cast: torch.dtype | None) -> None:
    class Mul(torch.autograd.Function):
        @staticmethod
        @custom_fwd(cast_inputs=cast)
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            seen.append((a.dtype, torch.is_autocast_enabled()))
            return a @ b

        @staticmethod
        @custom_bwd
        def backward(ctx, gradient):
            a, b = ctx.saved_tensors
            seen.append((a.dtype, torch.is_autocast_enabled()))
            return gradient @ b.t(), a.t() @ gradient

    seen: list[tuple[torch.dtype, bool]] = []
    a = torch.ones(2, 2, device=ACC, requires_grad=True)
    with autocast():
        y = Mul.apply(a.half(), a)
    y.sum().backward()
    if cast is None:
        assert seen[0] == (torch.float16, True) and seen[1] == (torch.float16, True)
        assert y.dtype == torch.float16
    else:
        assert seen == [(torch.float32, False)] * 2
        assert y.dtype == torch.float32
    assert a.grad is not None and a.grad.dtype == torch.float32


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("make", [GradScaler, torch.cuda.amp.GradScaler, torch.amp.GradScaler])
def test_scalers_scale_on_acc(make) -> None:
    scaler = make(init_scale=4.0)
    assert scaler.is_enabled()
    parameter = torch.ones(2, device=ACC, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(parameter.sum()).backward()
    assert parameter.grad is not None and parameter.grad.tolist() == [4.0, 4.0]
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [0.0, 0.0]
    assert scaler._scale.device.type == ACC


@pytest.mark.usefixtures("patched")
def test_functions_of_cuda_ask_acc() -> None:
    held = torch.ones(1000, device=ACC)
    torch.cuda.synchronize()
    assert held.sum().item() == 1000
    torch.cuda.synchronize("cuda:0")
    torch.cuda.synchronize(torch.device("cuda"))
    torch.cuda.synchronize(device="cuda")
    assert torch.cuda.memory_allocated() == torch.acc.memory_allocated() > 0
    assert torch.cuda.max_memory_allocated("cuda") >= torch.cuda.memory_allocated()
    assert torch.cuda.get_device_name(0) == torch.acc.get_device_name(0)
    torch.cuda.manual_seed_all(3)
    first = torch.rand(2, device=ACC)
    torch.acc.manual_seed_all(3)
    assert torch.equal(first, torch.rand(2, device=ACC))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    time.sleep(0.01)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 10  # milliseconds
    with torch.cuda.device("cuda:0"), torch.cuda.stream(torch.cuda.Stream(device="cuda:0")):
        assert product() == torch.float32
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@pytest.mark.usefixtures("patched")
def test_events_of_cuda_are_made_of_options_by_position() -> None:
    made = torch.cuda.Event(True), torch.cuda.Event(True, False), torch.cuda.Event()
    assert all(type(each) is torch.Event and isinstance(each, torch.cuda.Event) for each in made)
    assert not isinstance(torch.cuda.Stream(), torch.cuda.Event)
    assert issubclass(torch.cuda.Event, torch.Event) and issubclass(torch.Event, torch.cuda.Event)
    assert isinstance(torch.acc.current_stream().record_event(), torch.cuda.Event)
    start, end = made[:2]
    start.record()
    torch.ones(8, device=ACC).sum()
    torch.cuda.current_stream().record_event(end)
    torch.cuda.Stream().wait_event(end)
    end.synchronize()
    assert start.elapsed_time(end) >= 0 and end.query()
    with pytest.raises(ValueError, match="enable_timing"):
        made[2].elapsed_time(end)


@pytest.mark.usefixtures("patched")
def test_what_decides_where_tensors_go_stays() -> None:
    before = torch.cuda.is_available(), torch.cuda.device_count()
    torchacc.unpatch()
    assert (torch.cuda.is_available(), torch.cuda.device_count()) == before
    if not torch.cuda.is_available():
        torchacc.patch()
        with pytest.raises((AssertionError, RuntimeError)):
            torch.ones(1, device="cuda")


def listed(said: str) -> list[str]:
    """The names that the log says are patched."""
    owners = [each.split(": ") for each in said.partition("Patched: ")[2].split("; ")]
    return sorted(f"{owner}.{name}" for owner, names in owners for name in names.split(", "))


def test_it_is_asked_for_said_and_taken_back(caplog: pytest.LogCaptureFixture) -> None:
    names = ("__init__", "__enter__", "__exit__")
    originals = [vars(torch.autocast)[name] for name in names]
    synchronize = torch.cuda.synchronize
    torchacc.unpatch()
    caplog.set_level("DEBUG", logger="TorchAcc")
    assert "torch.cuda.synchronize" in torchacc.patch()
    torchacc.patch()
    assert [r.levelname for r in caplog.records] == ["INFO"]
    (said,) = [r.getMessage() for r in caplog.records]
    assert "torchacc.unpatch()" in said and listed(said) == sorted(_patches.AS_CUDA)
    torchacc.patch(devices=True)
    assert listed(caplog.records[-1].getMessage()) == sorted(_patches.DEVICES_AS_CUDA)
    assert set(_patches.AS_CUDA) <= set(_patches.applied())
    assert torch.cuda.synchronize is not synchronize
    torchacc.unpatch()
    assert not set(_patches.AS_CUDA) & set(_patches.applied())
    assert [vars(torch.autocast)[name] for name in names] == originals
    assert torch.cuda.synchronize is synchronize
    assert set(_patches.LIST) <= set(_patches.applied())


def test_accelerate_asks_for_it() -> None:
    try:
        model = torchacc.accelerate(nn.Linear(2, 2))
        with autocast():
            assert model(torch.ones(1, 2, device=ACC)).dtype == torch.float16
    finally:
        torchacc.unpatch()
        torch.distributed.destroy_process_group()  # of this process alone; other tests ask for one


@pytest.mark.usefixtures("patched")
def test_a_region_of_float32_casts_to_it() -> None:
    first, second = (torch.nn.Linear(4, 4).to("acc") for _ in range(2))
    with torch.autocast("cuda", dtype=torch.float16):
        h = first(torch.ones(2, 4, device="acc"))
        with torch.autocast("cuda", dtype=torch.float32):
            y = second(h)
    assert (h.dtype, y.dtype) == (torch.float16, torch.float32)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("options", [{}, {"devices": [0]}, {"device_type": "cuda"}])
def test_a_fork_of_the_generators_gives_them_back(options) -> None:
    def draw() -> list[float]:
        return torch.rand(3, device="acc").tolist()

    torch.manual_seed(3)
    expected = draw(), draw()
    torch.manual_seed(3)
    first = draw()
    with torch.random.fork_rng(**options):
        torch.manual_seed(0)
        draw()
    assert (first, draw()) == expected


@pytest.mark.parametrize("devices", [False, True])
def test_workers_of_a_loader_are_seeded_though_the_device_is_in_use(devices: bool) -> None:
    """torch seeds them, also what it calls CUDA: a device that a forked process cannot use.

    In a process of its own: where CUDA was looked for, torch leaves it out in forked ones.
    """
    done = helpers.run_python(
        f"""
import torchacc
from torch.utils.data import DataLoader, Dataset

class Drawn(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand(())

def seed(worker):
    torch.cuda.manual_seed(worker)
    torch.cuda.manual_seed_all(worker)

torch.ones(1, device=DEVICE).item()
torchacc.patch(devices={devices})
loader = torchacc.AsyncLoader(DataLoader(Drawn(), num_workers=2, worker_init_fn=seed))
print(len({{batch.item() for _ in range(2) for batch in loader}}))
"""
    )
    assert done.stdout == "8\n"


@pytest.mark.parametrize("absent", [True, False], ids=["no GPU", "a GPU"])
def test_what_was_made_before_is_acc_s_too(absent: bool) -> None:
    """Whether torch has switched it off for want of CUDA, or made it CUDA's."""
    code = f"""
import warnings
warnings.simplefilter("ignore")
absent = {absent}
if absent:
    torch.cuda.is_available = lambda: False
else:
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
def product():
    x = torch.ones(2, 2, device=DEVICE)
    return str((x @ x).dtype)
regions = [
    torch.cuda.amp.autocast(),
    torch.cuda.amp.autocast(enabled=False),
    torch.autocast("cuda", dtype=torch.float16),
]
scalers = [
    torch.cuda.amp.GradScaler(4.0),
    torch.amp.GradScaler("cuda", init_scale=8.0),
    torch.amp.GradScaler(enabled=False),
]
forwards = [region(product) for region in regions]
square = torch.autocast("cuda")(lambda x: x @ x)  # not called before
enabled = [each.is_enabled() for each in scalers]
print([call() for call in forwards], enabled == [not absent, not absent, False])
import torchacc
torchacc.patch()
print([call() for call in forwards], [each.is_enabled() for each in scalers])
with torch.autocast("cuda"):
    print([call() for call in forwards], product())
"""
    code += (
        SCALED
        + """
print(torch.compile(square, backend="eager")(torch.ones(2, 2, device=DEVICE)).dtype)
torchacc.unpatch()
print(torch.is_autocast_enabled(), torch.is_autocast_enabled(DEVICE), product())
"""
    )
    half, single = "torch.float16", "torch.float32"
    assert helpers.run_python(code).stdout.splitlines() == [
        f"{[single] * 3} True",
        f"{[half, single, half]} [True, True, False]",
        f"{[half, single, half]} {half}",
        "[1.0, 1.0] 4.0",  # unscaled by the step
        "[1.0, 1.0] 8.0",
        "[1.0, 1.0] 1.0",
        half,
        f"False False {single}",
    ]


def test_inside_a_region_it_is_not_taken_back() -> None:
    torchacc.patch()
    with autocast():
        with pytest.raises(RuntimeError, match="inside an autocast region"):
            torchacc.unpatch()
        with autocast(enabled=False), pytest.raises(RuntimeError, match="inside an autocast"):
            torchacc.unpatch()
        assert product() == torch.float16
    torchacc.unpatch()


# What follows runs without a GPU, or as if there were none.
# Steps under `scalers`, and what is left of the gradients and the scale.
SCALED = """
weight = torch.ones(2, device=DEVICE, requires_grad=True)
for scaler in scalers:
    weight.grad = None
    scaler.scale(weight.sum()).backward()
    scaler.step(torch.optim.SGD([weight], lr=0.0))
    scaler.update()
    print(weight.grad.tolist(), scaler.get_scale())
"""
WITHOUT = """
import warnings
warnings.simplefilter("ignore")
torch.cuda.is_available = lambda: False
import torchacc
"""


def test_what_a_scaler_was_told_before_is_kept() -> None:
    """As one that torch has not switched off: the last of what it was told counts."""
    code = """
state = {"scale": 128.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 9}
state["_growth_tracker"] = 7
loaded, told, both = (torch.amp.GradScaler("cuda", init_scale=4.0) for _ in range(3))
for scaler in (loaded, both):
    scaler.load_state_dict(state)
for scaler in (told, both):
    scaler.set_growth_factor(5.0)
    scaler.set_backoff_factor(0.125)
    scaler.set_growth_interval(6)
loaded.load_state_dict({})  # of a scaler that was off when it was saved
assert loaded.state_dict() == {} and loaded.get_scale() == 1.0 and not loaded.is_enabled()
torchacc.patch()
assert loaded.state_dict() == state, loaded.state_dict()
for scaler, scale, tracker in ((told, 4.0, 0), (both, 128.0, 7)):
    expected = dict(zip(state, (scale, 5.0, 0.125, 6, tracker)))
    assert scaler.state_dict() == expected, scaler.state_dict()
weight = torch.ones(2, device=DEVICE, requires_grad=True)
loaded.scale(weight.sum()).backward()
assert weight.grad.tolist() == [128.0, 128.0]
"""
    helpers.run_python(WITHOUT + code)


def test_unpatch_switches_off_what_patch_switched_on() -> None:
    code = """
region, open_then = torch.autocast("cuda"), torch.autocast("cuda")
scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
before = [dict(vars(each)) for each in (region, scaler)]
def now():
    return [{k: vars(o).get(k) for k in b} for o, b in zip((region, scaler), before)]
with open_then:
    torchacc.patch()
with open_then, region:
    assert torch.is_autocast_enabled(DEVICE)
weight = torch.ones(2, device=DEVICE, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.0)
def step():
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update(scaler.get_scale() * 2)
step()
torchacc.unpatch()
assert now() == before, now()
for each in (region, open_then):
    with each:
        assert not torch.is_autocast_enabled(DEVICE) and not torch.is_autocast_enabled("cuda")
assert scaler.get_scale() == 1.0 and scaler.scale(weight).tolist() == [1.0, 1.0]
torchacc.patch()
with region:
    assert torch.is_autocast_enabled(DEVICE)
assert scaler.get_scale() == 8.0  # it goes on where it was
step()
torchacc.unpatch()
scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=2.0).state_dict())
torchacc.patch()
assert scaler.get_scale() == 2.0
"""
    helpers.run_python(WITHOUT + code)


def test_unpatch_gives_regions_of_cuda_back() -> None:
    code = """
torch.cuda.amp.common.amp_definitely_not_available = lambda: False
import torchacc
region = torch.autocast("cuda", dtype=torch.float16)
torchacc.patch()
with region:
    assert torch.is_autocast_enabled(DEVICE)
torchacc.unpatch()
assert region.device == "cuda"
with region:
    assert not torch.is_autocast_enabled(DEVICE)
"""
    helpers.run_python(code)


def test_a_scaler_of_shards_that_was_made_before_scales() -> None:
    code = """
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
class Ours(ShardedGradScaler):
    pass
scalers = [ShardedGradScaler(init_scale=4.0), Ours("cuda", 8.0)]
torchacc.patch()
dist.init_process_group("acc", store=dist.HashStore(), rank=0, world_size=1)
"""
    code += SCALED + "dist.destroy_process_group()"
    done = helpers.run_python(WITHOUT + code)
    assert done.stdout.splitlines() == ["[1.0, 1.0] 4.0", "[1.0, 1.0] 8.0"]


def test_scalers_of_which_nobody_knows_how_to_switch_them_on_are_named() -> None:
    code = """
class Asks(torch.amp.GradScaler):
    def __init__(self, mine):
        absent = torch.cuda.amp.common.amp_definitely_not_available()
        super().__init__("cuda", enabled=not absent)
class Ours(torch.amp.GradScaler):
    __hash__ = None
    def __init__(self, mine):
        super().__init__("cuda")
        self.factor = mine if self._enabled else None
asks, ours, wrong = Asks(3), Ours(3), torch.amp.GradScaler("cuda", growth_factor=0.5)
good = torch.amp.GradScaler("cuda")
before = [dict(vars(each)) for each in (asks, ours, wrong)]
names = torchacc.patch()
assert [vars(each) for each in (asks, ours, wrong)] == before
assert good.is_enabled() and "torch.GradScaler.__init__" in names
torchacc.patch()
"""
    said = [line for line in helpers.run_python(WITHOUT + code).stderr.splitlines() if line]
    said = [line for line in said if "[patch]" in line]
    assert len(said) == 2, said
    for line, kind, why in zip(
        said,
        ("__main__.Ours", "torch.amp.grad_scaler.GradScaler"),
        ("its own __init__", "The growth factor must be > 1.0"),
        strict=True,
    ):
        assert f"a {kind} that was made before patch() stays disabled" in line
        assert why in line and "Make it after patch() or accelerate()" in line
