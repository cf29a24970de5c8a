"""Models of timm train on acc as on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests import helpers

timm = pytest.importorskip("timm", reason="needs the package timm")

pytestmark = [pytest.mark.usefixtures("acc_only"), pytest.mark.filterwarnings("ignore")]

# Of each kind of network the smallest that timm has.
SMALL = ("test_resnet", "test_vit", "test_convnext", "test_byobnet")
LARGER = ("mobilenetv3_small_050", "efficientnet_lite0", "convnext_atto", "vit_tiny_patch16_224")


def train(name: str, device: str) -> list[float]:
    """Losses of three steps with timm's own optimizer and no dropout, batches of 4 images."""
    from timm.optim import create_optimizer_v2

    torch.manual_seed(0)
    sizes = {"img_size": 32} if "vit" in name else {}
    model = timm.create_model(name, num_classes=10, drop_rate=0.0, **sizes).train().to(device)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, foreach=False)
    losses = []
    for step in range(3):
        images = helpers.drawn(4, 3, 32, 32, device=device, seed=step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), torch.arange(4, device=device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("name", [*SMALL, *(LARGER if helpers.FULL else ())])
def test_a_model_trains_with_the_cpus_numbers(name: str) -> None:
    assert train(name, "acc") == pytest.approx(train(name, "cpu"), rel=1e-5)
