"""`torchacc.dist.Mesh`: which rank is where, and its groups. Large ones on c10d's fake group."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg

import torchacc
from tests.distributed.ranks import run_ranks
from tests.distributed.test_faults import SOON, reduced
from torchacc.dist import Mesh, mesh

NAMES = ("dp", "pp", "tp", "fsdp", "sp")


def fake_world(rank: int, size: int) -> None:
    leave_world()
    dist.init_process_group(
        "cpu:fake,acc:fake", store=fake_pg.FakeStore(), rank=rank, world_size=size
    )


def leave_world() -> None:
    mesh.forget()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def alone(device) -> Iterator[None]:
    leave_world()
    yield
    leave_world()


def place(made: Mesh) -> dict[str, int]:
    return {name: made.coordinate(name) for name in NAMES}


def test_the_default_topology_puts_tensor_parallel_ranks_beside_each_other(device):
    fake_world(13, 16)
    made = Mesh(dp_num=2, fsdp_num=2, pp_num=2, tp_num=2)
    assert place(made) == {"dp": 1, "fsdp": 1, "pp": 0, "tp": 1, "sp": 0}
    assert made.get_tp_rank_groups()[:2] == [[0, 1], [2, 3]]
    assert made.get_dp_rank_groups()[0] == [0, 8]
    assert [made.get_dp_rank(), made.get_tp_rank(), made.get_pp_rank()] == [1, 1, 0]
    assert (made.get_global_rank(), made.get_world_size(), made.get_stage_id()) == (13, 16, 0)
    assert made.is_first_stage() and not made.is_last_stage()
    assert (made.stage_to_global(0), made.stage_to_global(1)) == (13, 15)
    with pytest.raises(ValueError, match="stage 2: there are 2 stages"):
        made.stage_to_global(2)


@pytest.mark.parametrize("order", list(itertools.permutations(("dp", "fsdp", "pp", "tp")))[::5])
def test_every_rank_is_in_one_group_of_each_dimension(device, order):
    sizes = {"dp": 2, "fsdp": 3, "pp": 2, "tp": 2, "sp": 2}
    count = 48
    for rank in (0, 17, count - 1):
        fake_world(rank, count)
        made = Mesh(**{f"{n}_num": s for n, s in sizes.items()}, topology=list(order))
        # Its own arithmetic: the rank as a number with the sizes as digits, the last the lowest.
        rest, digits = rank, {}
        for name in (*order, "sp")[::-1]:
            rest, digits[name] = divmod(rest, sizes[name])
        assert place(made) == digits
        for name in NAMES:
            groups = getattr(made, f"get_{name}_rank_groups")()
            assert sorted(sum(groups, [])) == list(range(count))
            (mine,) = (group for group in groups if rank in group)
            assert mine.index(rank) == getattr(made, f"get_{name}_rank")()
            assert dist.get_process_group_ranks(getattr(made, f"get_{name}_proc_group")()) == mine
            assert len(mine) == getattr(made, f"get_{name}_num")() == sizes[name]


def test_sequence_parallel_has_the_place_that_the_topology_gives_it(device):
    fake_world(5, 8)
    made = Mesh(dp_num=2, sp_num=4, topology=["sp", "dp", "fsdp", "pp", "tp"])
    assert (made.get_sp_rank(), made.get_dp_rank()) == (2, 1)
    assert made.get_sp_rank_groups() == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_several_dimensions_together_are_one_group(device):
    fake_world(6, 16)
    made = Mesh(dp_num=4, tp_num=2, sp_num=2)
    group = made.joint_group("dp", "sp")
    # Ranks that share the place of rank 6 in tp: dp has the stride 4, sp 1.
    assert dist.get_process_group_ranks(group) == [2, 3, 6, 7, 10, 11, 14, 15]
    assert made.joint_num("dp", "sp") == 8 and made.joint_coordinate("dp", "sp") == 2
    assert made.joint_group("dp", "sp") is group
    assert made.joint_group("dp", "fsdp") is made.get_dp_proc_group()


def test_a_mesh_of_ten_thousand(device):
    fake_world(9_999, 10_000)
    made = Mesh(dp_num=1250, tp_num=8)
    assert (made.get_dp_rank(), made.get_tp_rank()) == (1249, 7)
    assert made.get_dp_proc_group().size() == 1250


def test_a_dimension_of_one_has_a_group_of_its_own(device):
    fake_world(2, 4)
    made = Mesh(dp_num=4)
    assert dist.get_process_group_ranks(made.get_pp_proc_group()) == [2]
    assert made.get_pp_proc_group() is made.get_tp_proc_group()


def test_the_mesh_of_a_config_is_made_once_for_each_world(device, monkeypatch):
    fake_world(3, 8)
    config = torchacc.Config()
    config.dist.fsdp.size = 2
    made = config.get_mesh()
    assert (made.get_dp_num(), made.get_fsdp_num(), made.get_fsdp_rank()) == (4, 2, 1)
    assert config.get_mesh() is made
    fake_world(3, 4)
    assert config.get_mesh() is not made and config.get_mesh().get_dp_num() == 2
    assert repr(config.get_mesh()).startswith("Mesh(dp_num=2, fsdp_num=2, ")


def test_what_a_mesh_refuses(device):
    with pytest.raises(RuntimeError, match="there is no process group"):
        Mesh()
    fake_world(0, 6)
    text = "dp 2 x fsdp 1 x pp 1 x tp 2 x sp 1 make 4 processes, and there are 6"
    with pytest.raises(ValueError, match=re.escape(text)):
        Mesh(dp_num=2, tp_num=2)
    with pytest.raises(ValueError, match="tp_num = 0: should be at least 1"):
        Mesh(dp_num=6, tp_num=0)
    for order in (["dp", "dp", "pp", "tp"], ["dp", "fsdp", "pp"], ["dp", "fsdp", "pp", "tp", "x"]):
        with pytest.raises(ValueError, match="should name each of dp, fsdp, pp, tp once"):
            Mesh(dp_num=6, topology=order)


def test_groups_of_a_real_mesh_add_up_their_own(device):
    code = """
import torchacc
torchacc.dist.init_process_group()
config = torchacc.Config()
config.dist.tp.size = 2
config.dist.dp.size = 2
mesh = config.get_mesh()
torchacc.dist.init_nccl_context(config)
for name in ("dp", "tp", "sp"):
    x = torch.full((3,), float(10 ** RANK), device=DEVICE)
    dist.all_reduce(x, group=mesh.group(name))
    report(**{name: x.tolist()})
"""
    done = run_ranks(code, 4)
    assert [each.reports["dp"][0] for each in done] == [101, 1010, 101, 1010]
    assert [each.reports["tp"][0] for each in done] == [11, 11, 1100, 1100]
    assert [each.reports["sp"][0] for each in done] == [1, 10, 100, 1000]


def test_groups_of_a_mesh_have_the_timeout_of_the_default_group(device):
    """torch gives each of them its own default: they would wait 30 minutes for a late rank."""
    code = """
from datetime import timedelta
from torchacc.dist import Mesh
dist.init_process_group("acc", timeout=timedelta(seconds=100))
def seconds(group):
    return group._get_backend(torch.device(DEVICE)).transport.options._timeout.total_seconds()
found = {}
for sizes in ({"dp": 2, "fsdp": 2, "tp": 2}, {"pp": 4, "sp": 2}, {"dp": 8}):
    mesh = Mesh(**{f"{name}_num": size for name, size in sizes.items()})
    joint = ("dp", "fsdp") if "tp" in sizes else ("dp", "tp")
    for names in (*((name,) for name in ("dp", "fsdp", "tp", "pp", "sp")), joint):
        found[f"{sizes} {names}"] = seconds(mesh.joint_group(*names))
    if "tp" in sizes:  # one that the program changes stays as it is
        distributed = dist.distributed_c10d
        distributed._set_pg_timeout(timedelta(seconds=200), mesh.joint_group(*joint))
        found["changed"] = seconds(mesh.joint_group(*joint)) - 100
report(found=found)
"""
    for rank in run_ranks(code, 8):
        assert len(rank.reports["found"]) == 19
        assert set(rank.reports["found"].values()) == {100}


def test_a_late_rank_is_an_error_in_a_group_of_a_mesh(acc_only):
    """Sharded in pairs: what the late rank leaves waiting at first is not the default group."""
    code = """
import torchacc
config = torchacc.Config()
config.dist.fsdp.size, config.dist.fsdp.wrap_layer_cls = 2, {"Linear"}
layers = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)
model = torchacc.accelerate(nn.Sequential(*layers), config=config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    loss = model(torch.ones(4, 8, device=device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
for _ in range(2):
    step()
if RANK == 1:
    for other in (0, 2, 3):
        asleep_until_reported(other)
def train():
    for _ in range(2):
        step()
heard(train)
"""
    for rank in reduced(code, 4, begin=SOON, ACC_MODE="nofuse"):  # nothing to compile meanwhile
        assert rank["kind"] == "DistBackendError"
        assert rank["seconds"] < 18
        assert re.search(r"rank \d", rank["text"]) and "in collective number" in rank["text"]
