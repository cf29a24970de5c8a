"""What programs expect of a device without saying it, and the tests that show it.

Eighteen expectations, found by reading the documents' scripts and PyTorch's sources: `SHOWN` has
the tests of each. Those that belong to no other file follow.
"""

from __future__ import annotations

import ast
import copy
import functools

import pytest
import torch
from torch import nn

import torchacc
from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only")

HERE = "tests/python/test_expectations.py"
SHOWN = {
    "H1: acc is the accelerator: indices, pinned memory, the default backend": (
        "tests/python/test_accelerator.py::test_acc_is_the_accelerator",
        "tests/python/test_accelerator.py::test_tensors_move_to_the_accelerator",
        "tests/python/test_accelerator.py::test_synchronize_submits_everything",
        "tests/python/test_pin_memory.py::test_the_loader_pins_its_batches",
        "tests/distributed/test_plain.py::test_names_of_the_backend",
        "tests/distributed/test_half.py::"
        "test_torchs_own_sharding_takes_a_scaler_and_stages_without_gradients_take_part",
    ),
    "H2: a loss can be formatted": (
        f"{HERE}::test_a_loss_is_formatted_as_a_number",
        "tests/models/test_plans.py::test_logging_every_step_makes_no_plan_per_step",
        "tests/python/test_traps.py::test_a_step_that_logs_does_not_drive_out_the_plan",
    ),
    "H3: AdamW as it is called by default, and rates that change, make no plan per step": (
        "tests/models/test_plans.py::test_no_new_plans_after_step_3",
        "tests/python/test_traps.py::test_a_rate_that_changes_every_step_reaches_the_optimizer",
        "tests/models/test_models.py::test_the_optimizers_defaults_train_equally_well",
        f"{HERE}::test_states_are_read_by_one_submission",
    ),
    "H4: CUDA's autocast acts on acc, however it was imported": (
        "tests/python/test_patch.py::test_regions_of_every_name_act_on_acc",
        "tests/python/test_autocast.py::test_the_operators_are_those_of_cuda",
        "tests/python/test_autocast.py::test_a_weight_is_cast_once_in_a_region",
    ),
    "H5: a scaler reads nothing on the host; its growth makes no plan": (
        "tests/python/test_grad_scaler.py::test_a_steady_state_reads_nothing_and_makes_no_plan",
        "tests/python/test_grad_scaler.py::test_five_hundred_steps_are_torchs",
        "tests/distributed/test_half.py::test_an_overflow_on_one_rank_is_one_on_all",
        "tests/distributed/test_half.py::"
        "test_steps_of_several_processes_read_nothing_and_make_no_plan",
    ),
    "H6: steps end where a program's steps do, and leaving a loop loses nothing": (
        "tests/python/test_boundary.py::test_a_native_loop_makes_one_plan_for_all_its_steps",
        "tests/python/test_boundary.py::test_with_a_loader_the_batch_is_the_only_boundary",
        "tests/python/test_boundary.py::test_gradient_accumulation_has_one_boundary_per_batch",
        f"{HERE}::test_accumulated_gradients_make_no_plan_per_batch",
        "tests/python/test_loader.py::test_leaving_the_loop_early_ends_the_thread_and_the_workers",
        "tests/distributed/test_faults.py::"
        "test_ranks_that_log_alone_in_the_middle_of_a_step_are_no_fault",
    ),
    "H7: there is a process group after accelerate, of one process too": (
        "tests/distributed/test_group.py::test_a_process_without_a_launcher_is_a_group_of_its_own",
        "tests/distributed/test_group.py::"
        "test_a_launched_process_joins_the_others_though_it_is_the_only_one",
        "tests/python/test_device.py::test_each_local_rank_has_a_host_device",
    ),
    "H8: every process starts from the first one's parameters and buffers": (
        "tests/distributed/test_data_parallel.py::test_parts_of_a_batch_train_like_the_whole",
        "tests/distributed/test_fsdp.py::test_parts_of_a_batch_train_like_the_whole",
        "tests/distributed/test_data_parallel.py::test_a_divided_loader_reads_everything_once",
    ),
    "H9: Parameters stay the same objects": (
        "tests/python/test_accelerate.py::"
        "test_parameters_and_buffers_move_and_stay_the_same_objects",
        "tests/python/test_device.py::test_module_to_keeps_the_parameters",
        f"{HERE}::test_an_optimizer_may_be_built_before_or_after",
        "tests/distributed/test_data_parallel.py::"
        "test_an_optimizer_that_was_built_before_goes_on_working",
        "tests/distributed/test_fsdp.py::"
        "test_an_optimizer_of_parameters_that_were_replaced_is_an_error",
    ),
    "H10: forward, backward and copies run in different threads": (
        "tests/python/test_threads.py::test_backward_in_another_thread_than_forward",
        "tests/python/test_loader.py::test_copies_beside_a_training_step_disturb_no_number",
        "tests/threads/test_threads.py::test_no_race",
    ),
    "H11: buffers that are written in place are the module's own": (
        f"{HERE}::test_buffers_of_replayed_steps_are_the_modules_own",
        "tests/python/test_traps.py::test_batch_norm_statistics_of_a_dropped_forward",
    ),
    "H12: what a program holds is never overwritten": (
        "tests/python/test_traps.py::test_what_is_held_is_never_overwritten",
        "tests/python/test_traps.py::test_gradients_kept_between_steps",
    ),
    "H13: gradients and updates are compared, not losses alone": (
        "tests/models/test_models.py::test_bit_equal_to_the_cpu",
        "tests/models/test_fused.py::test_as_accurate_as_eager",
        "tests/models/test_fused.py::test_a_wrong_operator_is_seen",
    ),
    "H14: a process ends, whatever is under way": (
        "tests/python/test_loader.py::test_the_process_ends_with_an_epoch_under_way",
        "tests/python/test_exit.py::test_exit_with_work_in_flight",
        "tests/distributed/test_group.py::test_programs_that_do_not_leave_their_group_end_quietly",
    ),
    # `benchmarks/startup.py` has the seconds to step 20.
    "H15: the first steps are quick: nothing is planned after the third, kernels are kept": (
        "tests/models/test_plans.py::test_no_new_plans_after_step_3",
        "tests/python/test_compilers.py::test_two_processes_that_need_the_same_kernels_at_once",
    ),
    "H16: the script for fully sharded training runs as it is": (
        "tests/distributed/test_documents.py::test_fully_sharded",
        "tests/distributed/test_documents.py::test_fully_sharded_by_too_few_processes",
    ),
    "H17: a ragged last batch makes no new plan in each epoch": (
        "tests/python/test_loader.py::test_ragged_last_batches_make_no_new_plan_each_epoch",
    ),
    "H18: torch.acc has what PyTorch calls by name": (
        f"{HERE}::test_the_module_of_the_device_has_what_torch_calls_by_name",
        "tests/python/test_device.py::test_the_module_is_part_of_torch",
    ),
}


@functools.cache
def functions(path: str) -> set[str]:
    """The tests of a file that run by default: none is skipped without ACC_TEST_FULL."""
    tree = ast.parse((helpers.ROOT / path).read_text())
    full: set[str] = set()  # what the file calls such marks
    for node in tree.body:
        if isinstance(node, ast.Assign) and skips_by_default(node.value, full):
            full |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and not any(skips_by_default(mark, full) for mark in node.decorator_list)
    }


def skips_by_default(mark: ast.expr, full: set[str]) -> bool:
    """Whether an expression is a mark that skips a test unless `helpers.FULL`."""
    text = ast.unparse(mark)
    return text in full or ("skipif" in text and "not helpers.FULL" in text)


def test_every_expectation_is_shown_by_a_test() -> None:
    assert [name.partition(":")[0] for name in SHOWN] == [f"H{n}" for n in range(1, 19)]
    missing = [
        test
        for tests in SHOWN.values()
        for test in tests
        if test.partition("::")[2] not in functions(test.partition("::")[0])
    ]
    assert not missing


def test_a_test_that_is_skipped_by_default_shows_nothing() -> None:
    path = "tests/distributed/test_checkpoints.py"
    assert "test_whole_files_are_what_torch_gathers" in functions(path)
    assert "test_four_processes_go_on_from_the_shards_of_two" not in functions(path)


def test_a_loss_is_formatted_as_a_number(device: str) -> None:
    model, x = helpers.small_net(device), helpers.drawn(3, 4, device=device)
    loss = model(x).square().mean()
    assert type(loss) is torch.Tensor and loss.requires_grad
    number = loss.item()
    assert f"{loss:.4f} {loss:E} {loss:>12.3g}" == f"{number:.4f} {number:E} {number:>12.3g}"
    loss.backward()  # what was read can still be differentiated
    assert all(p.grad is not None for p in model.parameters())


def test_an_optimizer_may_be_built_before_or_after(device: str, unfused: None) -> None:
    def trained(before: bool) -> list[torch.Tensor]:
        model = helpers.small_net("cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1) if before else None
        model, loader = torchacc.accelerate(model, [helpers.drawn(5, 4, device="cpu")] * 4)
        optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.1)
        for x in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        state = optimizer.state_dict()["state"]
        return [*helpers.state_tensors(model), *helpers.tensors(list(state.values()))]

    before, after = trained(True), trained(False)
    assert len(before) == 4 * 4  # a parameter, its two moments, and its count of steps
    for one, other in zip(before, after, strict=True):
        assert one.device == other.device and torch.equal(one.cpu(), other.cpu())


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("fused", [False, True])
def test_states_are_read_by_one_submission(fused: bool) -> None:
    """A state that is saved, loaded or shown is not submitted, or waited for, by parameter."""
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))).to("acc")
    scaler = torch.amp.GradScaler("acc")  # moves the counts of steps to the device
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(net(torch.ones(2, 4, device="acc")).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(state["step"].device.type == "acc" for state in optimizer.state.values())
    helpers.flush()

    net[0].weight.detach().add_(1)  # something is pending
    with helpers.counting() as counted:
        saved, steps = optimizer.state_dict(), [s["step"] for s in optimizer.state.values()]
        optimizer.load_state_dict(copy.deepcopy(saved))
    assert counted["flushes"] == 0
    with helpers.counting() as counted:
        on_host = helpers.tensors([t.cpu() for t in helpers.tensors(list(saved["state"].values()))])
        numbers = [step.item() for step in steps]
    assert counted["flushes"] == counted["flush_read"] == 1
    assert len(on_host) == 3 * 16 and numbers == [3.0] * 16


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("loader", [False, True])
def test_accumulated_gradients_make_no_plan_per_batch(loader: bool) -> None:
    """Eight batches to an update: the plans are few, and stay so."""
    updates, batches = 6, 8
    x = [helpers.drawn(3, 4, device="cpu", seed=i) for i in range(batches)]
    model, async_loader = torchacc.accelerate(helpers.small_net("cpu"), x)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    plans = []
    for _ in range(updates):
        with helpers.counting() as counted:
            optimizer.zero_grad()
            for each in async_loader if loader else [t.to("acc") for t in x]:
                (model(each).square().mean() / batches).backward()
            optimizer.step()
            helpers.mark_step()
        plans.append(counted["plans_built"])
    # With a loader each batch is a step: the first, those that add up, and the update.
    assert plans[3:] == [0] * (updates - 3), plans
    assert sum(plans) <= (4 if loader else 2), plans


def test_buffers_of_replayed_steps_are_the_modules_own(device: str, unfused: None) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model = copy.deepcopy(plain).to(device)
    held = dict(model.named_buffers())  # as an average of weights holds them
    for index in range(6):
        for each, where in ((plain, "cpu"), (model, device)):
            each.zero_grad()
            each(helpers.drawn(5, 4, device=where, seed=index)).sum().backward()
        helpers.mark_step()
    assert held["1.num_batches_tracked"].item() == 6
    for name, buffer in plain.named_buffers():
        assert model.get_buffer(name) is held[name]
        helpers.assert_same(held[name], buffer, what=name)
        helpers.assert_same(model.state_dict()[name], buffer, what=name)


NAMES = """
    is_available device_count current_device set_device device synchronize Stream Event stream
    current_stream manual_seed manual_seed_all get_rng_state set_rng_state memory_allocated
    max_memory_allocated empty_cache get_amp_supported_dtype is_initialized _is_in_bad_fork
""".split()


@pytest.mark.parametrize("name", NAMES)
def test_the_module_of_the_device_has_what_torch_calls_by_name(name: str) -> None:
    assert callable(getattr(torch.get_device_module("acc"), name))
