"""Attention by hand and by the fused function agree with the CPU each."""

import torch
import torch.nn.functional as F


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 6, 4).to(device).requires_grad_() for _ in range(3))
    mask = torch.ones(6, 6, dtype=torch.bool, device=device).tril()
    scores = (q @ k.transpose(-1, -2) / 2).masked_fill(~mask, float("-inf"))
    by_hand = scores.softmax(-1) @ v
    fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    masked = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    (by_hand.sum() + fused.pow(2).sum() + masked.sum()).backward()
    return [by_hand, fused, masked, q.grad, k.grad, v.grad]
