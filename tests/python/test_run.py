"""`python -m torchacc run`: scripts that say "cuda" run on acc as `python script.py` runs them."""

from __future__ import annotations

import atexit
import importlib
import io
import pickle
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchacc
from tests import helpers
from torchacc.__main__ import main
from torchacc_device import _as_cuda_devices, _patches

pytestmark = pytest.mark.usefixtures("acc_only")


@pytest.fixture
def devices() -> Iterator[None]:
    torchacc.patch(devices=True)
    yield
    torchacc.unpatch()


def saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def with_default() -> torch.Tensor:
    torch.set_default_device("cuda")
    try:
        return torch.zeros(2)
    finally:
        torch.set_default_device(None)


def with_default_type(name: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it
        torch.set_default_tensor_type(name)
        try:
            made = torch.zeros(2)
            assert made.dtype == torch.float64
            return made
        finally:
            torch.set_default_tensor_type("torch.FloatTensor")
            assert torch.zeros(2).device.type == "cpu" and torch.zeros(2).dtype == torch.float32


def in_context() -> torch.Tensor:
    with torch.device("cuda:0"):
        return nn.Linear(2, 2).weight


X = torch.ones(2)
# What a script may write, and whose result is to be on acc.
PLACED: dict[str, Callable[[], Any]] = {
    "device": lambda: torch.device("cuda:0" if torch.cuda.is_available() else "cpu"),
    "device with an index": lambda: torch.device("cuda", 0),
    "zeros": lambda: torch.zeros(2, device="cuda"),
    "tensor": lambda: torch.tensor([1.0], device="cuda:0"),
    "like": lambda: torch.rand_like(X, device="cuda"),
    "new": lambda: X.new_zeros(3, device="cuda"),
    "fft": lambda: torch.fft.fftfreq(4, device="cuda"),
    "device object": lambda: torch.ones(2, device=torch.device("cuda")),
    "to": lambda: X.to("cuda", torch.float16, non_blocking=True),
    "to by keyword": lambda: X.to(device="cuda"),
    "cuda": lambda: X.cuda(),
    "cuda by index": lambda: X.cuda(0, non_blocking=True),
    "cuda by name": lambda: X.cuda("cuda:0"),
    "type": lambda: X.type("torch.cuda.HalfTensor"),
    "tensor type": lambda: X.type(torch.cuda.LongTensor),
    "tensor class": lambda: torch.cuda.FloatTensor([1, 2]),
    "module": lambda: nn.Linear(2, 2, device="cuda").weight,
    "module to": lambda: nn.Linear(2, 2).to("cuda").weight,
    "module cuda": lambda: nn.Linear(2, 2).cuda().weight,
    "module to_empty": lambda: nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight,
    "data parallel": lambda: nn.DataParallel(nn.Linear(2, 2)).cuda()(torch.ones(1, 2).cuda()),
    "default device": with_default,
    "default type": lambda: with_default_type("torch.cuda.DoubleTensor"),
    "default type by class": lambda: with_default_type(torch.cuda.DoubleTensor),
    "context": in_context,
    "generator": lambda: torch.randn(2, generator=torch.Generator("cuda"), device="cuda"),
    "load": lambda: torch.load(saved(X), map_location="cuda"),
    "load to an index": lambda: torch.load(saved(X), map_location="cuda:0"),
    "load to a device": lambda: torch.load(saved(X), map_location=torch.device("cuda")),
    "load by a table": lambda: torch.load(saved(X), map_location={"cpu": "cuda:0"}),
    "load by a function": lambda: torch.load(
        saved(X), map_location=lambda storage, location: storage.cuda(0)
    ),
    "pinned": lambda: X.pin_memory().cuda(non_blocking=True),
    "packed": lambda: nn.utils.rnn.pack_sequence([X]).cuda().data,
}


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("what", PLACED)
def test_what_is_called_cuda_is_on_acc(what: str) -> None:
    made = PLACED[what]()
    device = made if isinstance(made, torch.device) else made.device
    assert device.type == "acc"
    assert isinstance(made, torch.device) or made.is_cuda


@pytest.mark.usefixtures("devices")
def test_the_rest_is_where_it_was() -> None:
    assert torch.device("cpu").type == "cpu" and torch.zeros(2, device="cpu").device.type == "cpu"
    assert torch.zeros(2, device=None).device.type == "cpu" and not X.is_cuda
    assert X.to(torch.float16).dtype == torch.float16 and X.type() == "torch.FloatTensor"
    assert nn.Linear(2, 2).to(torch.float64).weight.dtype == torch.float64
    assert torch.load(saved(X.cuda()), map_location="cpu").device.type == "cpu"
    assert isinstance(X.cuda(), torch.cuda.FloatTensor) and not isinstance(
        X, torch.cuda.FloatTensor
    )
    assert torch.cuda.device_count() == torch.acc.device_count()
    with pytest.raises(RuntimeError, match="Invalid device string|Expected one of"):
        torch.zeros(2, device="cudda")


def test_a_device_of_cuda_stays_one() -> None:
    """A kernel that acc calls with tensors of CUDA makes its results beside them."""
    device = torch.device("cuda", 0)
    assert _as_cuda_devices.named(device) is device
    assert _as_cuda_devices.named("cuda:1") == "acc:1"


@pytest.mark.usefixtures("devices")
def test_what_stands_for_classes_looks_like_them() -> None:
    device = torch.device("cuda")
    original = type(device)
    assert torch.device is not original and isinstance(device, torch.device)
    assert original in {torch.device} and torch.device in {original: 1}
    assert pickle.loads(pickle.dumps(device)) == device
    assert pickle.loads(pickle.dumps(torch.zeros)) is torch.zeros
    generator = torch.Generator(device="cuda").manual_seed(7)
    assert isinstance(generator, torch.Generator)
    again = pickle.loads(pickle.dumps(generator))
    assert again.device == generator.device and again.initial_seed() == 7

    @torch.jit.script
    def scripted(x, n: int):
        return x + torch.zeros(n, device=x.device) + torch.ones(1, device=torch.device("cpu")).to(x)

    assert scripted(X.cuda(), 2).tolist() == [2, 2]


@pytest.mark.usefixtures("devices")
def test_seeds_are_taken_while_the_device_is_in_use() -> None:
    """CUDA's own functions would look for its generators: something has been initialized."""
    torch.ones(1, device="cuda").item()
    assert torch.cuda.is_initialized()

    def drawn(seed: Callable[..., Any], *number: int) -> list[float]:
        seed(*number)
        return torch.rand(3, device="cuda").tolist()

    for module in (torch.cuda, torch.cuda.random):
        for seed in (module.manual_seed, module.manual_seed_all, torch.manual_seed):
            assert drawn(seed, 5) == drawn(seed, 5) != drawn(seed, 6)
        for seed in (module.seed, module.seed_all, torch.seed):
            assert drawn(seed) != drawn(seed)


ANNOTATED = """
    from typing import Optional
    import torch

    class Placing(torch.nn.Module):
        where: torch.device

        def __init__(self) -> None:
            super().__init__()
            self.where = torch.device("cpu")

        def forward(self, count: int, where: Optional[torch.device] = None) -> torch.Tensor:
            return torch.ones(count, device=self.where if where is None else where)
"""


def test_what_was_annotated_with_torchs_device_before_is_scripted(tmp_path: Path) -> None:
    write(tmp_path / "annotated.py", ANNOTATED)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        module = importlib.import_module("annotated")
    try:
        torchacc.patch(devices=True)
        scripted = torch.jit.script(module.Placing())
        assert scripted(2).device.type == "cpu"
        assert scripted(2, torch.device("cuda")).device.type == "acc"
    finally:
        torchacc.unpatch()
        del sys.modules["annotated"]


def exposed() -> set[str]:
    """Functions of torch, and methods of tensors, with an operator that takes a device."""
    names = {
        schema.name.removeprefix("aten::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::")
        and any("Device" in str(argument.type) for argument in schema.arguments)
    }
    public = {name for name in names if not name.startswith("_")}
    return {
        *(f"torch.{name}" for name in public if hasattr(torch, name)),
        *(f"torch.Tensor.{name}" for name in public if hasattr(torch.Tensor, name)),
    }


def test_every_function_of_torch_that_takes_a_device_is_wrapped() -> None:
    # these compare devices, or map a file into the memory of the CPU
    others = {"torch.eq", "torch.ne", "torch.Tensor.eq", "torch.Tensor.ne", "torch.from_file"}
    assert exposed() - others <= set(_patches.DEVICES_AS_CUDA)


def test_it_is_taken_back() -> None:
    everything = (*_as_cuda_devices.TABLE, *_patches._as_cuda.TABLE)
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in everything]
    torchacc.patch()
    assert torchacc.patch(devices=True) == (*_patches.AS_CUDA, *_patches.DEVICES_AS_CUDA)
    torchacc.patch()  # as `accelerate` does
    assert torch.zeros(1, device="cuda").is_cuda
    torchacc.unpatch()
    assert [(owner, name, vars(owner).get(name)) for owner, name, _ in everything] == before


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: torch.cuda.CUDAGraph(), "torch.cuda.CUDAGraph needs CUDA itself.*replayed"),
        (lambda: torch.cuda.graph(None), "torch.cuda.graph needs CUDA itself"),
        (lambda: torch.cuda.make_graphed_callables(len, ()), "torchacc.capture"),
        (lambda: torch.cuda.get_sync_debug_mode(), "this call needs CUDA itself.*device acc"),
        (lambda: torch.cuda.set_per_process_memory_fraction(0.5), "memory is not limited per"),
    ],
)
def test_what_needs_cuda_itself_says_so(call: Callable[[], Any], words: str) -> None:
    if helpers.extension().executor_name() != "host":
        pytest.skip("there is CUDA")
    with pytest.raises(RuntimeError, match=words):
        call()


@pytest.mark.usefixtures("devices")
def test_without_cuda_there_is_no_cudnn() -> None:
    if helpers.extension().executor_name() != "host":
        pytest.skip("there is CUDA")
    assert torch.cuda.is_available() and torch.backends.cudnn.version() is None


@pytest.mark.usefixtures("devices")
def test_a_group_of_nccl_is_one_of_acc() -> None:
    from torch import distributed as dist

    for backend in ("nccl", "cpu:gloo,cuda:nccl"):
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            x = X.cuda()
            dist.all_reduce(x)
            model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1).cuda(), device_ids=[0])
            assert x.tolist() == [1, 1] and model(x.view(1, 2)).is_cuda
        finally:
            dist.destroy_process_group()


# --- the command --------------------------------------------------------------------------------

SCRIPT = """
    import sys

    import torch
    from torch.cuda.amp import GradScaler, autocast
    from torch.utils.data import DataLoader, TensorDataset

    import beside

    if __name__ == "__main__":
        device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        model = model.cuda() if torch.cuda.is_available() else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        images = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
        loader = DataLoader(TensorDataset(images), batch_size=8, pin_memory=device.type != "cpu")
        losses = []
        for _ in range(2):
            for (x,) in loader:
                x = x.to(device, non_blocking=True)
                optimizer.zero_grad()
                loss = model(x).pow(2).mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        torch.save(model.state_dict(), sys.argv[1])
        again = torch.load(sys.argv[1], map_location=device)
        if torch.cuda.is_available():
            assert all(p.is_cuda for p in again.values())
            scaler = GradScaler()
            with autocast():
                assert model(x).dtype == torch.float16
            torch.cuda.synchronize()
        assert beside.NAME == "beside"
"""


@pytest.fixture
def as_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """`run` makes the process the script's; here it is the test's again. What it leaves to exit."""
    left: list[Any] = []
    monkeypatch.setattr(atexit, "register", left.append)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    yield left
    _patches.undo_as_cuda()


def write(path: Path, text: str) -> str:
    path.write_text(textwrap.dedent(text))
    return str(path)


@pytest.mark.usefixtures("unfused")
def test_a_native_script_trains_with_the_cpus_numbers(as_script, tmp_path: Path) -> None:
    script = write(tmp_path / "native.py", SCRIPT)
    write(tmp_path / "beside.py", "NAME = 'beside'\n")
    with warnings.catch_warnings(), helpers.counting() as counted:
        warnings.simplefilter("ignore", FutureWarning)
        assert main(["run", script, str(tmp_path / "model.pt")]) == 0
    found = vars(sys.modules["__main__"])
    assert found["__name__"] == "__main__" and found["__file__"] == script
    assert sys.argv == [script, str(tmp_path / "model.pt")] and sys.path[0] == str(tmp_path)
    assert found["device"] == torch.device("acc:0")
    assert counted["flush_step"] == 6 or helpers.runs_at_once()
    assert _patched() and as_script.count(_patches.undo_as_cuda) == 1
    _patches.undo_as_cuda()  # as at exit
    assert type(torch.device("cpu")) is torch.device

    sys.argv[:] = [script, str(tmp_path / "model.pt")]
    names = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        exec(compile(Path(script).read_text(), script, "exec"), names)
    assert found["losses"] == names["losses"] and len(found["losses"]) == 6


def test_a_script_that_cannot_be_run_is_named(as_script, tmp_path: Path, capsys) -> None:
    for script, words in (
        (str(tmp_path / "gone.py"), "cannot open '.*gone.py': No such file or directory"),
        (str(tmp_path), "is a folder"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["run", script])
        assert caught.value.code == 2
        said = capsys.readouterr().err
        assert "usage: python -m torchacc" in said
        assert re.search(words, said), said
    with pytest.raises(SyntaxError):
        main(["run", write(tmp_path / "wrong.py", "def f(:\n")])
    assert as_script == [] and sys.argv == ["before"] and not _patched()


def test_ctrl_c_has_no_advice(as_script, tmp_path: Path, capsys) -> None:
    script = write(tmp_path / "waits.py", "raise KeyboardInterrupt('cuda')\n")
    with pytest.raises(KeyboardInterrupt) as raised:
        main(["run", script])
    sys.excepthook(raised.type, raised.value, raised.tb)
    assert "[torchacc run]" not in capsys.readouterr().err


def _patched() -> bool:
    return bool(set(_patches.applied()) & set(_patches.DEVICES_AS_CUDA))


@pytest.mark.parametrize(
    ("end", "status"), [("sys.exit(7)", 7), ("sys.exit('words')", 1), ("raise KeyError('x')", 1)]
)
def test_it_ends_as_python_ends(as_script, tmp_path: Path, capsys, end: str, status: int) -> None:
    script = write(tmp_path / "ends.py", f"import sys\ndef last():\n    {end}\nlast()\n")
    if end.startswith("sys"):
        with pytest.raises(SystemExit) as caught:
            main(["run", script])
        assert caught.value.code == (status if status == 7 else "words")
        return
    with pytest.raises(KeyError) as raised:
        main(["run", script])
    sys.excepthook(raised.type, raised.value, raised.tb)
    said = capsys.readouterr().err
    assert said.startswith(f'Traceback (most recent call last):\n  File "{script}", line 4, in')
    assert said.endswith("KeyError: 'x'\n") and "torchacc" not in said


def test_an_error_of_missing_cuda_says_what_does_not_run(as_script, tmp_path: Path, capsys) -> None:
    script = write(tmp_path / "misses.py", "import torch\ntorch.cuda.CUDAGraph()\n")
    with pytest.raises(RuntimeError) as raised:
        main(["run", script])
    sys.excepthook(raised.type, raised.value, raised.tb)
    said = capsys.readouterr().err
    assert "torch.cuda.CUDAGraph needs CUDA itself" in said
    assert said.endswith("docs/migration.md has what does.\n")


@pytest.mark.parametrize(
    "arguments", [["--", "--x"], ["-h"], ["a", "--", "b"], ["run", "--version"], []], ids=str
)
def test_the_script_gets_every_argument(as_script, tmp_path: Path, arguments: list[str]) -> None:
    script = write(tmp_path / "lists.py", "import sys\nfound = sys.argv[:]\n")
    main(["run", script, *arguments])
    assert vars(sys.modules["__main__"])["found"] == [script, *arguments]


def test_the_command_itself(tmp_path: Path) -> None:
    """In a process of its own: threads outlive the script's end, and patches them."""
    script = write(
        tmp_path / "late.py",
        """
        import sys, threading
        import torch
        def late():
            threading.main_thread().join()
            print(torch.ones(1, device="cuda").item(), *sys.argv[1:])
        threading.Thread(target=late).start()
        """,
    )
    done = helpers.run_python(
        f"import sys\nfrom torchacc.__main__ import main\nsys.exit(main(['run', {script!r}, '-x']))"
    )
    assert done.stdout == "1.0 -x\n"
