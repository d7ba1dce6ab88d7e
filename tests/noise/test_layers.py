"""Every kind of layer that can carry noise: Monte Carlo against θ²(α h²)."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from fmwc.field import attach
from fmwc.noise import KINDS, Draw
from fmwc.noise.layers import Projection, layer_kind
from tests.conftest import awaken
from tests.reference import assert_within, noise_var, statistics

DRAWS = 6000


@dataclass(frozen=True)
class Row:
    """Layers of one kind, each with the shape of one input."""

    layers: tuple[tuple[nn.Module, tuple[int, ...]], ...]


torch.manual_seed(0)
ROWS = {
    nn.Linear: Row(((nn.Linear(5, 3), (5,)), (nn.Linear(5, 3, bias=False), (4, 5)))),
    nn.Conv1d: Row(((nn.Conv1d(4, 2, 3, stride=2, padding=1), (4, 6)),)),
    nn.Conv2d: Row(
        (
            (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), (4, 5, 5)),
            (nn.Conv2d(2, 3, 3, padding=2, dilation=2), (2, 4, 4)),
            (nn.Conv2d(2, 2, 3, padding="same", padding_mode="circular"), (2, 4, 4)),
        )
    ),
    nn.Conv3d: Row(((nn.Conv3d(2, 2, 2, stride=2), (2, 4, 4, 4)),)),
    nn.ConvTranspose1d: Row(((nn.ConvTranspose1d(3, 2, 3, stride=2, padding=1), (3, 4)),)),
    nn.ConvTranspose2d: Row(
        (
            (nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, output_padding=1), (4, 3, 3)),
            (nn.ConvTranspose2d(4, 4, 2, stride=2, groups=2), (4, 2, 2)),
            (nn.ConvTranspose2d(2, 2, 2, dilation=2), (2, 3, 3)),
        )
    ),
    Projection: Row(()),  # tested in tests/noise/test_attention.py
    nn.ConvTranspose3d: Row(((nn.ConvTranspose3d(2, 2, 2, stride=2), (2, 2, 2, 2)),)),
}
CASES = [
    pytest.param(layer, shape, id=f"{kind.__name__}{i}")
    for kind, row in ROWS.items()
    for i, (layer, shape) in enumerate(row.layers)
]


class Alone(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.layer(x)


def test_every_kind_has_a_row():
    assert ROWS.keys() == KINDS.keys()


@pytest.mark.parametrize(("layer", "shape"), CASES)
def test_draws_have_the_mean_of_the_layer_and_the_closed_form_variance(layer, shape):
    torch.manual_seed(1)
    field = awaken(attach(Alone(layer), width=8, initial_log_alpha=-1.0)).double()
    x = torch.randn(1, *shape, dtype=torch.float64)
    t = torch.full((1,), 0.4, dtype=torch.float64)
    alphas = []

    class Peek(Draw):
        def after(self, noisy, layer, h, y):
            alphas.append(noisy.log_alpha(h).exp())
            return y

    with torch.no_grad():
        field.run(Peek(None), x, t)
        (alpha,) = alphas
        rows = DRAWS if layer.__class__ is not nn.Conv3d else 3000
        drawn = field.draw(x.expand(rows, *shape), t.expand(rows), seed=0)
    mean, var, mean_error, var_error = statistics(drawn)
    if isinstance(layer, nn.Linear) and x.ndim == 3:  # the layer acts on each token as a matrix
        expected = (alpha * x.square()) @ layer.weight.detach().square().T
    else:
        expected = noise_var(layer, x, alpha)
    assert_within(mean, layer(x)[0].detach(), mean_error)
    assert_within(var, expected[0], var_error)
    # ε is not shared over positions, so outputs at different positions are uncorrelated.
    flat = (drawn - mean).flatten(1)
    correlation = (flat.T @ flat / rows) / (var.flatten()[:, None] * var.flatten()[None]).sqrt()
    correlation.fill_diagonal_(0)
    assert correlation.abs().max() < 6 / rows**0.5


@pytest.mark.parametrize(("layer", "shape"), CASES)
def test_output_var_is_the_closed_form(layer, shape):
    field = attach(Alone(layer), width=8).double()
    x = torch.randn(2, *shape, dtype=torch.float64)
    alpha = torch.rand(2, *[1] * (len(shape) - 1), shape[-1], dtype=torch.float64)
    if layer_kind(layer).spatial:
        alpha = torch.rand(2, shape[0], *[1] * (len(shape) - 1), dtype=torch.float64)
    found = field.noise.layers[0].output_var(layer, x, alpha.log())
    torch.testing.assert_close(found, noise_var(layer, x, alpha) if len(shape) != 2 or layer_kind(layer).spatial
                               else (alpha * x.square()) @ layer.weight.square().T)  # fmt: skip


def test_the_bias_carries_no_noise():
    layer = nn.Linear(3, 2)
    field = attach(Alone(layer))
    zero = torch.zeros(4, 3)
    torch.testing.assert_close(field.draw(zero, 0.5, seed=0), layer(zero))


def test_kinds_know_subclasses_and_nothing_else():
    class Own(nn.Linear):
        pass

    assert layer_kind(Own(2, 2)) is KINDS[nn.Linear]
    for module in (nn.SiLU(), nn.LayerNorm(2), nn.Embedding(2, 2), nn.Bilinear(2, 2, 2)):
        assert layer_kind(module) is None
