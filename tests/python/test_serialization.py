"""Saving, loading, pickling and copying of tensors, modules and optimizers."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import ROOT, assert_same, child_env, extension

pytestmark = pytest.mark.usefixtures("acc_only")


def saved(value: object, **options: object) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    buffer.seek(0)
    return buffer


FORMATS = [{}, {"_use_new_zipfile_serialization": False}]
FORMAT_NAMES = ["zip", "legacy"]


@pytest.mark.parametrize("options", FORMATS, ids=FORMAT_NAMES)
def test_a_tensor_comes_back_where_it_was(options: dict[str, object]) -> None:
    x = torch.arange(12.0, device="acc").view(3, 4) * 2
    y = torch.load(saved(x, **options))
    assert y.device == x.device and y.stride() == x.stride()
    assert torch.equal(y.cpu(), x.cpu())


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("options", FORMATS, ids=FORMAT_NAMES)
def test_pending_work_is_saved(options: dict[str, object]) -> None:
    extension().flush()
    x = torch.ones(4, device="acc").mul_(3)
    assert extension().pending(0) > 0
    y = torch.load(saved(x, **options), map_location="cpu")
    assert y.device.type == "cpu" and y.tolist() == [3.0] * 4


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
)
def test_every_dtype_comes_back(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1, 0], dtype=dtype, device="acc")
    y = torch.load(saved(x))
    assert y.dtype == dtype and torch.equal(y.cpu(), x.cpu())


def test_a_cpu_tensor_loads_onto_acc() -> None:
    x = torch.arange(5)
    for where in ("acc", "acc:0", torch.device("acc", 0), {"cpu": "acc:0"}):
        y = torch.load(saved(x), map_location=where)
        assert y.device == torch.device("acc:0") and y.tolist() == x.tolist()


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(RuntimeError, match="acc|ACC"):
        torch.load(saved(torch.ones(2)), map_location="acc:99")


def test_views_keep_sharing_their_storage() -> None:
    base = torch.arange(6.0, device="acc")
    a, b = torch.load(saved([base[:4], base[2:]]))
    a[2:] += 10
    assert b.tolist() == [12.0, 13.0, 4.0, 5.0]
    assert base.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_parameters_stay_parameters() -> None:
    p = torch.nn.Parameter(torch.ones(2, device="acc"), requires_grad=False)
    q = torch.load(saved(p))
    assert isinstance(q, torch.nn.Parameter) and not q.requires_grad and q.device.type == "acc"


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten(), torch.nn.Linear(8, 3)
    )


def trained(device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    net = model().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for i in range(2):
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 2 * 16).view(2, 1, 4, 4) + i
        net(x.to(device)).square().mean().backward()
        optimizer.step()
    return net, optimizer


def test_state_dicts_cross_devices() -> None:
    net, optimizer = trained("acc")
    there = model()
    there.load_state_dict(net.state_dict())
    assert_same(net.state_dict(), dict(there.state_dict()))
    back = model().to("acc")
    back.load_state_dict(torch.load(saved(there.state_dict()), map_location="acc"))
    assert all(p.device.type == "acc" for p in back.parameters())
    assert_same(back.state_dict(), dict(there.state_dict()))
    other = torch.optim.AdamW(back.parameters(), lr=1.0)
    other.load_state_dict(torch.load(saved(optimizer.state_dict()), map_location="cpu"))
    assert other.param_groups[0]["lr"] == 0.01
    for p, q in zip(net.parameters(), back.parameters(), strict=True):
        assert other.state[q]["exp_avg"].device.type == "acc"
        assert torch.equal(other.state[q]["exp_avg"].cpu(), optimizer.state[p]["exp_avg"].cpu())


def test_training_goes_on_where_a_checkpoint_left_off() -> None:
    net, optimizer = trained("acc")
    restored = model().to("acc")
    other = torch.optim.AdamW(restored.parameters(), lr=0.01)
    state = torch.load(saved({"net": net.state_dict(), "optimizer": optimizer.state_dict()}))
    restored.load_state_dict(state["net"])
    other.load_state_dict(state["optimizer"])
    for module, opt in ((net, optimizer), (restored, other)):
        opt.zero_grad()
        module(torch.ones(2, 1, 4, 4, device="acc")).sum().backward()
        opt.step()
    assert_same(restored.state_dict(), {k: v.cpu() for k, v in net.state_dict().items()})


def test_a_checkpoint_loads_where_the_plugin_is_not_there(tmp_path: Path) -> None:
    net, optimizer = trained("acc")
    path = tmp_path / "checkpoint.pt"
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, path)
    expected = {name: value.cpu().double().sum().item() for name, value in net.state_dict().items()}
    code = f"""
import sys, torch
state = torch.load({str(path)!r}, map_location="cpu")
assert not any(name.startswith("torchacc") for name in sys.modules)
assert torch._C._get_privateuse1_backend_name() == "privateuseone"
print({{name: value.double().sum().item() for name, value in state["net"].items()}})
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=child_env(TORCH_DEVICE_BACKEND_AUTOLOAD="0"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(expected)


def test_pickle_and_deepcopy_keep_values_and_sharing() -> None:
    x = torch.arange(4.0, device="acc")
    pair = [x, x[1:]]
    for twin in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
        assert [t.tolist() for t in twin] == [[0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
        assert all(t.device == x.device for t in twin)
        twin[0].zero_()
        assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
    twin = copy.deepcopy(pair)
    twin[0].fill_(5)
    assert twin[1].tolist() == [5.0] * 3


def test_a_module_can_be_deepcopied_in_the_middle_of_a_step() -> None:
    net = torch.nn.Linear(3, 2, device="acc")
    with torch.no_grad():
        net.weight.fill_(2)
        twin = copy.deepcopy(net)
        net.weight.fill_(3)
    assert twin.weight.detach().cpu().unique().tolist() == [2.0]
    assert net.weight.detach().cpu().unique().tolist() == [3.0]
    assert twin.weight is not net.weight and twin.weight.requires_grad


def test_storages_copy_and_save() -> None:
    storage = torch.arange(4, dtype=torch.uint8, device="acc").untyped_storage()
    assert bytes(storage.cpu().tolist()) == b"\x00\x01\x02\x03"
    assert bytes(storage.clone().cpu().tolist()) == b"\x00\x01\x02\x03"
    assert copy.deepcopy(storage).device == storage.device


def test_a_storage_writes_its_bytes_to_a_file(tmp_path: Path) -> None:
    """The writer of the legacy format reads the address behind the dispatcher."""
    x = torch.full((4,), 2.0, device="acc") * 1
    path = tmp_path / "storage"
    with open(path, "wb") as file:
        x.untyped_storage()._write_file(file, True, False, 4)
    assert path.read_bytes() == torch.full((4,), 2.0).numpy().tobytes()


def test_sharing_with_another_process_is_refused_with_advice() -> None:
    x = torch.ones(3, device="acc")
    x.share_memory_()  # does nothing, as on CUDA
    for share in ("_share_fd_cpu_", "_share_filename_cpu_", "_share_cuda_"):
        with pytest.raises(RuntimeError, match=r"Send tensor.cpu\(\)"):
            getattr(x.untyped_storage(), share)()
    assert x.tolist() == [1.0] * 3
    y = torch.ones(2)
    y.share_memory_()
    assert y.is_shared()


def test_numpy_goes_through_the_cpu() -> None:
    x = torch.arange(3.0, device="acc")
    with pytest.raises(TypeError, match="cpu"):
        x.numpy()
    assert x.cpu().numpy().tolist() == [0.0, 1.0, 2.0]
    assert x.numpy(force=True).tolist() == [0.0, 1.0, 2.0]


def test_the_repository_is_not_needed_to_find_the_child() -> None:
    """The child of the checkpoint test sees torchacc_device on its path and leaves it alone."""
    assert str(ROOT) in child_env()["PYTHONPATH"]
