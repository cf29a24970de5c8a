"""What only a GPU can refuse or run out of, and what only one can be lost to."""

from __future__ import annotations

import subprocess
import threading
import warnings

import pytest
import torch

import torchacc
from tests import helpers

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("acc_only", "capturing")]


@pytest.fixture(autouse=True)
def on_cuda(device):
    if helpers.extension().executor_name() != "cuda":
        pytest.skip("a host captures everything")


def test_what_cannot_be_captured_is_called_between_the_pieces(device, capfd):
    """Numbers that are drawn on the host are copied: no part of a CUDA graph."""
    x = torch.ones(64, 64, device=device)
    weights = torch.ones(64, device=device)
    before = torchacc.report()
    for _ in range(12):
        y = (x @ x).cumsum(0)
        drawn = torch.multinomial(weights, 8, replacement=True)
        z = y.index_select(0, drawn).sum(1)
        helpers.flush()
        assert torch.equal(z.cpu(), (64.0 * 64 * (drawn.cpu() + 1)).float())
    found = torchacc.report(since=before)
    failed = found.of("not_captured/failed")
    assert [name.split(" at ")[0] for name in failed] == ["acc::multinomial"]
    assert found.counters["captures_submitted"] >= 6
    told = capfd.readouterr().err.splitlines()
    assert len([line for line in told if "acc::multinomial" in line]) == 1


def test_a_copy_of_a_cuda_tensor_waits_for_what_makes_it(device):
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(6):
        y = x
        for _ in range(20):
            y = y @ x * 1e-2
        copied = y.to(device)
        helpers.flush()
        assert torch.equal(copied.cpu(), y.cpu())


def test_a_cuda_tensor_of_another_stream_is_read_in_its_order(device):
    """By copies, and by operators that run at once: it may be freed and used again there."""
    x = torch.randn(4096, 4096, device="cuda")
    mine = torch.arange(4096, device=device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for number in range(6):
        with torch.cuda.stream(stream):
            y = x
            for _ in range(20):
                y = y @ x * 1e-2
            number_there = (y[0] * 0 + number).long()
            copied = y.to(device)
            taken = torch.take(mine, number_there)
            kept = y.clone()
            del y, number_there
            torch.empty_like(x).zero_()
            wanted = kept.cpu()
        assert torch.equal(copied.cpu(), wanted)
        assert taken.tolist() == [number] * 4096


def test_what_attention_leaves_on_the_cpu_is_given_to_another_plan(device):
    """The forward of a step that ended, its backward in a step that is captured."""
    q, k, v = (helpers.drawn(2, 4, 32, 16, device=device, seed=i, grad=True) for i in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = [each.detach().cpu().requires_grad_() for each in (q, k, v)]
    attend(*expected).square().sum().backward()
    for _ in range(6):
        made = attend(q, k, v)
        helpers.flush()
        for each in (q, k, v):
            each.grad = None
        made.square().sum().backward()
        helpers.flush()
        for each, same in zip((q, k, v), expected, strict=True):
            torch.testing.assert_close(each.grad.cpu(), same.grad, rtol=1e-4, atol=1e-5)


def test_a_copy_from_the_host_waits_for_no_work(device):
    """Copies are on a stream of their own, and work that is submitted later waits for them."""
    x = torch.randn(4096, 4096, device=device)
    source = torch.randn(1024, 1024).pin_memory()
    for _ in range(6):
        y = x
        for _ in range(20):
            y = y @ x * 1e-2
        torchacc.mark_step()
        copied = source.to(device, non_blocking=True)
        doubled = copied * 2
        del copied
        other = source.to(device, non_blocking=True)  # may not lie where the copy is still read
        other.zero_()
        helpers.flush()
        assert torch.equal(doubled.cpu(), source * 2)
        assert not other.cpu().any()


TRAINING = """
from tests import helpers
net = helpers.small_net(DEVICE)
opt = torch.optim.AdamW(net.parameters(), lr=0.01)
x = torch.ones(6, 4, device=DEVICE)
losses = []
for step in range(60):
    opt.zero_grad()
    loss = ((net(x) - 1) ** 2).mean()
    loss.backward()
    opt.step()
    losses.append(loss.detach())
print([each.item() for each in losses])
"""


def test_two_processes_share_a_gpu():
    """Neither sees anything of the other."""
    alone = helpers.run_python(TRAINING, fresh=True).stdout
    command, env = helpers.python_command(TRAINING), helpers.child_env()
    both = [
        subprocess.Popen(command, cwd=helpers.ROOT, env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for each in both:
        said, _ = each.communicate(timeout=300)
        assert (each.returncode, said) == (0, alone)


def test_memory_that_is_missing_while_work_is_captured_comes_from_captures(device):
    """What others have captured goes; the run is captured or not, and right in either case."""
    code = """
import torchacc
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction((1 << 30) / total)
x = torch.ones(64 << 20 >> 2, device=DEVICE)  # 64 MiB
def work(n):
    made = [(x * i).flip(0) for i in range(n)]
    torchacc.mark_step()
    return [each[-1] for each in made]
for n in (2, 3, 4, 5, 2, 5):
    for _ in range(4):
        last = work(n)
        assert [each.item() for each in last] == list(map(float, range(n)))
        del last
try:
    work(40)
    torch.acc.synchronize()
except torch.OutOfMemoryError as error:
    assert "Captured steps gave" in str(error), error
else:
    raise SystemExit("40 tensors of 64 MiB had room in 1 GiB")
"""
    helpers.run_python(code, fresh=True)


def test_a_kernel_that_goes_wrong_ends_the_device_and_says_so():
    code = """
import torchacc
table = torch.ones(4, 4, device=DEVICE)
index = torch.tensor([7], device=DEVICE)
made = torch.index_select(table, 0, index)
try:
    print(made.cpu())
except torch.AcceleratorError as error:
    assert "of no more use to this process" in str(error), error
else:
    raise SystemExit("an index out of range went unnoticed")
"""
    helpers.run_python(code, fresh=True)


def test_products_outlive_other_captures_and_their_threads(device):
    """Torch frees the workspaces of a stream where a graph that was captured on it ends."""
    x = torch.randn(512, 512, device=device)
    wanted = (x.cpu().double() @ x.cpu().double()).relu()

    def mine() -> torch.Tensor:
        made = (x @ x).relu()
        helpers.flush()
        return made

    def in_a_thread() -> None:
        for _ in range(6):
            mine()

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    told = []
    with helpers.counting() as counted:
        for _ in range(8):  # results that stay where they are: the work is captured anew
            made = (x @ x).cumsum(0)
            helpers.flush()
            told.append((made, made.data_ptr()))
    assert counted["captured_again/result"] >= 1
    others = [torch.full((1 << 22,), 7.0, device=device) for _ in range(8)]
    helpers.synchronize()
    with helpers.counting() as counted:
        made = mine()
    assert counted["captures_submitted"] == 1
    torch.testing.assert_close(made.cpu().double(), wanted, rtol=1e-3, atol=1e-2)
    assert all(each.eq(7).all() for each in others)


def test_a_thread_that_never_called_cudnn_captures_a_convolution(device):
    """It has no handle yet, which none gets in a capture, nor anything chosen."""
    convolution = torch.nn.Conv2d(3, 16, 3).to(device)
    x = torch.randn(8, 3, 32, 32, device=device)

    def steps() -> None:
        for _ in range(16):
            made = convolution(x).relu()
            helpers.synchronize()
            del made

    steps()
    torch.acc.empty_cache()  # drops what was captured
    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
    with helpers.counting() as counted:
        steps()
    assert (counted["captures"], counted["captured_launches"]) == (0, 16)


def test_a_pool_whose_last_graph_is_gone_serves_another(device):
    """What is called between the pieces is captured without a graph, and keeps the pool."""
    x = torch.ones(64, 64, device=device)
    weights = torch.ones(64, device=device)
    for _ in range(12):
        torch.multinomial(weights, 8, replacement=True)
        helpers.synchronize()
    told = []
    with helpers.counting() as counted:
        for _ in range(8):  # results that stay where they are: the graph goes, and comes anew
            made = (x @ x).cumsum(0)
            helpers.synchronize()
            told.append((made, made.data_ptr()))
        assert counted["captured_again/result"] >= 1
        for _ in range(4):
            made = (x @ x).cumsum(0)
            helpers.synchronize()
    assert counted["captures_submitted"] >= 1
    assert all(torch.equal(each, made) for each, _ in told)


def test_a_graph_without_nodes_is_not_warned_of(device, capfd):
    x = torch.ones(0, 8, device=device)
    with warnings.catch_warnings(record=True) as told, helpers.counting() as counted:
        warnings.simplefilter("always")
        for _ in range(12):
            x.cumsum(1)
            helpers.synchronize()
    assert counted["captured_launches"] >= 4
    assert "is empty" not in "".join([*(str(each.message) for each in told), *capfd.readouterr()])


def test_a_graph_that_the_program_captures_has_only_what_is_its_own(device):
    """Its stream was told an address, so that the device's work would wait for what is in it."""
    x = torch.ones(64, device=device)
    for _ in range(2):
        assert (x + 2).sum().item() == 192  # its kernels are loaded
    y = x + 1
    own = torch.acc.Stream()
    with torch.acc.stream(own):
        theirs = torch.from_dlpack(y)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(
        stream_id=own.stream_id, device_index=own.device_index, device_type=1
    )
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        theirs.mul_(3)
        z = (x + 2).sum()
        for drawn in (lambda: torch.from_dlpack(x), lambda: theirs.copy_(x), lambda: x + theirs):
            with pytest.raises(RuntimeError, match="captures a CUDA graph on its current stream"):
                drawn()
        helpers.flush()
    assert (y.sum().item(), z.item()) == (128, 192)
    with torch.cuda.stream(stream):
        graph.replay()
    x.zero_()
    assert (y.sum().item(), z.item()) == (384, 192)
