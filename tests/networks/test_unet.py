"""The UNet: shapes, conditions, and every estimator through norms, strides and skip connections."""

import pytest
import torch
import torch.nn.functional as F

from fmwc.errors import ShapeError, UsageError
from fmwc.estimators import ESTIMATORS, Linearised, MonteCarlo, Tangent
from fmwc.field import attach
from fmwc.networks import UNet
from fmwc.sampling import SamplingConfig, sample
from tests.conftest import awaken
from tests.options import arguments
from tests.reference import assert_within, jacobian_var, statistics

CLASSES = 3


def tiny(**options):
    torch.manual_seed(0)
    return UNet(**{"base": 8, "stages": (1, 2), "cond": 8, "classes": CLASSES, **options})


def inputs(count=3, side=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 1, side, side, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.linspace(0.1, 0.9, count, dtype=dtype), torch.arange(count) % CLASSES


# ---- the network ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(8, 8), (4, 12), (28, 28)], ids=str)
@pytest.mark.parametrize("stages", [(1,), (1, 2), (1, 2, 4)], ids=str)
def test_a_velocity_has_the_shape_of_its_image(stages, size):
    net = tiny(stages=stages, channels=2, blocks=2)
    x, y = torch.randn(2, 2, *size), torch.tensor([0, 2])
    assert net(x, torch.rand(2), y).shape == x.shape


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


def test_time_is_one_number_or_one_per_sample():
    net, (x, _, y) = tiny(), inputs()
    assert torch.equal(net(x, torch.tensor(0.3), y), net(x, torch.full((3,), 0.3), y))
    assert torch.equal(net(x, torch.tensor([0.3]), y), net(x, torch.full((3,), 0.3), y))


def test_samples_do_not_depend_on_each_other():
    net, (x, t, y) = tiny(), inputs()
    whole = net(x, t, y)
    for i in range(3):
        torch.testing.assert_close(whole[i : i + 1], net(x[i : i + 1], t[i : i + 1], y[i : i + 1]))
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(net(x, t, y)[1].sum(), x)
    assert gradient[1].abs().min() > 0  # every pixel depends on every pixel
    assert not gradient[[0, 2]].any()


def test_output_depends_on_time_and_class():
    net, (x, t, y) = tiny(), inputs()
    plain = net(x, t, y)
    assert not torch.allclose(net(x, t + 0.05, y), plain, atol=1e-4)
    other = net(x, t, torch.tensor([0, 1, 0]))
    torch.testing.assert_close(other[:2], plain[:2])
    assert not torch.allclose(other[2], plain[2], atol=1e-4)


def test_unconditional_network_equals_zero_embedding():
    bare, net = tiny(classes=0), tiny()
    state = net.state_dict()
    state["label.weight"].zero_()
    bare.load_state_dict({k: v for k, v in state.items() if k != "label.weight"})
    x, t, y = inputs()
    torch.testing.assert_close(bare(x, t), net(x, t, y))


def test_a_second_head_doubles_the_output_and_leaves_the_first():
    one, two = tiny(), tiny(outputs=2)
    state = one.state_dict()
    two.load_state_dict({**state, "out.weight": state["out.weight"].repeat(2, 1, 1, 1), "out.bias": torch.zeros(2)})
    x, t, y = inputs()
    both = two(x, t, y)
    assert both.shape == (3, 2, 4, 4)
    for head in both.split(1, 1):
        torch.testing.assert_close(head, one(x, t, y) - one.out.bias)


@pytest.mark.parametrize(
    ("stages", "side", "step"), [((1, 2), (5, 4), 2), ((1, 2), (4, 7), 2), ((1, 2, 4), (6, 8), 4)], ids=str
)
def test_sides_that_cannot_be_halved_are_refused(stages, side, step):
    with pytest.raises(ShapeError, match=f"multiples of {step}, got \\({side[0]}, {side[1]}\\)"):
        tiny(stages=stages)(torch.zeros(1, 1, *side), torch.tensor(0.5), torch.tensor([0]))


def test_wrong_number_of_classes_is_refused():
    x, t, y = inputs()
    with pytest.raises(UsageError, match="needs the class of every image, y"):
        tiny()(x, t)
    with pytest.raises(UsageError, match="has no classes; omit y"):
        tiny(classes=0)(x, t, y)


@pytest.mark.parametrize(
    ("y", "error", "message"),
    [
        (torch.tensor([0, 1]), ShapeError, r"one integer per image \(3\), got torch.int64 of shape \(2,\)"),
        (torch.tensor(1), ShapeError, r"of shape \(\)"),
        (torch.tensor([0.0, 1.0, 2.0]), ShapeError, "got torch.float32"),
        (torch.tensor([0, 1, 3]), UsageError, "y must lie between 0 and 2, got 0 to 3"),
        (torch.tensor([-1, 1, 2]), UsageError, "y must lie between 0 and 2, got -1 to 2"),
    ],
    ids=["too few", "a number", "floats", "too high", "negative"],
)
def test_invalid_classes_are_refused(y, error, message):
    x, t, _ = inputs()
    with pytest.raises(error, match=message):
        tiny()(x, t, y)


@pytest.mark.parametrize("base", [4, 12, 33])
def test_channels_that_do_not_fill_the_groups_are_refused(base):
    with pytest.raises(UsageError, match=f"multiple of 8, .* got {base}"):
        tiny(base=base)


# ---- its variance ---------------------------------------------------------------------------------------------------


def noisy(**options):
    return awaken(attach(tiny(), space=(1, 4, 4), width=8, **options))


def test_attaching_does_not_change_outputs():
    net, (x, t, y) = tiny(), inputs()
    plain = net(x, t, y)
    field = attach(net, space=(1, 4, 4))
    assert torch.equal(field(x, t, y=y), plain)
    assert torch.equal(net(x, t, y), plain)
    assert len(field.noise.names) == sum(isinstance(m, torch.nn.Conv2d | torch.nn.Linear) for m in net.modules())
    bare = sample(field.detach(), 3, steps=3, confidence=None, cond={"y": y}, config=SamplingConfig(space=(1, 4, 4)))
    assert torch.equal(sample(attach(net, space=(1, 4, 4)), 3, steps=3, cond={"y": y}).x, bare.x)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_runs(name):
    x, t, y = inputs()
    mean, var = noisy().moments(x, t, name, seed=0, cond={"y": y})
    assert mean.shape == var.shape == x.shape
    assert torch.isfinite(var).all()
    assert float(var.min()) > 0


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


def test_random_directions_agree_on_average():
    field = noisy().double()
    x, t, y = inputs(2, dtype=torch.float64)
    exact = field.moments(x, t, Linearised(), cond={"y": y}).var
    many = 600
    repeated = [v.repeat(many, *[1] * (v.ndim - 1)) for v in (x, t, y)]
    single = field.moments(*repeated[:2], Tangent(1), seed=0, cond={"y": repeated[2]}).var
    mean, _, error, _ = statistics(single.reshape(many, *x.shape))
    assert_within(mean, exact, error)
    assert float((error / exact).max()) < 0.1
    signs = field.moments(*repeated[:2], Linearised(1), seed=0, cond={"y": repeated[2]}).var
    mean, _, error, _ = statistics(signs.reshape(many, 2))
    assert_within(mean, exact.flatten(1).mean(1), error)
    assert float((error / mean).max()) < 0.05


def test_noise_of_the_last_layer_alone_is_exact_for_every_estimator():
    """v is then Gaussian with variance θ²(α h²), so no estimator approximates."""
    field = noisy(include=["out"]).double()
    x, t, y = inputs(2, dtype=torch.float64)
    exact = field.moments(x, t, Linearised(), cond={"y": y}).var
    torch.testing.assert_close(field.moments(x, t, "diagonal", cond={"y": y}).var, exact)
    draws = 3000
    found = field.moments(x, t, MonteCarlo(draws, 100), seed=0, cond={"y": y}).var
    assert float((found / exact - 1).abs().max()) < 6 * (2 / draws) ** 0.5


def test_variance_depends_on_the_class():
    field = noisy()
    x, t, y = inputs()
    one, other = (field.moments(x, t, cond={"y": label}).var for label in (y, y.flip(0)))
    torch.testing.assert_close(one[1], other[1])
    assert not torch.allclose(one[0], other[0], rtol=1e-3)


def test_random_projections_agree_on_average_with_exact_transport():
    field = noisy().double()
    x0, _, y = inputs(2, dtype=torch.float64)
    options = {"x0": x0, "steps": 2, "confidence": None, "cond": {"y": y}}
    exact = sample(field, **arguments(transport=True, **options))
    assert exact.transported.var.shape == (2, 16)
    found = sample(field, **arguments(transport=True, projections=200, **options))
    mean, _, error, _ = statistics(found.transported.var.T)
    assert_within(mean, exact.transported.var.mean(1), error)
    assert float((error / mean).max()) < 0.05
    torch.testing.assert_close(found.score("dispersion"), exact.score("dispersion"), rtol=0.2, atol=0)
    assert exact.transported.profile.shape == (2, len(field.noise.names), 2)
    torch.testing.assert_close(exact.transported.profile.sum((0, 1)), exact.transported.var.sum(1))
