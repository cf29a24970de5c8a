"""torch.func on the device: vmap, grad, jvp and what is built from them, equal to the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)

from tests.helpers import drawn, same


def test_vmap_over_products_and_reductions(device):
    def run(where):
        a, b = drawn(5, 3, 4, device=where), drawn(5, 4, device=where, seed=1)
        return [
            vmap(torch.mv)(a, b),
            vmap(torch.dot, in_dims=(0, None))(b, b[0]),
            vmap(lambda m: m.softmax(0).sum(1), out_dims=1)(a),
            vmap(vmap(lambda r: r.norm()))(a),
            vmap(lambda m, v: (m @ v, v.max()), in_dims=(0, 0))(a, b),
        ]

    same(run, device)


def test_vmap_with_in_place_and_indexing(device):
    def run(where):
        x = drawn(4, 6, device=where)

        def fn(row):
            y = row.clone()
            y[1:3].mul_(2)
            return torch.where(y > 0, y, y.flip(0))

        return [vmap(fn)(x), vmap(lambda r, i: r.index_select(0, i))(x, (x > 0).long()[:, :2])]

    same(run, device)


def test_vmap_in_chunks(device):
    def run(where):
        x = drawn(7, 3, device=where)
        return [vmap(lambda r: r.cumsum(0), chunk_size=2)(x)]

    same(run, device)


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_vmap_randomness(device, randomness):
    x = torch.zeros(50, 20, device=device)
    y = vmap(lambda r: r + torch.rand_like(r), randomness=randomness)(x).cpu()
    assert 0 <= float(y.min()) and float(y.max()) < 1
    assert bool((y[0] == y[1]).all()) == (randomness == "same")


def test_per_sample_gradients(device):
    def run(where):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).to(where)
        params = {k: v.detach() for k, v in net.named_parameters()}
        x, t = drawn(5, 4, device=where), torch.tensor([0, 2, 1, 1, 0], device=where)

        def loss(p, row, label):
            return F.cross_entropy(functional_call(net, p, (row[None],)), label[None])

        each = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, t)
        return [each[k] for k in params]

    same(run, device)


def test_grad_and_value_with_aux(device):
    def run(where):
        x = drawn(4, device=where)
        (g, (v, aux)) = grad_and_value(lambda t: (t.pow(3).sum(), t * 2), has_aux=True)(x)
        return [g, v, aux]

    same(run, device)


def test_nested_grad(device):
    def run(where):
        x = drawn(3, device=where)
        return [grad(lambda t: grad(lambda u: u.sin().prod())(t).sum())(x)]

    same(run, device)


def test_jvp_vjp_and_linearize(device):
    def run(where):
        x, v = drawn(3, 4, device=where), drawn(3, 4, device=where, seed=1)
        w = drawn(4, 2, device=where, seed=2)

        def fn(t):
            return F.gelu(t @ w)

        value, pull = vjp(fn, x)
        linear_value, push = linearize(fn, x)
        return [*jvp(fn, (x,), (v,)), value, *pull(torch.ones_like(value)), linear_value, push(v)]

    same(run, device)


def test_jacobians_and_hessian(device):
    def run(where):
        x = drawn(3, device=where)

        def fn(t):
            return t.exp() * t.sum()

        return [jacrev(fn)(x), jacfwd(fn)(x), hessian(lambda t: fn(t).sum())(x)]

    same(run, device)


def test_ensembles(device):
    def run(where):
        torch.manual_seed(0)
        nets = [nn.Linear(3, 2).to(where) for _ in range(4)]
        params, buffers = stack_module_state(nets)
        base = nn.Linear(3, 2, device="meta")
        x = drawn(5, 3, device=where)

        def one(p, b, batch):
            return functional_call(base, (p, b), (batch,))

        return [vmap(one, in_dims=(0, 0, None))(params, buffers, x)]

    same(run, device)


def test_functionalize(device):
    def run(where):
        def fn(t):
            y = t.clone()
            y[0].add_(1)
            y.t_()
            return y

        return [functionalize(fn)(drawn(2, 3, device=where))]

    same(run, device)


def test_batched_gradients(device):
    def run(where):
        x = drawn(3, device=where, grad=True)
        y = x.pow(2) * x.sum()
        basis = torch.eye(3, device=where)
        return [torch.autograd.grad(y, x, basis, is_grads_batched=True)[0]]

    same(run, device)


def test_a_mapped_function_that_raises_leaves_the_device_usable(device):
    x = torch.ones(3, 2, device=device)
    with pytest.raises(RuntimeError):
        vmap(lambda r: r.view(5))(x)
    with pytest.raises(RuntimeError, match="vmap"):
        vmap(lambda r: r.sum().item())(x)
    assert vmap(lambda r: r.sum())(x).tolist() == [2.0, 2.0, 2.0]
