"""Fitting the noise of a trained network: the network and its samples do not change."""

import math

import pytest
import torch
from torch import nn

from fmwc.field import attach
from fmwc.flow import elbo_loss
from fmwc.networks import UNet
from fmwc.sampling import sample
from fmwc.training import fit_noise
from tests import cells
from tests.conftest import awaken, mlp_field
from tests.options import arguments
from tests.recipes.conftest import identical, weights

Y = torch.arange(12) % 3


def points():
    return torch.randn(40, 2, generator=torch.Generator().manual_seed(8)) * 0.3 + 1


def images():
    return torch.rand(12, 1, 4, 4, generator=torch.Generator().manual_seed(2))


def image_field():
    torch.manual_seed(0)
    return awaken(attach(UNet(base=8, stages=(1, 2), cond=8, classes=3), space=(1, 4, 4), width=8))


def crystals():
    x, _, atoms = cells.batch(*(1 + i % cells.WIDTH for i in range(12)), dtype=torch.float32)
    order = atoms.argsort(stable=True)
    return {k: v[order] for k, v in x.items()}, atoms[order]


def mean_elbo(field):
    with torch.no_grad():
        return sum(elbo_loss(field, points(), 0.1, seed=s).item() for s in range(20)) / 20


def test_fitting_does_not_change_the_network():
    field = mlp_field()
    field.network.layers[0].bias.requires_grad_(False)  # as before
    field.network.train()
    field.network.acts[0].eval()
    gradients = {n: p.requires_grad for n, p in field.network.named_parameters()}
    modes = {n: m.training for n, m in field.network.named_modules()}
    before, noise = weights(field.network), weights(field.noise)
    samples, loss = sample(field, 5, steps=4).x, mean_elbo(field)

    fit_noise(field, points(), 300, beta=0.1, batch=32, lr=1e-2)

    assert identical(weights(field.network), before)
    assert not identical(weights(field.noise), noise)
    assert torch.equal(sample(field, 5, steps=4).x, samples)
    assert mean_elbo(field) < loss
    assert {n: p.requires_grad for n, p in field.network.named_parameters()} == gradients
    assert {n: m.training for n, m in field.network.named_modules()} == modes
    assert all(p.requires_grad for p in field.noise.parameters())


def test_an_interrupted_fit_restores_gradients_and_modes():
    field = mlp_field()

    def stop(step, loss):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_noise(field, points(), 4, batch=4, progress=stop, every=2)
    assert all(p.requires_grad for p in field.parameters())
    assert field.network.training


def test_a_fit_resumes_to_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("fmwc.training.PAUSE", 0)  # seconds between two resume points

    def stop(step, loss):
        if step == 10:
            raise KeyboardInterrupt

    path, options = tmp_path / "noise.safetensors", {"batch": 8, "confidence": False, "every": 5}
    fields = [mlp_field() for _ in range(4)]
    whole, killed, resumed, again = fields
    fit_noise(whole, points(), 20, **options)
    with pytest.raises(KeyboardInterrupt):
        fit_noise(killed, points(), 20, resume=path, progress=stop, **options)
    assert path.exists()
    for field in (resumed, again):
        assert fit_noise(field, points(), 20, resume=path, **options)[-1][0] == 20
        assert identical(weights(field), weights(whole))


def test_classes_reach_the_noise_and_the_network_does_not_change():
    fitted = []
    for y in (Y, Y, Y.flip(0)):
        field = image_field()
        before, samples = weights(field.network), sample(field, 4, steps=3, cond={"y": Y[:4]}).x
        fit_noise(field, images(), 3, batch=6, cond={"y": y}, confidence=False)
        assert identical(weights(field.network), before)
        assert all(p.grad is None for p in field.network.parameters())
        assert torch.equal(sample(field, 4, steps=3, cond={"y": Y[:4]}).x, samples)
        fitted.append(weights(field.noise))
    assert identical(fitted[0], fitted[1])
    assert not identical(fitted[0], fitted[2])
    assert not identical(fitted[0], weights(image_field().noise))


def test_the_noise_of_crystals_is_fitted_and_their_samples_do_not_change():
    field, (data, atoms) = cells.field(torch.float32), crystals()
    before, noise = weights(field.network), weights(field.noise)
    options = {"steps": 3, "confidence": None, "cond": {"atoms": atoms}}
    samples = sample(field, 12, **arguments(**options)).x
    history = fit_noise(field, data, 10, batch=6, beta=1e-2, stratified=True, cond={"atoms": atoms})
    assert identical(weights(field.network), before)
    assert not identical(weights(field.noise), noise)
    after = sample(field, 12, **arguments(**options)).x
    assert all(torch.equal(after[k], samples[k]) for k in samples)
    assert math.isfinite(history[-1][1])


def test_running_statistics_global_randomness_and_precision_do_not_change():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.drop = nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
            self.out = nn.Linear(8, 2)

        def forward(self, x, t):
            return self.out(self.drop(self.norm(self.first(x))))

    field = attach(Normed(), space=(2,), width=8)
    before, state, products = weights(field.network), torch.get_rng_state(), torch.get_float32_matmul_precision()
    fit_noise(field, points(), 3, batch=8, precision="bf16")
    assert identical(weights(field.network), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_float32_matmul_precision() == products
    assert not torch.is_autocast_enabled("cpu")
    assert field.network.training
