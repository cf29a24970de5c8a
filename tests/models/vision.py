"""torchvision's classification models, all of them, at small inputs and with ten classes.

They train as users train them, with dropout, stochastic depth and auxiliary heads; what is dropped
is drawn on the CPU, so that it is the same on every device and in every precision.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from tests import helpers
from tests.models import zoo

MODELS: tuple[str, ...] = tuple(torchvision.models.list_models(module=torchvision.models))

# One of each family, the quickest, and two of RegNet: what `make test` runs. Those of Inception,
# MaxViT, Swin, VGG and AlexNet, whose 57 million parameters are few operators, take too long for
# that. The longest come first, so that processes share them evenly.
FEW: tuple[str, ...] = (
    "densenet121",
    "vit_b_32",
    "resnet18",
    "googlenet",
    "convnext_tiny",
    "efficientnet_b0",
    "mobilenet_v3_small",
    "shufflenet_v2_x0_5",
    "mnasnet1_0",
    "regnet_y_400mf",
    "regnet_x_400mf",
    "squeezenet1_1",
)

# Width of the square images where 64 will not do: Inception's auxiliary head and the windows of
# MaxViT, 7 wide after five halvings, need these; ViT-H has patches of 14.
SIZES = {"inception_v3": 299, "maxvit_t": 224, "vit_h_14": 56}

# How many of equal blocks are kept, where all four copies with their gradients would need more
# than 16 GB: the path of the blocks in the model, and the number. In `make test` ViT-B too, which
# else takes 11 GB and most of a minute there.
KEPT_BLOCKS = {
    **({} if helpers.FULL else {"vit_b_32": ("encoder.layers", 4)}),
    "convnext_large": ("features.5", 9),
    "regnet_y_128gf": ("trunk_output.block3", 2),
    "vit_h_14": ("encoder.layers", 6),
    "vit_l_16": ("encoder.layers", 8),
    "vit_l_32": ("encoder.layers", 8),
}

TRANSFORMERS = ("maxvit", "swin", "vit")

# Without normalisation, VGG's with it in their large heads: eager's losses overflow at the others'
# learning rate.
UNNORMALISED = ("alexnet", "squeezenet", "vgg")

OPTIMIZERS: dict[str, zoo.MakeOptimizer] = {
    "adamw": zoo.OPTIMIZERS["adamw"],
    "sgd": zoo.OPTIMIZERS["sgd"],
    "slow_sgd": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, weight_decay=5e-4, foreach=True),
}


class Drawn(nn.Module):
    """Drops elements, or whole rows of the batch, that are drawn on the CPU."""

    def __init__(self, p: float, rows: bool) -> None:
        super().__init__()
        self.p, self.rows = p, rows

    def forward(self, x: Tensor) -> Tensor:
        """shape -> shape."""
        if self.p == 0.0:
            return x
        shape = (x.shape[0], *[1] * (x.dim() - 1)) if self.rows else x.shape
        kept = (torch.rand(shape) >= self.p) / (1.0 - self.p)
        return x * kept.to(x.device, x.dtype)


def draw_on_the_cpu(model: nn.Module) -> None:
    """Puts `Drawn` in the place of every dropout and stochastic depth."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout):
                setattr(module, name, Drawn(child.p, rows=False))
            elif isinstance(child, torchvision.ops.StochasticDepth):
                setattr(module, name, Drawn(child.p, rows=child.mode == "row"))


def classify(model: nn.Module, batch: zoo.Batch) -> Tensor:
    """Cross entropy of the classes; that of auxiliary heads counts 0.3."""
    results = model(batch[0])
    if isinstance(results, Tensor):
        return F.cross_entropy(results, batch[1])
    main, *auxiliary = (F.cross_entropy(head, batch[1]) for head in results)
    return main + 0.3 * torch.stack(auxiliary).sum()


def options(name: str) -> dict[str, Any]:
    """What the model's constructor is told besides the number of classes."""
    if name in ("googlenet", "inception_v3"):
        return {"init_weights": False}
    if name.startswith("vit"):
        return {"image_size": size(name)}
    return {}


def size(name: str) -> int:
    """Width and height of the images."""
    return SIZES.get(name, 64)


def optimizer(name: str) -> str:
    """The name of the model's optimizer: AdamW for transformers, SGD for the others."""
    if name.startswith(TRANSFORMERS):
        return "adamw"
    return "slow_sgd" if name.startswith(UNNORMALISED) else "sgd"


def make(name: str) -> zoo.Case:
    """A case of four batches, made from the same seed at every call."""
    torch.manual_seed(1234)
    model = torchvision.models.get_model(name, weights=None, num_classes=10, **options(name))
    if name in KEPT_BLOCKS:
        path, count = KEPT_BLOCKS[name]
        owner, _, last = path.rpartition(".")
        parent = model.get_submodule(owner)
        setattr(parent, last, nn.Sequential(*list(parent.get_submodule(last).children())[:count]))
    draw_on_the_cpu(model)
    rows = 2 if size(name) > 64 else 4
    batches = [
        (torch.randn(rows, 3, size(name), size(name)), torch.randint(10, (rows,))) for _ in range(4)
    ]
    return zoo.Case(model, batches, classify)
