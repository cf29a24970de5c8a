"""Trains a tiny GPT-2 and a tiny BERT on acc with Hugging Face's Trainer; nothing is downloaded.

    python examples/huggingface.py          (needs: pip install transformers accelerate)

The text is this project's documentation, its letters are the tokens. GPT-2 learns to continue it,
with gradient accumulation and evaluation, and goes on from a checkpoint; BERT learns to tell which
page a passage is from. What acc needs are the lines marked with an arrow (<--).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

import torchacc  # <--

PAGES = ("design.md", "gpu.md", "distributed.md")
LENGTH = 64  # of a passage, in bytes
LETTERS = 256


class Passages(Dataset):
    """Passages of `LENGTH` bytes: (LENGTH,) int64, each with what is to be learned of it."""

    def __init__(self, passages: Sequence[bytes], classes: Sequence[int] | None = None) -> None:
        self.passages, self.classes = passages, classes

    def __len__(self) -> int:
        return len(self.passages)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        letters = torch.tensor(list(self.passages[index]))
        labels = letters if self.classes is None else torch.tensor(self.classes[index])
        # With a mask transformers need not look whether several texts share a row.
        return {"input_ids": letters, "attention_mask": torch.ones_like(letters), "labels": labels}


def passages(page: str) -> list[bytes]:
    """The passages of a page of the documentation, in order; what is left at its end is not one."""
    text = (Path(__file__).resolve().parents[1] / "docs" / page).read_bytes()
    return [text[at : at + LENGTH] for at in range(0, len(text) - LENGTH + 1, LENGTH)]


def settings(folder: Path, steps: int, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=2e-3,
        logging_steps=1,
        logging_nan_inf_filter=False,  # it reads the loss in the middle of each step
        report_to=[],
        disable_tqdm=True,
        seed=0,
        **options,
    )


def gpt2(folder: Path, steps: int = 8, resume: str | None = None, **options: Any) -> Trainer:
    """A GPT-2 of two layers that was trained for `steps` steps of two batches each.

    It has been evaluated and saved half-way. `resume`: the folder of a checkpoint to go on from.
    """
    set_seed(0)
    text = passages(PAGES[0])
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=LETTERS,
            n_positions=LENGTH,
            n_embd=32,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,  # acc draws dropout from a stream of its own
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    half = max(1, steps // 2)
    arguments = settings(
        folder,
        steps,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=half,
        save_steps=half,
        **options,
    )
    trainer = Trainer(
        model, arguments, train_dataset=Passages(text[16:]), eval_dataset=Passages(text[:16])
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def bert(folder: Path, steps: int = 8, **options: Any) -> Trainer:
    """A BERT of two layers that was trained to tell pages apart."""
    set_seed(0)
    found = [(passage, number) for number, page in enumerate(PAGES) for passage in passages(page)]
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=LETTERS,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
            num_labels=len(PAGES),
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    data = Passages([passage for passage, _ in found], [number for _, number in found])
    trainer = Trainer(
        model, settings(folder, steps, save_strategy="no", **options), train_dataset=data
    )
    trainer.train()
    return trainer


def losses(trainer: Trainer, kind: str = "loss") -> list[float]:
    """What a training has logged as `kind`, in order."""
    return [entry[kind] for entry in trainer.state.log_history if kind in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    torchacc.accelerate_hf_trainer()  # <--
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trained = gpt2(folder / "gpt2", steps)
        print("GPT-2 on", trained.args.device, *(f"{loss:.3f}" for loss in losses(trained)))
        print("  held out:", *(f"{loss:.3f}" for loss in losses(trained, "eval_loss")))
        half = folder / "gpt2" / f"checkpoint-{max(1, steps // 2)}"
        again = gpt2(folder / "again", steps, resume=str(half))
        print("  from step", max(1, steps // 2), *(f"{loss:.3f}" for loss in losses(again)))
        print("BERT", *(f"{loss:.3f}" for loss in losses(bert(folder / "bert", steps))))


if __name__ == "__main__":
    main()
