"""Attention in which several heads of queries share one of keys and values."""

import torch
import torch.nn.functional as F


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        shapes = ((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))
        q, k, v = (torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out.float().sum().backward()
        results += [out, q.grad, k.grad, v.grad]
    return results
