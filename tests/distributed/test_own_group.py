"""Processes that a program starts itself, without a launcher, and whose group it makes."""

from __future__ import annotations

from tests.distributed.ranks import run_ranks
from tests.distributed.test_data_parallel import SETUP

OWN = (
    """
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]
dist.init_process_group("acc", store=store, rank=RANK, world_size=WORLD)
torch.acc.set_device(RANK)
"""
    + SETUP
)


def test_a_loader_that_reads_ahead_cannot_be_divided(device):
    code = """
config.dataloader.shard = True
model, loader = torchacc.accelerate(models.made(0), [torch.ones(1)] * 4, config)
report(length=len(loader))
ahead = torchacc.AsyncLoader([torch.ones(1)] * 4)
report(error=refused(lambda: torchacc.accelerate(model, ahead, config)))
"""
    for each in run_ranks(OWN + code, 2):
        assert each.reports["length"] == 2
        assert "the loader is an AsyncLoader, which reads ahead" in each.reports["error"]


def test_a_model_on_the_device_of_another_process_is_refused(device):
    code = """
plain = models.made(0).to(torch.device(DEVICE, 1 - RANK))
report(error=refused(lambda: torchacc.accelerate(plain)))
"""
    for rank, each in enumerate(run_ranks(OWN + code, 2)):
        said = f"the model is on acc:{1 - rank}, and this process uses acc:{rank}. Leave the model"
        assert said in each.reports["error"]


def test_the_first_of_all_writes_and_speaks(device):
    """On pretended machines with eight GPUs, of which all have a process."""
    code = """
from torchacc.dist import group
group._C = type("C", (), {"executor_name": staticmethod(lambda: "cuda")})
torch.acc.device_count = lambda: 8
model = torchacc.accelerate(models.made(0))
path = f"{os.environ['REPORTS']}/saved-{RANK}"
torchacc.save(model.state_dict(), path, global_master=True)
report(written=os.path.exists(path))
"""
    first, second = run_ranks(OWN + code, 2)
    assert first.reports["written"] and not second.reports["written"]
    assert "names of torch.cuda act on the lazy device" in first.stderr
    assert "names of torch.cuda act on the lazy device" not in second.stderr
    assert "GPUs is used" not in first.stderr + second.stderr
