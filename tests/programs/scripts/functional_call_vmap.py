"""torch.func: functional_call, vmap and grad over a model."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    net, x = nn.Linear(3, 2).to(device), torch.randn(4, 3).to(device)
    params = {k: v.detach() for k, v in net.named_parameters()}

    def loss(p, row):
        return functional_call(net, p, (row,)).pow(2).sum()

    each = vmap(grad(loss), in_dims=(None, 0))(params, x)
    return [each["weight"], each["bias"], vmap(torch.dot)(x, x)]
