"""The usual loss functions and their gradients."""

import torch
import torch.nn.functional as F


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    x = torch.randn(4, 3).to(device).requires_grad_()
    t, c = torch.rand(4, 3).to(device), torch.tensor([0, 2, 1, -100], device=device)
    r = [F.mse_loss(x, t), F.l1_loss(x, t), F.smooth_l1_loss(x, t), F.huber_loss(x, t)]
    r += [F.cross_entropy(x, c), F.cross_entropy(x, t, label_smoothing=0.1)]
    r += [F.binary_cross_entropy_with_logits(x, t), F.kl_div(x.log_softmax(1), t, reduction="sum")]
    r += [F.nll_loss(x.log_softmax(1), c, reduction="none"), F.cosine_embedding_loss(x, t, t[:, 0])]
    sum(v.sum() for v in r).backward()
    return [*r, x.grad]
