"""`fit_confidence`: its tests, its choice, and the reference in the field and its checkpoint."""

import pytest
import torch
from torch import nn

import fmwc
from fmwc.calibration import Disturbed, _near, auroc
from fmwc.checks import Nearest, embedded
from fmwc.errors import UsageError
from fmwc.flow import euclidean
from fmwc.sampling import SamplingConfig, stream
from fmwc.sampling.trajectory import combined
from fmwc.uses.best_of import best_of
from tests import cells
from tests.options import arguments

from .test_checks import MEANS, Gaussians


class Points(nn.Module):
    """The exact velocity of a flow to given points."""

    def __init__(self, data: torch.Tensor) -> None:
        super().__init__()
        self.data = data
        self.layer = nn.Linear(2, 2)  # carries the noise

    def forward(self, x, t):
        t = t[:, None].clamp_max(0.98)
        far = (x[:, None] - t[:, None] * self.data[None]).square().sum(2) / (2 * (1 - t) ** 2)
        mean = torch.softmax(-far, 1) @ self.data
        return (mean - x) / (1 - t) + 0.0 * self.layer(x)


def circle(count: int, seed: int = 0) -> torch.Tensor:
    angle = 6.2832 * torch.rand(count, generator=torch.Generator().manual_seed(seed))
    return torch.stack([angle.cos(), angle.sin()], 1)


def test_auroc_is_the_share_of_ordered_pairs():
    high, low = torch.tensor([3.0, 2.0, 2.0]), torch.tensor([1.0, 2.0])
    pairs = [(a > b) + 0.5 * (a == b) for a in high for b in low]
    assert auroc(high, low) == pytest.approx(float(sum(pairs)) / 6)


def test_scores_are_combined_by_ranks():
    levels = torch.linspace(0, 1, 101)
    a, b = torch.tensor([0.1, 0.5, 0.9, 2.0]), torch.tensor([0.9, 0.5, 0.1, 0.5])
    alone = combined([(a, 1.0, levels)])
    assert bool((alone.diff() > 0).all())
    assert float(alone[1]) == pytest.approx(0.0, abs=1e-6)
    inside = a[:3]  # ranks do not change with the scale of a score
    torch.testing.assert_close(combined([(inside**3, 1.0, levels**3)]), alone[:3], atol=0.05, rtol=0.05)
    beyond = combined([(torch.tensor([1.0, 2.0, 3.0, 10.0]), 1.0, levels)])
    assert bool((beyond.diff() > 0).all())  # the order is kept beyond the reference
    added = combined([(a, 1.0, levels), (b, 1.0, levels)])
    assert float(added[0]) == pytest.approx(0.0, abs=1e-4)


def test_dense_training_points_are_chosen(tmp_path):
    data = circle(2_000)
    field = fmwc.attach(Points(data[:400]), space=(2,))
    reference = fmwc.fit_confidence(field, data, pilot=200, steps=20)
    assert "nearest" in reference.score
    assert not reference.withheld
    assert reference.reason
    one = fmwc.sample(field, 1, steps=20)
    many = fmwc.sample(field, 50, steps=20)
    assert float(one.confidence[0]) == pytest.approx(float(many.confidence[0]), abs=2e-3)
    off = fmwc.check(field, torch.tensor([[3.0, 3.0]]), evidence=reference.checks["nearest"], conventions=False)
    assert float(off.confidence[0]) == 0.0
    fmwc.save(field, tmp_path / "x")
    again = fmwc.load(tmp_path / "x", Points(data[:400]))
    assert again.reference.score == reference.score
    assert again.reference.reason == reference.reason
    assert again.reference.checks == reference.checks
    torch.testing.assert_close(fmwc.sample(again, 50, steps=20).confidence, many.confidence)
    parts = list(stream(again, 50, steps=20, config=SamplingConfig(batch=20)))
    torch.testing.assert_close(torch.cat([p.confidence for p in parts]), many.confidence)


@pytest.mark.parametrize(
    ("noticed", "by_echo", "usable"),
    [(0.7, 0.9, True), (0.59, 0.6, True), (0.55, 0.6, False), (0.6, 0.85, False), (0.43, 0.4, False)],
)
def test_nearest_points_must_detect_disturbances(noticed, by_echo, usable):
    data = circle(2_000)
    candidate = _near(euclidean((2,)), Nearest(data[:1_500]), data, noticed, by_echo)
    assert candidate.use is usable
    assert f"{noticed:.2f} (the echo: {by_echo:.2f})" in candidate.why


def test_a_distance_that_decreases_with_noise_is_detected():
    """Small vectors are near each other, so shrinking a vector moves it towards the data."""
    generator = torch.Generator().manual_seed(0)
    radius = 0.1 + 2 * torch.rand(3_000, 1, generator=generator)
    data = radius * torch.randn(3_000, 12, generator=generator)
    field = fmwc.attach(Straight(12), space=(12,))
    near, rows = Nearest(data[:2_000]), data[2_000:2_400]
    noise = 0.1 * torch.randn(rows.shape, generator=generator)
    assert Disturbed(field, field.space, rows, rows + 10 * noise, {}, 0).detects(near) > 0.6
    assert Disturbed(field, field.space, rows, 0.5 * rows + noise, {}, 0).detects(near) < 0.4


class Straight(nn.Module):
    """A zero velocity; distances do not depend on it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layer = nn.Linear(dim, dim)

    def forward(self, x, t):
        return 0.0 * self.layer(x)


class Asked(Gaussians):
    def __init__(self) -> None:
        super().__init__(MEANS * 0.35, 0.3)
        self.layer = nn.Linear(2, 2)

    def forward(self, x, t, y):
        return super().forward(x, t, y) + 0.0 * self.layer(x)


def test_contest_is_a_candidate_without_data():
    field = fmwc.attach(Asked(), space=(2,))
    reference = fmwc.fit_confidence(field, cond={"y": torch.arange(4)}, pilot=400)
    contest = next(row for row in reference.candidates if row["score"].startswith("contest"))
    assert "wrong classes" in contest["why"]
    run = fmwc.sample(field, 20, cond={"y": torch.arange(20) % 4})
    assert run.withheld == "" or reference.withheld


def test_confidence_is_withheld_if_no_evidence_is_usable():
    class Blind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x, t):
            return torch.zeros_like(x) + 0.0 * self.layer(x)

    field = fmwc.attach(Blind(), space=(2,))
    reference = fmwc.fit_confidence(field, pilot=400, steps=10)
    assert "no evidence is better than chance" in reference.withheld
    run = fmwc.sample(field, 10, steps=10)
    assert "no evidence" in run.withheld
    assert run.confidence is None
    assert run.rank.shape == (10,)
    assert "no evidence" in fmwc.sample(field, 20, steps=20, check=False).withheld
    with pytest.raises(UsageError, match="evidence"):
        best_of(field, 4, 2, steps=20)


def test_labels_can_prefer_another_score():
    data = circle(2_000)
    field = fmwc.attach(Points(data[:400]), space=(2,))
    plain = fmwc.fit_confidence(field, data, pilot=300, steps=20)

    def failed(x, cond):
        return x[:, 0] > 0.5  # unrelated to anything that a flow could learn

    labelled = fmwc.fit_confidence(field, data, failed, judged=100, pilot=300, steps=20)
    assert all("auroc" in row for row in labelled.candidates)
    assert "100 labels" in labelled.reason
    none = fmwc.fit_confidence(field, data, lambda x, cond: torch.zeros(len(x), dtype=torch.bool), pilot=300, steps=20)
    assert none.score == plain.score


class Named(Points):
    """A network that ignores the id of each sample."""

    def forward(self, x, t, id, y=None):
        return super().forward(x, t)


def piloted(monkeypatch, field, *given, **options):
    """Return the reference and the number of samples that its pilot drew."""
    from fmwc import calibration

    drawn = []

    def spy(field, count, **how):
        drawn.append(count)
        return fmwc.sample(field, count, **arguments(**how))

    monkeypatch.setattr(calibration, "sample", spy)
    return fmwc.fit_confidence(field, *given, steps=5, conventions=False, **options), drawn


@pytest.mark.parametrize("with_data", [True, False])
def test_ids_are_not_classes_and_do_not_enlarge_the_pilot(monkeypatch, with_data):
    data = circle(3_000)
    field = fmwc.attach(Named(data[:50]), space=(2,))
    given = [data] if with_data else []
    reference, drawn = piloted(monkeypatch, field, *given, cond={"id": torch.arange(3_000)}, pilot=60)
    assert drawn == [60]
    why = next(row["why"] for row in reference.candidates if row["score"] == "contest")
    assert "'id' has 3,000 values" in why
    assert "not used as a class" in why
    assert reference.classes == {}
    assert "contest" not in reference.checks
    assert "nearest" not in reference.checks  # distances ignore the id
    cond = {"id": torch.tensor([7, 7, 8, -1, 9_999])}  # the ids do not matter
    run = fmwc.sample(field, 5, steps=5, cond=cond)
    assert bool(run.withheld) == bool(reference.withheld)


# ---- features --------------------------------------------------------------------------------------------------------


def test_nearest_points_by_features(tmp_path):
    data = circle(2_000)
    wide = torch.cat([data, 5 * torch.randn(2_000, 6, generator=torch.Generator().manual_seed(1))], 1)

    class Wide(Points):
        def forward(self, x, t):
            return torch.cat([super().forward(x[:, :2], t), 0.0 * x[:, 2:]], 1)

    calls = []

    def features(x):
        calls.append(len(x))
        return x[:, :2]

    field = fmwc.attach(Wide(data[:400]), space=(8,))
    plain = fmwc.fit_confidence(field, wide, pilot=100, steps=20, conventions=False)
    assert plain.score != "nearest"  # the other numbers are noise
    reference = fmwc.fit_confidence(field, wide, features=features, pilot=100, steps=20, conventions=False)
    assert reference.score == "nearest"
    assert reference.checks["nearest"].points.shape[1] == 2
    assert calls
    run = fmwc.sample(field, 20, steps=20)
    assert not run.withheld
    fmwc.save(field, tmp_path / "x")
    again = fmwc.load(tmp_path / "x", Wide(data[:400]))
    blind = fmwc.sample(again, 20, steps=20)
    torch.testing.assert_close(blind.x, run.x)
    assert "a checkpoint cannot store the function" in blind.withheld
    assert "\n" not in blind.withheld
    with pytest.raises(UsageError, match="function"):
        fmwc.check(again, wide[:4], evidence=again.reference.checks["nearest"], conventions=False)
    assert "cannot store the function" in fmwc.check(again, wide[:4], conventions=False).withheld
    fmwc.save(again, tmp_path / "y")  # missing evidence remains missing
    assert fmwc.load(tmp_path / "y", Wide(data[:400])).reference.checks["nearest"].missing


def test_crystals_need_features_for_nearest_points():
    x, _, atoms = cells.batch(*[1 + i % 5 for i in range(60)])
    field = cells.field()
    options = {"cond": {"atoms": atoms}, "pilot": 16, "steps": 4, "conventions": False}
    names = {row["score"] for row in fmwc.fit_confidence(field, x, **options).candidates}
    assert "nearest" not in names
    found = fmwc.fit_confidence(field, x, features=lambda state: state["lattice"], **options)
    assert "nearest" in {row["score"] for row in found.candidates}
    with pytest.raises(UsageError, match="features"):
        embedded(field.space, x)
