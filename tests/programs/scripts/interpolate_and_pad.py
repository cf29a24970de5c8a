"""Resizing images, padding and pixel shuffling, with gradients."""

import torch
import torch.nn.functional as F


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(32.0).view(1, 2, 4, 4).to(device).requires_grad_()
    ys = [F.interpolate(x, scale_factor=2, mode=m) for m in ("nearest", "bilinear", "bicubic")]
    ys += [F.interpolate(x, size=(3, 5), mode="area"), F.interpolate(x, scale_factor=1.5)]
    ys += [F.pad(x, (1, 2, 0, 1), mode=m) for m in ("reflect", "replicate", "circular", "constant")]
    ys += [F.avg_pool2d(x, 3, 1, 1), F.max_pool2d(x, 2), F.pixel_shuffle(x.repeat(1, 2, 1, 1), 2)]
    sum(y.pow(2).sum() for y in ys).backward()
    return [*ys, x.grad]
