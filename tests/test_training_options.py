"""Training of states with channels, and the options of a plan: averages, decay, clipping, slices, rates."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fmwc.data.batches import Rows
from fmwc.errors import MismatchError, NotFiniteError, ShapeError, UsageError
from fmwc.flow import flow_matching_loss
from fmwc.sampling import sample
from fmwc.training import TrainingConfig, fit_noise, train
from tests import cells
from tests.conftest import PRODUCT, TwoChannels
from tests.options import arguments

PLAN = TrainingConfig(30, batch=8, lr=1e-2, decay="cosine", seed=3, save_every=10)


def points(count=40):
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(8)) + 1


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


def objective(net, stop_at=None):
    calls = 0

    def loss(x1, randomness, beta, cond):
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise KeyboardInterrupt
        return (net(x1 + 0.1 * randomness.normal(x1)) - x1.sum(1, keepdim=True)).square().mean()

    return loss


def weights(module):
    return {k: v.detach().clone() for k, v in module.state_dict().items()}


def identical(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture
def spy():
    """What the optimiser saw at every step (rates, gradients), and the weights after it."""
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


# ---- the average ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.5, 0.9, 0.999])
def test_the_average_is_the_one_computed_by_hand(rate, spy):
    net = network()
    average = [p.detach().double() for p in net.parameters()]
    train(net, objective(net), points(), dataclasses.replace(PLAN, average=rate))
    for n, after in enumerate(spy["weights"]):
        kept = min(rate, (1 + n) / (10 + n))
        average = [kept * a + (1 - kept) * w.double() for a, w in zip(average, after, strict=True)]
    assert len(spy["weights"]) == 30
    for found, expected, last in zip(net.parameters(), average, spy["weights"][-1], strict=True):
        torch.testing.assert_close(found.detach().double(), expected, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(found.detach(), last, atol=1e-4)  # which is not where it ended


def test_the_average_does_not_change_what_is_averaged(spy):
    plain, averaged = network(), network()
    train(plain, objective(plain), points(), PLAN)
    train(averaged, objective(averaged), points(), dataclasses.replace(PLAN, average=0.9))
    for a, b in zip(spy["weights"][:30], spy["weights"][30:], strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
    assert not identical(weights(plain), weights(averaged))


@pytest.mark.parametrize("options", [{"average": 0.9}, {"average": 0.9, "weight_decay": 0.1, "clip": 0.05,
                                     "stratified": True, "last_lr": 1e-3}], ids=str)  # fmt: skip
@pytest.mark.parametrize("stop_at", [25, 11, 5], ids=lambda n: f"killed in step {n}")
def test_a_killed_run_resumes_to_the_same_weights_and_average(tmp_path, stop_at, options):
    plan = dataclasses.replace(PLAN, **options)
    undisturbed = network()
    train(undisturbed, objective(undisturbed), points(), plan)
    path = tmp_path / "resume.safetensors"
    killed = network()
    with pytest.raises(KeyboardInterrupt):
        train(killed, objective(killed, stop_at), points(), plan, resume=path)
    assert path.exists() == (stop_at > 10)
    resumed = network(seed=99 if stop_at > 10 else 0)
    train(resumed, objective(resumed), points(), plan, resume=path)
    assert identical(weights(resumed), weights(undisturbed))
    again = network(seed=4)  # a finished run gives the average, too
    assert train(again, objective(again, stop_at=1), points(), plan, resume=path)[-1][0] == plan.iterations
    assert identical(weights(again), weights(undisturbed))


@pytest.mark.parametrize(
    "change",
    [{"average": 0.8}, {"average": 0.0}, {"weight_decay": 0.1}, {"clip": 0.1}, {"last_lr": 1e-4}, {"stratified": True}],
    ids=str,
)
def test_another_option_is_another_plan(tmp_path, change):
    path = tmp_path / "resume.safetensors"
    plan = dataclasses.replace(PLAN, average=0.9)
    net = network()
    with pytest.raises(KeyboardInterrupt):
        train(net, objective(net, 15), points(), plan, resume=path)
    with pytest.raises(MismatchError, match="other settings"):
        train(net, objective(net), points(), dataclasses.replace(plan, **change), resume=path)


# ---- rates, decay, clipping -----------------------------------------------------------------------------------------


def test_a_cosine_goes_from_its_rate_to_the_last(spy):
    plan = dataclasses.replace(PLAN, last_lr=2e-3)
    assert plan.lr_at(0) == pytest.approx(1e-2)
    assert plan.lr_at(15) == pytest.approx((1e-2 + 2e-3) / 2)
    assert plan.lr_at(30) == pytest.approx(2e-3)
    net = network()
    train(net, objective(net), points(), plan)
    expected = [2e-3 + 8e-3 * 0.5 * (1 + math.cos(math.pi * n / 30)) for n in range(30)]
    assert spy["rates"] == pytest.approx(expected)
    assert all(2e-3 < rate <= 1e-2 for rate in spy["rates"])
    constant = dataclasses.replace(plan, decay="constant")
    assert [constant.lr_at(n) for n in (0, 15, 30)] == pytest.approx([1e-2] * 3)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_weights_shrink_where_nothing_pulls_at_them(decay, spy):
    """By 1 − lr·w at every step, and by nothing where there is no decay."""
    net = nn.Linear(2, 1)
    start = net.weight.detach().clone()
    plan = TrainingConfig(20, batch=4, lr=1e-2, decay="cosine", weight_decay=decay)
    train(net, lambda x1, r, beta, cond: 0 * net(x1).sum() + net.bias.square().sum(), points(), plan)
    share = math.prod(1 - plan.lr_at(n) * decay for n in range(20))
    torch.testing.assert_close(net.weight.detach(), start * share)
    assert (share < 0.98) == (decay > 0)
    assert set(spy["kinds"]) == {torch.optim.AdamW if decay else torch.optim.Adam}


@pytest.mark.parametrize("clip", [0.0, 0.25])
def test_gradients_are_bounded_entry_by_entry(clip, spy):
    net = nn.Linear(2, 1)
    pull = torch.tensor([[1e6, -0.1]])
    plan = TrainingConfig(5, batch=4, clip=clip)
    train(net, lambda x1, r, beta, cond: (net.weight * pull).sum() - 3 * net.bias.sum(), points(), plan)
    weight, bias = ([[0.25, -0.1]], [-0.25]) if clip else ([[1e6, -0.1]], [-3.0])
    for gradients in spy["gradients"]:
        torch.testing.assert_close(gradients, [torch.tensor(weight), torch.tensor(bias)])
    assert len(spy["gradients"]) == 5


@pytest.mark.parametrize(
    "change",
    [
        {"last_lr": -1e-4},
        {"last_lr": 2e-2},  # above the first
        {"weight_decay": -1.0},
        {"clip": -0.5},
        {"average": 1.5},
        {"average": -0.1},
        {"average": math.nan},
    ],
    ids=str,
)
def test_options_that_make_no_sense(change):
    with pytest.raises(UsageError, match=f"{next(iter(change))} must lie between 0 and"):
        dataclasses.replace(PLAN, **change)


# ---- slices ---------------------------------------------------------------------------------------------------------


def drawn(rows, batch, times, seed=0):
    source, generator = Rows(torch.zeros(rows, 1), {}, batch, True, torch.device("cpu")), torch.Generator()
    generator.manual_seed(seed)
    return torch.stack([source.draw_indices(generator) for _ in range(times)])


@pytest.mark.parametrize(("rows", "batch"), [(40, 8), (40, 40), (41, 8), (17, 16), (1000, 7), (1, 1)], ids=str)
def test_every_slice_is_drawn_from_once_and_every_row_is_as_likely(rows, batch):
    times = 4000
    index = drawn(rows, batch, times)
    assert index.shape == (times, batch)
    assert index.min() >= 0
    assert index.max() < rows
    # the i-th is of the i-th slice, whose ends may cut a row
    low = torch.arange(batch) * rows / batch
    assert bool((index >= low.floor() - 1e-9).all())
    assert bool((index < low + rows / batch + 1e-9).all())
    assert bool((index.diff(dim=1) >= 0).all())
    # as likely: a count is a sum of draws of mean batch/rows a time, and of no more variance than a binomial's
    counts = torch.bincount(index.flatten(), minlength=rows).double()
    share = batch / rows
    assert bool(((counts - times * share).abs() <= 6 * (times * share) ** 0.5 + 1e-9).all())
    if rows % batch == 0:  # a slice's own draws are then multinomial: Σ (o − e)²/e over rows − batch degrees
        chi = ((counts - times * share).square() / (times * share)).sum().item()
        freedom = rows - batch
        assert chi <= freedom + 6 * (2 * max(freedom, 1)) ** 0.5


def test_slices_are_the_data_in_its_order():
    """With data sorted by size, batches are alike in size."""
    sizes = torch.arange(1, 41).double()
    assert float(sizes[drawn(40, 8, 2000)].sum(1).std()) < 0.25 * float(
        sizes[torch.randint(40, (2000, 8))].sum(1).std()
    )


def test_a_stratified_run_sees_one_of_each_slice_with_its_condition():
    seen, net = [], nn.Linear(1, 1)

    def loss(x1, randomness, beta, cond):
        y = cond["y"]
        assert torch.equal(x1[:, 0].long(), y)
        seen.append(y // 5)
        return net(x1 / 40).square().mean()

    rows = torch.arange(40)
    train(net, loss, rows[:, None].float(), dataclasses.replace(PLAN, stratified=True), cond={"y": rows})
    assert all(batch.tolist() == list(range(8)) for batch in seen)


def test_a_batch_larger_than_the_data_has_no_slices():
    net = network()
    before = weights(net)
    plan = dataclasses.replace(PLAN, stratified=True, batch=41)
    with pytest.raises(UsageError, match="a stratified batch of 41 needs as many samples; --set batch=40"):
        train(net, objective(net), points(), plan)
    assert identical(weights(net), before)
    train(net, objective(net), points(), dataclasses.replace(plan, batch=40))
    train(net, objective(net), points(), dataclasses.replace(plan, stratified=False))  # with replacement, it may be


# ---- states of channels ---------------------------------------------------------------------------------------------


def channels(count=40):
    rows = torch.arange(count).float()
    return {"place": torch.stack([rows / count, rows / count], 1), "shape": rows[:, None].expand(count, 3) / count}


def product_loss(net, stop_at=None):
    calls = 0

    def loss(x1, randomness, beta, cond):
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise KeyboardInterrupt
        return flow_matching_loss(net, PRODUCT, x1, seed=randomness)

    return loss


def two_channels(seed=0):
    torch.manual_seed(seed)
    return TwoChannels()


def test_channels_and_conditions_are_drawn_together():
    net, seen = two_channels(), []
    rows = torch.arange(40)

    def loss(x1, randomness, beta, cond):
        y, pair = cond["y"], cond["pair"]
        assert list(x1) == ["place", "shape"]
        assert torch.equal((x1["place"][:, 0] * 40).round().long(), y)
        assert torch.equal((x1["shape"][:, 2] * 40).round().long(), y)
        assert torch.equal(pair["a"], -y)
        seen.append(y)
        return flow_matching_loss(net, PRODUCT, x1, seed=randomness)

    train(net, loss, channels(), dataclasses.replace(PLAN, iterations=60), cond={"y": rows, "pair": {"a": -rows}})
    assert torch.cat(seen).unique().tolist() == rows.tolist()
    assert all(len(y) == 8 for y in seen)


def test_channels_do_not_move_what_is_drawn():
    """A state of two channels sees the rows that a plain one does."""
    seen = {"plain": [], "channels": []}

    def loss(name, net):
        def keep(x1, randomness, beta, cond):
            seen[name].append(x1 if name == "plain" else x1["shape"])
            return net(seen[name][-1]).square().mean()

        return keep

    for name, data in (("plain", channels()["shape"]), ("channels", channels())):
        net = nn.Linear(3, 1)
        train(net, loss(name, net), data, PLAN)
    assert torch.equal(torch.cat(seen["plain"]), torch.cat(seen["channels"]))


def test_training_of_channels_learns_and_resumes(tmp_path):
    net = two_channels()
    before = sum(flow_matching_loss(net, PRODUCT, channels(), seed=s).item() for s in range(10))
    plan = dataclasses.replace(PLAN, iterations=300, save_every=100, average=0.9)
    train(net, product_loss(net), channels(), plan)
    assert sum(flow_matching_loss(net, PRODUCT, channels(), seed=s).item() for s in range(10)) < 0.9 * before
    path = tmp_path / "resume.safetensors"
    killed, resumed = two_channels(), two_channels(5)
    with pytest.raises(KeyboardInterrupt):
        train(killed, product_loss(killed, 150), channels(), plan, resume=path)
    other = channels()
    other["shape"] = other["shape"] + 1e-3
    with pytest.raises(MismatchError, match="data: "):
        train(resumed, product_loss(resumed), other, plan, resume=path)
    train(resumed, product_loss(resumed), channels(), plan, resume=path)
    assert identical(weights(resumed), weights(net))


def test_channels_of_another_length_or_not_finite_are_refused():
    net, short, wrong = two_channels(), channels(), channels()
    short["shape"] = short["shape"][:39]
    with pytest.raises(ShapeError, match="'x1' needs one row per sample: got 39 for 40 samples"):
        train(net, product_loss(net), short, PLAN)
    wrong["shape"][3, 1] = math.nan
    with pytest.raises(NotFiniteError, match="the training data holds 1 NaN"):
        train(net, product_loss(net), wrong, PLAN)


# ---- crystals -------------------------------------------------------------------------------------------------------


def crystals(count=12):
    x, _, atoms = cells.batch(*(1 + i % cells.WIDTH for i in range(count)), dtype=torch.float32)
    order = atoms.argsort(stable=True)
    return {k: v[order] for k, v in x.items()}, atoms[order]


def test_a_network_of_crystals_trains():
    net, (data, atoms) = cells.small(dtype=torch.float32), crystals()

    def loss(x1, randomness, beta, cond):
        return flow_matching_loss(net, cells.space(), x1, seed=randomness, cond=cond)

    def error():
        return sum(
            flow_matching_loss(net, cells.space(), data, seed=s, cond={"atoms": atoms}).item() for s in range(10)
        )

    before = error()
    plan = TrainingConfig(60, batch=6, lr=3e-3, clip=0.5, weight_decay=5e-3, average=0.9, stratified=True)
    train(net, loss, data, plan, cond={"atoms": atoms})
    assert error() < before
    with pytest.raises(UsageError, match=r"give cond=\{'atoms': \.\.\.\}"):
        train(net, lambda x1, r, b, cond: flow_matching_loss(net, cells.space(), x1, seed=r), data, plan)


def test_the_noise_of_crystals_is_fitted_and_leaves_their_samples_alone():
    made, (data, atoms) = cells.field(torch.float32), crystals()
    before, noise = weights(made.network), weights(made.noise)
    options = {"steps": 3, "confidence": None, "cond": {"atoms": atoms}}
    samples = sample(made, 12, **arguments(**options)).x
    history = fit_noise(made, data, 10, batch=6, beta=1e-2, stratified=True, cond={"atoms": atoms})
    assert identical(weights(made.network), before)
    assert not identical(weights(made.noise), noise)
    after = sample(made, 12, **arguments(**options)).x
    assert all(torch.equal(after[k], samples[k]) for k in samples)
    assert math.isfinite(history[-1][1])
