"""Layer, group, instance and RMS normalisation with gradients."""

import torch
import torch.nn.functional as F


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6).to(device).requires_grad_()
    w = torch.randn(6).to(device).requires_grad_()
    ys = [F.layer_norm(x, (6,), w), F.group_norm(x, 2), F.instance_norm(x), F.rms_norm(x, (6,), w)]
    ys += [F.normalize(x, dim=1), F.local_response_norm(x, 2)]
    sum(y.pow(3).sum() for y in ys).backward()
    return [*ys, x.grad, w.grad]
