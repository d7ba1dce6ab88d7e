"""The training loop: configuration, randomness, data in memory, and resuming to the same weights."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fmwc.data.batches import Rows
from fmwc.errors import (
    CheckpointError,
    DataError,
    MismatchError,
    NotFiniteError,
    ShapeError,
    UnknownNameError,
    UsageError,
)
from fmwc.flow import elbo_loss, euclidean, flow_matching_loss
from fmwc.networks import MLP
from fmwc.noise import cyclic
from fmwc.training import TrainingConfig, train
from tests.conftest import PRODUCT, TwoChannels, mlp_field
from tests.recipes.conftest import identical, weights

CPU = torch.device("cpu")
CONFIG = TrainingConfig(60, batch=16, lr=1e-2, decay="cosine", seed=3, save_every=20)
SHORT = dataclasses.replace(CONFIG, iterations=30, batch=8, save_every=10)


def points():
    return torch.randn(40, 2, generator=torch.Generator().manual_seed(8)) * 0.3 + 1


def labels():
    return torch.arange(40) % 3


def channels():
    rows = torch.arange(40) / 40
    return {"place": torch.stack([rows, rows], 1), "shape": rows[:, None].expand(40, 3)}


class Labelled(nn.Module):
    """A velocity network for points of three classes."""

    def __init__(self):
        super().__init__()
        self.label, self.out = nn.Embedding(3, 4), nn.Linear(2 + 1 + 4, 2)

    def forward(self, x, t, y):
        return self.out(torch.cat([x, t[:, None].to(x.dtype), self.label(y)], 1))


def network():
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


def elbo(field):
    return lambda x1, randomness, beta, cond: elbo_loss(field, x1, 1e-2 * beta, seed=randomness)


def regression(net):
    def loss(x1, randomness, beta, cond):
        return (net(x1 + 0.1 * randomness.normal(x1)) - x1.sum(1, keepdim=True)).square().mean()

    return loss


def flow_of(space):
    """Return a function that computes the flow-matching loss of a network."""
    return lambda net: lambda x1, randomness, beta, cond: flow_matching_loss(net, space, x1, seed=randomness, cond=cond)


def stopping(loss, at):
    """Interrupt training in this step."""
    calls = itertools.count(1)

    def stopped(*args):
        if next(calls) == at:
            raise KeyboardInterrupt
        return loss(*args)

    return stopped


def seeded(build, seed=0):
    torch.manual_seed(seed)
    return build()


@pytest.fixture
def spy():
    """Record what the optimiser sees at every step (rates, gradients), and the weights after it."""
    seen = {"rates": [], "gradients": [], "weights": [], "kinds": []}

    def parameters(optimiser):
        return [p for group in optimiser.param_groups for p in group["params"]]

    def before(optimiser, args, kwargs):
        seen["rates"].append(optimiser.param_groups[0]["lr"])
        seen["kinds"].append(type(optimiser))
        seen["gradients"].append([None if p.grad is None else p.grad.clone() for p in parameters(optimiser)])

    def after(optimiser, args, kwargs):
        seen["weights"].append([p.detach().clone() for p in parameters(optimiser)])

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    yield seen
    for handle in handles:
        handle.remove()


# ---- resuming --------------------------------------------------------------------------------------------------------

OPTIONS = {"average": 0.9, "weight_decay": 0.1, "clip": 0.05, "stratified": True, "last_lr": 1e-3}
RUNS = {
    "field": (mlp_field, elbo, points(), None, {}),
    "all options": (network, regression, points(), None, OPTIONS),
    "conditions": (Labelled, flow_of(euclidean((2,))), points(), {"y": labels()}, {}),
    "channels": (TwoChannels, flow_of(PRODUCT), channels(), None, {"average": 0.9}),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("stop_at", [25, 11, 5], ids=lambda n: f"killed in step {n}")
def test_a_killed_run_resumes_to_the_same_weights_bit_for_bit(name, stop_at, tmp_path):
    build, objective, data, cond, options = RUNS[name]
    config, path = dataclasses.replace(SHORT, **options), tmp_path / "resume.safetensors"
    undisturbed, killed = seeded(build), seeded(build)
    train(undisturbed, objective(undisturbed), data, config, cond=cond)
    with pytest.raises(KeyboardInterrupt):
        train(killed, stopping(objective(killed), stop_at), data, config, cond=cond, resume=path)
    assert path.exists() == (stop_at > 10)
    assert not identical(weights(killed), weights(undisturbed))
    other = lambda: build(seed=99) if build is mlp_field else seeded(build, 99)  # noqa: E731
    resumed = other() if stop_at > 10 else seeded(build)  # a resume point replaces all weights
    rare = dataclasses.replace(config, save_every=7)  # how often it saves does not matter
    train(resumed, objective(resumed), data, rare, cond=cond, resume=path)
    assert identical(weights(resumed), weights(undisturbed))
    again = other()  # a finished run is not run again
    history = train(again, stopping(objective(again), 1), data, config, cond=cond, resume=path)
    assert history[-1][0] == config.iterations
    assert identical(weights(again), weights(undisturbed))


@pytest.fixture(scope="module")
def resume_point(tmp_path_factory):
    path = tmp_path_factory.mktemp("point") / "resume.safetensors"
    field, config = mlp_field(), dataclasses.replace(CONFIG, average=0.9)
    with pytest.raises(KeyboardInterrupt):
        train(field, stopping(elbo(field), 25), points(), config, cond={"y": labels()}, resume=path)
    return path.read_bytes()


@pytest.fixture
def point(resume_point, tmp_path):
    path = tmp_path / "resume.safetensors"
    path.write_bytes(resume_point)
    return path


def refused(path, message, field=None, data=None, y=None, **change):
    field = mlp_field() if field is None else field
    before, content = weights(field), path.read_bytes()
    config = dataclasses.replace(CONFIG, average=0.9)
    with pytest.raises((CheckpointError, MismatchError), match=message) as raised:
        train(
            field,
            elbo(field),
            points() if data is None else data,
            dataclasses.replace(config, **change),
            cond={"y": labels() if y is None else y} if y is not False else None,
            resume=path,
        )
    assert "\n" not in str(raised.value)
    assert identical(weights(field), before)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "change",
    [{"iterations": 61}, {"seed": 4}, {"last_lr": 1e-4},],
    ids=str,
)  # fmt: skip
def test_a_resume_point_of_another_configuration_is_refused(point, change):
    refused(point, f"a run with other settings \\({next(iter(change))}: ", **change)


@pytest.mark.parametrize(
    "change", [{"data": points() + 1}, {"y": labels().flip(0)}, {"y": (labels() + 1) % 3}, {"y": False}], ids=len
)
def test_a_resume_point_of_other_data_is_refused(point, change):
    refused(point, "a run with other settings", **change)


@pytest.mark.parametrize("keep", [0, 5, 200, -1], ids=lambda n: f"{n} bytes")
def test_a_truncated_resume_point_is_refused(point, keep):
    point.write_bytes(point.read_bytes()[:keep])
    refused(point, "not a resume point, or is truncated or modified")


# ---- the loop --------------------------------------------------------------------------------------------------------


def test_training_lowers_the_loss_and_reports_it():
    reported, net = [], seeded(lambda: MLP(2, 16, 2, 8))
    loss = flow_of(euclidean((2,)))(net)
    before = flow_matching_loss(net, euclidean((2,)), points(), seed=0).item()
    config = TrainingConfig(450, batch=16, lr=1e-2)
    history = train(net, loss, points(), config, progress=lambda *step: reported.append(step))
    assert flow_matching_loss(net, euclidean((2,)), points(), seed=0).item() < 0.8 * before
    assert [step for step, _ in history] == [200, 400, 450]
    assert reported == history


def test_the_loss_gets_the_annealed_weight_of_the_kl():
    seen = []
    field = mlp_field()

    def loss(x1, randomness, beta, cond):
        seen.append(float(beta))
        assert x1.shape == (16, 2)
        return elbo_loss(field, x1, 1e-2, seed=randomness)

    train(field, loss, points(), dataclasses.replace(CONFIG, iterations=40))
    assert seen == pytest.approx([CONFIG.beta * cyclic(s, 40) for s in range(40)], abs=1e-9)


def test_a_loss_that_is_not_finite_raises(mlp):
    with pytest.raises(NotFiniteError, match="the loss is nan at step 60; lower lr"):
        train(mlp, lambda x1, r, beta, cond: elbo_loss(mlp, x1, seed=r) * float("nan"), points(), CONFIG)


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({name: 0}, f"{name} must be") for name in ("iterations", "batch", "save_every", "cycles", "lr")),
        *(
            ({name: value}, f"{name} must lie between 0 and")
            for name, value in [
                ("last_lr", -1e-4), ("last_lr", 2e-2), ("weight_decay", -1.0), ("clip", -0.5), ("average", 1.5),
                ("average", -0.1), ("average", math.nan),
            ]
        ),
        ({"decay": "cosin"}, "did you mean 'cosine'"),
        ({"precision": "bf61"}, "unknown precision 'bf61'; did you mean 'bf16'"),
    ],
)  # fmt: skip
def test_invalid_options_are_refused(change, message):
    with pytest.raises((UsageError, UnknownNameError), match=message):
        dataclasses.replace(CONFIG, **change)


@pytest.mark.parametrize("rate", [0.5, 0.9, 0.999])
def test_the_average_of_the_weights_is_that_of_its_formula(rate, spy):
    net = seeded(network)
    average = [p.detach().double() for p in net.parameters()]
    train(net, regression(net), points(), dataclasses.replace(SHORT, average=rate))
    for n, after in enumerate(spy["weights"]):
        share = min(rate, (1 + n) / (10 + n))
        average = [share * a + (1 - share) * w.double() for a, w in zip(average, after, strict=True)]
    assert len(spy["weights"]) == 30
    for trained, expected, last in zip(net.parameters(), average, spy["weights"][-1], strict=True):
        torch.testing.assert_close(trained.detach().double(), expected, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(trained.detach(), last, atol=1e-4)


def test_a_cosine_goes_from_the_first_rate_to_the_last(spy):
    config, net = dataclasses.replace(SHORT, last_lr=2e-3), seeded(network)
    assert [config.lr_at(n) for n in (0, 15, 30)] == pytest.approx([1e-2, 6e-3, 2e-3])
    train(net, regression(net), points(), config)
    expected = [2e-3 + 8e-3 * 0.5 * (1 + math.cos(math.pi * n / 30)) for n in range(30)]
    assert spy["rates"] == pytest.approx(expected)
    constant = dataclasses.replace(config, decay="constant")
    assert [constant.lr_at(n) for n in (0, 15, 30)] == pytest.approx([1e-2] * 3)


# ---- data in memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "cond", "error", "message"),
    [
        (torch.full((40, 2), math.nan), None, NotFiniteError, "the training data holds 80 NaN"),
        ({**channels(), "shape": torch.full((40, 3), math.inf)}, None, NotFiniteError, "the training data holds"),
        (torch.zeros(0, 2), None, DataError, "no sample"),
        (points(), {"y": torch.zeros(39)}, ShapeError, "'y' needs one row per sample: got 39 for 40 samples"),
        (points(), {"y": torch.zeros(1)}, ShapeError, "'y' needs one row per sample: got 1 for 40 samples"),
        ({**channels(), "shape": torch.zeros(39, 3)}, None, ShapeError, "'x1' needs one row per sample: got 39 for 40"),
    ],
    ids=["NaN", "inf in a channel", "no sample", "39 conditions", "one condition", "39 rows of a channel"],
)
def test_unusable_data_is_refused(data, cond, error, message):
    net = network()
    before = weights(net)
    with pytest.raises(error, match=message):
        train(net, regression(net), data, CONFIG, cond=cond)
    assert identical(weights(net), before)


def test_channels_and_conditions_are_drawn_together():
    net, seen, rows = seeded(TwoChannels), [], torch.arange(40)

    def loss(x1, randomness, beta, cond):
        y, pair = cond["x1"], cond["beta"]  # any name will do
        assert list(x1) == ["place", "shape"]
        assert torch.equal((x1["place"][:, 0] * 40).round().long(), y)
        assert torch.equal((x1["shape"][:, 2] * 40).round().long(), y)
        assert torch.equal(pair["a"], -y)
        seen.append(y)
        return flow_matching_loss(net, PRODUCT, x1, seed=randomness)

    train(net, loss, channels(), CONFIG, cond={"x1": rows, "beta": {"a": -rows}})
    assert torch.cat(seen).unique().tolist() == rows.tolist()
    assert all(len(y) == CONFIG.batch for y in seen)


def test_conditions_and_channels_do_not_change_the_rows_that_are_drawn():
    seen = []

    def loss(x1, randomness, beta, cond):
        rows = x1["shape"] if isinstance(x1, dict) else x1
        seen[-1].append(torch.cat([rows, randomness.normal(rows)], 1))
        return net(rows).square().mean()

    for data, cond in ((channels()["shape"], None), (channels()["shape"], {"y": labels()}), (channels(), None)):
        net = nn.Linear(3, 1)
        seen.append([])
        train(net, loss, data, SHORT, cond=cond)
    first, *others = (torch.cat(run) for run in seen)
    assert all(torch.equal(first, other) for other in others)


# ---- stratified batches ----------------------------------------------------------------------------------------------


def drawn(rows, batch, times):
    source = Rows(torch.zeros(rows, 1), {}, batch, True, CPU)
    generator = torch.Generator().manual_seed(0)
    return torch.stack([source.draw_indices(generator) for _ in range(times)])


@pytest.mark.parametrize(("rows", "batch"), [(40, 8), (40, 40), (41, 8), (17, 16), (1000, 7), (1, 1)], ids=str)
def test_every_slice_is_drawn_from_once_and_every_row_is_equally_likely(rows, batch):
    times = 4000
    index = drawn(rows, batch, times)
    assert index.shape == (times, batch)
    assert index.min() >= 0
    assert index.max() < rows
    low = torch.arange(batch) * rows / batch  # per slice, whose ends may divide a row
    assert bool((index >= low.floor() - 1e-9).all())
    assert bool((index < low + rows / batch + 1e-9).all())
    assert bool((index.diff(dim=1) >= 0).all())
    # The variance of a row's count is at most that of a binomial distribution of the same mean.
    counts = torch.bincount(index.flatten(), minlength=rows).double()
    share = batch / rows
    assert bool(((counts - times * share).abs() <= 6 * (times * share) ** 0.5 + 1e-9).all())
    if rows % batch == 0:  # the counts of a slice are multinomial: χ² with rows − batch degrees of freedom
        chi = ((counts - times * share).square() / (times * share)).sum().item()
        freedom = rows - batch
        assert chi <= freedom + 6 * (2 * max(freedom, 1)) ** 0.5


def test_a_stratified_batch_holds_one_row_of_each_slice_with_its_condition():
    seen, net, rows = [], nn.Linear(1, 1), torch.arange(40)

    def loss(x1, randomness, beta, cond):
        assert torch.equal(x1[:, 0].long(), cond["y"])
        seen.append(cond["y"] // 5)
        return net(x1 / 40).square().mean()

    train(net, loss, rows[:, None].float(), dataclasses.replace(SHORT, stratified=True), cond={"y": rows})
    assert all(batch.tolist() == list(range(8)) for batch in seen)
