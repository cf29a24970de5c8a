"""A checkpoint of model and optimizer through torch.save."""

import io

import torch
from torch import nn


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    net, x = nn.Linear(3, 3).to(device), torch.ones(2, 3, device=device)
    opt = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(x).pow(2).sum().backward()
    opt.step()
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, file)
    net(x).sum().backward()
    opt.step()
    state = torch.load(io.BytesIO(file.getvalue()))
    net.load_state_dict(state["net"]), opt.load_state_dict(state["opt"])
    net(x).sum().backward()
    opt.step()
    return [*net.parameters(), state["net"]["weight"].device.type == torch.device(device).type]
