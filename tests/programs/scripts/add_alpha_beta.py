"""alpha and beta of add, addmm, addcmul; beta 0 ignores NaN."""

import torch


def run(device):
    """Returns what is compared between devices."""
    a = torch.arange(4.0, device=device).view(2, 2)
    nan = torch.full((2, 2), float("nan"), device=device)
    r = [torch.add(a, a, alpha=k) for k in (1, 2, -0.5)]
    r += [torch.addmm(nan, a, a, beta=0), torch.addmm(a, a, a, beta=0.5, alpha=2)]
    r += [torch.addcmul(a, a, a, value=v) for v in (1, 0.1)]
    a.addmm_(a.clone(), a.clone(), beta=0.5)
    return [*r, torch.sub(a, 1, alpha=3), torch.rsub(a, 2), torch.lerp(a, a + 1, 0.25)]
