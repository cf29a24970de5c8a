"""`config.dist.comm`: other ways to average gradients come to the same averages."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import models
from tests.distributed.ranks import run_ranks
from tests.distributed.test_data_parallel import SETUP, close
from torchacc.dist import comm, cost

TRAINED = """
from torchacc.dist import comm
def trained(pieces=1 << 20, **options):
    comm._PIECE, comm._PIECES = pieces, 1 << 20
    config = torchacc.Config()
    for name, value in options.items():
        setattr(config.dist.comm, name, value)
    batches = [tuple(models.part(t, RANK, WORLD) for t in pair) for pair in models.data()]
    model, loader = torchacc.accelerate(models.made(RANK), batches, config)
    models.trained(model, loader)
    return {name: value.tolist() for name, value in model.state_dict().items()}
"""
# The gradient of `weight` is the process's own row, the same in every step.
CONSTANT = """
class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16))
    def forward(self, row):
        return (self.weight * row).sum()
def averaged(others, steps, **options):
    rows = torch.randn(WORLD, 16, generator=torch.Generator().manual_seed(3))
    rows[1:] *= others
    config = torchacc.Config()
    for name, value in options.items():
        setattr(config.dist.comm, name, value)
    model = torchacc.accelerate(Constant(), config=config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(rows[RANK].to(model.device)).backward()
        optimizer.step()
    return (-model.weight / steps).tolist()
"""


@pytest.mark.parametrize(
    ("ranks", "calls", "said"),
    [
        (
            2,
            [
                "fusion_threshold=64",  # a bucket for nearly every parameter
                "fusion_threshold='auto'",
                "topk=True, topk_ratio=1.0, topk_threshold=0",
                "topk=True, topk_ratio=0.01",  # the buckets are too small for it
                "streams=3, fusion_threshold=64",
                "streams=2, fusion_threshold=64, topk=True, topk_ratio=1.0, topk_threshold=0",
            ],
            [
                "buckets of 1.0 MiB: an all-reduce takes",
                "the largest 1 of each bucket from 0",
                "the largest 0.01 of each bucket from 1048576",
                "by: all-reduce, on 3 streams",
            ],
        ),
        (
            4,
            [
                "hierarchical=True, intra_size=2",
                "pieces=72, hierarchical=True, intra_size=2",  # bytes, in place of 1 MiB
                "hierarchical=True, intra_size=2, fusion_threshold=64",  # many buckets
                "hierarchical=True, intra_size=2, fusion_threshold=64, hierarchical_threshold=200",
                "hierarchical=True, hierarchical_threshold=0",
                "hierarchical=True, intra_size=2, fusion_threshold=64, streams=2",
            ],
            ["over 2 machines of 2 processes", "over 1 machines of 4 processes"],
        ),
    ],
)
def test_what_loses_nothing_trains_like_the_whole(device, ranks, calls, said):
    code = SETUP + TRAINED
    for number, options in enumerate(calls):
        code += f"report(state{number}=trained({options}))\n"
    done = run_ranks(code, ranks)
    _, state = models.alone()
    for each in done:
        assert each.reports == done[0].reports, "the replicas differ"
        for number in range(len(calls)):
            close(each.reports[f"state{number}"], state)
    for text in said:
        assert text in done[0].stderr


def test_what_is_left_out_of_one_step_is_sent_later(device):
    """The sum over many steps is right, though no single one is.

    Where the other processes have no gradients, no sum has to be rounded.
    """
    largest = "topk=True, topk_ratio=0.125, topk_threshold=0"
    cases = [
        ("compression='bf16'", 0, 32, 1e-4),
        ("compression='fp16'", 0, 32, 1e-5),
        (largest, 1, 160, 0.1),
        (f"{largest}, topk_fp16=True", 1, 160, 0.1),
    ]
    code = SETUP + CONSTANT
    for number, (options, others, steps, _) in enumerate(cases):
        code += f"report(one{number}=averaged({others}, 1, {options}))\n"
        code += f"report(many{number}=averaged({others}, {steps}, {options}))\n"
    done = [each.reports for each in run_ranks(code, 2)]
    assert done[0] == done[1], "the replicas differ"
    for number, (options, others, _, tolerance) in enumerate(cases):
        rows = torch.randn(2, 16, generator=torch.Generator().manual_seed(3))
        rows[1:] *= others
        one, many = (torch.tensor(done[0][f"{name}{number}"]) for name in ("one", "many"))
        wrong = (many - rows.mean(0)).abs().max()
        assert wrong < tolerance, options
        assert (one - rows.mean(0)).abs().max() > 3 * wrong, options
        if options == largest:  # two elements of each process were sent at first
            assert 2 <= int((one != 0).sum()) <= 4


PLAIN = """
from tiacc_training.torch.distributed import init_tiacc_training
init_tiacc_training()  # the device was registered before the switches were set
from tests.distributed import models
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("acc")
torch.acc.set_device(RANK % torch.acc.device_count())
device = torch.device(DEVICE, torch.acc.current_device())
def made():
    return models.made(0).to(device)
def trained(model):
    batches = [tuple(models.part(t, RANK, WORLD).to(device) for t in pair)
               for pair in models.data()]
    models.trained(model, batches)
    return {name: value.tolist() for name, value in model.module.state_dict().items()}
model = DistributedDataParallel(made())
report(bucket=model.bucket_bytes_cap, state=trained(model))
walked, parameters = [], DistributedDataParallel.parameters
DistributedDataParallel.parameters = lambda self: walked.append(1) or parameters(self)
model(torch.ones(2, 4, device=device))
report(walked=len(walked))
said = str(model._comm_hooks[0][1])
other = DistributedDataParallel(made(), bucket_cap_mb=1)
other.register_comm_hook(None, default_hooks.allreduce_hook)
report(policy=said, own=trained(other), hooks=len(other._comm_hooks),
       own_bucket=other.bucket_bytes_cap)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "options", ["compression='fp16'", "topk=True, topk_ratio=0.25, topk_threshold=0"]
)
def test_a_step_that_overflows_is_seen_and_forgotten(device, options):
    """A GradScaler needs the infinity, once: with what is left over it would never go away."""
    code = (
        SETUP
        + CONSTANT
        + f"""
config.dist.comm = torchacc.config.CommConfig({options})
model = torchacc.accelerate(Constant(), config=config)
finite = []
for step in range(5):
    row = torch.ones(16)
    if step == 1 and RANK == 1:
        row[3] = float("inf")
    if step == 2 and RANK == 0:
        row[5] = 1e6  # in float16 it is infinite
    model.zero_grad()
    model(row.to(model.device)).backward()
    finite.append(bool(model.weight.grad.isfinite().all()))
report(finite=finite)
"""
    )
    overflows = "fp16" in options
    for each in run_ranks(code, 2):
        assert each.reports["finite"] == [True, False, not overflows, True, True]


def test_what_a_skipped_step_left_out_is_not_sent(device):
    """It has the scale of that step's loss, also where another bucket overflowed. What was left out
    before is sent later.
    """
    code = (
        SETUP
        + """
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.small = nn.Parameter(torch.zeros(4))
        self.one, self.two = (nn.Parameter(torch.zeros(16)) for _ in range(2))
    def forward(self, row):
        return (self.one * row).sum() + self.two.sum() + (self.small * row[:4]).sum()
def largest(place, **options):
    config = torchacc.Config()
    for name, value in {"fusion_threshold": 16, **options}.items():
        setattr(config.dist.comm, name, value)
    model = torchacc.accelerate(Pair(), config=config)
    found = []
    for step in range(5):
        row = torch.ones(16)
        if step == 3 and RANK == 1:
            row[place] = float("inf")
        model.zero_grad()
        model(row.to(model.device)).backward()
        found.append([float(p.grad.max()) for p in (model.one, model.two)])
    return found
for place in (2, 9):  # the first is in a bucket that is sent as it is, too
    report(**{str(place): largest(place, topk=True, topk_ratio=0.25, topk_threshold=64)})
"""
    )
    for each in run_ranks(code, 2):
        for place, found in each.reports.items():
            # Of 16 ones a step sends the four that waited longest. The buckets of the first step
            # are others than those of the next ones.
            assert found[:3] == [[1.0, 1.0], [1.0, 1.0], [2.0, 2.0]]
            assert found[3][0] == float("inf")
            assert found[4] == [3.0, 3.0], place


def test_what_was_left_out_has_the_scale_of_the_step_that_sends_it(device):
    code = (
        SETUP
        + CONSTANT
        + """
def unscaled(scales):
    config = torchacc.Config()
    config.dist.comm.topk, config.dist.comm.topk_ratio = True, 0.25
    config.dist.comm.topk_threshold = 0
    model = torchacc.accelerate(Constant(), config=config)
    scaler = torch.amp.GradScaler(DEVICE)
    scaler.scale(torch.ones((), device=model.device))  # makes what update() writes
    rows, found = torch.arange(1.0, 17.0), []
    for scale in scales:
        model.zero_grad()
        loss = model(rows.to(model.device))
        if scale:
            scaler.update(scale)
            loss = scaler.scale(loss)
        loss.backward()
        found.append((model.weight.grad / (scale or 1.0)).tolist())
    return found
changing = unscaled([8.0, 8.0, 4.0, 16.0, 2.0, 2.0])
constant = unscaled([None] * 6)

def beside(scales, fused):
    # without a scaler, next to a model with one
    config = torchacc.Config()
    config.dist.comm.topk, config.dist.comm.topk_ratio = True, 0.25
    config.dist.comm.topk_threshold = 0
    model, other = (torchacc.accelerate(Constant(), config=config) for _ in range(2))
    scaler = torch.amp.GradScaler(DEVICE)
    scaler.scale(torch.ones((), device=model.device))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, fused=fused)
    rows, found = torch.arange(1.0, 17.0).to(model.device), []
    for scale in scales:
        scaler.update(scale)
        optimizer.zero_grad()
        scaler.scale(other(rows)).backward()
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        model(rows).backward()
        found.append(model.weight.grad.tolist())
    return found

report(changing=changing, constant=constant)
report(beside=[beside([8.0, 8.0, 4.0, 16.0, 2.0, 2.0], fused) for fused in (False, True)])
"""
    )
    for each in run_ranks(code, 2):
        assert each.reports["changing"] == each.reports["constant"]
        assert each.reports["beside"] == [each.reports["constant"]] * 2


def test_a_model_with_a_policy_can_be_copied_and_pickled(device):
    code = (
        SETUP
        + """
import copy, io
config.dist.comm.topk, config.dist.comm.topk_threshold = True, 0
model = torchacc.accelerate(models.made(0), config=config)
file = io.BytesIO()
torch.save(model, file)
file.seek(0)
x = torch.ones(2, 4, device=model.device)
expected = model(x)
for way, other in (("copied", copy.deepcopy(model)),
                   ("pickled", torch.load(file, weights_only=False))):
    y = other(x)
    y.sum().backward()
    report(**{way: [torch.equal(y, expected), other.head.weight is not model.head.weight,
                    bool(other.head.weight.grad.abs().sum() > 0)]})
"""
    )
    for each in run_ranks(code, 2):
        assert each.reports == {"copied": [True] * 3, "pickled": [True] * 3}


def test_the_launcher_says_what_is_on_a_machine(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert comm.processes_inside(range(8), None) == 4
    assert comm.processes_inside(range(0, 16, 2), None) == 2  # the other dimension is tp
    assert comm.processes_inside(range(8), 2) == 2
    assert comm.processes_inside(range(3), 8) == 3
    with pytest.raises(ValueError, match=r"unlike numbers \(\[2, 4\]\)"):
        comm.processes_inside(range(6), None)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert comm.processes_inside(range(16), None) == 8


def test_ways_of_the_benchmark_come_to_the_average(device):
    """benchmarks/exchanges.py, which comm.py runs on simulated hosts."""
    code = """
from benchmarks.exchanges import build
torch.acc.set_device(RANK % torch.acc.device_count())
made = build("", DEVICE, "plain")
for way in (*made.policies, *made.groups):
    report(**{way: made.measure({"way": way, "bytes": 40000, "steps": 2})})
dist.destroy_process_group()
"""
    for each in run_ranks(code, 4):
        ways = {"plain": 1e-6, "hierarchical": 1e-6, "fp16": 1e-3, "top-k": 1, "top-k fp16": 1}
        for way, away in {**ways, "within a host": 1e-6, "between hosts": 1e-6}.items():
            assert each.reports[way]["away"] <= away
            assert len(each.reports[way]["each"]) == 2


def test_programs_of_plain_torch_follow_the_switches_of_tiacc(device):
    _, state = models.alone()
    switches = {
        "LIGHT_2D_ALLREDUCE": "1",
        "LIGHT_INTRA_SIZE": "2",
        "TIACC_TRAINING_FUSION_THRESHOLD": "4096",
        "TIACC_TRAINING_NUM_NCCL_STREAMS": "2",
    }
    for each in run_ranks(PLAIN, 4, **switches):
        found = each.reports
        assert found["policy"] == "all-reduce over 2 machines of 2 processes"
        assert found["bucket"] == 4096
        close(found["state"], state)
        assert found["walked"] == 0  # but for the first forward
        # what the program says itself goes first
        assert found["own_bucket"] == 1 << 20 and found["hooks"] == 1
        close(found["own"], state)


def test_a_mesh_of_plain_torch_has_its_own_processes(device):
    """Ranks 0 and 2 average, and 1 and 3; the bucket's policy is not the world's."""
    code = """
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from tiacc_training.torch.distributed import init_tiacc_training
init_tiacc_training()
dist.init_process_group("acc")
torch.acc.set_device(RANK % torch.acc.device_count())
device = torch.device(DEVICE, torch.acc.current_device())
mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
model = nn.Linear(4, 1, bias=False).to(device)
model = DistributedDataParallel(model, device_mesh=mesh["dp"])
model(torch.full((2, 4), float(RANK), device=device)).sum().backward()
report(gradient=model.module.weight.grad.tolist(), hooks=len(model._comm_hooks))
dist.new_group([0, 1])
try:
    DistributedDataParallel(nn.Linear(4, 1).to(device), device_mesh=mesh["dp"])
except RuntimeError as error:
    report(error=str(error))
dist.destroy_process_group()
"""
    done = run_ranks(code, 4, TIACC_TRAINING_NUM_NCCL_STREAMS="2")
    for number, each in enumerate(done):
        assert each.reports["hooks"] == 1
        assert each.reports["gradient"] == [[2.0 * (1 + number % 2)] * 4]
        assert "are in [5, 4] process groups" in each.reports["error"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("config.dist.comm.hierarchical = RANK == 1", "dist.comm.hierarchical = True"),
        ("config.dist.fsdp.size = 1 + RANK", "process 1 has dist.dp.size = 1"),
        ("config.dist.dp.size = 2; config.dist.topology.sort(reverse=RANK == 1)", "topology = ["),
    ],
)
def test_options_that_differ_are_told_before_any_process_waits(device, change, said):
    code = SETUP + change + "\ntorchacc.accelerate(models.made(0), config=config)\n"
    for each in run_ranks(code, 2, check=False):
        assert each.status == 1
        assert "[config] the processes have other options" in each.stderr
        assert said in each.stderr and "process 1 has" in each.stderr


def test_what_has_no_effect_is_said(device):
    code = (
        SETUP
        + """
config.dist.fsdp.size = 2
config.dist.dp.find_unused_parameters = True
config.dist.comm.fusion_threshold = 1 << 20
torchacc.accelerate(models.made(0), config=config)
"""
    )
    first, second = run_ranks(code, 2)
    names = "dist.comm.fusion_threshold, dist.dp.find_unused_parameters: without effect"
    assert names in first.stderr and "without effect" not in second.stderr


def test_machines_of_unequal_size_are_refused_on_every_process(device):
    """Also where each process knows only the number of its own machine."""
    code = (
        SETUP
        + """
from torchacc.dist import comm
config.dist.comm.hierarchical, config.dist.comm.intra_size = True, 2
report(asked=refused(lambda: torchacc.accelerate(models.made(0), config=config)))
config.dist.comm.intra_size, os.environ["LOCAL_WORLD_SIZE"] = None, ["2", "2", "1"][RANK]
report(launched=refused(lambda: torchacc.accelerate(models.made(0), config=config)),
       plain=refused(lambda: comm.make_policy(config.dist.comm, dist.group.WORLD)))
"""
    )
    for each in run_ranks(code, 3):
        found = each.reports
        assert "dist.comm.intra_size = 2 does not divide the 3 processes" in found["asked"]
        assert "process 2 has dist.comm.hierarchical: LOCAL_WORLD_SIZE = 1" in found["launched"]
        assert "which average gradients, have LOCAL_WORLD_SIZE = [2, 2, 1]" in found["plain"]


def test_the_first_process_decides_on_the_size_of_buckets(device):
    code = (
        SETUP
        + """
from torchacc.dist import comm, cost
seconds = {size: (1 + RANK) * (1e-3 + size / 1e8) for size in cost.SIZES}
cost._seconds = lambda group, device, size: seconds[size]
config.dist.comm.fusion_threshold = "auto"
model = torchacc.accelerate(nn.Linear(2000, 2000), config=config)
report(bytes=model.model.model.bucket_bytes_cap)
"""
    )
    done = run_ranks(code, 2)
    # sqrt(4 * 2000 * 2001 bytes * 1 ms * 100 MB/s)
    assert [each.reports["bytes"] for each in done] == [pytest.approx(1265227, abs=2)] * 2
    assert "buckets of 1.2 MiB: an all-reduce takes 1.000 ms and 100 MB/s" in done[0].stderr


def test_costs_follow_from_times():
    found = cost.fit([(n, 2e-3 + n / 5e8) for n in (4096.0, 1e6, 4e6)])
    assert found.latency == pytest.approx(2e-3) and found.bandwidth == pytest.approx(5e8)
    assert found.seconds(5e8) == pytest.approx(1.002)
    # No other size of buckets is cheaper, by the formula that its text names.
    gradients, best = 400 << 20, found.bucket(400 << 20)
    cheapest = gradients / best * found.latency + best / found.bandwidth
    for other in (best * 0.9, best * 1.1):
        assert gradients / other * found.latency + other / found.bandwidth > cheapest
    assert found.bucket(1000) == cost.LEAST and found.bucket(1 << 50) == cost.MOST


def test_costs_of_times_that_are_noise_are_positive():
    found = cost.fit([(1e6, 3e-3), (4e6, 1e-3)])
    assert found.latency > 0 and found.bandwidth > 0
    with pytest.raises(ValueError, match="two sizes"):
        cost.fit([(1e6, 3e-3), (1e6, 1e-3)])
