"""Hooks on tensors, modules, optimizers and saved tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import (
    disable_saved_tensors_hooks,
    register_multi_grad_hook,
    save_on_cpu,
    saved_tensors_hooks,
)

from tests.helpers import drawn, same, small_net


def test_saved_tensor_hooks_see_and_replace_values(device):
    def run(where):
        seen = []

        def pack(t):
            seen.append(t.detach().clone())
            return t * 2

        x = drawn(4, device=where, grad=True)
        with saved_tensors_hooks(pack, lambda t: t / 2):
            y = x.exp() * x.sin()
        y.sum().backward()
        return [*seen, x.grad]

    same(run, device)


def test_saved_tensors_to_the_host_and_back(device):
    def run(where):
        net, x = small_net(where), drawn(6, 4, device=where, grad=True)
        with saved_tensors_hooks(lambda t: (t.device, t.cpu()), lambda p: p[1].to(p[0])):
            y = net(x).pow(2).sum()
        y.backward()
        return [y, x.grad, *(p.grad for p in net.parameters())]

    same(run, device)


@pytest.mark.parametrize("pinned", [False, True])
def test_save_on_cpu(device, pinned, unfused):
    def run(where):
        net, x = small_net(where), drawn(6, 4, device=where, grad=True)
        if pinned and where != "cpu":
            on_cpu = save_on_cpu(pin_memory=True, device_type=where)
        elif pinned:
            # What pinning does to the layout: the saved copy is contiguous.
            on_cpu = saved_tensors_hooks(
                lambda t: torch.empty(t.size(), dtype=t.dtype).copy_(t), lambda t: t
            )
        else:
            on_cpu = save_on_cpu()
        with on_cpu:
            y = net(x).pow(2).sum()
        y.backward()
        return [y, x.grad, *(p.grad for p in net.parameters())]

    same(run, device)


def test_saved_tensor_hooks_can_be_forbidden(device):
    x = torch.ones(3, device=device, requires_grad=True)
    with disable_saved_tensors_hooks("not here"):
        with pytest.raises(RuntimeError, match="not here"):
            with saved_tensors_hooks(lambda t: t, lambda t: t):
                pass
    assert (x * 2).sum().item() == 6.0


def test_tensor_hooks_run_in_order_and_change_gradients(device):
    def run(where):
        x, seen = drawn(3, device=where, grad=True), []
        y = x * 2
        y.register_hook(lambda g: g + 1)
        y.register_hook(lambda g: seen.append(g.clone()))
        handle = y.register_hook(lambda g: g * 100)
        handle.remove()
        y.pow(2).sum().backward()
        return [x.grad, *seen]

    same(run, device)


def test_multi_grad_hook(device):
    def run(where):
        a, b = drawn(3, device=where, grad=True), drawn(3, device=where, seed=1, grad=True)
        seen = []
        register_multi_grad_hook([a, b], lambda grads: seen.extend(g.clone() for g in grads))
        (a * b).sum().backward()
        return [*seen, a.grad, b.grad]

    same(run, device)


def test_optimizer_in_backward(device):
    def run(where):
        net = small_net(where)
        opts = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in net.parameters()}

        def step(p):
            opts[p].step()
            opts[p].zero_grad()

        for p in net.parameters():
            p.register_post_accumulate_grad_hook(step)
        for i in range(4):
            net(drawn(5, 4, device=where, seed=i)).pow(2).sum().backward()
        assert all(p.grad is None for p in net.parameters())
        return list(net.parameters())

    # A bias's gradient is a sum over rows: fused, in another order than ATen's.
    for made, expected in zip(run(device), run("cpu"), strict=True):
        torch.testing.assert_close(made.cpu(), expected)


def test_module_hooks_of_every_kind(device):
    def run(where):
        net, seen = small_net(where), []
        net.register_forward_pre_hook(lambda m, a: (a[0] * 2,))
        net[0].register_forward_hook(lambda m, a, y: seen.append(y.detach().clone()))
        net[1].register_forward_hook(lambda m, a, kw, y: y + 1, with_kwargs=True)
        net[2].register_full_backward_pre_hook(lambda m, g: (g[0] * 3,))
        net[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
        x = drawn(5, 4, device=where, grad=True)
        y = net(x)
        y.sum().backward()
        return [y, x.grad, *seen, *(p.grad for p in net.parameters())]

    same(run, device)


def test_global_module_hooks(device):
    from torch.nn.modules.module import register_module_forward_hook

    def run(where):
        net, seen = small_net(where), []
        handle = register_module_forward_hook(lambda m, a, y: seen.append(y.detach().sum()))
        try:
            net(drawn(5, 4, device=where))
        finally:
            handle.remove()
        return seen

    same(run, device)


def test_optimizer_hooks(device):
    def run(where):
        w = nn.Parameter(drawn(4, device=where))
        opt = torch.optim.SGD([w], lr=0.5)
        seen = []
        opt.register_step_pre_hook(lambda o, a, k: seen.append(w.detach().clone()))
        opt.register_step_post_hook(lambda o, a, k: seen.append(w.detach().clone()))
        for _ in range(3):
            opt.zero_grad()
            w.pow(2).sum().backward()
            opt.step()
        return [*seen, w]

    same(run, device)


def test_graph_node_hooks(device):
    def run(where):
        x, seen = drawn(3, device=where, grad=True), []
        y = x.exp()
        y.grad_fn.register_hook(lambda gi, go: seen.append(go[0].clone()))
        y.grad_fn.register_prehook(lambda go: (go[0] * 2,))
        y.sum().backward()
        return [x.grad, *seen]

    same(run, device)


def test_a_hook_that_reads_the_value_in_the_middle_of_backward(device, unfused):
    def run(where):
        net, norms = small_net(where), []
        for p in net.parameters():
            p.register_hook(lambda g: norms.append(g.norm().item()))
        for i in range(3):
            net.zero_grad()
            net(drawn(5, 4, device=where, seed=i)).pow(2).sum().backward()
        return [norms, *(p.grad for p in net.parameters())]

    same(run, device)


def test_saved_tensor_hook_that_raises(device):
    x = torch.ones(3, device=device, requires_grad=True)

    def refuse(t):
        raise ValueError("no room")

    with saved_tensors_hooks(refuse, lambda t: t):
        with pytest.raises(ValueError, match="no room"):
            x.exp()
    y = x.exp().sum()
    y.backward()
    assert torch.equal(x.grad, x.detach().exp())
