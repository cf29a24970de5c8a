"""The layout pass: convolutional programs compute as eager does, and nobody sees its strides.

Each program runs on the CPU and, several times, on the device: first unfused, then with kernels.
Values agree up to rounding, strides exactly. A program also says whether the pass has to act in it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "one_thread", "recording")


Results = dict[str, Tensor]
Program = Callable[[str], Results]

RUNS = 3

# How far a value may be from eager's, relative to the largest of its tensor. After three steps
# through batch norms eager's own layouts are 0.025 apart; what is laid out wrongly is wrong by all.
APART = 0.05


def convolutions(device: str = helpers.DEVICE) -> tuple[int, int]:
    """Of the device's last plan: how many convolutions there are, and how many make channels last.

    Both layouts count where they are the same memory.
    """
    plan = helpers.extension().plan_data(torch.device(device).index or 0, True)
    lines = [node["text"] for node in plan["nodes"] if node["op"] == "aten::convolution"]
    return len(lines), sum("]/[" in line.split("=")[0] for line in lines)


def check(program: Program, acts: bool | None = None) -> None:
    """Runs a program on both sides. `acts`: whether some convolution has to be channels last."""
    expected = program("cpu")
    extension = helpers.extension()
    extension.skip_passes("")  # no plan of another program counts as the largest
    extension.time_plans(True)
    try:
        for _ in range(RUNS):
            actual = program(helpers.DEVICE)
            assert actual.keys() == expected.keys()
            for name, right in expected.items():
                got = actual[name]
                assert got.stride() == right.stride(), f"{name}: {got.stride()}, {right.stride()}"
                apart = (got.detach().cpu() - right.detach()).abs().max()
                assert apart <= APART * right.detach().abs().max() + 1e-6, f"{name}: {apart}"
        if acts is not None:
            assert (convolutions()[1] > 0) == acts, convolutions()
    finally:
        extension.time_plans(False)


def images(device: str, *shape: int, seed: int = 0) -> Tensor:
    """Normal images."""
    return helpers.drawn(*shape, device="cpu", seed=seed).to(device)


def train(
    device: str,
    model: nn.Module,
    shape: tuple[int, ...],
    steps: int = 3,
    forward: Callable[[nn.Module, Tensor], Tensor] | None = None,
) -> Results:
    """Steps of SGD with momentum from the model's state; parameters, gradients, state, the loss."""
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-3)
    for step in range(steps):
        x = images(device, *shape, seed=step)
        helpers.flush()
        optimizer.zero_grad()
        out = model(x) if forward is None else forward(model, x)
        loss = out.float().square().mean()
        loss.backward()
        optimizer.step()
        if device != "cpu":
            helpers.mark_step()
    made: Results = {"loss": loss, "out": out}
    for name, p in model.named_parameters():
        made[name] = p
        assert p.grad is not None
        made[f"gradient of {name}"] = p.grad
        made[f"momentum of {name}"] = optimizer.state[p]["momentum_buffer"]
    made.update(model.named_buffers())
    return made


def block(inputs: int, outputs: int, kernel: int = 3, **options: int) -> list[nn.Module]:
    """A convolution, batch norm, ReLU in place."""
    return [
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False, **options),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    ]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """The module, with the same weights at each call."""
    torch.manual_seed(0)
    return make()


def head(channels: int) -> list[nn.Module]:
    """From images to rows of five."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5)]


class Residual(nn.Module):
    """What residual networks are made of, with a convolution of one pixel in the shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *block(inputs, outputs, stride=stride),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.short = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, outputs, H / stride, W / stride)."""
        return F.relu(self.body(x) + self.short(x), inplace=True)


def residual_net() -> nn.Module:
    """A small residual network."""
    return nn.Sequential(
        *block(3, 16),
        nn.MaxPool2d(3, 2, 1),
        Residual(16, 16, 1),
        Residual(16, 32, 2),
        *head(32),
    )


def test_a_network_of_residual_blocks():
    check(lambda d: train(d, seeded(residual_net), (8, 3, 32, 32)), acts=True)


def test_nothing_is_copied_for_its_strides_in_steps_that_are_fused():
    model = seeded(residual_net).to(helpers.DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(5):
        with helpers.counting() as counted:
            optimizer.zero_grad()
            model(images(helpers.DEVICE, 8, 3, 32, 32, seed=step)).square().mean().backward()
            optimizer.step()
            helpers.mark_step()
    assert counted["stride_copies"] == 0


def test_activations_that_hooks_keep_have_eagers_strides():
    def program(device: str) -> Results:
        model = seeded(residual_net)
        kept: Results = {}
        for name, module in model.named_modules():
            if isinstance(module, (nn.Conv2d, nn.MaxPool2d, nn.BatchNorm2d)):

                def keep(_: nn.Module, __: object, out: Tensor, name: str = name) -> None:
                    kept[f"activation {name}"] = out

                module.register_forward_hook(keep)
        return {**train(device, model, (8, 3, 32, 32)), **kept}

    check(program)


def test_gradients_of_images_and_activations_have_eagers_strides():
    def program(device: str) -> Results:
        model = seeded(residual_net).to(device)
        x = images(device, 8, 3, 32, 32).requires_grad_()
        middle = model[:4](x)
        middle.retain_grad()
        model[4:](middle).square().mean().backward()
        assert x.grad is not None and middle.grad is not None
        return {"images": x.grad, "middle": middle, "its gradient": middle.grad}

    check(program)


def test_evaluation():
    def program(device: str) -> Results:
        model = seeded(residual_net).to(device).eval()
        with torch.no_grad():
            return {
                "rows": model(images(device, 8, 3, 32, 32)),
                "features": model[:5](images(device, 8, 3, 32, 32, seed=1)),
            }

    check(program)


def test_checkpointing():
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        x = checkpoint(model[:4], x, use_reentrant=False)
        return model[4:](x)

    check(
        lambda d: train(d, seeded(residual_net), (8, 3, 32, 32), forward=forward),
        acts=True,
    )


def test_a_layer_that_is_used_twice():
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        x = model[0](x)
        return model[2](model[1](F.relu(model[1](x))))

    def make() -> nn.Module:
        layers = [nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)]
        return nn.Sequential(*layers, nn.Sequential(*head(16)))

    check(lambda d: train(d, seeded(make), (8, 3, 32, 32), forward=forward), acts=True)


def test_views_of_activations():
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        x = F.relu(model[0](x))
        y = model[1](x)
        parts = [y.flatten(1), x[:, ::2].flatten(1), y.transpose(1, 2).flatten(1), x.view(8, -1)]
        y[:, 0].mul_(2)
        return torch.cat(parts, 1)

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1))

    check(lambda d: train(d, seeded(make), (8, 3, 16, 16), forward=forward))


class Strip(nn.Module):
    """Maps times a gate of their rows, or plus what was made of their mean over the images."""

    def __init__(self, rows: bool) -> None:
        super().__init__()
        self.rows = rows
        self.first, self.gate, self.last = (
            nn.Conv2d(16, 16, kernel, padding=kernel // 2) for kernel in (3, 1 if rows else 3, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, 16, H, W) -> the same."""
        x = self.first(x)
        if self.rows:
            return self.last(x * torch.sigmoid(self.gate(x.mean(3, keepdim=True))))
        return self.last(x + self.gate(F.relu(self.first(x.mean(0, keepdim=True)))))


@pytest.mark.parametrize("rows", [True, False])
def test_maps_that_are_broadcast(rows):
    check(lambda d: train(d, seeded(lambda: Strip(rows)), (4, 16, 32, 32)), acts=True)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic", "trilinear"])
def test_strides_of_enlarged_maps_of_one_channel(mode):
    """Whose layout their strides alone tell: eager keeps it."""
    dims = 3 if mode == "trilinear" else 2
    x = torch.randn(4, *[6] * dims, 1).movedim(-1, 1)
    mine, eager = (F.interpolate(t, scale_factor=2, mode=mode) for t in (x.to(helpers.DEVICE), x))
    assert mine.stride() == eager.stride()
    assert mine.stride()[1] == 1


def test_networks_that_join_and_enlarge():
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        fine = model[0](x)
        coarse = model[1](F.avg_pool2d(fine, 2))
        up = F.interpolate(coarse, scale_factor=2, mode="nearest")
        smooth = F.interpolate(coarse, scale_factor=2, mode="bilinear", align_corners=False)
        return model[2](torch.cat([fine, up, smooth], 1))

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Sequential(*block(3, 16)),
            nn.Sequential(*block(16, 16)),
            nn.Sequential(*block(48, 16), *head(16)),
        )

    check(lambda d: train(d, seeded(make), (8, 3, 32, 32), forward=forward), acts=True)


@pytest.mark.parametrize(
    "shape", [(1, 3, 32, 32), (8, 1, 32, 32), (1, 1, 32, 32), (8, 3, 1, 32), (8, 3, 32, 1)], ids=str
)
def test_shapes_whose_strides_are_ambiguous(shape):
    def make() -> nn.Module:
        return nn.Sequential(*block(shape[1], 16), *block(16, 16), *block(16, 1, 1), nn.Flatten())

    check(lambda d: train(d, seeded(make), shape))


def test_images_of_one_pixel():
    def make() -> nn.Module:
        return nn.Sequential(*block(3, 16, 1), *block(16, 16), nn.Flatten(), nn.Linear(16, 5))

    check(lambda d: train(d, seeded(make), (8, 3, 1, 1)), acts=False)


def test_groups_and_transposed_convolutions():
    def make() -> nn.Module:
        return nn.Sequential(
            *block(4, 16),
            *block(16, 16, groups=4),
            *block(16, 16, groups=16),
            *block(16, 16, 1),
            nn.ConvTranspose2d(16, 8, 2, stride=2),
            nn.ReLU(),
            *block(8, 8),
            *head(8),
        )

    check(lambda d: train(d, seeded(make), (8, 4, 32, 32)))


def test_a_model_that_the_user_made_channels_last():
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return model(x.to(memory_format=torch.channels_last))

    def program(device: str) -> Results:
        model = seeded(residual_net).to(memory_format=torch.channels_last)
        return train(device, model, (8, 3, 32, 32), forward=forward)

    check(program)


def test_half_of_a_model_channels_last():
    def program(device: str) -> Results:
        model = seeded(residual_net)
        model[5].to(memory_format=torch.channels_last)
        return train(device, model, (8, 3, 32, 32))

    check(program)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_types_keep_their_layout(dtype):
    def program(device: str) -> Results:
        model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)))
        model = model.to(dtype).to(device)
        return {"out": model(images(device, 4, 3, 16, 16).to(dtype)).float()}

    expected, actual = program("cpu")["out"], program(helpers.DEVICE)["out"]
    assert actual.stride() == expected.stride()
    torch.testing.assert_close(actual.cpu(), expected, rtol=2e-2, atol=2e-2)


def test_gradients_that_add_up():
    def program(device: str) -> Results:
        model = seeded(residual_net).to(device)
        for seed in range(3):
            model(images(device, 8, 3, 32, 32, seed=seed)).square().mean().backward()
            if device != "cpu":
                helpers.mark_step()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    check(program, acts=True)


def test_a_gradient_of_a_gradient():
    def program(device: str) -> Results:
        model = seeded(
            lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh())
        ).to(device)
        x = images(device, 8, 3, 32, 32).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        grad.square().sum().backward()
        assert x.grad is not None
        return {"first": grad, "second": x.grad}

    check(program)


def test_the_pass_can_be_left_out():
    extension = helpers.extension()

    def run() -> int:
        train(helpers.DEVICE, seeded(residual_net), (8, 3, 32, 32))
        helpers.flush()
        return 0

    before = dict(train(helpers.DEVICE, seeded(residual_net), (8, 3, 32, 32)))
    extension.skip_passes("layout")
    try:
        extension.time_plans(True)
        run()
        assert convolutions()[1] == 0
        after = train(helpers.DEVICE, seeded(residual_net), (8, 3, 32, 32))
    finally:
        extension.time_plans(False)
        extension.skip_passes("")
    for name, right in before.items():
        torch.testing.assert_close(after[name], right, rtol=1e-3, atol=1e-4)


# --- plans of a GPU ---------------------------------------------------------------------------

HALF = (torch.float16, torch.bfloat16)

# How far half types in either layout may be from each other, of the norm of a tensor. After three
# steps through batch norms it is 0.035, and 0.2 from float32; what is laid out wrongly is 1.
HALF_APART = 0.1


def check_layouts(program: Program, last: bool | None, apart: float = HALF_APART) -> None:
    """Runs a program in the layouts that were chosen and in those that it was recorded with.

    `last`: whether all of its convolutions have to be channels last, or none of them; None: any.
    """
    extension = helpers.extension()
    extension.time_plans(True)
    made: dict[str, Results] = {}
    try:
        for skipped in ("layout", ""):
            extension.skip_passes(skipped)
            for _ in range(RUNS):
                made[skipped] = {name: t.detach().cpu() for name, t in program("acc").items()}
            count, changed = convolutions()
            if last is not None:
                assert count > 0 and changed == (count if last and not skipped else 0)
    finally:
        extension.time_plans(False)
        extension.skip_passes("")
    norms = {name: t.double().norm().item() for name, t in made["layout"].items()}
    for name, right in made["layout"].items():
        got = made[""][name]
        assert got.stride() == right.stride(), f"{name}: {got.stride()}, {right.stride()}"
        away = (got.double() - right.double()).norm().item()
        # the gradient of a bias in front of a batch norm is zero but for what was rounded
        size = max(norms[name], 1e-3 * max(norms.values()))
        assert away <= apart * size, f"{name}: {away} of {size}"


def in_type(dtype: torch.dtype) -> Callable[[nn.Module, Tensor], Tensor]:
    """A forward in autocast to `dtype`."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("acc", dtype=dtype, enabled=dtype != torch.float32):
            return model(x)

    return forward


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_on_a_gpu_autocast_is_channels_last(plans_of_a_gpu, dtype):
    def program(device: str) -> Results:
        model = seeded(residual_net)
        return train(device, model, (8, 3, 32, 32), forward=in_type(dtype))

    check_layouts(program, last=True)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_on_a_gpu_models_of_half_types_are_channels_last(plans_of_a_gpu, dtype):
    """Whose weights are what the step is given; each of its tensors is as exact as the type."""

    def program(device: str) -> Results:
        layers = [*block(8, 16)[::2], nn.MaxPool2d(2), *block(16, 32, 1)[::2], *head(32)]
        model = nn.Sequential(*layers).to(device, dtype)
        for i, p in enumerate(model.parameters()):
            p.data.copy_(images(device, *p.shape, seed=i) / 8)
        x = images(device, 4, 8, 16, 16).to(dtype).requires_grad_()
        out = model(x)
        out.float().square().mean().backward()
        helpers.mark_step()
        assert x.grad is not None
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {"out": out, "images": x.grad, **grads}

    check_layouts(program, last=True, apart=4 * torch.finfo(dtype).eps)


def test_on_a_gpu_floats_keep_their_layout(plans_of_a_gpu):
    check_layouts(lambda d: train(d, seeded(residual_net), (8, 3, 32, 32)), last=False, apart=0)


def test_on_a_gpu_autocast_copies_no_image_and_no_weight_but_by_its_casts(plans_of_a_gpu):
    """What a step copies more than without the pass are the gradients of weights."""
    extension = helpers.extension()
    copies = []
    extension.time_plans(True)
    try:
        for skipped in ("layout", ""):
            extension.skip_passes(skipped)
            forward = in_type(torch.bfloat16)
            train("acc", seeded(residual_net), (8, 3, 32, 32), forward=forward)
            plan = extension.plan_data(torch.acc.current_device(), True)
            texts = [node["text"] for node in plan["nodes"] if node["op"] == "aten::copy_"]
            copies.append((len(texts), sum("]/[" in text for text in texts)))
    finally:
        extension.time_plans(False)
        extension.skip_passes("")
    spatial = sum(p.dim() == 4 and p.shape[-1] > 1 for p in residual_net().parameters())
    (before, changed_before), (after, changed) = copies
    assert changed_before == 0
    assert after - before == spatial
    assert changed == 2 * spatial + 1  # with the casts of those weights and of the images


@pytest.mark.parametrize("seed", range(16))
def test_random_networks_on_a_gpu(plans_of_a_gpu, seed):
    def program(device: str) -> Results:
        torch.manual_seed(seed)
        model = Random(seed, 8).to(device)
        x = images(device, 4, 8, 16, 16).requires_grad_()
        out, middle = in_type(torch.float16)(model, x)
        (out.float().square().sum() + middle.float().sum()).div(16).backward()
        helpers.mark_step()
        assert x.grad is not None
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {"out": out, "middle": middle, "images": x.grad, **grads}

    check_layouts(program, last=None, apart=0.02)


# --- random networks --------------------------------------------------------------------------


class Random(nn.Module):
    """A network drawn from a seed: layers one after the other, some results kept and joined."""

    def __init__(self, seed: int, channels: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.layers = nn.ModuleList()
        self.plan: list[tuple[str, int]] = []
        width = channels
        widths = [width]
        for _ in range(draw.randint(4, 9)):
            kind = draw.choice(
                ["conv"] * 3
                + ["norm", "relu", "relu_", "pool", "add", "cat", "scale", "rows", "mean"]
            )
            at = len(self.layers)
            if kind == "conv":
                kernel, out = draw.choice([1, 3, 3, 5]), draw.choice([1, 4, 8, 16])
                groups = draw.choice([1, 1, 1, width]) if out % width == 0 else 1
                self.layers.append(
                    nn.Conv2d(width, out, kernel, padding=kernel // 2, groups=groups)
                )
                width = out
            elif kind in ("rows", "mean"):
                self.layers.append(nn.Conv2d(width, width, 3, padding=1))
            elif kind == "norm":
                self.layers.append(nn.BatchNorm2d(width))
            elif kind == "pool":
                self.layers.append(
                    draw.choice([nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1), nn.Dropout(0.0)])
                )
            elif kind == "add":
                matching = [i for i, w in enumerate(widths) if w in (1, width)]
                if not matching:
                    continue
                at = draw.choice(matching)
            elif kind == "cat":
                at = draw.randrange(len(widths))
                width += widths[at]
            self.plan.append((kind, at))
            widths.append(width)
        self.keep = draw.random() < 0.3

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(N, C, H, W) -> the last activation, and one in the middle."""
        seen = [x]
        for kind, at in self.plan:
            if kind in ("conv", "norm", "pool"):
                x = self.layers[at](x)
            elif kind == "relu":
                x = F.relu(x)
            elif kind == "relu_":
                x = F.relu_(x * 1.5)
            elif kind == "add":
                x = x + seen[at]
            elif kind == "cat":
                x = torch.cat([x, seen[at]], 1)
            elif kind == "rows":
                x = x * self.layers[at](x.mean(3, keepdim=True)).sigmoid()
            elif kind == "mean":
                x = self.layers[at](x.mean(0, keepdim=True)) + x
            else:
                x = x * 0.5 + x.mean((2, 3), keepdim=True)
            seen.append(x)
        return x, seen[len(seen) // 2]


@pytest.mark.parametrize("seed", range(40))
def test_random_networks(seed):
    draw = random.Random(1000 + seed)
    shape = (draw.choice([1, 4, 8]), draw.choice([1, 3, 8]), *[draw.choice([5, 16, 24])] * 2)

    def program(device: str) -> Results:
        torch.manual_seed(seed)
        model = Random(seed, shape[1]).to(device)
        made: Results = {}
        for step in range(3):
            model.zero_grad()
            x = images(device, *shape, seed=step).requires_grad_()
            out, middle = model(x)
            (out.square().mean() + middle.mean()).backward()
            if device != "cpu":
                helpers.mark_step()
        assert x.grad is not None
        made["images"], made["out"] = x.grad, out
        if model.keep:
            made["middle"] = middle
        for name, p in model.named_parameters():
            if p.grad is not None:
                made[name] = p.grad
        return made

    check(program)
