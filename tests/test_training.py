"""Training: resumable to the same weights, refusing what it cannot resume, and the retrofit."""

import dataclasses

import pytest
import torch
from torch import nn

from fmwc.errors import (
    CheckpointError,
    DataError,
    MismatchError,
    NotFiniteError,
    ShapeError,
    UnknownNameError,
    UsageError,
)
from fmwc.field import attach
from fmwc.flow import elbo_loss, euclidean, flow_matching_loss
from fmwc.networks import MLP, UNet
from fmwc.noise import cyclic
from fmwc.sampling import sample
from fmwc.training import DECAYS, PRECISIONS, TrainingConfig, fit_noise, train
from tests.conftest import awaken, mlp_field

PLAN = TrainingConfig(60, batch=16, lr=1e-2, decay="cosine", seed=3, save_every=20)


def data():
    return torch.randn(40, 2, generator=torch.Generator().manual_seed(8)) * 0.3 + 1


def objective(field, stop_at=None):
    calls = 0

    def loss(x1, randomness, beta, cond):
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise KeyboardInterrupt
        return elbo_loss(field, x1, 1e-2 * beta, seed=randomness)

    return loss


def weights(module):
    return {k: v.clone() for k, v in module.state_dict().items()}


def identical(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ---- resuming -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_at", [45, 21, 10], ids=lambda n: f"killed in step {n}")
def test_a_killed_run_resumes_to_the_same_weights_bit_for_bit(tmp_path, stop_at):
    undisturbed = mlp_field()
    train(undisturbed, objective(undisturbed), data(), PLAN)

    path = tmp_path / "resume.safetensors"
    killed = mlp_field()
    with pytest.raises(KeyboardInterrupt):
        train(killed, objective(killed, stop_at), data(), PLAN, resume=path)
    assert path.exists() == (stop_at > 20)
    assert not identical(weights(killed), weights(undisturbed))

    resumed = mlp_field(seed=99)  # whatever it holds is overwritten, unless nothing was saved yet
    if stop_at <= 20:
        resumed = mlp_field()
    train(resumed, objective(resumed), data(), PLAN, resume=path)
    assert identical(weights(resumed), weights(undisturbed))


def test_a_finished_run_is_not_run_again(tmp_path):
    path = tmp_path / "resume.safetensors"
    first = mlp_field()
    train(first, objective(first), data(), PLAN, resume=path)
    again = mlp_field(seed=4)
    history = train(again, objective(again, stop_at=1), data(), PLAN, resume=path)
    assert history[-1][0] == PLAN.iterations  # what the first run saw
    assert identical(weights(again), weights(first))


def test_how_often_it_saves_is_not_part_of_the_plan(tmp_path):
    path = tmp_path / "resume.safetensors"
    field = mlp_field()
    with pytest.raises(KeyboardInterrupt):
        train(field, objective(field, 45), data(), PLAN, resume=path)
    other = dataclasses.replace(PLAN, save_every=7)
    train(field, objective(field), data(), other, resume=path)
    undisturbed = mlp_field()
    train(undisturbed, objective(undisturbed), data(), PLAN)
    assert identical(weights(field), weights(undisturbed))


@pytest.fixture
def point(tmp_path):
    path = tmp_path / "resume.safetensors"
    field = mlp_field()
    with pytest.raises(KeyboardInterrupt):
        train(field, objective(field, 25), data(), PLAN, resume=path)
    return path


def refused(path, field, plan, message):
    before = weights(field)
    with pytest.raises((CheckpointError, MismatchError), match=message) as raised:
        train(field, objective(field), data(), plan, resume=path)
    assert "\n" not in str(raised.value)
    assert identical(weights(field), before)


@pytest.mark.parametrize(
    "change",
    [
        {"iterations": 61},
        {"batch": 17},
        {"lr": 2e-2},
        {"decay": "constant"},
        {"seed": 4},
        {"cycles": 2},
        {"warmup": 0.2},
        {"beta": 2e-3},
    ],
    ids=str,
)
def test_another_plan_is_refused(point, change):
    refused(point, mlp_field(), dataclasses.replace(PLAN, **change), f"other settings \\({next(iter(change))}: ")


def test_other_data_is_refused(point):
    field = mlp_field()
    with pytest.raises(MismatchError, match="training with other settings"):
        train(field, objective(field), data() + 1, PLAN, resume=point)


@pytest.mark.parametrize("options", [{"hidden": 12}, {"depth": 3}, {"include": ["out"]}], ids=str)
def test_another_architecture_is_refused(point, options):
    refused(point, mlp_field(**options), PLAN, "another architecture")


@pytest.mark.parametrize("keep", [0, 5, 200, -1], ids=lambda n: f"{n} bytes")
def test_a_file_that_is_cut_off_is_refused(point, keep):
    point.write_bytes(point.read_bytes()[:keep])
    refused(point, mlp_field(), PLAN, "not a resume point, or is cut off or changed")


def test_a_file_of_another_kind_is_refused(point, mlp):
    sample(mlp, 3, steps=2).save(point)
    refused(point, mlp_field(), PLAN, "another|not a resume point")


# ---- the loop -------------------------------------------------------------------------------------------------------


def test_it_learns():
    torch.manual_seed(0)
    network = MLP(2, 16, 2, 8)
    field = mlp_field()

    def loss(x1, randomness, beta, cond):
        return flow_matching_loss(network, field.space, x1, seed=randomness)

    before = flow_matching_loss(network, field.space, data(), seed=0).item()
    history = train(network, loss, data(), TrainingConfig(200, batch=32, lr=1e-2))
    after = flow_matching_loss(network, field.space, data(), seed=0).item()
    assert after < 0.8 * before
    assert [step for step, _ in history] == [200]


def test_the_loss_is_handed_the_annealed_weight():
    seen = []
    field = mlp_field()

    def loss(x1, randomness, beta, cond):
        seen.append(float(beta))
        assert x1.shape == (16, 2)
        return elbo_loss(field, x1, 1e-2, seed=randomness)

    train(field, loss, data(), dataclasses.replace(PLAN, iterations=40))
    assert seen == pytest.approx([PLAN.beta * cyclic(s, 40) for s in range(40)], abs=1e-9)


def test_progress_and_history():
    told = []
    network, field = MLP(2, 8, 1, 4), mlp_field()

    def loss(x1, randomness, beta, cond):
        return flow_matching_loss(network, field.space, x1, seed=randomness)

    history = train(
        network, loss, data(), TrainingConfig(450, batch=4), progress=lambda n, value: told.append((n, value))
    )
    assert [n for n, _ in history] == [200, 400, 450]
    assert told == history


def test_only_what_wants_a_gradient_is_trained():
    field = mlp_field()
    field.network.out.requires_grad_(False)
    before = weights(field)
    train(field, objective(field), data(), dataclasses.replace(PLAN, iterations=3))
    after = weights(field)
    changed = {k for k in before if not torch.equal(before[k], after[k])}
    assert not any(k.startswith("network.out") for k in changed)
    assert any(k.startswith("network.layers") for k in changed)


SHARES = {"constant": [1, 1, 1], "cosine": [1, 0.5, 0]}


def test_every_decay_is_tested():
    assert SHARES.keys() == DECAYS.keys()


@pytest.mark.parametrize("name", SHARES)
def test_decays(name):
    assert [DECAYS[name](x) for x in (0, 0.5, 1)] == pytest.approx(SHARES[name])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_data_that_is_not_finite_is_refused(bad, mlp):
    wrong = data()
    wrong[3, 1] = bad
    before = weights(mlp)
    for call in (lambda: train(mlp, objective(mlp), wrong, PLAN), lambda: fit_noise(mlp, wrong, 5)):
        with pytest.raises(NotFiniteError, match="the training data holds 1 NaN"):
            call()
    assert identical(weights(mlp), before)


def test_no_data_is_refused(mlp):
    with pytest.raises(DataError, match="no sample"):
        train(mlp, objective(mlp), torch.zeros(0, 2), PLAN)


def test_a_loss_that_runs_away_is_said_to(mlp):
    with pytest.raises(NotFiniteError, match="the loss is nan at step 60; lower lr"):
        train(mlp, lambda x1, r, beta, cond: elbo_loss(mlp, x1, seed=r) * float("nan"), data(), PLAN)


@pytest.mark.parametrize(
    "change", [{"iterations": 0}, {"batch": 0}, {"save_every": 0}, {"cycles": 0}, {"lr": 0.0}], ids=str
)
def test_plans_that_make_no_sense(change):
    with pytest.raises(UsageError, match=next(iter(change))):
        dataclasses.replace(PLAN, **change)
    with pytest.raises(UnknownNameError, match="did you mean 'cosine'"):
        dataclasses.replace(PLAN, decay="cosin")


# ---- conditions -----------------------------------------------------------------------------------------------------


class Labelled(nn.Module):
    """A velocity network for points of three classes."""

    def __init__(self):
        super().__init__()
        self.label, self.out = nn.Embedding(3, 4), nn.Linear(2 + 1 + 4, 2)

    def forward(self, x, t, y):
        return self.out(torch.cat([x, t[:, None].to(x.dtype), self.label(y)], 1))


def labels():
    return torch.arange(40) % 3


def conditional(network, stop_at=None):
    calls = 0

    def loss(x1, randomness, beta, cond):
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise KeyboardInterrupt
        return flow_matching_loss(network, euclidean((2,)), x1, seed=randomness, cond=cond)

    return loss


def test_conditions_reach_the_loss_beside_their_own_data():
    rows = torch.arange(40)
    seen, parameter = [], nn.Linear(1, 1)

    def loss(x1, randomness, beta, cond):
        y, pair = cond["y"], cond["pair"]
        assert torch.equal(x1[:, 0].long(), y)
        assert torch.equal(pair, torch.stack([y, -y], 1))
        seen.append(y)
        return parameter(x1[:, :1]).square().mean()

    train(parameter, loss, rows[:, None].float(), PLAN, cond={"y": rows, "pair": torch.stack([rows, -rows], 1)})
    assert torch.cat(seen).unique().tolist() == rows.tolist()
    assert all(len(batch) == PLAN.batch for batch in seen)


def test_conditions_do_not_move_what_is_drawn():
    seen = {"without": [], "with": []}
    parameter = nn.Linear(2, 1)

    def loss(name):
        def keep(x1, randomness, beta, cond):
            seen[name].append(torch.cat([x1, randomness.normal(x1)], 1))
            return parameter(x1).square().mean()

        return keep

    train(parameter, loss("without"), data(), PLAN)
    train(parameter, loss("with"), data(), PLAN, cond={"y": labels()})
    assert torch.equal(torch.cat(seen["without"]), torch.cat(seen["with"]))


@pytest.mark.parametrize("count", [39, 41, 1])
def test_conditions_of_another_length_are_refused(count):
    network = Labelled()
    before = weights(network)
    wrong = torch.zeros(count, dtype=torch.long)
    with pytest.raises(ShapeError, match=f"'y' needs one row per sample: got {count} for 40 samples"):
        train(network, conditional(network), data(), PLAN, cond={"y": wrong})
    assert identical(weights(network), before)


@pytest.mark.parametrize("name", ["x1", "randomness", "beta", "cond"])
def test_a_condition_may_have_any_name(name):
    seen, parameter = [], nn.Linear(2, 1)

    def loss(x1, randomness, beta, cond):
        seen.append(list(cond))
        return parameter(x1).square().mean()

    train(parameter, loss, data(), PLAN, cond={name: labels()})
    assert seen == [[name]] * PLAN.iterations


def labelled(seed=0):
    torch.manual_seed(seed)
    return Labelled()


def test_a_killed_run_with_conditions_resumes_bit_for_bit_and_takes_no_others(tmp_path):
    undisturbed = labelled()
    train(undisturbed, conditional(undisturbed), data(), PLAN, cond={"y": labels()})

    path = tmp_path / "resume.safetensors"
    killed = labelled()
    with pytest.raises(KeyboardInterrupt):
        train(killed, conditional(killed, 45), data(), PLAN, cond={"y": labels()}, resume=path)
    point = path.read_bytes()

    resumed = labelled(seed=9)
    before = weights(resumed)
    for cond in ({"y": labels().flip(0)}, {"y": (labels() + 1) % 3}):
        with pytest.raises(MismatchError, match="training with other settings"):
            train(resumed, conditional(resumed), data(), PLAN, cond=cond, resume=path)
    with pytest.raises(MismatchError, match="training with other settings"):
        train(resumed, conditional(resumed), data(), PLAN, resume=path)
    assert identical(weights(resumed), before)
    assert path.read_bytes() == point

    train(resumed, conditional(resumed), data(), PLAN, cond={"y": labels()}, resume=path)
    assert identical(weights(resumed), weights(undisturbed))


# ---- precision ------------------------------------------------------------------------------------------------------


def test_bf16_is_for_a_gpu_and_a_cpu_trains_in_full():
    fields = {precision: mlp_field() for precision in PRECISIONS}
    for precision, field in fields.items():
        train(field, objective(field), data(), dataclasses.replace(PLAN, precision=precision))
    assert identical(*(weights(field) for field in fields.values()))


def test_another_precision_is_another_plan(point):
    refused(point, mlp_field(), dataclasses.replace(PLAN, precision="bf16"), "precision: full before, bf16 now")


def test_an_unknown_precision_is_refused():
    assert set(PRECISIONS) == {"full", "bf16"}
    with pytest.raises(UnknownNameError, match="unknown precision 'bf61'; did you mean 'bf16'"):
        dataclasses.replace(PLAN, precision="bf61")


def test_training_leaves_torchs_own_generator_and_settings_alone(mlp):
    state, products = torch.get_rng_state(), torch.get_float32_matmul_precision()
    train(mlp, objective(mlp), data(), dataclasses.replace(PLAN, iterations=3))
    fit_noise(mlp, data(), 3, batch=8, precision="bf16")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_float32_matmul_precision() == products
    assert not torch.is_autocast_enabled("cpu")


# ---- the retrofit ---------------------------------------------------------------------------------------------------


def bound(field):
    with torch.no_grad():
        return sum(elbo_loss(field, data(), 0.1, seed=s).item() for s in range(20)) / 20


def test_fitting_the_noise_leaves_the_backbone_and_its_samples_alone():
    field = mlp_field()
    field.network.layers[0].bias.requires_grad_(False)  # as the user left it
    field.network.train()
    field.network.acts[0].eval()
    wants = {n: p.requires_grad for n, p in field.network.named_parameters()}
    modes = {n: m.training for n, m in field.network.named_modules()}
    before, noise = weights(field.network), weights(field.noise)
    samples, loss = sample(field, 5, steps=4).x, bound(field)

    fit_noise(field, data(), 300, beta=0.1, batch=32, lr=1e-2)

    assert identical(weights(field.network), before)
    assert not identical(weights(field.noise), noise)
    assert torch.equal(sample(field, 5, steps=4).x, samples)
    assert bound(field) < loss
    assert {n: p.requires_grad for n, p in field.network.named_parameters()} == wants
    assert {n: m.training for n, m in field.network.named_modules()} == modes
    assert all(p.requires_grad for p in field.noise.parameters())


def test_an_interrupted_fit_gives_the_gradients_back():
    field = mlp_field()

    def stop(step, loss):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_noise(field, data(), 200, batch=4, progress=stop)
    assert all(p.requires_grad for p in field.parameters())
    assert field.network.training


def test_a_fit_resumes_too(tmp_path):
    path = tmp_path / "noise.safetensors"
    first, second = mlp_field(), mlp_field()
    fit_noise(first, data(), 20, batch=8, resume=path)
    fit_noise(second, data(), 20, batch=8, resume=path)
    assert identical(weights(first), weights(second))


def test_a_broken_network_is_refused_before_any_step(mlp):
    with torch.no_grad():
        mlp.network.out.weight[0, 0] = float("nan")
    with pytest.raises(NotFiniteError, match=r"network\.out\.weight"):
        fit_noise(mlp, data(), 5)


def image_field():
    torch.manual_seed(0)
    return awaken(attach(UNet(base=8, stages=(1, 2), cond=8, classes=3), space=(1, 4, 4), width=8))


def images():
    return torch.rand(12, 1, 4, 4, generator=torch.Generator().manual_seed(2)), torch.arange(12) % 3


def test_fitting_the_noise_with_labels_leaves_the_network_bit_for_bit():
    field, (x, y) = image_field(), images()
    before, noise = weights(field.network), weights(field.noise)
    samples = sample(field, 4, steps=3, cond={"y": y[:4]}).x
    fit_noise(field, x, 5, batch=6, cond={"y": y})
    assert identical(weights(field.network), before)
    assert all(p.grad is None for p in field.network.parameters())
    assert not identical(weights(field.noise), noise)
    assert torch.equal(sample(field, 4, steps=3, cond={"y": y[:4]}).x, samples)


def test_the_labels_are_what_the_noise_is_fitted_with():
    x, y = images()
    fitted = []
    for given in (y, y, y.flip(0)):
        field = image_field()
        fit_noise(field, x, 3, batch=6, cond={"y": given})
        fitted.append(weights(field.noise))
    assert identical(fitted[0], fitted[1])
    assert not identical(fitted[0], fitted[2])


def test_labels_missing_or_too_few_are_refused_before_any_step():
    field, (x, y) = image_field(), images()
    noise = weights(field.noise)
    with pytest.raises(UsageError, match="needs the class of every image"):
        fit_noise(field, x, 3)
    with pytest.raises(ShapeError, match="'y' needs one row per sample: got 11 for 12 samples"):
        fit_noise(field, x, 3, cond={"y": y[:11]})
    assert identical(weights(field.noise), noise)


def test_fitting_the_noise_leaves_running_statistics_and_dropout_alone():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.drop = nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
            self.out = nn.Linear(8, 2)

        def forward(self, x, t):
            return self.out(self.drop(self.norm(self.first(x))))

    field = attach(Normed(), space=(2,), width=8)
    before, state = weights(field.network), torch.get_rng_state()
    fit_noise(field, data(), 3, batch=8)
    assert identical(weights(field.network), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert field.network.training
