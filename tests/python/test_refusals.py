"""What acc does not do is refused with the remedy, and leaves everything else usable."""

from __future__ import annotations

import pytest
import torch


def test_sparse_gradients_of_embeddings_name_the_option() -> None:
    """Sparse tensors do not exist on acc; the message says which option makes them."""
    embedding = torch.nn.Embedding(6, 2, sparse=True).to("acc")
    out = embedding(torch.tensor([1, 4, 1], device="acc")).pow(2).sum()
    with pytest.raises(NotImplementedError, match=r"nn\.Embedding\(sparse=False\)"):
        out.backward()
    assert out.isfinite().item()


def test_mixed_devices_are_refused_at_the_line() -> None:
    """A CPU tensor with dimensions beside an acc tensor is PyTorch's usual error."""
    a = torch.ones(3, device="acc")
    with pytest.raises(RuntimeError, match="same device"):
        a + torch.ones(3)
    assert (a + torch.tensor(2.0)).tolist() == [3.0, 3.0, 3.0]


def test_shape_errors_are_raised_at_the_line_with_pytorchs_message() -> None:
    """The error of a product of wrong shapes is the one that the CPU gives."""
    a = torch.ones(2, 3, device="acc")
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied") as acc:
        a @ a
    with pytest.raises(RuntimeError) as cpu:
        a.cpu() @ a.cpu()
    assert str(acc.value) == str(cpu.value)


@pytest.mark.usefixtures("recording")
def test_an_index_error_names_operator_and_line_and_poisons_only_its_results() -> None:
    """An index error in the middle of a step: type, operator, file; the rest goes on."""
    table = torch.ones(4, 2, device="acc")
    before = table * 2
    bad = torch.nn.functional.embedding(torch.tensor([1, 9], device="acc"), table)
    after = bad + 1
    with pytest.raises(IndexError, match=r"aten::embedding.*test_refusals\.py"):
        after.cpu()
    with pytest.raises(RuntimeError, match="no valid contents"):
        (bad * 2).cpu()
    assert before.tolist() == [[2.0, 2.0]] * 4
    assert (table + 1).sum().item() == 16.0


@pytest.mark.usefixtures("recording")
def test_an_error_outside_of_training_leaves_the_statistics_of_batch_norm() -> None:
    """They are read there, not written: what fails before them does not touch them."""
    table = torch.ones(4, 2, device="acc")
    norm = torch.nn.BatchNorm1d(2).to("acc")
    for training in (True, False):
        norm.train(training)
        with torch.no_grad(), pytest.raises(IndexError):
            bad = torch.nn.functional.embedding(torch.tensor([1, 9], device="acc"), table)
            norm(bad).sum().item()
        if training:  # they were to be written
            with pytest.raises(RuntimeError, match="no valid contents"):
                norm.running_mean.cpu()
            norm.running_mean.copy_(torch.zeros(2))
            norm.running_var.copy_(torch.ones(2))
    assert norm.running_mean.tolist() == [0.0, 0.0]
    assert norm.running_var.tolist() == [1.0, 1.0]


@pytest.mark.usefixtures("recording")
def test_a_failed_in_place_write_is_not_repeated() -> None:
    """What was written before the failure is written once, what comes after it is poisoned."""
    counter = torch.zeros(1, device="acc")
    counter.add_(1)
    table = torch.ones(4, 2, device="acc")
    torch.nn.functional.embedding(torch.tensor([9], device="acc"), table, padding_idx=0).mul_(2)
    later = torch.zeros(1, device="acc") + 1
    bad = torch.nn.functional.embedding(torch.tensor([9], device="acc"), table)
    with pytest.raises(IndexError):
        bad.cpu()
    assert counter.item() == 1.0
    assert later.item() == 1.0


def test_mixed_devices_are_refused_by_operators_that_run_at_once() -> None:
    a = torch.ones(3, device="acc")
    for call in (
        lambda: torch.equal(a, torch.ones(3)),
        lambda: torch.masked_select(a, torch.ones(3) > 0),
        lambda: torch.nonzero(a, out=torch.empty(0, dtype=torch.long)),
        lambda: torch.bincount(a.int(), torch.ones(3)),
    ):
        with pytest.raises(RuntimeError, match=r"same device.*acc:0 and cpu.*Move it with"):
            call()
    lengths = torch.tensor([3, 2])
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 1, device="acc"), lengths)
    assert packed.data.sum().item() == 5.0


@pytest.mark.parametrize("marked", ["conj", "neg"])
def test_other_types_of_lazily_conjugated_or_negated_tensors_are_refused(marked: str) -> None:
    def call(device: str) -> torch.Tensor:
        z = torch.ones(2, dtype=torch.complex64, device=device).conj()
        return z.view(torch.float32) if marked == "conj" else z.imag.view(torch.int32)

    with pytest.raises(RuntimeError) as cpu:
        call("cpu")
    with pytest.raises(RuntimeError) as acc:
        call("acc")
    assert str(acc.value) == str(cpu.value)


def test_a_part_of_a_storage_is_refused() -> None:
    x = torch.arange(8.0, device="acc")
    with pytest.raises(RuntimeError, match="part of an acc storage, of 4 bytes.*Slice a tensor"):
        x.untyped_storage()[4:8]
    assert x.sum().item() == 28.0


def test_quantized_tensors_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="no quantized tensors.*on the CPU"):
        torch.quantize_per_tensor(torch.ones(3, device="acc"), 0.1, 0, torch.quint8)
