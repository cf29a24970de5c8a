"""PyTorch Lightning's Trainer on acc, through its own interface for accelerators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests import helpers

L = pytest.importorskip("lightning", reason="needs the package lightning")

pytestmark = [pytest.mark.usefixtures("acc_only"), pytest.mark.filterwarnings("ignore")]

QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.losses: list[torch.Tensor] = []
        self.types: set[torch.dtype] = set()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        out = self.net(x)
        self.types.add(out.dtype)
        loss = nn.functional.cross_entropy(out, y)
        self.losses.append(loss.detach())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("val", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader() -> DataLoader:
    x, y = helpers.drawn(40, 4, device="cpu"), torch.arange(40) % 2
    return DataLoader(TensorDataset(x, y), batch_size=8)


def fit(folder: Any, epochs: int = 2, **options: Any) -> tuple[list[float], Any, Net]:
    net, trainer = Net(), L.Trainer(**QUIET, max_epochs=epochs, default_root_dir=folder, **options)
    trainer.fit(net, loader(), loader())
    return [loss.item() for loss in net.losses], trainer, net


@pytest.mark.usefixtures("unfused")
def test_a_trainer_gives_the_cpus_numbers_and_goes_on_from_its_checkpoint(tmp_path):
    from torchacc.lightning import LazyStrategy

    expected, plain, _ = fit(tmp_path / "cpu", accelerator="cpu")
    losses, trainer, net = fit(tmp_path / "acc", strategy=LazyStrategy())
    assert losses == expected
    assert trainer.callback_metrics["val"].item() == plain.callback_metrics["val"].item()
    assert trainer.strategy.root_device == torch.device("acc", 0)
    straight, _, _ = fit(tmp_path / "straight", epochs=3, accelerator="cpu")
    again = Net()
    more = L.Trainer(
        **QUIET, max_epochs=3, default_root_dir=tmp_path / "again", strategy=LazyStrategy()
    )
    more.fit(again, loader(), ckpt_path=trainer.checkpoint_callback.best_model_path)
    assert [loss.item() for loss in again.losses] == straight[-len(loader()) :]


def test_a_strategy_of_another_device_is_refused(tmp_path):
    from lightning.pytorch.strategies import SingleDeviceStrategy

    from torchacc.lightning import LazyAccelerator

    strategy = SingleDeviceStrategy(device=torch.device("cpu"), accelerator=LazyAccelerator())
    with pytest.raises(ValueError, match=r"has the device cpu\. Pass strategy="):
        fit(tmp_path, strategy=strategy)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16)]
)
def test_mixed_precision_is_accs(tmp_path, precision: str, dtype: torch.dtype):
    from torchacc.lightning import LazyStrategy

    losses, _, net = fit(
        tmp_path, strategy=LazyStrategy(), precision=precision, enable_checkpointing=False
    )
    assert net.types == {dtype}
    assert losses[-1] < losses[0]
