"""No function advances the global generators of torch, numpy or Python."""

import random

import numpy as np
import pytest
import torch

import fmwc
from fmwc.estimators import ESTIMATORS
from fmwc.networks import MLP
from fmwc.sampling import SamplingConfig, fit_grid
from tests.conftest import mlp_field


def drawn() -> tuple:
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002


CALLS = {
    "attach": lambda field, path: fmwc.attach(field.network, space=(2,), seed=1),
    "save": lambda field, path: fmwc.save(field, path.with_name("other")),
    "load": lambda field, path: fmwc.load(path),
    "load with a network": lambda field, path: fmwc.load(path, network=field.network),
    "sample": lambda field, path: fmwc.sample(
        field, 8, steps=2, transport=True, config=SamplingConfig(decoder="stochastic")
    ),
    "moments": lambda field, path: [field.moments(torch.zeros(3, 2), 0.5, e, seed=0) for e in ESTIMATORS],
    "draw": lambda field, path: field.draw(torch.zeros(3, 2), 0.5, seed=0),
    "watched": lambda field, path: fmwc.VarianceRecorder(field, "tangent")(torch.zeros(3, 2), 0.5),
    "fit_noise": lambda field, path: fmwc.fit_noise(field, torch.zeros(8, 2), 2),
    "fit_grid": lambda field, path: fit_grid(field, 2, pilot=16),
}


@pytest.mark.parametrize("call", CALLS)
def test_global_generators_are_not_advanced(call, tmp_path):
    field = mlp_field()
    fmwc.save(field, tmp_path / "field")
    before = drawn()
    CALLS[call](field, tmp_path / "field")
    assert drawn() == before


def test_initial_weights_match_torch():
    """Initial weights come from a separate generator, and equal those of a seeded torch.nn.Linear."""
    field = fmwc.attach(MLP(2, 16, 2, 8), width=8, seed=3)
    torch.manual_seed(3)
    for layer in field.noise.layers:
        channels = layer.inference.out.out_features
        hidden = torch.nn.Linear(channels + 16, 8)
        torch.nn.Linear(8, channels)
        assert torch.equal(layer.inference.hidden.weight, hidden.weight)
        assert torch.equal(layer.inference.hidden.bias, hidden.bias)
