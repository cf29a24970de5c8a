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


def trained(folder, compilers: dict[int, str]):
    code = f"FOLDER, COMPILERS = {str(folder)!r}, {compilers!r}\n" + TRAIN
    done = run_ranks(code, 4)
    assert all(rank.reports["equal"] == [True] * 4 for rank in done)
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


def test_a_rank_without_a_compiler(tmp_path):
    done = trained(tmp_path, {3: "/bin/false", 1: str(tmp_path / "none")})
    for rank in done:
        assert rank.reports["launches"] == 0
        assert "no rank uses generated kernels, since one has none: rank " in rank.stderr
        assert "ACC_CXX" in rank.stderr


def test_a_compiler_that_fails_later_on_one_rank_is_warned_of_there(tmp_path):
    """The ranks have agreed on kernels before: the others use theirs, and all go on."""
    failing = tmp_path / "g++"
    failing.write_text(
        "#!/bin/sh\n"
        'for each in "$@"; do\n'
        '  case "$each" in *.cpp) grep -q acc_nothing "$each" || exit 1 ;; esac\n'
        "done\n"
        f'exec {shutil.which("g++")} "$@"\n'
    )
    failing.chmod(0o755)
    code = f"FOLDER, COMPILERS = {str(tmp_path)!r}, {{1: {str(failing)!r}}}\n" + TRAIN
    for rank, each in enumerate(run_ranks(code, 2)):
        told = "Other processes of this training may have that kernel" in each.stderr
        assert told == (rank == 1)
        assert (each.reports["launches"] == 0) == (rank == 1)
