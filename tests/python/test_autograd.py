"""Autograd on the device: every test runs the same code on the CPU and compares bit by bit."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import helpers
from tests.helpers import drawn, same, small_net


def test_gradients_of_a_network(device):
    def run(where):
        net = small_net(where)
        x = drawn(5, 4, device=where, grad=True)
        net(x).pow(2).sum().backward()
        return [x.grad, *(p.grad for p in net.parameters())]

    same(run, device)


def test_gradcheck_and_gradgradcheck(device):
    x = drawn(3, 4, device=device).double().requires_grad_()
    w = drawn(4, 2, device=device, seed=1).double().requires_grad_()

    def fn(a, b):
        return F.softplus(a @ b).sum(1)

    assert torch.autograd.gradcheck(fn, (x, w))
    assert torch.autograd.gradgradcheck(fn, (x, w))


def test_double_and_triple_backward(device):
    def run(where):
        x = drawn(4, device=where, grad=True)
        grads, y = [], (x.sin() * x).sum()
        for _ in range(3):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            grads.append(y)
        return grads

    same(run, device)


def test_forward_mode(device):
    from torch.autograd import forward_ad

    def run(where):
        x, t = drawn(3, 4, device=where), drawn(3, 4, device=where, seed=1)
        w = drawn(4, 2, device=where, seed=2)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, t)
            return list(forward_ad.unpack_dual((dual @ w).tanh().sum(1)))

    same(run, device)


def test_anomaly_mode_names_the_forward_line(device):
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * float("nan")

    x = torch.ones(2, device=device, requires_grad=True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly():
            y = Bad.apply(x).sum()
            with pytest.raises(RuntimeError, match="returned nan values"):
                y.backward()
    assert any("Bad.apply(x)" in str(w.message) for w in seen)
    z = (x * 3).sum()
    z.backward()
    assert x.grad.tolist() == [3.0, 3.0]


def test_anomaly_mode_lets_good_gradients_pass(device):
    def run(where):
        net = small_net(where)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly():
                net(drawn(5, 4, device=where)).sum().backward()
        return [p.grad for p in net.parameters()]

    same(run, device)


def test_inference_tensors(device):
    with torch.inference_mode():
        x = torch.ones(3, device=device)
        y = x * 2
        y[0] = 7
        assert y.is_inference() and x.is_inference()
        view = y[1:]
        view.add_(1)
    assert y.tolist() == [7.0, 3.0, 3.0]
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        (torch.ones(3, device=device, requires_grad=True) * y).sum().backward()
    with pytest.raises(RuntimeError, match="[Ii]nplace update to inference tensor"):
        y.add_(1)
    # The CPU writes before it refuses: the check is made when the version is counted.
    assert y.tolist() == [8.0, 4.0, 4.0]
    w = torch.ones(3, device=device, requires_grad=True)
    (w * y.clone()).sum().backward()
    assert w.grad.tolist() == [8.0, 4.0, 4.0]


def test_reentrant_backward(unfused, device):
    def run(where):
        net = small_net(where)

        class Inner(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * 1

            @staticmethod
            def backward(ctx, g):
                (x,) = ctx.saved_tensors
                with torch.enable_grad():
                    inner = x.detach().requires_grad_()
                    loss = net(inner).pow(2).sum()
                    loss.backward()
                return g + inner.grad

        x = drawn(5, 4, device=where, grad=True)
        Inner.apply(x * 2).sum().backward()
        return [x.grad, *(p.grad for p in net.parameters())]

    same(run, device)


def test_deep_reentrant_backward(device):
    class Deep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, depth):
            ctx.depth = depth
            return x * 2

        @staticmethod
        def backward(ctx, g):
            if ctx.depth:
                with torch.enable_grad():
                    y = torch.ones(2, device=g.device, requires_grad=True)
                    Deep.apply(y, ctx.depth - 1).sum().backward()
                    return g + y.grad, None
            return g * 2, None

    def run(where):
        x = torch.ones(2, device=where, requires_grad=True)
        Deep.apply(x, 70).sum().backward()
        return [x.grad]

    same(run, device)


def test_exception_in_backward_leaves_everything_usable(device):
    x = torch.ones(3, device=device, requires_grad=True)
    kept = x * 5
    y = (x * 2).exp()

    def fail(grad):
        raise KeyError("from a hook")

    y.register_hook(fail)
    with pytest.raises(KeyError, match="from a hook"):
        (y * kept).sum().backward()
    assert x.grad is None
    assert kept.tolist() == [5.0, 5.0, 5.0]
    (x * 3).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0, 3.0]


def test_shape_error_in_backward_is_raised_by_backward(device):
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return torch.ones(7, device=g.device)

    x = torch.ones(3, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="invalid gradient"):
        Bad.apply(x).sum().backward()
    assert (x + 1).tolist() == [2.0, 2.0, 2.0]


def test_retain_grad_and_non_leaf_gradients(device):
    def run(where):
        x = drawn(3, device=where, grad=True)
        y = x * 2
        y.retain_grad()
        z = y.pow(2)
        z.retain_grad()
        z.sum().backward()
        return [x.grad, y.grad, z.grad]

    same(run, device)


def test_accumulated_gradient_is_not_copied(acc_only):
    w = torch.ones(8, device=acc_only, requires_grad=True)
    given = torch.arange(8.0, device=acc_only)
    address = given.untyped_storage().data_ptr()
    y = w * 1
    y.backward(given)
    assert w.grad.tolist() == list(range(8))
    # The product's gradient is a fresh tensor that AccumulateGrad takes over: it is not `given`.
    assert w.grad.untyped_storage().data_ptr() != address
    taken = w.grad.untyped_storage().data_ptr()
    (w * 1).sum().backward()
    assert w.grad.untyped_storage().data_ptr() == taken, "accumulation moved the gradient"


def test_gan_with_two_optimizers(unfused, device):
    def run(where):
        torch.manual_seed(0)
        gen = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)).to(where)
        dis = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)).to(where)
        opt_g = torch.optim.Adam(gen.parameters(), lr=1e-2, foreach=True)
        opt_d = torch.optim.Adam(dis.parameters(), lr=1e-2, foreach=True)
        losses = []
        for step in range(6):
            real = drawn(16, 2, device=where, seed=step) + 3
            fake = gen(drawn(16, 2, device=where, seed=100 + step))
            one, zero = torch.ones(16, 1, device=where), torch.zeros(16, 1, device=where)
            loss_d = F.binary_cross_entropy_with_logits(dis(real), one)
            loss_d = loss_d + F.binary_cross_entropy_with_logits(dis(fake.detach()), zero)
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()
            loss_g = F.binary_cross_entropy_with_logits(dis(fake), one)
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
            losses += [loss_d.detach(), loss_g.detach()]
        return [*losses, *gen.parameters(), *dis.parameters()]

    same(run, device)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs(device, search, unfused):
    def run(where):
        net, x = small_net(where), drawn(12, 4, device=where)
        target = x[:, :1] * 2
        opt = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=6, line_search_fn=search)

        def closure():
            opt.zero_grad()
            loss = F.mse_loss(net(x), target)
            loss.backward()
            return loss

        return [*(opt.step(closure).detach() for _ in range(3)), *net.parameters()]

    same(run, device)


def test_swap_tensors_keeps_identity(device):
    a = torch.arange(3.0, device=device)
    b = torch.ones(2, device=device, dtype=torch.float64)
    kept_a, kept_b = a, b
    torch.utils.swap_tensors(a, b)
    assert kept_a is a and kept_b is b
    assert a.tolist() == [1.0, 1.0] and a.dtype == torch.float64
    assert b.tolist() == [0.0, 1.0, 2.0]
    b.add_(1)
    assert b.tolist() == [1.0, 2.0, 3.0]


def test_module_conversion_by_swapping(device):
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net = nn.Linear(2, 2)
        weight, values = net.weight, net.weight.detach().clone()
        net.to(device)
        assert net.weight is weight
        assert net.weight.device.type == device
        helpers.assert_same(net.weight.detach(), values)
        net.cpu()
        assert net.weight is weight and weight.device.type == "cpu"
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def test_share_memory(device):
    x = torch.arange(4.0, device=device)
    if device == "cpu":
        assert x.share_memory_().is_shared()
        return
    # As on CUDA: memory of a device is not made shared, the call returns the tensor unharmed.
    assert x.share_memory_() is x
    x.add_(1)
    assert x.tolist() == [1.0, 2.0, 3.0, 4.0]
    net = nn.Linear(2, 2).to(device)
    assert net.share_memory() is net
    assert net(torch.ones(1, 2, device=device)).isfinite().all()


def test_version_counters(device):
    x = torch.zeros(3, device=device)
    assert x._version == 0
    x.add_(1)
    x[0] = 5
    assert x._version == 2
    v = x[1:]
    v.mul_(2)
    assert (x._version, v._version) == (3, 3)
    assert x.detach()._version == 3


def test_gradient_through_views_and_in_place(device):
    def run(where):
        x = drawn(4, 6, device=where, grad=True)
        y = x * 1
        y.t()[2:4].mul_(3)
        y[:, ::2] += x[:, 1::2].exp()
        y.view(-1)[5] = x[0, 0] * 2
        loss = (y * y).sum()
        loss.backward()
        return [y, x.grad]

    same(run, device)


def test_sparse_and_dense_gradients_of_one_embedding(device):
    def run(where):
        torch.manual_seed(0)
        emb = nn.Embedding(6, 2).to(where)
        i = torch.tensor([[0, 1], [1, 5]], device=where)
        emb(i).pow(2).sum().backward()
        (emb(i) * emb.weight[:2]).sum().backward()
        return [emb.weight.grad]

    same(run, device)


def test_gradient_of_a_copy_between_devices(device):
    w = torch.ones(3, requires_grad=True)
    y = (w.to(device) * torch.arange(3.0, device=device)).cpu()
    y.sum().backward()
    assert w.grad.device.type == "cpu"
    assert w.grad.tolist() == [0.0, 1.0, 2.0]


def test_grad_mode_is_not_part_of_what_was_recorded(device):
    x = torch.ones(2, device=device, requires_grad=True)
    for enabled in (True, False, True):
        with torch.set_grad_enabled(enabled):
            y = x * 3
        assert y.requires_grad == enabled
        assert y.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("parameters", [torch.float32, None], ids=["mixed", "half"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_in_half_precision(device, training, dtype, parameters):
    def run(where):
        norm = nn.BatchNorm2d(3).to(where, parameters or dtype).train(training)
        x = drawn(2, 3, 4, 4, device=where).to(dtype).requires_grad_()
        y = norm(x)
        y.sum().backward()
        saved = torch.ops.aten.native_batch_norm(
            x.detach(), norm.weight, norm.bias, None, None, True, 0.1, 1e-5
        )
        return [y, x.grad, norm.weight.grad, norm.running_var, *saved]

    same(run, device)


def test_attention_in_double_precision(device):
    def run(where):
        q, k, v = (drawn(2, 3, 8, 4, device=where, seed=i).double() for i in range(3))
        q.requires_grad_()
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        return q.grad

    same(run, device)


def test_views_of_the_zeros_that_autograd_passes_around(device):
    def run(where):
        zeros = torch._efficientzerotensor((3, 4), device=where)
        views = [zeros.mT, zeros[1:], zeros[0], zeros.expand(2, 3, 4), zeros.unfold(0, 2, 1)]
        assert all(view._is_zerotensor() for view in views)
        huge = torch._efficientzerotensor((1 << 20, 1 << 20), device=where)
        return [*(view + 1 for view in views), huge[0, :3] + 1]

    same(run, device)


def test_the_zeros_that_autograd_passes_around_are_not_read(acc_only):
    with pytest.raises(RuntimeError, match="zeros without memory"):
        copy.deepcopy(torch._efficientzerotensor((3,), device=acc_only))


def test_second_gradient_of_singular_values(device):
    def run(where):
        x = drawn(3, 3, device=where).double().requires_grad_()
        values = torch.svd(x, some=False)[1]
        (first,) = torch.autograd.grad(values.sum(), x, create_graph=True)
        return [first, *torch.autograd.grad(first.square().sum(), x)]

    same(run, device)
