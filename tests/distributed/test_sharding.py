"""Options of PyTorch's two FSDP on acc: numbers, whole parameters, and states."""

from __future__ import annotations

import pytest

from tests.distributed import sharding
from tests.distributed.ranks import GROUP, LEAVE, run_ranks

pytestmark = pytest.mark.usefixtures("acc_only")

BEGIN = "from tests.distributed import models, sharding\n" + GROUP


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [
        (2, list(sharding.FLAT)),
        (2, list(sharding.UNITS)),
        (4, [*sharding.FLAT_OF_FOUR, *sharding.UNITS_OF_FOUR]),
    ],
)
def test_options_train_like_one_process_and_like_eagers(ranks, kinds):
    code = "".join(f"report({kind}=sharding.compare({kind!r}, device))\n" for kind in kinds)
    for number, rank in enumerate(run_ranks(BEGIN + code + LEAVE, ranks, timeout=200)):
        assert list(rank.reports) == kinds
        for kind, found in rank.reports.items():
            eager = set() if kind in sharding.NOT_ON_THE_CPU else {"eager"}
            assert set(found) == {"one process"} | eager
            half = kind.endswith("precision") or kind.startswith("half")
            for reference, away in found.items():
                assert set(away) == {"losses", "norms"} | ({"state"} if number == 0 else set())
                low, high = 0, 1e-6
                if half:  # one process trains in float32; of eager's a last bit may be another
                    low, high = (0, 5e-4) if reference == "eager" else (1e-4, 1e-2)
                assert all(low <= a < high for a in away.values()), (kind, reference, away)


@pytest.mark.parametrize("original", [True, False])
def test_whole_parameters_can_be_read_and_written(original):
    code = f"""
from torch.distributed.fsdp import FullyShardedDataParallel as Sharded
model = sharding.KINDS[{"prefetch" if original else "flat_parameters"!r}]()(
    models.made(0), device)
names = dict(models.made(0).named_parameters())
def whole(**options):
    with Sharded.summon_full_params(model, **options):
        return {{n: p.detach().cpu().clone() for n, p in model.named_parameters()}}
plain = {{n.replace("_fsdp_wrapped_module.", ""): p for n, p in whole().items()}}
report(equal=all(torch.equal(plain[n], p.detach()) for n, p in names.items()))
with Sharded.summon_full_params(model):
    for p in model.parameters():
        p.data.mul_(2)
report(doubled=all(torch.equal(a, b * 2) for a, b in zip(whole().values(), plain.values())))
with Sharded.summon_full_params(model, writeback=False):
    for p in model.parameters():
        p.data.zero_()
report(kept=all(torch.equal(a, b * 2) for a, b in zip(whole().values(), plain.values())))
sizes = [p.numel() for p in whole(rank0_only=True, offload_to_cpu=True, writeback=False).values()]
report(sizes=sizes, whole=[p.numel() for p in names.values()])
model(models.data()[0][0].to(device)).sum().backward()
if {original}:
    with Sharded.summon_full_params(model, with_grads=True):
        report(grads=all(p.grad.shape == p.shape for p in model.parameters()))
"""
    for number, rank in enumerate(run_ranks(BEGIN + code + LEAVE, 2)):
        found = rank.reports
        assert found["equal"] and found["doubled"] and found["kept"]
        assert (found["sizes"] == found["whole"]) == (number == 0)
        assert found.get("grads", True)


def test_states_go_into_a_model_that_goes_on():
    code = """
from torch.distributed.fsdp import FullyShardedDataParallel as Sharded, StateDictType
def steps(model, optimizer, batches):
    mine = [tuple(models.part(t, RANK, WORLD).to(device) for t in pair) for pair in batches]
    return sharding.trained(model, mine, optimizer)[0]
half = models.STEPS // 2
for name in ("FULL", "SHARDED"):
    kind = StateDictType[name + "_STATE_DICT"]
    model, other = (sharding.KINDS["prefetch"]()(models.made(seed), device) for seed in (0, 1))
    optimizer, its = sharding.optimizer(model), sharding.optimizer(other)
    steps(model, optimizer, models.data()[:half])
    with Sharded.state_dict_type(model, kind):
        state = model.state_dict()
        state_of_optimizer = Sharded.optim_state_dict(model, optimizer)
    expected = steps(model, optimizer, models.data()[half:])
    with Sharded.state_dict_type(other, kind):
        other.load_state_dict(state)
        its.load_state_dict(Sharded.optim_state_dict_to_load(other, its, state_of_optimizer))
    report(**{name: steps(other, its, models.data()[half:]), name + "_expected": expected})
"""
    for rank in run_ranks(BEGIN + code + LEAVE, 2):
        for name in ("FULL", "SHARDED"):
            assert rank.reports[name] == rank.reports[name + "_expected"]
