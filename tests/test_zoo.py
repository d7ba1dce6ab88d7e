"""The zoo: failure rules accept data and refuse noise, paths agree with velocities, and a run ends with a table."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

import fmwc
from benchmarks.zoo import digits, flows, scores
from benchmarks.zoo.flows import FLOWS, HALVES, TRAINING
from benchmarks.zoo.networks import Denoiser, Equivariant, Guided, Recurrent, ResidualMLP
from benchmarks.zoo.runner import one
from benchmarks.zoo.shapes import (
    BONDS,
    CORNERS,
    Sphere,
    broken,
    broken_river,
    emblems,
    hunts,
    irregular,
    missed,
    nearer_another,
    no_hunt,
    no_octahedron,
    not_right,
    off_circle,
    off_line,
    overlapping,
    rivers,
    same_neighbours,
    slipped,
    unbalanced,
    wrong_count,
    wrong_emblem,
    wrong_notes,
    wrong_tones,
)
from benchmarks.zoo.table import auroc, collect, summary, tables
from fmwc.randomness import Stream

CPU = torch.device("cpu")
DRAWN = [name for name in FLOWS if not name.startswith("mnist")]
SHARED = Path(__file__).parents[2] / "shared" / "data" / "mnist"
MNIST = os.environ.get("FMWC_DATA") or (str(SHARED) if SHARED.exists() else "")


@pytest.fixture
def few(monkeypatch):
    """Flows that train for a few steps, on few data."""
    monkeypatch.setattr(flows, "TRAINING", {name: how._replace(steps=20, batch=64) for name, how in TRAINING.items()})


def _judge(made, least):
    noise = made.space.noise(1000, Stream(torch.Generator().manual_seed(0)))
    assert float(made.failed(made.data, made.cond).float().mean()) <= 1 - least
    assert float(made.failed(made.held_out, made.held_out_cond).float().mean()) <= 1 - least
    assert float(made.failed(noise, made.conditions(1000)).float().mean()) > 0.5


def test_halves_are_equal_and_every_flow_has_training_settings():
    halves = [flow.half for flow in FLOWS.values()]
    assert halves.count("choose") == halves.count("report") >= 7
    assert halves.count("fresh") >= 5
    assert halves.count("fresh2") >= 5
    assert halves.count("fresh3") >= 5
    assert set(halves) == set(HALVES)
    assert TRAINING.keys() == FLOWS.keys()


@pytest.mark.parametrize("name", DRAWN)
def test_rule_accepts_data_and_the_field_reads(name):
    made = FLOWS[name].untrained(0, CPU)
    _judge(made, 0.97)
    made.space.check(made.data)
    field, cond = fmwc.attach(made.network, space=made.space), made.conditions(3)
    found = field.moments(made.data[:3], 0.5, seed=0, cond=cond)
    assert float(found.var.min()) >= 0
    assert float(found.var.max()) > 0
    again = FLOWS[name].untrained(0, CPU)
    assert torch.equal(made.data, again.data)
    assert all(torch.equal(a, b) for a, b in zip(made.network.parameters(), again.network.parameters(), strict=True))


@pytest.mark.skipif(not MNIST, reason="MNIST is not here; set FMWC_DATA")
def test_mnist_rule_accepts_data(monkeypatch, tmp_path):
    monkeypatch.setenv("FMWC_DATA", MNIST)
    monkeypatch.setenv(digits.JUDGES, str(tmp_path))
    whole = digits._split
    monkeypatch.setattr(digits, "_split", lambda split: tuple(c[:3000] for c in whole(split)))
    monkeypatch.setattr(digits, "JUDGE", digits.TrainingConfig(120, 128, 3e-3, "cosine"))
    made = FLOWS["mnist-inverted"].untrained(0, CPU)
    _judge(made, 0.8)  # a judge trained on 3,000 images for 120 steps, which is less accurate than that of the zoo
    assert float(made.data.median()) == 1.0  # light background
    again = FLOWS["mnist-inverted"].untrained(1, CPU)  # its judge is read from the file
    assert again.notes == made.notes
    assert not torch.equal(again.data, made.data)


def test_labels_are_replaced_in_the_stated_share():
    y = torch.arange(20_000) % 10
    wrong = digits._replaced(y, torch.Generator().manual_seed(0)) != y
    assert float(wrong.float().mean()) == pytest.approx(digits.WRONG, abs=0.01)


def test_velocity_of_the_variance_preserving_path():
    """If the denoiser predicts the true data, its velocity is that of the path, which is the slope of the path."""
    network = Denoiser(ResidualMLP(2, 16, 1)).double()
    x0, x1 = torch.randn(2, 50, 2, dtype=torch.float64)
    t = torch.rand(50, dtype=torch.float64)
    x_t, u_t = network.path(x0, x1, t)
    slope = (network.path(x0, x1, t + 1e-6)[0] - network.path(x0, x1, t - 1e-6)[0]) / 2e-6
    assert torch.allclose(slope, u_t, atol=1e-6)
    network.network.forward = lambda x, t: x1
    assert torch.allclose(network(x_t, t), u_t, atol=1e-9)
    assert torch.allclose(network.path(x0, x1, 0 * t)[0], x0)
    assert float((network.path(x0, x1, 0 * t + 1)[0] - x1).norm(dim=1).max()) < 0.2


def test_guidance_combines_two_velocities():
    network = Guided(ResidualMLP(2, 16, 1, classes=4), none=3, weight=2.0)
    x, t, y = torch.randn(5, 2), torch.rand(5), torch.arange(5) % 3
    with_, without = network.network(x, t, y), network.network(x, t, torch.full((5,), 3))
    assert torch.allclose(network(x, t, y), 2 * with_ - without, atol=1e-5)


def test_optimal_pairs_are_a_cheaper_permutation():
    x1 = torch.randn(64, 2, generator=torch.Generator().manual_seed(1))
    x0 = flows.optimal_pairs(x1, Stream(torch.Generator().manual_seed(0)))
    drawn = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(x0.sort(0).values, drawn.sort(0).values)
    assert (x1 - x0).square().sum() < 0.5 * (x1 - drawn).square().sum()


def test_noise_of_a_coupled_flow_is_fitted(few):
    made = FLOWS["triangles-ot"].train(0, CPU)
    field = fmwc.attach(made.network, space=made.space)
    fmwc.fit_noise(field, made.data, 2, batch=32, seed=0, confidence=False, **scores._coupling(made))
    assert all(bool(p.isfinite().all()) for p in field.parameters())


def test_rules_of_first_flows():
    s = torch.arange(64) / 64
    tone = lambda f: (2 * torch.pi * f * s).sin()  # noqa: E731
    waves = torch.stack([tone(2) + tone(7), tone(2) + tone(11), tone(2) + tone(7) + tone(20)])[:, None]
    assert wrong_tones(waves).tolist() == [False, True, True]
    half = torch.stack([torch.cat([tone(4)[:32], tone(10)[32:]]), torch.cat([tone(10)[:32], tone(4)[32:]])])[:, None]
    assert wrong_notes(half, torch.tensor([0, 1])).tolist() == [False, False]
    assert wrong_notes(half, torch.tensor([1, 0])).tolist() == [True, True]
    angle = torch.arange(8) * torch.pi / 4
    circle = 3 + torch.stack([angle.cos(), angle.sin()], 1)
    dented = circle.clone()
    dented[0, 0] -= 0.5
    assert off_circle(torch.stack([circle, dented])).tolist() == [False, True]
    ring = torch.stack([(angle * 4 / 3)[:6].cos(), (angle * 4 / 3)[:6].sin()], 1)
    longer = ring.clone()
    longer[0] *= 1.5
    assert broken(torch.stack([ring, longer, ring]), torch.tensor([0, 0, 2])).tolist() == [False, True, True]
    assert torch.equal(BONDS, BONDS.transpose(1, 2))


def test_rules_of_fresh_flows():
    line = torch.linspace(-1, 1, 6)[:, None] * torch.tensor([0.6, 0.8])
    bent = line.clone()
    bent[0, 0] += 0.6
    assert off_line(torch.stack([3 + line, bent])).tolist() == [False, True]
    right = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.5]])
    short, slanted = right * torch.tensor([0.5, 1.0]), right + torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.5, 0.0]])
    assert not_right(torch.stack([right, short, slanted, right[[0, 2, 1]]])).tolist() == [False, True, True, True]
    track = torch.zeros(3, 1, 32)
    track[:, 0, [0, 10, 11]] = 1.5
    track[1, 0, 20] = 0.5  # too low to count
    track[2, 0, 31] = 1.5
    assert wrong_count(track, torch.tensor([1, 1, 1])).tolist() == [False, False, True]
    centres = torch.tensor([[[0.0, 0.0], [4.0, 0.0]], [[1.0, 0.0], [9.0, 0.0]]])
    points = torch.tensor([[4.0, 0.0], [0.6, 0.0], [0.9, 0.0], [0.9, 0.0]])
    assert nearer_another(points, torch.tensor([0, 0, 0, 1]), centres, 0.4).tolist() == [False, False, True, False]


def test_rules_of_second_fresh_flows():
    bent = CORNERS.clone()
    bent[0] = Sphere().projx(torch.tensor([1.0, 0.4, 0.0]))
    assert no_octahedron(torch.stack([CORNERS[torch.arange(5, -1, -1)], bent])).tolist() == [False, True]
    words = ["([])[()]", "([)][()]", "(((((())", "()()()()", "))))(((("]
    letters = torch.tensor([["([)]".index(letter) for letter in word] for word in words])
    assert unbalanced(torch.nn.functional.one_hot(letters, 4)).tolist() == [False, True, True, False, True]
    series = hunts(2, torch.Generator().manual_seed(0))
    series[1, 5] += 0.5
    assert no_hunt(series).tolist() == [False, True]
    x, y = emblems(50, torch.Generator().manual_seed(0))
    assert not wrong_emblem(x, y).any()
    assert wrong_emblem(x, (y + 1) % 9).all()  # another colour, or another figure
    assert wrong_emblem(x, (y + 3) % 9).all()  # another figure
    assert wrong_emblem(torch.zeros_like(x), y).all()  # no figure


def test_third_fresh_rules_catch_the_failure_they_name():
    board = (torch.arange(4)[:, None] + torch.arange(4)) % 2
    wrong = board.clone()
    wrong[3, 3] = board[3, 2]
    fields = torch.nn.functional.one_hot(torch.stack([board, wrong]).flatten(1), 4)
    assert same_neighbours(fields).tolist() == [False, True]
    river = rivers(1, torch.Generator().manual_seed(0)).repeat(4, 1, 1, 1)
    river[1, 0, :, 6] = -1.0  # a dry column
    river[2, 0, :, 6] = 1.0  # a lake
    river[3, 0, :, -1] = -1.0  # an end before the edge
    assert broken_river(river).tolist() == [False, True, True, True]
    angle = torch.tensor([[0.5, 1.0], [4.0, 8.0], [0.5, 2.0]])
    wheels = torch.stack([angle.cos(), angle.sin()], -1)
    assert slipped(wheels, torch.tensor([1, 1, 1])).tolist() == [False, False, True]
    pulse = torch.zeros(6, 1, 64)
    for row, places in enumerate(([5, 17, 29, 41, 53], [5, 17, 25, 41, 53], [5, 17, 25, 37, 49, 61])):
        pulse[row, 0, places] = 2.0
    for row, places in enumerate(([5, 17, 41, 53], [5, 17, 33, 41, 53], [5, 17, 29, 41]), 3):
        pulse[row, 0, places] = 2.0
    # regular; one early; a shift for good; one missing; one late; the last one missing
    assert irregular(pulse).tolist() == [False, False, True, True, True, True]
    rods = torch.tensor([[0.0, 0.0, 0.25, 0.0], [0.0, 0.0, 0.25, 0.5]])  # to (3, 1) and (1, 1)
    goal = torch.zeros(2, dtype=torch.long)
    assert missed(rods, goal).tolist() == [True, True]
    assert missed(rods, goal, tolerance=1.1).tolist() == [False, False]
    discs = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]).repeat(3, 1, 1)
    discs[1, 0, 0] = 0.6
    discs[2, 1, 0] = 1.4
    assert overlapping(discs).tolist() == [False, True, True]


def test_geodesics_of_the_sphere_reach_their_end_at_constant_speed():
    sphere, generator = Sphere(), torch.Generator().manual_seed(0)
    x, y = (sphere.projx(torch.randn(50, 3, generator=generator, dtype=torch.float64)) for _ in range(2))
    u = sphere.logmap(x, y)
    assert torch.allclose(sphere.expmap(x, u), y)
    assert torch.allclose(u.norm(dim=1), (x * y).sum(1).acos())
    assert torch.allclose((x * u).sum(1), torch.zeros(50, dtype=torch.float64), atol=1e-12)


def test_recurrent_network_reads_every_place():
    """A place of the output depends on all places before and after it, for an even or an odd number of LSTM layers."""
    for depth in (1, 2, 3):
        network = Recurrent(2, 8, depth)
        x = torch.randn(1, 6, 2, requires_grad=True)
        network(x, torch.tensor([0.5]))[0, 2].sum().backward()
        seen = x.grad[0].abs().sum(1) > 0
        assert seen[2:].all()  # the first layer reads backwards
        assert seen.all() == (depth > 1)


def test_equivariant_network_rotates_and_permutes_with_its_input():
    network, generator = Equivariant(8, 2).double(), torch.Generator().manual_seed(0)
    x = Sphere().projx(torch.randn(3, 6, 3, generator=generator, dtype=torch.float64))
    turn = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64)).Q
    order, t = torch.randperm(6, generator=generator), torch.rand(3, dtype=torch.float64)
    v = network(x, t)
    assert torch.allclose(network(x @ turn, t), v @ turn)
    assert torch.allclose(network(x[:, order], t), v[:, order])
    assert torch.allclose((v * x).sum(-1), torch.zeros(3, 6, dtype=torch.float64), atol=1e-12)


def test_summary_has_every_half():
    names = {half: next(name for name, flow in FLOWS.items() if flow.half == half) for half in HALVES}
    numbers = {metric: {"mean": 0.8, "std": None} for metric in ("auroc", "auprc", "lift", "cost")}
    rest = {"about": "", "rule": "", "failed": {"mean": 0.1, "std": None}}
    found = {name: {"half": half, **rest, "scores": {"echo": numbers}} for half, name in names.items()}
    assert {half: part["echo"]["worst_flow"] for half, part in summary(found).items()} == names
    assert all(f"## Half `{half}`" in tables(found) for half in HALVES)


def test_table_compares_the_default_with_the_best_score():
    def flow(**auroc):
        known = {"auprc": {"mean": 0.5, "std": None}, "lift": {"mean": 2.0, "std": None}}
        scores = {name: {"auroc": {"mean": value, "std": None}, **known} for name, value in auroc.items()}
        return {"half": "choose", "about": "", "rule": "", "failed": {"mean": 0.1, "std": None}, "scores": scores}

    text = tables({"moons": flow(echo=0.8, contest=0.9, default=0.85), "rings": flow(echo=0.5)})
    assert "| moons | choose | 0.85 | contest 0.90 | -0.05 |" in text
    assert "| rings | choose | withheld | echo 0.50 |" in text


def test_auroc_matches_scikit_learn():
    generator = np.random.default_rng(0)
    score, failed = generator.integers(0, 20, 300).astype(float), generator.random(300) < 0.2
    assert auroc(score, failed) == pytest.approx(roc_auc_score(failed, score))


def test_flow_is_trained_scored_and_summarised(few, monkeypatch, tmp_path):
    monkeypatch.setattr(scores, "NOISE_STEPS", 5)
    monkeypatch.setattr(scores, "STEPS", 10)
    assert "trained" in one("torus", 0, "cpu", tmp_path, "", 60)
    with np.load(tmp_path / "torus-0.npz") as file:
        first = dict(file)
    assert first["failed"].shape == first["score.integrated"].shape == first["score.dispersion"].shape == (60,)
    assert (
        first["cost.integrated"] == 10 * 2 * 2
    )  # ten readings, two coordinates, and a backward pass counts as two evaluations
    assert "done already" in one("torus", 0, "cpu", tmp_path, "", 60)
    assert "scored" in one("torus", 0, "cpu", tmp_path, "scores", 60)  # from the saved weights
    with np.load(tmp_path / "torus-0.npz") as file:
        assert all(np.array_equal(first[key], file[key]) for key in file.files)
    found = collect(tmp_path)
    expected = auroc(first["score.integrated"], first["failed"])
    assert found["torus"]["scores"]["integrated"]["auroc"]["mean"] == pytest.approx(expected)
    assert summary(found)["choose"]["integrated"]["worst_flow"] == "torus"
    assert "| torus | choose |" in tables(found)
