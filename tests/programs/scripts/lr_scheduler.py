"""Learning rates from schedulers, one of them by tensor."""

import torch


def run(device):
    """Returns what is compared between devices."""
    w = torch.nn.Parameter(torch.ones(3, device=device))
    opt = torch.optim.SGD([w], lr=0.5, momentum=0.5)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=6)
    rates = []
    for _ in range(8):
        opt.zero_grad()
        (w**2).sum().backward()
        opt.step()
        sched.step()
        rates.append(sched.get_last_lr()[0])
    return [w, rates]
