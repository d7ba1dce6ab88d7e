"""Arguments in other forms (lists, arrays, single numbers, other precisions) work or are rejected in one line."""

import numpy as np
import pytest
import torch
from torch import nn

import fmwc
from fmwc.baselines import dispersion
from fmwc.errors import FmwcError, UsageError
from fmwc.flow import euclidean, flow_matching_loss
from fmwc.networks import MLP, UNet
from fmwc.sampling import Sampler, SamplingConfig, Uniform, noise

X = torch.linspace(-1, 1, 8).reshape(4, 2)
ALIKE = {
    "a list of tensors": list(X),
    "a tuple of tensors": tuple(X),
    "a list of lists": X.tolist(),
    "an array": X.numpy(),
    "an array of doubles": X.double().numpy(),
    "a list of arrays": list(X.numpy()),
    "doubles": X.double(),
}


@pytest.mark.parametrize("name", ALIKE)
def test_states_in_every_supported_form(name, mlp):
    t = torch.full((4,), 0.5)
    assert torch.equal(fmwc.sample(mlp, x0=ALIKE[name], steps=2).x, fmwc.sample(mlp, x0=X, steps=2).x)
    assert torch.equal(mlp.moments(ALIKE[name], t).var, mlp.moments(X, t).var)
    assert torch.equal(mlp.draw(ALIKE[name], t, seed=0), mlp.draw(X, t, seed=0))


REFUSED = {
    "rows of two shapes": [torch.zeros(2), torch.zeros(3)],
    "ragged lists": [[0.0, 1.0], [0.0]],
    "words": ["a", "b"],
    "text": "noise",
    "a number": 3.0,
    "a tensor of one number": torch.tensor(3.0),
    "truth values": torch.zeros(4, 2) > 0,
    "complex numbers": torch.zeros(4, 2, dtype=torch.complex64),
    "no samples": torch.zeros(0, 2),
    "another shape": torch.zeros(4, 3),
    "a set": {1.0, 2.0},
    "channels": {"x": torch.zeros(4, 2)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_states_are_rejected_in_one_line(name, mlp):
    for call in (lambda: fmwc.sample(mlp, x0=REFUSED[name], steps=2), lambda: mlp.moments(REFUSED[name], 0.5)):
        with pytest.raises(UsageError) as error:
            call()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("t", [0.5, torch.tensor(0.5), np.float64(0.5), np.full(4, 0.5, np.float32), [0.5] * 4])
def test_one_time_for_all_samples(t, mlp):
    times = torch.full((4,), 0.5)
    assert torch.equal(mlp.moments(X, t).var, mlp.moments(X, times).var)
    assert torch.equal(mlp.moments(X, t, "monte_carlo", seed=0).var, mlp.moments(X, times, "monte_carlo", seed=0).var)
    assert torch.equal(mlp.draw(X, t, seed=0), mlp.draw(X, times, seed=0))
    if not isinstance(t, (list, np.ndarray)):
        assert torch.equal(mlp(X, t), mlp(X, times))
        assert torch.equal(mlp.draw_with_kl(X, t, seed=0)[0], mlp.draw_with_kl(X, times, seed=0)[0])


@pytest.mark.parametrize("t", ["now", None, [0.5, 0.5], torch.zeros(3), float("nan")])
def test_invalid_times_are_rejected(t, mlp):
    for call in (lambda: mlp.moments(X, t), lambda: mlp.draw(X, t)):
        with pytest.raises(UsageError):
            call()


def test_shape_is_accepted_as_a_euclidean_space(mlp):
    spaces = ((2,), [2], 2, torch.Size([2]), euclidean((2,)))
    for space in spaces:
        assert torch.equal(noise(space, 3, 0), noise((2,), 3, 0))
        assert Sampler(mlp, SamplingConfig(controller=Uniform(2), space=space))(X).x.shape == X.shape
        assert flow_matching_loss(mlp, space, X, seed=0) == flow_matching_loss(mlp, (2,), X, seed=0)
        assert dispersion(torch.stack([X, 2 * X]), space).shape == (4,)
        assert fmwc.attach(MLP(2, 8, 1, 4), space=space).space.channels["x"].shape == (2,)
        assert fmwc.sample(mlp.network, 3, steps=1, confidence=None, config=SamplingConfig(space=space)).x.shape == (
            3,
            2,
        )


class Labelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.label, self.layer = nn.Embedding(3, 2), nn.Linear(2, 2)

    def forward(self, x, t, y):
        return self.layer(x + self.label(y))


@pytest.mark.parametrize("label", [1, 1.5, torch.arange(3)], ids=str)
@pytest.mark.parametrize("build", [Labelled, lambda: UNet(1, 8, (1, 2), 1, 8, 3)], ids=["own", "unet"])
def test_labels_must_be_one_per_sample(build, label):
    network = build()
    shape = (2,) if isinstance(network, Labelled) else (1, 8, 8)
    field, x = fmwc.attach(network, space=shape, width=8), torch.randn(4, *shape)
    calls = [
        lambda: fmwc.sample(field, 4, steps=1, cond={"y": label}),
        lambda: fmwc.sample(field, 4, steps=1, confidence=None, cond={"y": label}),
        lambda: field.moments(x, 0.5, cond={"y": label}),
        lambda: field.draw(x, 0.5, cond={"y": label}),
    ]
    for call in calls:
        with pytest.raises(FmwcError) as error:
            call()
        assert "\n" not in str(error.value)
        assert "y" in str(error.value)
