"""Ranks that train together hold the same bits, whatever their compilers do."""

from __future__ import annotations

import shutil

import pytest

from tests import helpers
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("acc_only")

TRAIN = """
import tempfile
import torchacc_device
from torch import nn
from torch.nn.parallel import DistributedDataParallel
os.environ["ACC_CACHE_DIR"] = tempfile.mkdtemp(dir=FOLDER)  # nothing is there already
if RANK in COMPILERS:
    os.environ["ACC_CXX"] = COMPILERS[RANK]
dist.init_process_group("cpu:gloo,acc:acc")
torch.acc.set_device(RANK % torch.acc.device_count())
device = torch.device(DEVICE, torch.acc.current_device())
torch.manual_seed(RANK)
net = nn.Sequential(nn.Linear(8, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 1))
net = DistributedDataParallel(net.to(device))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
for i in range(50):
    torch.manual_seed(10 * i + RANK)
    optimizer.zero_grad()
    loss = net(torch.randn(4 + RANK, 8).to(device)).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    if RANK == 0 and i % 3 == 0:
        loss.item()  # cuts its steps elsewhere
mine = [p.detach().cpu() for p in net.parameters()]
mine += [value.cpu() for state in optimizer.state.values() for value in state.values()]
there = [None] * WORLD
dist.all_gather_object(there, mine)
report(equal=[all(map(torch.equal, mine, other)) for other in there],
       launches=torchacc_device._C.stats()["kernel_launches"])
dist.destroy_process_group()
"""


def trained(folder, compilers: dict[int, str], ranks: int = 4):
    code = f"FOLDER, COMPILERS = {str(folder)!r}, {compilers!r}\n" + TRAIN
    done = run_ranks(code, ranks)
    assert all(rank.reports["equal"] == [True] * ranks for rank in done)
    return done


@pytest.fixture(autouse=True)
def host_only(device):
    if helpers.extension().executor_name() != "host" or not shutil.which("g++"):
        pytest.skip("its kernels are not made by g++")


def test_compilers_of_other_speeds(tmp_path):
    slow = tmp_path / "g++"
    slow.write_text(f'#!/bin/sh\nsleep 1.5\nexec {shutil.which("g++")} "$@"\n')
    slow.chmod(0o755)
    for rank in trained(tmp_path, {1: str(slow), 2: str(slow)}):
        assert rank.reports["launches"] > 100
        assert "UserWarning" not in rank.stderr


CUT = """
import time
import torchacc_device
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("cpu:gloo,acc:acc")
device = torch.device(DEVICE)
ALONE = RANK == 0
def read(x):
    if ALONE:
        x.cpu()

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05).step
def by_hand(parameters):
    def step():
        for p in parameters:
            read(p.grad)
            p.data.add_(p.grad, alpha=-0.05)
    return step
def momentum(parameters):
    kept = [torch.zeros_like(p) for p in parameters]
    @torch.no_grad()
    def step():
        for p, m in zip(parameters, kept):
            m.mul_(0.9).add_(p.grad)
            change = m + p * 1e-4
            read(change)
            p.add_(change, alpha=-0.05)
    return step
def squashed(parameters):
    @torch.no_grad()
    def step():
        for p in parameters:
            change = p.grad * 3
            read(change)
            change = nn.functional.silu(change)
            read(change)
            p.sub_(change, alpha=0.05)
    return step

# With one parameter the update is alone in a plan that begins behind the backward.
def one():
    return nn.Linear(40, 40, bias=False)
def three():
    return nn.Sequential(nn.Linear(40, 30, bias=False), nn.Tanh(), nn.Linear(30, 3))
def trained(net, make, dtype, between):
    torch.manual_seed(0)
    net = DistributedDataParallel(net().to(device, dtype))
    parameters = list(net.parameters())
    step = make(parameters)
    for i in range(8):
        torch.manual_seed(10 * i + RANK)
        net.zero_grad()
        net(torch.randn(4, 40).to(device, dtype)).square().mean().backward()
        between(parameters)
        step()
        read(parameters[-1])
    mine = [p.detach().cpu() for p in parameters]
    there = [None] * WORLD
    dist.all_gather_object(there, mine)
    assert all(bool(p.isfinite().all()) for p in mine)
    return sum(int((a != b).sum()) for a, b in zip(*there))
def logged(parameters):
    for p in parameters:
        read(p.grad)
def differ(make, dtype, between):
    return [trained(net, make, dtype, between) for net in (one, three)]
def paused(parameters):
    if ALONE:
        idle = torchacc_device._C.stats().get("flush_idle", 0)
        until = time.monotonic() + 60
        while torchacc_device._C.stats().get("flush_idle", 0) == idle:
            assert time.monotonic() < until, "nothing was submitted meanwhile"
            time.sleep(0.05)
"""

HALVES = ("bfloat16", "float16")
LAUNCHES = 'report(launches=torchacc_device._C.stats()["kernel_launches"])'


def same(differ: str, before: str = "") -> None:
    """Both ranks end with the same bits, computed by kernels."""
    code = [CUT, before, f"report(differ={differ})", LAUNCHES, "dist.destroy_process_group()"]
    for rank in run_ranks("\n".join(code), 2):
        assert rank.reports["differ"] == [0, 0]
        assert rank.reports["launches"] > 30


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        *((make, dtype) for make in ("sgd", "by_hand", "momentum") for dtype in HALVES),
        ("squashed", "float32"),
    ],
)
def test_a_rank_that_reads_alone_computes_the_same(make, dtype):
    """What it reads cuts its plans in the middle of the update, where a node is alone in one."""
    same(f"differ({make}, torch.{dtype}, logged)")


def test_a_rank_that_pauses_alone_computes_the_same():
    """Work that waits for long is submitted as it is."""
    same("differ(sgd, torch.bfloat16, paused)", before="read = lambda x: None")


def test_a_rank_without_a_compiler(tmp_path):
    done = trained(tmp_path, {3: "/bin/false", 1: str(tmp_path / "none")})
    for rank in done:
        assert rank.reports["launches"] == 0
        assert "no rank uses generated kernels, since one has none: rank " in rank.stderr
        assert "ACC_CXX" in rank.stderr


@pytest.fixture
def failing(tmp_path):
    """A compiler that makes no kernel but the one by which ranks agree that they have kernels."""
    path = tmp_path / "g++"
    path.write_text(
        "#!/bin/sh\n"
        'for each in "$@"; do\n'
        '  case "$each" in *.cpp) grep -q acc_nothing "$each" || exit 1 ;; esac\n'
        "done\n"
        f'exec {shutil.which("g++")} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


def test_compilers_that_fail_later_on_all_ranks(tmp_path, failing):
    for rank in trained(tmp_path, {0: failing, 1: failing}, ranks=2):
        assert rank.reports["launches"] == 0
        assert "Where another process of this training has that kernel" in rank.stderr


# Exchanges until it is an error; without one it comes to its end.
EXCHANGE = """
import time
def exchange(rounds=1200):  # of all ranks alike, whenever each begins: a minute and more
    for _ in range(rounds):
        x = torch.ones(3, device=DEVICE)
        dist.all_reduce(x)
        x.cpu()
        time.sleep(0.05)
"""


def ended(code: str):
    done = run_ranks(code, 2, check=False)
    for rank in done:
        assert rank.status == 1
        assert "rank 1 has run without the generated kernel " in rank.stderr
        assert ", which rank 0 uses" in rank.stderr
    return done


def test_a_compiler_that_fails_later_on_one_rank_ends_the_training_of_all(tmp_path, failing):
    code = f"FOLDER, COMPILERS = {str(tmp_path)!r}, {{1: {failing!r}}}\n" + TRAIN
    code = EXCHANGE + code.replace("mine = [p", "exchange()\nmine = [p", 1)
    for rank, each in enumerate(ended(code)):
        told = "Where another process of this training has that kernel" in each.stderr
        assert told == (rank == 1)


def test_the_end_of_a_group_tells_of_a_kernel_that_was_missed_just_before(tmp_path, failing):
    code = f"FOLDER, COMPILERS = {str(tmp_path)!r}, {{1: {failing!r}}}\n" + TRAIN
    # By then the other has shown what it misses: not one long sleep, which a process that stands
    # still has behind it at once.
    wait = "import time\nfor _ in range(20 * (RANK == 0)): time.sleep(0.05)\n"
    code = code.replace("dist.destroy", f"{wait}dist.destroy")
    first, _ = run_ranks(code, 2, check=False)  # on a slow machine the training ends by it
    destroyed = "a process group was destroyed with an error: "
    assert f"{destroyed * (first.status == 0)}rank 1 has run without" in first.stderr


def interrupted(tmp_path, then: str = "") -> str:
    """A program in which Ctrl-C comes to rank 1 while it waits for a kernel, and which goes on.

    `then`: what its compiler does afterwards, in place of what it was called for.
    """
    compiler, once = tmp_path / "g++", tmp_path / "once"
    compiler.write_text(
        "#!/bin/sh\n"
        'for each in "$@"; do\n'
        '  case "$each" in *.cpp) grep -q acc_nothing "$each" || kernels=1 ;; esac\n'
        "done\n"
        f'if [ "$kernels" ] && mkdir {once} 2> /dev/null; then kill -INT $PPID; sleep 2; fi\n'
        f'[ -z "$kernels" ] || {then or ":"}\n'
        f'exec {shutil.which("g++")} "$@"\n'
    )
    compiler.chmod(0o755)
    return f"""
import tempfile
os.environ["ACC_CACHE_DIR"] = tempfile.mkdtemp(dir={str(tmp_path)!r})
if RANK == 1:
    os.environ["ACC_CXX"] = {str(compiler)!r}
dist.init_process_group("acc")
def compute():
    x = torch.ones(100, device=DEVICE)
    for _ in range(5):
        x = (x * 0.5 + 1).tanh()
        x.cpu()
try:
    compute()
except KeyboardInterrupt:
    report(interrupted=True)
"""


def test_a_rank_that_does_not_wait_for_its_kernels_ends_the_training_of_all(tmp_path):
    """What it computed then had none."""
    done = ended(EXCHANGE + interrupted(tmp_path) + "exchange()\n")
    assert done[1].reports == {"interrupted": True}


def test_a_later_group_does_not_hear_of_what_was_missed_once(tmp_path):
    code = """
dist.destroy_process_group()
dist.init_process_group("acc")
exchange(rounds=80)
report(whole=True)
"""
    done = run_ranks(EXCHANGE + interrupted(tmp_path) + code, 2)
    assert done[1].reports == {"interrupted": True, "whole": True}


def test_what_is_missed_again_and_for_good_ends_a_later_group(tmp_path):
    code = """
dist.destroy_process_group()
dist.init_process_group("acc")
compute()
exchange()
"""
    done = ended(EXCHANGE + interrupted(tmp_path, then="exit 1") + code)
    assert done[1].reports == {"interrupted": True}
