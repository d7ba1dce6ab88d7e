"""Confidence that means nothing is withheld (issue 30, section 2 and "Weights" and "one class" of section 4)."""

import copy
import math

import pytest
import torch

import fmwc
from fmwc.calibration import auroc
from fmwc.errors import UsageError
from fmwc.flow import Channel, Euclidean, Space, flow_matching_loss
from fmwc.networks import MLP
from fmwc.sampling import noise

STEPS = 5


def circle(count, seed=0):
    angle = 2 * math.pi * torch.rand(count, generator=torch.Generator().manual_seed(seed))
    return torch.stack([angle.cos(), angle.sin()], 1)


class ToCircle(torch.nn.Module):
    """The velocity to the nearest point of the circle, with weights that can change."""

    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.eye_(self.gain.weight)

    def forward(self, x, t, y=None):
        end = x / x.norm(dim=1, keepdim=True).clamp_min(1e-6)
        return self.gain((end - x) / (1 - t[:, None]).clamp_min(0.05))


def fitted(data=None, network=None, **options):
    field = fmwc.attach(network or ToCircle(), space=options.pop("space", (2,)))
    fmwc.fit_confidence(
        field, circle(2_000) if data is None else data, steps=STEPS, pilot=100, conventions=False, **options
    )
    assert field.reference.withheld == ""
    return field


# ---- stale references ------------------------------------------------------------------------------------------------


def optimiser_step(field):
    optimiser = torch.optim.SGD(field.network.parameters(), 0.1)
    flow_matching_loss(field.network, 2, circle(10), seed=0).backward()
    optimiser.step()


def refitted_noise(field):
    fmwc.fit_noise(field, circle(200), 1, conventions=False, confidence=False)


CHANGES = {
    "an optimiser step": optimiser_step,
    "noise fitted again": refitted_noise,
    "other weights loaded": lambda field: field.network.load_state_dict({"gain.weight": 2 * torch.eye(2)}),
    "the last layer set to zero": lambda field: torch.nn.init.zeros_(field.network.gain.weight),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_withhold_confidence_also_after_save_and_load(change, tmp_path):
    field = fitted()
    assert fmwc.sample(field, 20, steps=STEPS).withheld == ""
    CHANGES[change](field)
    assert "changed" in fmwc.sample(field, 20, steps=STEPS).withheld
    assert "changed" in fmwc.check(field, circle(20), conventions=False).withheld
    again = fmwc.load(fmwc.save(field, tmp_path / "field"), network=ToCircle())
    assert "changed" in fmwc.sample(again, 20, steps=STEPS).withheld
    fmwc.fit_confidence(field, circle(2_000), steps=STEPS, pilot=100, conventions=False)
    assert fmwc.sample(field, 20, steps=STEPS).withheld == ""


def test_unchanged_weights_keep_confidence_through_copies_files_and_precision(tmp_path):
    field = fitted()
    expected = fmwc.sample(field, 20, steps=STEPS).confidence
    again = fmwc.load(fmwc.save(field, tmp_path / "field"), network=ToCircle())
    for one in (again, copy.deepcopy(field), fmwc.load(fmwc.save(again, tmp_path / "again"), network=ToCircle())):
        assert torch.equal(fmwc.sample(one, 20, steps=STEPS).confidence, expected)
    assert fmwc.sample(copy.deepcopy(field).double(), 20, steps=STEPS).withheld == ""


def test_rounding_weights_on_saving_withholds_confidence(tmp_path):
    net = MLP(dim=2, hidden=16, depth=2)
    field = fmwc.attach(net, space=(2,))
    field.reference = fitted().reference._replace(weights=field.checksum())
    again = fmwc.load(fmwc.save(field, tmp_path / "small", quantise=True))
    assert "changed" in fmwc.sample(again, 20, steps=STEPS).withheld
    again.reference = field.reference._replace(weights=again.checksum())  # of weights that are rounded already
    again = fmwc.load(fmwc.save(again, tmp_path / "smaller", quantise=True))
    assert fmwc.sample(again, 20, steps=STEPS).withheld == ""


def test_shipped_weights_with_an_empty_last_layer():
    field = fmwc.load("checkerboard")
    assert fmwc.sample(field, 50).withheld == ""
    with torch.no_grad():
        field.network.out.weight.zero_()
    assert "changed" in fmwc.sample(field, 50).withheld


@pytest.mark.parametrize("shape", [(4,), (64, 64), (2048, 1024)])
def test_the_checksum_notices_changes_that_keep_regular_sums(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    others = [2 * weight, weight / 2, -weight, weight.flip(0), weight.roll(1, 0), weight * (1 + 1e-6), 0 * weight]
    found = {fmwc.identity.checksum({"w": w}) for w in (weight, *others)}
    assert len(found) == 1 + len(others)


# ---- the source ------------------------------------------------------------------------------------------------------


def eight(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    angle = torch.randint(8, (count,), generator=generator) * math.pi / 4
    return 4 * torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(count, 2, generator=generator)


class FromEight(Euclidean):
    def noise(self, randomness, like):
        angle = (8 * randomness.uniform(like)[:, 0]).floor() * math.pi / 4
        return 4 * torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * randomness.normal(like)


EIGHT = Space({"x": Channel((2,), FromEight(), "own")})


@pytest.mark.parametrize("pairs", [eight(2_000), lambda x1, randomness: eight(len(x1))], ids=["rows", "function"])
def test_pairs_from_another_source_than_the_space_are_refused(pairs):
    field = fmwc.attach(ToCircle(), space=(2,))
    with pytest.raises(UsageError, match="own"):
        fmwc.fit_noise(field, circle(2_000), 1, pairs=pairs, conventions=False)
    field = fmwc.attach(ToCircle(), space=EIGHT)
    fmwc.fit_noise(field, circle(2_000), 1, pairs=pairs, conventions=False, confidence=False)
    field = fitted(space=EIGHT)
    run = fmwc.sample(field, 500, steps=STEPS)
    assert run.x0.norm(dim=1).min() > 3  # the run and the pilot start from the same source
    assert abs(float(run.confidence.mean()) - 0.5) < 0.1


def shuffled(x1, randomness):
    x0 = randomness.normal(x1)
    return x0[x0[:, 0].argsort()][x1[:, 0].argsort().argsort()]


@pytest.mark.parametrize(
    "pairs", [torch.randn(2_000, 2), torch.randn(40, 2), shuffled], ids=["rows", "few", "function"]
)
def test_coupled_noise_of_the_space_is_accepted(pairs):
    field = fmwc.attach(ToCircle(), space=(2,))
    data = circle(2_000 if callable(pairs) else len(pairs))
    fmwc.fit_noise(field, data, 1, pairs=pairs, conventions=False, confidence=False)


def test_given_starts_withhold_confidence_unless_they_are_the_noise_of_the_seed():
    field = fitted()
    expected = fmwc.sample(field, 20, steps=STEPS, seed=3)
    for x0 in (5 * torch.randn(20, 2), torch.randn(20, 2), expected.x0[:1]):
        assert "x0" in fmwc.sample(field, x0=x0, steps=STEPS).withheld
    for x0 in (expected.x0, noise(field.space, 20, 3)):
        assert torch.equal(fmwc.sample(field, x0=x0, steps=STEPS, seed=3).confidence, expected.confidence)


def test_another_space_withholds_confidence(tmp_path):
    field = fitted()
    run = fmwc.sample(field, 20, steps=STEPS, config=fmwc.SamplingConfig(space=EIGHT))
    assert "space" in run.withheld
    field.space = EIGHT
    fmwc.save(field, tmp_path)
    assert "space" in fmwc.load(tmp_path, network=field.network, space=EIGHT).reference.withheld


class Between(torch.nn.Module):
    """The exact velocity from the eight Gaussians to a checkerboard, as a mean over data."""

    def __init__(self, source, data):
        super().__init__()
        self.scale = torch.nn.Linear(1, 1)
        self.source, self.data = source, data

    def forward(self, x, t):
        t = t[:, None, None].clamp_max(0.98)
        x0 = (x[:, None] - t * self.data) / (1 - t)
        density = torch.logsumexp(-(torch.cdist(x0, self.source) ** 2) / (2 * 0.3**2), 2)
        weight = density.softmax(1)[..., None]
        return (weight * (self.data - x0)).sum(1) + 0 * self.scale.weight.sum()


def test_the_convention_check_does_not_blame_the_scale_of_data_for_another_source():
    data, angle = fmwc.checkerboard.sample(400, seed=0), torch.arange(8) * math.pi / 4
    net = Between(4 * torch.stack([angle.cos(), angle.sin()], 1), data)
    source = net.source[torch.arange(400) % 8] + 0.3 * torch.randn(400, 2)
    found = fmwc.conventions.examine_conventions(net, EIGHT, data, pairs=source)
    assert found.message == ""
    blamed = fmwc.conventions.examine_conventions(net, Space({"x": Channel((2,))}), data)
    assert "source" in blamed.message


# ---- conditions ------------------------------------------------------------------------------------------------------


class AtAngle(torch.nn.Module):
    """The exact velocity to points of the circle near the angle `y`."""

    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.eye_(self.gain.weight)

    def forward(self, x, t, y):
        end = torch.stack([y.cos(), y.sin()], 1)
        return self.gain((end - x) / (1 - t[:, None]).clamp_min(0.05))


def at_angle(angle, seed=0):
    noisy = angle + 0.02 * torch.randn(len(angle), generator=torch.Generator().manual_seed(seed))
    return torch.stack([noisy.cos(), noisy.sin()], 1)


def test_nearest_points_are_no_evidence_where_a_condition_is_continuous():
    y = 2 * math.pi * torch.rand(2_000, generator=torch.Generator().manual_seed(0))
    field = fmwc.attach(AtAngle(), space=(2,))
    reference = fmwc.fit_confidence(field, at_angle(y), cond={"y": y}, steps=STEPS, pilot=100, conventions=False)
    assert "nearest" not in reference.checks
    right, wrong = (
        fmwc.check(field, at_angle(y[:300], 1), cond={"y": given}, conventions=False)
        for given in (y[:300], y[:300] + math.pi)
    )
    assert right.confidence is None or auroc(wrong.score, right.score) > 0.95


def test_conditions_of_several_classes_and_those_with_few_rows_are_not_ignored():
    data, generator = circle(2_000), torch.Generator().manual_seed(0)
    y, z = (torch.randint(high, (2_000,), generator=generator) for high in (2, 3))
    rare = (torch.arange(2_000) < 5).long()

    class Several(ToCircle):
        def forward(self, x, t, **cond):
            return super().forward(x, t)

    for cond in ({"y": y, "z": z}, {"rare": rare}):
        field = fmwc.attach(Several(), space=(2,))
        reference = fmwc.fit_confidence(field, data, cond=cond, steps=STEPS, pilot=100, conventions=False)
        assert "nearest" not in reference.checks


def test_with_one_class_in_the_data_confidence_for_others_is_withheld(tmp_path):
    field = fitted(cond={"y": torch.full((2_000,), 3)})
    again = fmwc.load(fmwc.save(field, tmp_path / "field"), network=ToCircle())
    for one in (field, again):
        assert fmwc.sample(one, 10, steps=STEPS, cond={"y": torch.full((10,), 3)}).withheld == ""
        assert "y" in fmwc.sample(one, 10, steps=STEPS, cond={"y": torch.full((10,), 7)}).withheld
        found = fmwc.check(one, circle(10), cond={"y": torch.full((10,), 7)}, conventions=False)
        assert found.confidence is None


# ---- evidence below chance -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noticed", "by_echo", "usable"),
    [(0.43, 0.51, False), (0.49, 0.4, False), (0.55, 0.6, False), (0.6, 0.6, True), (0.9, 0.95, True)],
)
def test_evidence_at_chance_or_behind_the_echo_is_not_accepted(noticed, by_echo, usable, monkeypatch):
    from fmwc import calibration

    monkeypatch.setattr(calibration.Disturbed, "detects", lambda self, check: noticed)
    monkeypatch.setattr(calibration, "_best_echo", lambda check, tried: (check, by_echo))
    field = fmwc.attach(ToCircle(), space=(2,))
    reference = fmwc.fit_confidence(field, circle(2_000), steps=STEPS, pilot=100, conventions=False)
    assert (reference.score == "nearest") is usable


# ---- pilots ----------------------------------------------------------------------------------------------------------


def test_the_pilot_draws_random_conditions_of_sorted_data(monkeypatch):
    from fmwc import calibration

    given, seen = [], []
    draw = calibration.sample
    check = calibration.check_conventions
    monkeypatch.setattr(
        calibration, "sample", lambda *a, **options: given.append(options["cond"]) or draw(*a, **options)
    )
    monkeypatch.setattr(
        calibration,
        "check_conventions",
        lambda field, space, x1, cond, **o: seen.append(cond) or check(field, space, x1, cond, refuse=False, **o),
    )
    size = torch.arange(20_000) / 20_000  # data that are sorted by size
    field = fmwc.attach(ToCircle(), space=(2,))
    fmwc.fit_confidence(field, circle(20_000), cond={"y": size}, steps=STEPS, pilot=100)
    assert 0.3 < float(given[0]["y"].mean()) < 0.7
    assert 0.3 < float(seen[0]["y"].mean()) < 0.7
    rows = {seed: calibration.pilot_conditions({"y": size}, "", 100, seed)["y"] for seed in (1, 2)}
    assert torch.equal(rows[1], calibration.pilot_conditions({"y": size}, "", 100, 1)["y"])
    assert not torch.equal(rows[1], rows[2])


def test_the_pilot_draws_random_rows_of_each_class():
    from fmwc.calibration import pilot_conditions

    label, size = torch.arange(1_000) // 500, torch.arange(1_000) % 500 / 500
    drawn = pilot_conditions({"label": label, "size": size}, "label", 100, seed=0)
    assert drawn["label"].bincount().tolist() == [50, 50]
    assert 0.3 < float(drawn["size"].mean()) < 0.7
