"""The gradient of the variance against finite differences, and the decoder that uses it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmwc
from fmwc.errors import UsageError
from fmwc.randomness import Stream
from fmwc.sampling import SamplingConfig
from fmwc.state import channels, tree_map
from fmwc.uses.guidance import OBJECTIVES, Guidance, variance_gradient
from tests import cells
from tests.conftest import dict_field, mlp_field


def total_var(field, x, t, **cond):
    var = channels(field.moments(x, t, cond=cond).var)
    return sum(value.flatten(1).sum(1) * field.space.channels[name].weight for name, value in var.items())


def double(field):
    return field.double()


class Attending(nn.Module):
    """Attention by torch's fused kernel, which has no second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 3 * 8), nn.Linear(8, 3)

    def forward(self, x, t):  # (B, 4, 3)
        when = t[:, None, None].expand(*x.shape[:2], 1)
        q, k, v = self.into(torch.cat([x, when], 2))[:, None].chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v)[:, 0])


def attending_field():
    torch.manual_seed(0)
    return fmwc.attach(Attending(), space=(4, 3))


CASES = {
    "attention": lambda: (double(attending_field()), torch.randn(2, 4, 3).double(), torch.rand(2).double(), {}),
    "mlp": lambda: (double(mlp_field()), torch.randn(3, 2, dtype=torch.float64), torch.rand(3).double(), {}),
    "product": lambda: (
        double(dict_field()),
        {"place": torch.rand(3, 2).double(), "shape": torch.randn(3, 3).double()},
        torch.rand(3).double(),
        {},
    ),
}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("case", CASES)
def test_gradient_matches_finite_differences(case, objective):
    field, x, t, cond = CASES[case]()
    v, total, slope = variance_gradient(field, x, t, cond, objective=objective)
    tree_map(torch.testing.assert_close, v, tree_map(torch.Tensor.detach, field(x, t)))
    torch.testing.assert_close(total, total_var(field, x, t))
    read = torch.log if objective == "log_var" else torch.sqrt
    h = 1e-5
    for name, value in channels(x).items():
        for index in range(value[0].numel()):
            step = {n: torch.zeros_like(c) for n, c in channels(x).items()}
            step[name].flatten(1)[:, index] = h
            delta = step if isinstance(x, dict) else step["x"]
            ahead, behind = (read(total_var(field, tree_map(lambda a, b: a + s * b, x, delta), t)) for s in (1, -1))  # noqa: B023
            expected = (ahead - behind) / (2 * h)
            torch.testing.assert_close(channels(slope)[name].flatten(1)[:, index], expected, rtol=1e-5, atol=1e-7)


def test_random_probes_are_unbiased():
    field, x, t, _ = CASES["product"]()
    exact = variance_gradient(field, x, t)[1]
    probed = variance_gradient(field, x, t, probes=1000, randomness=Stream(torch.Generator().manual_seed(0)))[1]
    torch.testing.assert_close(probed, exact, rtol=0.1, atol=0)


def test_guidance_of_crystals():
    field = cells.field(torch.float32)
    atoms = torch.tensor([2, 5, 3])
    run = fmwc.sample(
        field,
        3,
        steps=4,
        cond={"atoms": atoms},
        confidence=None,
        config=SamplingConfig(decoder=Guidance(0.1, probes=1)),
    )
    assert (run.x["type"][~cells.present(atoms)] == 0).all()
    assert run.evaluations == 4


def test_zero_guidance_is_the_plain_sampler(mlp):
    plain = fmwc.sample(mlp, 8, steps=6)
    for none in (Guidance(0.0), Guidance(1.0, 0.5, 0.5), Guidance(1.0, limit=0.0)):
        torch.testing.assert_close(fmwc.sample(mlp, 8, steps=6, config=SamplingConfig(decoder=none)).x, plain.x)


def test_guidance_acts_only_in_its_window(mlp):
    plain = fmwc.sample(mlp, 8, steps=10, config=SamplingConfig(keep_states=True))
    late = fmwc.sample(mlp, 8, steps=10, config=SamplingConfig(keep_states=True, decoder=Guidance(0.1, early=0.5)))
    assert torch.equal(late.states[5], plain.states[5])
    assert (late.states[6] != plain.states[6]).any(1).all()


def test_guidance_decreases_the_variance_within_its_limit(mlp):
    mlp, x, t = mlp.double(), torch.randn(16, 2).double(), torch.full((16,), 0.5).double()
    v, before, _ = variance_gradient(mlp, x, t)
    steered = Guidance(1e-3)(mlp, x, t, {}, Stream())
    push = steered - v
    after = variance_gradient(mlp, x + push, t)[1]
    assert (after < before).all()
    far = Guidance(1e6, limit=0.3)(mlp, x, t, {}, Stream()) - v
    torch.testing.assert_close(far.norm(dim=1), 0.3 * v.norm(dim=1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{"objective": "var"}, {"early": 0.9, "late": 0.1}, {"probes": 0}, {"limit": -1.0}])
def test_invalid_arguments(options):
    with pytest.raises(UsageError):
        Guidance(1.0, **options)


def test_guided_velocity_is_one_evaluation(mlp):
    fmwc.sample(mlp, 8, steps=1)  # the first reading of a batch of this size also proves whose rows layers see
    calls = []
    mlp.network.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    run = fmwc.sample(mlp, 8, steps=6, confidence=None, config=SamplingConfig(decoder=Guidance(0.1, early=0.5)))
    assert run.evaluations * 8 == sum(calls) == 48
