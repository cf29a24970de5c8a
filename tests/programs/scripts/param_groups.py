"""Two parameter groups with different options; one is added later."""

import torch


def run(device):
    """Returns what is compared between devices."""
    a, b = (torch.nn.Parameter(torch.ones(2, device=device) * k) for k in (1, 2))
    opt = torch.optim.Adam([{"params": [a], "lr": 0.1}], weight_decay=0.01)
    for i in range(4):
        if i == 2:
            opt.add_param_group({"params": [b], "lr": 0.5})
        opt.zero_grad(set_to_none=i % 2 == 0)
        (a * b).sum().backward()
        opt.step()
    return [a, b, len(opt.state), opt.state[a]["exp_avg"], opt.state[b]["step"].item()]
