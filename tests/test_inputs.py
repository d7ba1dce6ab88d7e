"""Arguments in other forms (lists, arrays, single numbers, other precisions) work or are rejected in one line."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import fmwc
from fmwc.baselines import dispersion
from fmwc.errors import FmwcError, ShapeError, UsageError
from fmwc.flow import euclidean, flow_matching_loss
from fmwc.networks import MLP, UNet
from fmwc.sampling import Sampler, SamplingConfig, Uniform, noise
from fmwc.state import blame_conditions
from tests.conftest import mlp_field
from tests.options import arguments

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


def test_integer_states(mlp):
    assert torch.equal(
        fmwc.sample(mlp, x0=torch.ones(3, 2).long(), steps=2).x, fmwc.sample(mlp, x0=torch.ones(3, 2), steps=2).x
    )


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


@pytest.mark.parametrize("t", [0.25, torch.tensor(0.25), torch.full((4,), 0.25), torch.full((1,), 0.25)], ids=str)
def test_times_of_other_precisions(t, mlp):
    expected = mlp.moments(X, torch.full((4,), 0.25)).var
    assert torch.equal(mlp.moments(X, torch.as_tensor(t).double()).var, expected)
    assert torch.equal(mlp.moments(X, torch.as_tensor(t).bfloat16()).var, expected)
    double = mlp_field().double()
    assert double.moments(X, t).var.dtype == double(X.double(), 0.25).dtype == torch.float64


def test_a_column_of_times_is_rejected(mlp):
    for call in (mlp.moments, mlp.draw, fmwc.VarianceRecorder(mlp)):
        with pytest.raises(ShapeError, match=r"t\[:, 0\]"):
            call(X, torch.full((4, 1), 0.5))


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


@pytest.mark.parametrize("space", ["plane", (2.5,), (0,), -1, True, {"x": 2}, (2, None)], ids=str)
def test_invalid_spaces_are_rejected(space):
    with pytest.raises(UsageError, match=r"the shape of one sample such as \(2,\)"):
        fmwc.attach(MLP(2, 8, 1, 4), space=space)


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


def test_a_scalar_condition_is_passed_unchanged():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x, t, scale):
            return self.layer(x) * scale

    field = fmwc.attach(Scaled(), space=(2,))
    assert fmwc.sample(field, 4, steps=1, cond={"scale": 2}).x.shape == (4, 2)


def test_errors_of_the_network_are_not_changed(mlp):
    def broken(x, t):
        raise RuntimeError("mine")

    mlp.network.forward = broken
    for call in (lambda: fmwc.sample(mlp, 3, steps=1), lambda: mlp.moments(X, 0.5), lambda: mlp.draw(X, 0.5)):
        with pytest.raises(RuntimeError, match=r"^mine$"):
            call()


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_noise_is_fitted_although_gradients_are_disabled(off):
    expected = mlp_field()
    fmwc.fit_noise(expected, X, 2)
    field = mlp_field()
    with off():
        fmwc.fit_noise(field, X, 2)
    assert all(torch.equal(a, b) for a, b in zip(field.parameters(), expected.parameters(), strict=True))


def test_data_as_lists():
    for data in (list(X), X.tolist(), X.numpy(), X.double()):
        field = mlp_field()
        fmwc.fit_noise(field, data, 1)


def test_a_shape_error_names_the_expected_shape(mlp):
    with pytest.raises(ShapeError, match=r"must have shape \(B, 2\), got \(4, 3\)"):
        fmwc.sample(mlp, x0=torch.zeros(4, 3))


WHOLE = {
    "text": ("count", "5"),
    "a float": ("count", 5.0),
    "a truth value": ("count", True),
    "none": ("count", 0),
    "too many": ("count", 10**12 + 1),
    "NaN": ("steps", float("nan")),
    "a float of steps": ("steps", 2.0),
    "no steps": ("steps", 0),
    "too many steps": ("steps", 10**6 + 1),
    "evaluations": ("evaluations", 2.0),
    "no evaluations": ("evaluations", 0),
    "no seed": ("seed", None),
    "half a seed": ("seed", 1.5),
    "a seed below": ("seed", -(2**63) - 1),
    "a seed above": ("seed", 2**64),
    "half a batch": ("batch", 1.5),
    "no batch": ("batch", 0),
    "the first": ("first", -1),
}


@pytest.mark.parametrize(("name", "value"), WHOLE.values(), ids=WHOLE)
def test_invalid_integers_are_rejected(name, value, mlp):
    options = {"count": 3, name: value}
    with pytest.raises(UsageError, match=f"^{name} must be a whole number.* got "):
        fmwc.sample(mlp, **arguments(**options))
    if name not in ("first", "evaluations"):
        with pytest.raises(UsageError, match=f"^{name} must be a whole number.* got "):
            next(iter(fmwc.sampling.stream(mlp, **arguments(**options))))
    if name == "seed":
        with pytest.raises(UsageError, match=r"^seed must be a whole number"):
            fmwc.attach(MLP(2, 8, 1, 4), seed=value)
        with pytest.raises(UsageError, match=r"^seed must be a whole number"):
            Sampler(mlp, SamplingConfig(controller=Uniform(2)))(X, seed=value)
    if name == "batch":
        with pytest.raises(UsageError, match=r"^batch must be a whole number"):
            Sampler(mlp, SamplingConfig(controller=Uniform(2), batch=value))


@pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1, np.int64(5), np.uint8(5)])
def test_seeds_are_stored_in_files(seed, mlp, tmp_path):
    run = fmwc.sample(mlp, np.int32(3), steps=np.int64(2), seed=seed, config=SamplingConfig(batch=np.int16(2)))
    run.save(tmp_path / "run.safetensors")
    assert fmwc.Trajectory.load(tmp_path / "run.safetensors").seed == int(seed)
    assert torch.equal(run.x, fmwc.sample(mlp, 3, steps=2, seed=int(seed), config=SamplingConfig(batch=2)).x)
    fmwc.attach(MLP(2, 8, 1, 4), seed=seed)


class Failing(nn.Module):
    """A network with conditions that fails for another reason."""

    def __init__(self, error):
        super().__init__()
        self.layer, self.error = nn.Linear(2, 2), error

    def forward(self, x, t, scale=1.0, basis=None, y=None):
        self.layer(x)
        raise self.error


INNOCENT = {
    "memory of a GPU": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB"),
    "memory of a CPU": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 3 bytes"),
    "memory": MemoryError("3"),
    "a GPU": RuntimeError("CUDA error: an illegal memory access was encountered in kernel 3"),
    "its own": RuntimeError("mine"),
    "another keyword": TypeError("f() got an unexpected keyword argument 'float'"),
}


@pytest.mark.parametrize("error", INNOCENT.values(), ids=INNOCENT)
def test_errors_that_conditions_do_not_cause(error):
    field, cond = fmwc.attach(Failing(error), space=(2,)), {"scale": 2.0, "basis": torch.zeros(3, 2)}
    blame_conditions(error, cond, 4)
    for call in (
        partial(field.moments, cond=cond),
        partial(field.draw, cond=cond),
        partial(fmwc.VarianceRecorder(field), **cond),
    ):
        with pytest.raises(type(error)) as raised:
            call(X, 0.5)
        assert raised.value is error


def test_an_unknown_condition_is_named(mlp):
    cond = {"label": 3}
    for call in (
        partial(mlp.moments, cond=cond),
        partial(mlp.draw, cond=cond),
        partial(fmwc.VarianceRecorder(mlp), **cond),
    ):
        with pytest.raises(UsageError, match=r"^the network has no condition 'label'") as error:
            call(X, 0.5)
        assert "torch.full" not in str(error.value)
    with pytest.raises(UsageError, match=r"^the network has no condition 'label'"):
        fmwc.sample(mlp, 3, steps=1, cond={"label": torch.arange(3)})


def test_labels_may_be_bytes_and_a_single_row_is_named():
    class Labelled(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.layer = nn.Embedding(4, 3), nn.Linear(6, 2)

        def forward(self, x, t, y):
            return self.layer(torch.cat([x, t[:, None], self.embedding(y)], 1))

    field = fmwc.attach(Labelled(), space=(2,))
    bytes_, longs = (torch.arange(4, dtype=dtype) for dtype in (torch.uint8, torch.int64))
    runs = [fmwc.sample(field, 4, steps=2, cond={"y": y}) for y in (bytes_, longs, bytes_.numpy())]
    assert all(torch.equal(run.x, runs[1].x) for run in runs)
    with pytest.raises(ShapeError, match="condition 'y' has 1 row for 4 samples"):
        fmwc.sample(field, 4, steps=2, cond={"y": torch.tensor([2])})
