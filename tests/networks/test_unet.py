"""The UNet: shapes, conditions, and every estimator through norms, strides and skip connections."""

import pytest
import torch
import torch.nn.functional as F

from fmwc.estimators import Linearised, MonteCarlo
from fmwc.field import attach
from fmwc.networks import UNet
from tests.conftest import awaken
from tests.reference import assert_within, jacobian_var

CLASSES = 3


def tiny(**options):
    torch.manual_seed(0)
    return UNet(**{"base": 8, "stages": (1, 2), "cond": 8, "classes": CLASSES, **options})


def inputs(count=3, side=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 1, side, side, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.linspace(0.1, 0.9, count, dtype=dtype), torch.arange(count) % CLASSES


# ---- the network ----------------------------------------------------------------------------------------------------


def test_forward_equals_the_written_out_network():
    net = tiny(blocks=1)
    x, t, y = inputs()
    e = F.silu(net.time(net.embed(t)) + net.label.weight[y])

    def residual(block, h):
        inside = block.conv1(F.silu(block.norm1(h))) + block.cond(e)[..., None, None]
        return block.skip(h) + block.conv2(F.silu(block.norm2(inside)))

    kept = residual(net.down[0][0], net.first(x))
    deep = residual(net.middle[1], residual(net.middle[0], net.shrink[0](kept)))
    wide = deep.repeat_interleave(2, 2).repeat_interleave(2, 3)
    h = residual(net.up[0][0], torch.cat([net.grow[0](wide), kept], 1))
    torch.testing.assert_close(net(x, t, y), net.out(F.silu(net.norm(h))))
    assert deep.shape == (3, 16, 2, 2)


def test_samples_do_not_depend_on_each_other():
    net, (x, t, y) = tiny(), inputs()
    whole = net(x, t, y)
    for i in range(3):
        torch.testing.assert_close(whole[i : i + 1], net(x[i : i + 1], t[i : i + 1], y[i : i + 1]))
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(net(x, t, y)[1].sum(), x)
    assert gradient[1].abs().min() > 0  # every pixel depends on every pixel
    assert not gradient[[0, 2]].any()


def test_a_second_head_doubles_the_output_and_leaves_the_first():
    one, two = tiny(), tiny(outputs=2)
    state = one.state_dict()
    two.load_state_dict({**state, "out.weight": state["out.weight"].repeat(2, 1, 1, 1), "out.bias": torch.zeros(2)})
    x, t, y = inputs()
    both = two(x, t, y)
    assert both.shape == (3, 2, 4, 4)
    for head in both.split(1, 1):
        torch.testing.assert_close(head, one(x, t, y) - one.out.bias)


# ---- its variance ---------------------------------------------------------------------------------------------------


def noisy(**options):
    return awaken(attach(tiny(), space=(1, 4, 4), width=8, **options))


def test_exact_variance_equals_the_whole_jacobian():
    field = noisy().double()
    x, t, y = inputs(2, dtype=torch.float64)
    var, calls = jacobian_var(lambda given: field.run(given, x, t, cond={"y": y}))
    torch.testing.assert_close(
        field.moments(x, t, Linearised(), cond={"y": y}).var.flatten(1), var, rtol=1e-8, atol=1e-14
    )
    assert len(calls) == len(field.noise.names)
    assert bool((calls > 0).all())  # the noise of every layer reaches the velocity


def small(level=-8.0):
    """Make α constant and small."""
    field = attach(tiny(), space=(1, 4, 4), width=8, initial_log_alpha=level).double()
    for layer in field.noise.layers:
        layer.inference.out.weight.data.zero_()
    return field


def test_posterior_draws_agree_for_small_alpha():
    field, draws = small(), 1500
    x, t, y = inputs(2, dtype=torch.float64)
    found, exact = (field.moments(x, t, e, seed=0, cond={"y": y}) for e in (MonteCarlo(draws, 50), Linearised()))
    assert float((found.var / exact.var - 1).abs().max()) < 6 * (2 / draws) ** 0.5 + 0.03
    total, expected = (m.var.sum().item() for m in (found, exact))
    assert total == pytest.approx(expected, rel=0.05)
    assert_within(found.mean, exact.mean, (exact.var / draws).sqrt() + 0.03 * exact.var.sqrt())


def test_noise_of_the_last_layer_alone_is_exact_for_every_estimator():
    """v is then Gaussian with variance θ²(α h²), so no estimator approximates."""
    field = noisy(include=["out"]).double()
    x, t, y = inputs(2, dtype=torch.float64)
    exact = field.moments(x, t, Linearised(), cond={"y": y}).var
    torch.testing.assert_close(field.moments(x, t, "diagonal", cond={"y": y}).var, exact)
    draws = 3000
    found = field.moments(x, t, MonteCarlo(draws, 100), seed=0, cond={"y": y}).var
    assert float((found / exact - 1).abs().max()) < 6 * (2 / draws) ** 0.5
