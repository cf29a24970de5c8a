"""Hugging Face's Trainer and Accelerator on acc: examples/huggingface.py, and what it asks for."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchacc
from tests import helpers
from tests.distributed import ranks

accelerate = pytest.importorskip("accelerate", reason="needs the package accelerate")
pytest.importorskip("transformers", reason="needs the package transformers")

pytestmark = [pytest.mark.usefixtures("acc_only"), pytest.mark.filterwarnings("ignore")]

VARIABLE = "ACCELERATE_TORCH_DEVICE"


@pytest.fixture(scope="module")
def example() -> Any:
    path = helpers.ROOT / "examples" / "huggingface.py"
    spec = importlib.util.spec_from_file_location("huggingface_example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def on_acc() -> Iterator[None]:
    """The device is chosen anew before and after: accelerate keeps it for the process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    torchacc.accelerate_hf_trainer()
    yield
    torchacc.accelerate_hf_trainer(enable=False)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def on_cpu(example: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("cpu")
    gpt2 = example.gpt2(folder / "gpt2", use_cpu=True)
    bert = example.bert(folder / "bert", use_cpu=True)
    assert str(gpt2.args.device) == "cpu"
    return {
        "gpt2": example.losses(gpt2),
        "eval": example.losses(gpt2, "eval_loss"),
        "bert": example.losses(bert),
    }


def assert_follows(losses: list[float], expected: list[float]) -> None:
    """Lists of tensors are added up in another order than single ones: norms of gradients are."""
    assert len(losses) == len(expected) > 0
    assert losses == pytest.approx(expected, rel=2e-5)


@pytest.mark.usefixtures("unfused", "on_acc")
def test_gpt2_gives_the_cpus_losses_and_goes_on_from_a_checkpoint(example, on_cpu, tmp_path):
    trained = example.gpt2(tmp_path / "first")
    assert trained.args.device == trained.accelerator.device == torch.device("acc", 0)
    assert {p.device.type for p in trained.model.parameters()} == {"acc"}
    assert trained.model.lm_head.weight is trained.model.transformer.wte.weight
    assert_follows(example.losses(trained), on_cpu["gpt2"])
    assert_follows(example.losses(trained, "eval_loss"), on_cpu["eval"])
    assert on_cpu["gpt2"][-1] < on_cpu["gpt2"][0]

    half = tmp_path / "first" / "checkpoint-4"
    again = example.gpt2(tmp_path / "again", resume=str(half))
    assert_follows(example.losses(again), on_cpu["gpt2"])
    for one, other in zip(trained.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("unfused", "on_acc")
def test_bert_gives_the_cpus_losses(example, on_cpu, tmp_path):
    assert_follows(example.losses(example.bert(tmp_path)), on_cpu["bert"])


@pytest.mark.usefixtures("on_acc", "recording")
def test_a_step_is_one_plan_that_settles(example, tmp_path):
    example.bert(tmp_path / "first", steps=4)
    with helpers.counting() as counted:
        example.bert(tmp_path / "second", steps=6)
    assert counted["plans_built"] == 0
    assert counted["flush_step"] == 6


@pytest.mark.usefixtures("on_acc")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_autocast_on_acc(example, on_cpu, tmp_path, dtype):
    """In float16 with acc's scaler, whose first scale nothing here overflows."""
    seen = set()
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: (
            seen.add(output.dtype) if isinstance(module, nn.Linear) else None
        )
    )
    half = dtype == torch.float16
    try:
        trained = example.bert(tmp_path, fp16=half, bf16=not half)
    finally:
        handle.remove()
    assert seen == {dtype}
    assert example.losses(trained) == pytest.approx(on_cpu["bert"], rel=2e-2)
    scaler = trained.accelerator.scaler
    assert (scaler is not None) == half
    if half:
        assert scaler.is_enabled() and scaler.get_scale() == 65536
        assert scaler.scale(torch.ones((), device="acc")).device.type == "acc"


@pytest.mark.usefixtures("on_acc")
def test_an_overflow_in_float16_skips_the_step_and_backs_off():
    options = accelerate.utils.GradScalerKwargs(init_scale=1024.0, growth_interval=2)
    accelerator = accelerate.Accelerator(mixed_precision="fp16", kwargs_handlers=[options])
    model = nn.Linear(4, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for factor in (1.0, 1e5, 1.0, 1.0):  # 65,504 is the largest float16
        before = model.weight.clone()
        loss = model(torch.ones(2, 4, device=accelerator.device)).mean()
        accelerator.backward(factor * loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        moved = not torch.equal(before, model.weight)
        found.append((moved, optimizer.step_was_skipped, accelerator.scaler.get_scale()))
    assert found == [
        (True, False, 1024),
        (False, True, 512),
        (True, False, 512),
        (True, False, 1024),
    ]


@pytest.mark.usefixtures("on_acc", "unfused")
def test_a_training_that_goes_on_draws_what_it_would_have_drawn(
    example, monkeypatch, tmp_path, caplog
):
    """Dropout, from the second half on; without its state it goes on otherwise, and says so."""
    config = example.GPT2Config
    monkeypatch.setattr(
        example, "GPT2Config", lambda **options: config(**{**options, "resid_pdrop": 0.5})
    )
    whole = example.gpt2(tmp_path / "whole", steps=4)
    half = tmp_path / "whole" / "checkpoint-2"
    again = example.gpt2(tmp_path / "again", steps=4, resume=str(half))
    assert_follows(example.losses(again), example.losses(whole))
    ends = [list(trainer.model.parameters()) for trainer in (whole, again)]
    assert all(map(torch.equal, *ends))

    (half / "rng_state_acc_0.pth").unlink()
    other = example.gpt2(tmp_path / "other", steps=4, resume=str(half))
    assert example.losses(other)[:2] == example.losses(whole)[:2]
    assert not any(map(torch.equal, other.model.parameters(), ends[0]))
    assert "rng_state_acc_0.pth is not there" in caplog.text


@pytest.mark.usefixtures("on_acc")
def test_an_accelerators_state_has_what_is_drawn_next(tmp_path):
    accelerator = accelerate.Accelerator()
    accelerator.prepare(nn.Linear(2, 2))
    torch.rand(3, device="acc")
    accelerator.save_state(str(tmp_path / "state"))
    drawn = torch.rand(8, device="acc")
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(torch.rand(8, device="acc"), drawn)


@pytest.mark.usefixtures("on_acc")
def test_an_accelerator_prepares_for_acc():
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
    assert accelerator.device == torch.device("acc", 0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    before = model.weight.tolist()
    changed = []
    for batch in data:
        assert batch.device.type == "acc"
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
        changed.append(model.weight.tolist() != before)
        before = model.weight.tolist()
    assert changed == [False, True, False, True]


def test_it_is_taken_back(monkeypatch: pytest.MonkeyPatch):
    from transformers import training_args

    from torchacc import huggingface

    def state() -> list[Any]:
        return [getattr(huggingface._owner(*place[:2]), place[2]) for place in huggingface._WRAPPED]

    monkeypatch.setenv(VARIABLE, "cpu")
    before = state()
    torchacc.accelerate_hf_trainer()
    torchacc.accelerate_hf_trainer()
    assert os.environ[VARIABLE] == "acc:0"
    assert training_args.is_torch_bf16_gpu_available() is True
    assert all(one is not other for one, other in zip(before, state(), strict=True))
    torchacc.accelerate_hf_trainer(enable=False)
    torchacc.accelerate_hf_trainer(enable=False)
    assert os.environ[VARIABLE] == "cpu"
    assert state() == before
    monkeypatch.setenv(VARIABLE, "acc:0")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(ValueError, match="fp16 mixed precision requires a device in"):
        accelerate.Accelerator(mixed_precision="fp16")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_the_text_of_the_example_is_there(example):
    for page in example.PAGES:
        assert len(example.passages(page)) > 100, Path(page)


SCRIPT = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("huggingface_example", "examples/huggingface.py")
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
trained = example.bert(sys.argv[1], fp16=True)
scaler = trained.accelerator.scaler
print(json.dumps([str(trained.args.device), example.losses(trained), scaler.get_scale()]))
"""


def test_a_script_for_cuda_trains_in_float16(on_cpu, tmp_path):
    """Under `python -m torchacc run`, without a word about acc."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torchacc", "run", str(script), str(tmp_path / "made")],
        cwd=helpers.ROOT,
        env=helpers.child_env(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    device, losses, scale = json.loads(done.stdout.splitlines()[-1])
    assert (device, scale) == ("acc:0", 65536)
    assert losses == pytest.approx(on_cpu["bert"], rel=2e-2)


TWO_PROCESSES = """
import importlib.util
from pathlib import Path
spec = importlib.util.spec_from_file_location("huggingface_example", "examples/huggingface.py")
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
on_cpu = os.environ["ON"] == "cpu"
if not on_cpu:
    import torchacc
    torchacc.accelerate_hf_trainer()
folder = os.path.join(os.environ["FOLDER"], os.environ["ON"])
gpt2 = example.gpt2(folder, steps=4, use_cpu=on_cpu)
again = example.gpt2(folder + "-again", steps=4, resume=folder + "/checkpoint-2", use_cpu=on_cpu)
bert = example.bert(folder + "-bert", steps=4, use_cpu=on_cpu)
half = example.bert(folder + "-half", steps=4, use_cpu=on_cpu, fp16=not on_cpu)
report(
    gpt2=example.losses(gpt2),
    again=example.losses(again),
    bert=example.losses(bert),
    half=example.losses(half),
    device=str(gpt2.args.device),
    kind=str(gpt2.accelerator.distributed_type),
    backend=dist.get_backend(),
    weights=[p.sum().item() for p in bert.model.parameters()],
    random=sorted(path.name for path in Path(folder, "checkpoint-2").glob("rng_state_acc_*")),
)
"""


def test_two_processes_train_as_they_do_on_the_cpu(tmp_path):
    """With a checkpoint, and going on from it."""
    found = {
        device: [
            rank.reports
            for rank in ranks.run_ranks(TWO_PROCESSES, 2, ON=device, FOLDER=str(tmp_path))
        ]
        for device in ("acc", "cpu")
    }
    for index, rank in enumerate(found["acc"]):
        assert rank["device"] == f"acc:{index}"
        assert rank["kind"] == "DistributedType.MULTI_GPU"
        assert rank["backend"] == "acc"
    first, expected = found["acc"][0], found["cpu"][0]
    for name in ("gpt2", "bert"):
        assert_follows(first[name], expected[name])
    assert_follows(first["again"], first["gpt2"])
    assert first["half"] == pytest.approx(expected["bert"], rel=2e-2)
    assert first["weights"] == found["acc"][1]["weights"]
    assert first["random"] == ["rng_state_acc_0.pth", "rng_state_acc_1.pth"]
    assert expected["random"] == []
