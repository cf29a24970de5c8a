"""Traps of a lazy device that records, plans and replays: one test each.

Each test says what goes wrong when the trap is not seen. `helpers.counting()` gives the number of
plans; values are compared with the CPU bit by bit.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import helpers
from tests.helpers import assert_same, counting, drawn, extension, mark_step, run_python, same

# --- keys: what must and what must not make another plan --------------------------------------


def test_float_arange_of_two_lengths(device):
    # Bounds that differ by a rounding error give another length: they are structure, not values.
    def run(where):
        found = []
        for end in (0.9, 1.0, 0.9, 1.0000001, 1.2, 0.9):
            found.append(torch.arange(0.0, end, 0.1, device=where) * 2)
            mark_step()
        return found

    same(run, device)


def test_linspace_of_changing_bounds_and_one_length(device):
    def run(where):
        found = []
        for end in (1.0, 2.0, 3.5, 1.0):
            found.append(torch.linspace(0, end, 5, device=where) + 1)
            mark_step()
        return found

    same(run, device)


def test_int_and_float_scalars_promote_differently(device):
    # The kind of a scalar is part of the key even where its value is not.
    def run(where):
        x, found = torch.arange(4, device=where), []
        for scalar in (2, 2.0, True, 3, 0.5, 2):
            found.append(x * scalar)
            found.append(torch.full((2,), scalar, device=where))
            mark_step()
        return found

    same(run, device)


def test_adding_the_step_number_is_one_plan(acc_only):
    x = torch.arange(16.0, device=acc_only)
    helpers.flush()
    with counting() as counted:
        for i in range(200):
            y = x + i
            mark_step()
            if i % 60 == 59:
                assert y[3].item() == 3.0 + i
    # One for the step, one for the plan of the read.
    assert counted["plans_built"] <= 2
    assert y.tolist() == [k + 199.0 for k in range(16)]


def test_slices_at_moving_offsets_are_one_plan(acc_only):
    data = torch.arange(200.0 * 4, device=acc_only).view(200, 4)
    total = torch.zeros(4, device=acc_only)
    helpers.flush()
    with counting() as counted:
        for i in range(196):
            total += data[i : i + 4].sum(0)
            mark_step()
    # The offset decides the alignment of the rows; a plan per class of alignment is allowed.
    assert counted["plans_built"] <= 2
    expected = torch.zeros(4)
    for i in range(196):
        expected += torch.arange(800.0).view(200, 4)[i : i + 4].sum(0)
    assert_same(total, expected)


def test_selects_and_writes_at_moving_positions_are_few_plans(acc_only):
    ring = torch.zeros(64, 8, device=acc_only)
    row = torch.arange(8.0, device=acc_only)
    helpers.flush()
    with counting() as counted:
        for i in range(200):
            ring[i % 64] = row * i
            mark_step()
    assert counted["plans_built"] <= 2
    assert ring[199 % 64].tolist() == [k * 199.0 for k in range(8)]
    assert ring[0].tolist() == [k * 192.0 for k in range(8)]


VALUES: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "add": lambda x, s: x + s,
    "rsub": lambda x, s: s - x,
    "div": lambda x, s: x / (s + 7),
    "alpha": lambda x, s: torch.add(x, x, alpha=s),
    "beta": lambda x, s: torch.addmm(x * float("nan"), x, x, beta=0.0 if s == 0 else 1.0),
    "addcmul": lambda x, s: torch.addcmul(x, x, x, value=s),
    "pow": lambda x, s: x.abs().pow(s),
    "clamp": lambda x, s: x.clamp(-s, s),
    "fill": lambda x, s: x.clone().fill_(s),
    "full": lambda x, s: torch.full((3,), s, device=x.device),
    "masked_fill": lambda x, s: x.masked_fill(x > 0, s),
    "compare": lambda x, s: x > s,
    "lerp": lambda x, s: torch.lerp(x, x + 1, s),
    "leaky_relu": lambda x, s: F.leaky_relu(x, s),
    "threshold": lambda x, s: F.threshold(x, s, -1),
    "softplus": lambda x, s: F.softplus(x, beta=s + 2),
    "layer_norm_eps": lambda x, s: F.layer_norm(x, (4,), eps=abs(s) + 1e-5),
    "norm": lambda x, s: x.norm(p=abs(s) + 1),
    "foreach": lambda x, s: torch._foreach_add([x, x * 2], s)[1],
    "foreach_alpha": lambda x, s: torch._foreach_add([x], [x], alpha=s)[0],
    "where": lambda x, s: torch.where(x > 0, x, s),
    "roll": lambda x, s: x.roll(int(s)),
    "arange": lambda x, s: torch.arange(int(abs(s)) + 2, device=x.device),
    "cumsum_dim": lambda x, s: x.cumsum(int(s) % 2),
    "select": lambda x, s: x[int(abs(s)) % 4] * 2,
    "pad": lambda x, s: F.pad(x, (int(abs(s)), 1), value=s),
    "tril": lambda x, s: x.tril(int(s)),
    "quantile": lambda x, s: x.quantile(min(abs(s), 1.0)),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_changed_scalar_is_never_the_old_one(device, name, unfused):
    # A plan that bakes a scalar replays the old value; 0, 1 and 2 are what kernels specialise on.
    def run(where):
        x, found = drawn(4, 4, device=where), []
        for s in (1.0, 1.0, 1.0, 2.0, 0.0, -1.5, 3.0, 1.0):
            found.append(VALUES[name](x, s))
            mark_step()
        return found

    same(run, device)


def test_a_rate_that_changes_every_step_reaches_the_optimizer(device):
    def run(where):
        w = nn.Parameter(torch.ones(8, device=where))
        opt = torch.optim.AdamW([w], lr=0.1, foreach=True)
        seen = []
        for step in range(12):
            opt.param_groups[0]["lr"] = 0.1 / (step + 1)
            opt.param_groups[0]["betas"] = (0.9 - 0.01 * step, 0.99)
            opt.zero_grad()
            (w * w).sum().backward()
            opt.step()
            seen.append(w.detach().clone())
        return seen

    same(run, device)


def test_new_geometry_under_a_cached_plan(device):
    # Same operators, other sizes, strides or dtypes: the cached metadata must not be used.
    def run(where):
        found = []
        for n in (4, 4, 5, 1, 4):
            x = drawn(n, 3, device=where)
            for y in (x, x.t(), x[:, ::2], x.expand(2, n, 3), x.double(), x[:0]):
                found.append((y * 2 + 1).sum(-1))
            mark_step()
        return found

    same(run, device)


def test_alias_patterns_are_told_apart(device):
    # x.add_(y) with y = x, with y overlapping x, and with a separate y.
    def run(where):
        found = []
        for kind in ("other", "same", "other", "same", "view"):
            x = drawn(4, 4, device=where)
            y = {"other": x.clone(), "same": x, "view": x[:1]}[kind]
            if kind == "view":
                y = y.clone().expand(4, 4)
            x.mul_(2).add_(y)
            found.append(x)
            mark_step()
        return found

    same(run, device)


# --- the ambient state ------------------------------------------------------------------------


def test_default_dtype_set_in_a_block_that_has_ended(device, clean_flags):
    # The operator runs after the block: it must still see the dtype of the block.
    def run(where):
        x = torch.arange(4, device=where)
        found = [x / 2]
        torch.set_default_dtype(torch.float64)
        found += [x / 2, torch.ones(2, device=where), x.sqrt(), x.float().mean()]
        torch.set_default_dtype(torch.float32)
        found += [x / 2, torch.ones(2, device=where), x.sqrt()]
        return found

    same(run, device)


def test_mkldnn_switched_off_in_a_block_that_has_ended(device, one_thread, unfused):
    # oneDNN and the plain convolution differ in the last bits, so the wrong flag shows.
    def run(where):
        x, w = drawn(2, 8, 12, 12, device=where), drawn(8, 8, 3, 3, device=where, seed=1)
        found = []
        for enabled in (True, False, True, False):
            with torch.backends.mkldnn.flags(enabled=enabled):
                y = F.conv2d(x, w)
            found.append(y)
        return found

    expected = run("cpu")
    if torch.equal(expected[0], expected[1]):
        pytest.skip("both convolutions give the same bits on this machine: the flag cannot be seen")
    assert_same(run(device), expected)


def test_flush_denormal_set_in_a_block_that_has_ended(device):
    if not torch.set_flush_denormal(False):
        pytest.skip("this CPU cannot flush denormals")

    def run(where):
        x = torch.full((8,), 1.5e-38, device=where)
        helpers.synchronize()
        found = [x * 0.5]
        torch.set_flush_denormal(True)
        try:
            found.append(x * 0.5)
        finally:
            torch.set_flush_denormal(False)
        found.append(x * 0.5)
        # Read as integers: the comparison itself must not flush.
        return [y.view(torch.int32) for y in found]

    expected = run("cpu")
    assert not torch.equal(expected[0], expected[1])
    same(run, device)


def test_deterministic_algorithms_set_in_a_block_that_has_ended(device, clean_flags):
    def run(where):
        torch.use_deterministic_algorithms(True)
        inside = torch.empty(4, device=where)  # filled with NaN in this mode
        ints = torch.empty(4, dtype=torch.int32, device=where)
        torch.use_deterministic_algorithms(False)
        x = torch.zeros(4, device=where).index_add(
            0, torch.tensor([1, 1, 2], device=where), torch.ones(3, device=where)
        )
        return [inside, ints, x]

    same(run, device)


def test_thread_count_is_that_of_the_caller(device):
    def run(where):
        before, found = torch.get_num_threads(), []
        try:
            for n in (1, 2, 1):
                torch.set_num_threads(n)
                # its sums over the batch are split among the threads, which shows in the last bits
                x = drawn(4, 16, 64, 64, device=where)
                found.append(torch.nn.functional.batch_norm(x, None, None, training=True).sum())
        finally:
            torch.set_num_threads(before)
        return found

    same(run, device)


def test_a_precision_that_is_inherited_stays_so(device):
    mkldnn = torch.backends.mkldnn
    before = mkldnn.fp32_precision, mkldnn.matmul.fp32_precision

    def run(where):
        found = []
        x = drawn(4, 4, device=where)
        mkldnn.fp32_precision, mkldnn.matmul.fp32_precision = "bf16", "ieee"
        y = x @ x
        mkldnn.matmul.fp32_precision = "none"
        found.append(mkldnn.matmul.fp32_precision)
        y.cpu()
        mkldnn.fp32_precision = "ieee"
        found.append(mkldnn.matmul.fp32_precision)
        return found

    # torch's own test helpers, which other tests import, allow changes in `flags()` blocks only
    with torch.backends.__allow_nonbracketed_mutation():
        try:
            assert run("cpu") == run(device) == ["bf16", "ieee"]
        finally:
            mkldnn.fp32_precision, mkldnn.matmul.fp32_precision = before


def test_autocast_does_not_outlive_its_block(device):
    x = drawn(4, 4, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        inside = x @ x
    outside = x @ x
    assert (inside.dtype, outside.dtype) == (torch.bfloat16, torch.float32)
    assert_same(outside, drawn(4, 4, device="cpu") @ drawn(4, 4, device="cpu"))


# --- dead code and effects --------------------------------------------------------------------


def test_batch_norm_statistics_of_a_dropped_forward(device, unfused):
    # The write to the running statistics is not in the operator's schema.
    def run(where):
        bn = nn.BatchNorm2d(3).to(where)
        for step in range(4):
            bn(drawn(2, 3, 5, 5, device=where, seed=step))
            mark_step()
        return [bn.running_mean, bn.running_var, bn.num_batches_tracked]

    same(run, device)


def test_instance_norm_statistics_of_a_dropped_forward(device):
    def run(where):
        norm = nn.InstanceNorm1d(3, track_running_stats=True).to(where)
        for step in range(3):
            norm(drawn(2, 3, 5, device=where, seed=step))
        return [norm.running_mean, norm.running_var]

    same(run, device)


def test_embedding_renormalises_its_weights_though_the_result_is_dropped(device):
    def run(where):
        w = drawn(5, 4, device=where) * 3
        F.embedding(torch.tensor([1, 3, 1], device=where), w, max_norm=1.0)
        return [w]

    same(run, device)


def test_a_write_through_a_dropped_view_of_a_live_tensor(device):
    def run(where):
        x, y = torch.zeros(2, device=where), torch.ones(2, device=where)
        w = x.view(2)
        w.add_(y)
        w = None
        mark_step()
        x[1:].mul_(5)
        return [x]

    same(run, device)


def test_an_assertion_is_not_dead_code(device):
    with pytest.raises(RuntimeError, match="Expected|[Aa]ssert"):
        torch._assert_async(torch.zeros((), device=device, dtype=torch.bool))
        helpers.synchronize()
    assert torch.ones(2, device=device).sum().item() == 2.0


def test_random_draws_are_not_merged(device):
    torch.manual_seed(0)
    a, b = torch.rand(50, device=device), torch.rand(50, device=device)
    assert not torch.equal(a, b)
    x = torch.ones(1000, device=device)
    assert not torch.equal(F.dropout(x), F.dropout(x))
    mark_step()
    assert not torch.equal(torch.rand(50, device=device), a)


@pytest.mark.usefixtures("recording")
def test_random_garbage_collection_and_kept_outputs(acc_only):
    # What is alive at the end of a step varies; it is not part of the key.
    rng = random.Random(0)
    x = torch.arange(32.0, device=acc_only)
    helpers.flush()
    kept: list[tuple[int, torch.Tensor]] = []
    cycles = []
    with counting() as counted:
        for i in range(210):
            h = x * 2
            y = (h + i).relu()
            z = y.sum()
            if i % 7 == 0:
                kept.append((i, y))
            cycle: list[object] = [h, z]
            cycle.append(cycle)  # freed by the collector only
            cycles.append(None)
            del cycle, h, y, z
            if rng.random() < 0.2:
                gc.collect()
            mark_step()
    gc.collect()  # the last cycles: tests that follow count memory
    assert counted["plans_built"] <= 2
    for i, y in kept:
        assert_same(y, (torch.arange(32.0) * 2 + i).relu(), what=f"output of step {i}")


# --- what a user holds ------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["all", "every third", "the last three", "views"])
def test_what_is_held_is_never_overwritten(device, keep):
    def run(where):
        w, held = torch.ones(16, device=where), []
        for step in range(20):
            h = (w * (step + 1)).neg()
            out = h + w
            if keep == "all":
                held += [h, out]
            elif keep == "every third" and step % 3 == 0:
                held.append(h)
            elif keep == "the last three":
                held = [*held[-2:], out]
            elif keep == "views":
                held.append(out[step % 16 :])
            w = w + out.mean() * 0.01
            mark_step()
        return [*held, w]

    same(run, device)


def test_a_held_output_changed_in_place_does_not_change_later_steps(device):
    def run(where):
        x, found = drawn(8, device=where), []
        for step in range(6):
            y = x.exp()
            found.append(y)
            mark_step()
            if step % 2:
                found[step - 1].zero_()
        return found

    same(run, device)


def test_gradients_kept_between_steps(device):
    def run(where):
        w = nn.Parameter(drawn(8, device=where))
        opt, kept = torch.optim.SGD([w], lr=0.1), []
        for step in range(6):
            (w * w * (step + 1)).sum().backward()
            opt.step()
            kept.append(w.grad)
            if step % 2:
                w.grad = None
            else:
                opt.zero_grad(set_to_none=False)
        return [*kept, w]

    same(run, device)


def test_parameters_that_move_between_steps(device):
    # Two sets of addresses in turn under one plan.
    def run(where):
        a, b = drawn(8, device=where), drawn(8, device=where, seed=1)
        w, found = nn.Parameter(a), []
        for step in range(8):
            w.data = (a, b)[step % 2]
            with torch.no_grad():
                w.mul_(1.5).add_(step)
            mark_step()
            found.append(w.detach().clone())
        return [a, b, *found]

    same(run, device)


def test_a_cpu_operand_is_taken_at_the_time_of_the_call(device):
    def run(where):
        source, index, scalar = torch.arange(6.0), torch.tensor([0, 2]), torch.tensor(3.0)
        x = source.to(device=where, copy=True)
        y = torch.zeros(6, device=where)
        y.copy_(source, non_blocking=True) if where == "cpu" else y.copy_(source)
        z = x[index] * scalar
        x[index] = scalar
        source.fill_(-1), index.fill_(5), scalar.fill_(100)
        return [x, y, z]

    same(run, device)


def test_host_reads_in_the_middle_of_a_step(device, unfused):
    # Each reading pattern splits the step differently; all must give the same numbers.
    def run(where, log):
        w = nn.Parameter(drawn(8, device=where))
        opt = torch.optim.SGD([w], lr=0.05, momentum=0.9)
        losses = []
        for step in range(15):
            loss = (w * w).sum()
            opt.zero_grad()
            loss.backward()
            if log(step):
                losses.append(loss.item())
            opt.step()
        return [losses, w]

    for log in (lambda s: False, lambda s: True, lambda s: s % 5 == 0, lambda s: s in (3, 4, 9)):
        assert_same(run(device, log), run("cpu", log))


@pytest.mark.usefixtures("recording")
def test_a_step_that_logs_does_not_drive_out_the_plan(acc_only):
    w = nn.Parameter(torch.ones(8, device=acc_only))
    opt = torch.optim.SGD([w], lr=0.01, momentum=0.9)
    plans = []
    for step in range(40):
        with counting() as counted:
            loss = (w * w).sum()
            opt.zero_grad()
            loss.backward()
            if step % 10 == 9:
                assert loss.item() > 0
            opt.step()
        plans.append(counted["plans_built"])
    assert sum(plans[:3]) >= 1
    late = plans[3:]
    assert sum(late) <= 2 and all(n == 0 for n in late[8:]), plans


# --- storages ---------------------------------------------------------------------------------


def test_pending_storages_have_their_own_addresses(device):
    made = [torch.ones(n, device=device) + 1 for n in (1, 4, 4, 100)]
    addresses = [t.untyped_storage().data_ptr() for t in made]
    assert 0 not in addresses
    assert len(set(addresses)) == len(made)
    view = made[1][2:]
    assert view.untyped_storage().data_ptr() == addresses[1]
    empty = torch.empty(0, device=device)
    assert empty.untyped_storage().data_ptr() == 0
    assert torch._C._is_alias_of(view, made[1]) and not torch._C._is_alias_of(made[2], made[1])


def test_storage_resize_happens_in_program_order(device):
    # Freed while operators that read it are still only recorded.
    def run(where):
        x = torch.arange(64.0, device=where)
        y = x * 2
        nbytes = x.untyped_storage().nbytes()
        x.untyped_storage().resize_(0)
        z = y + 1
        x.untyped_storage().resize_(nbytes)
        x.copy_(z)
        return [x, y, z]

    same(run, device)


def test_growing_a_storage_keeps_its_elements(device):
    def run(where):
        x = torch.arange(4.0, device=where)
        x.add_(1)
        x.untyped_storage().resize_(32)
        x.set_(x.untyped_storage(), 0, (8,), (1,))
        x[4:] = 9
        return [x]

    same(run, device)


# --- memo misses, threads, events -------------------------------------------------------------


def test_memo_misses_in_backward_while_another_thread_frees_tensors(device):
    # A destructor or a meta function that takes a lock under the GIL hangs here.
    done = run_python(
        """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
sys.setswitchinterval(1e-6)
import torch.nn.functional as F
stop = threading.Event()

def churn():
    kept = []
    while not stop.is_set():
        t = torch.ones(7, device=DEVICE)
        kept.append(t * 2)
        if len(kept) > 20:
            kept.clear()

pool = ThreadPoolExecutor(2)
churning = [pool.submit(churn) for _ in range(2)]
try:
    for n in range(2, 42):  # another size each time: every operator misses
        x = torch.ones(n, n + 1, device=DEVICE, requires_grad=True)
        y = F.layer_norm(x * 2, (n + 1,)) + F.gelu(x).cumsum(0)
        loss = F.smooth_l1_loss(y, y.detach() * 0.5) + y.logsumexp(1).sum()
        loss.backward()
        c = torch.ones(n, n + 1, requires_grad=True)
        d = F.layer_norm(c * 2, (n + 1,)) + F.gelu(c).cumsum(0)
        (F.smooth_l1_loss(d, d.detach() * 0.5) + d.logsumexp(1).sum()).backward()
        torch.testing.assert_close(x.grad.cpu(), c.grad, rtol=1e-5, atol=1e-6)
finally:
    stop.set()
for each in churning:
    each.result()
print("done")
""",
        timeout=300,
    )
    assert done.stdout.strip() == "done"


def test_waiting_for_an_event_by_query(acc_only):
    # The event lies behind operators that nobody has submitted: query must submit them.
    x = torch.ones(64, 64, device=acc_only)
    y = x
    for _ in range(5):
        y = (y @ x).clamp(-1, 1)
    event = torch.acc.Event()
    event.record()
    limit = time.monotonic() + 30
    while not event.query():
        assert time.monotonic() < limit, "the event never becomes ready"
    assert y.sum().item() == 64 * 64


def test_waiting_for_a_stream_by_query(acc_only):
    x = torch.ones(64, 64, device=acc_only)
    y = x @ x
    limit = time.monotonic() + 30
    while not torch.acc.current_stream().query():
        assert time.monotonic() < limit, "the stream never becomes idle"
    assert y[0, 0].item() == 64.0


@pytest.mark.parametrize("submit_in_no_grad", [False, True])
def test_an_lstm_keeps_its_workspace_wherever_the_step_is_submitted(
    submit_in_no_grad: bool,
) -> None:
    """oneDNN's layer keeps what its backward needs only in grad mode: that of the forward."""

    def gradient(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.LSTM(8, 16).to(device)
        loss = model(torch.ones(5, 3, 8, device=device))[0].square().sum()
        with torch.set_grad_enabled(not submit_in_no_grad):
            loss.item()
        loss.backward()
        return model.weight_ih_l0.grad.cpu()

    assert torch.equal(gradient("acc"), gradient("cpu"))


@pytest.mark.usefixtures("recording")
def test_what_a_finalizer_records_while_a_meta_kernel_runs(acc_only: str) -> None:
    """Meta kernels may run Python, which may run finalizers and signal handlers."""
    extension().forget_inferences()
    inside: list[bool] = []

    def record(frame: object, event: str, argument: object) -> None:
        if event == "call" and not inside and extension().inferring():
            inside.append(True)
            torch.cat([torch.ones(7, device=acc_only).mul_(2)] * 2)

    matrix = drawn(5, 5, device="cpu")
    on_acc = matrix.to(acc_only)
    sys.setprofile(record)
    try:
        results = [torch.fft.fft(on_acc), torch.cdist(on_acc, on_acc)]
    finally:
        sys.setprofile(None)
    assert inside, "no Meta kernel ran Python"
    assert_same(results[0], torch.fft.fft(matrix))
    assert_same(results[1], torch.cdist(matrix, matrix))


def test_views_that_come_to_overlap_while_a_plan_is_followed(device: str) -> None:
    data = torch.arange(32.0, device=device)
    for start in (16, 14, 12, 10, 8):
        data[0:8].add_(data[start : start + 8])
        data.sum().item()
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        data[0:8].add_(data[3:11])


def test_many_views_of_an_input_in_a_call_that_is_not_the_expected_one(device: str) -> None:
    def run(where: str) -> list[torch.Tensor]:
        x = torch.arange(32.0).reshape(16, 2).to(where)
        x.cpu()
        found = []
        for end, dim in ((16, 0), (16, 0), (16, 0), (14, 0), (16, 1), (16, 0)):
            pieces = [x[0:4], x[4:8], x[8:12], x[12:end]]
            found.append(torch.cat(pieces, dim).sum().cpu())
        return found

    same(run, device)


def test_an_out_that_is_a_view_of_an_operand(device: str) -> None:
    def run(where: str) -> torch.Tensor:
        out = torch.tensor(2.0, device=where)
        view = out[...]
        return torch.mul(view, torch.ones(4, 1, device=where), out=out)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(run, device)


def test_backward_stays_in_its_thread_on_the_host(acc_only: str) -> None:
    """A thread of autograd's that still frees Python objects at exit would abort the process."""
    if extension().executor_name() != "host":
        pytest.skip("on a GPU backward has a thread of its own, as for CUDA")
    threads: list[int] = []
    x = torch.ones(2, device=acc_only, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: threads.append(threading.get_ident()))
    y.sum().backward()
    assert threads == [threading.get_ident()]


def test_a_padded_batch_in_a_transformer_encoder(device: str) -> None:
    """Eager makes a nested tensor of it in evaluation; acc has none and computes padding too."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        found = model.to(device)(x.to(device), src_key_padding_mask=padding.to(device)).cpu()
    torch.testing.assert_close(found[~padding], expected[~padding])


def test_kernels_that_ask_whether_two_operands_are_one_tensor(device: str) -> None:
    """The fused attention takes another way for a sequence that attends to itself."""

    def run(where: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
        x = torch.randn(2, 5, 8).to(where)
        with torch.no_grad():
            return model.to(where)(x, x, x)[0]

    same(run, device)


@pytest.mark.parametrize("given", [False, True], ids=["result", "out"])
def test_a_kernel_whose_result_is_lazily_conjugated(device: str, given: bool) -> None:
    def run(where: str) -> torch.Tensor:
        torch.manual_seed(0)
        a, b = (torch.randn(3, 3, dtype=torch.complex64) for _ in range(2))
        factors, pivots = torch.linalg.lu_factor(a)
        arguments = (t.to(where) for t in (factors, pivots, b))
        out = torch.empty_like(b, device=where) if given else None
        return torch.linalg.lu_solve(*arguments, left=False, out=out).resolve_conj()

    same(run, device)


def test_two_devices_that_run_at_once_leave_the_settings_as_they_were(acc_only: str) -> None:
    """One must not take what the other has set for the time of its run for what was there."""
    code = """
import threading
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(2)
ones = [torch.ones(200, device=f"acc:{i}") for i in range(2)]
for _ in range(150):
    torch.use_deterministic_algorithms(True)
    long = [ones[0] * 2 for _ in range(300)]
    torch.use_deterministic_algorithms(False)
    kept = [long[0], ones[1] * 2]
    start = threading.Barrier(2)
    def flush(tensor):
        start.wait()
        return tensor.tolist()
    assert list(pool.map(flush, kept)) == [[2.0] * 200] * 2
    assert not torch.are_deterministic_algorithms_enabled()
"""
    run_python(code, ACC_HOST_DEVICES="2", ACC_EXECUTOR="host")
