"""The stacked training of benchmarks/headline.py against the loss, optimiser and sampler of the library."""

import json
import math
from dataclasses import replace

import pytest
import torch

import fmwc
from benchmarks import headline
from benchmarks.headline import (
    FM,
    LAYERS,
    LIBRARY,
    PRINTED,
    SCREENED,
    Batch,
    Cell,
    Models,
    best,
    finals,
    objective,
    reading,
    spread,
    stack,
    summary,
)
from fmwc.checkerboard.recipe import PRESETS, SPACE
from fmwc.errors import MismatchError
from fmwc.flow import elbo_loss, flow_matching_loss
from fmwc.networks import TimeEmbedding
from fmwc.noise import Draw, divergence_from_prior, time_features
from fmwc.randomness import ReplayedRandomness, derive

CPU = torch.device("cpu")
TINY = replace(PRESETS["paper"], points=500, hidden=12, time_features=6, width=5, iterations=8, batch=16)
BETA, SHARE = 0.3, 0.7


def field_of(seed):
    """Return a field whose α depends on its input, unlike at the start of a training."""
    recipe = replace(TINY, seed=seed)
    field = recipe.attach(recipe.network())
    generator = torch.Generator().manual_seed(seed)
    for noisy in field.noise.layers:
        torch.nn.init.normal_(noisy.inference.out.weight, std=0.3, generator=generator)
    return field


@pytest.fixture
def draws():
    """Return x1, t, x0 and ε of two seeds."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(16, 2), (16,), (16, 2), (16, 12), (16, 12), (16, 12), (16, 2)]
    return [[torch.randn(s, generator=generator) if len(s) > 1 else torch.rand(s, generator=generator) for s in shapes]
            for _ in range(2)]  # fmt: skip


def stacked(fields, cells, draws, half=None):
    """Return the losses of stacked models, their gradients by layer, and log ratios. Model i has seed i."""
    layers = stack(fields, CPU)
    for layer in layers:
        for p in layer:
            p.requires_grad_()
    x1, t, x0, *epsilon = (torch.stack(c) for c in zip(*draws[: len(fields)], strict=True))
    shapes = [tuple(layer.weight.shape[1:]) for layer in layers]
    about = reading(cells, range(len(fields)), shapes, CPU)
    batch = Batch(t, x0 + t[..., None] * (x1 - x0), x1 - x0, epsilon)
    embedded = TimeEmbedding(6)(t)
    share = torch.tensor(SHARE)
    loss, ratio = objective(layers, batch, embedded, time_features(t), about, share, TINY.prior_rate, half)
    gradients = torch.autograd.grad(loss.sum(), [p for layer in layers for p in layer])
    return loss, gradients, ratio


def own_gradients(field):
    """Return the gradients of the library in the order of the stack."""
    found = []
    for name, noisy in zip(field.noise.names, field.noise.layers, strict=True):
        for part in (field.network.get_submodule(name), noisy.inference.hidden, noisy.inference.out):
            for p in (part.weight, part.bias):
                found.append(torch.zeros_like(p) if p.grad is None else p.grad)
    return [g.T if g.ndim == 2 else g[None] for g in found]


def test_losses_and_gradients_match_the_library(draws):
    fields = [field_of(0), field_of(1)]
    loss, gradients, _ = stacked(fields, [Cell(beta=BETA)] * 2, draws)
    for i, field in enumerate(fields):
        x1, *rest = draws[i]
        wanted = elbo_loss(field, x1, BETA * SHARE, seed=ReplayedRandomness(rest))
        wanted.backward()
        torch.testing.assert_close(loss[i], wanted, rtol=1e-5, atol=1e-6)
        for mine, own in zip(gradients, own_gradients(field), strict=True):
            torch.testing.assert_close(mine[i], own, rtol=1e-5, atol=1e-6)


def test_plain_flow_matching_matches_the_library(draws):
    fields = [field_of(0), field_of(1)]
    loss, gradients, _ = stacked(fields, [FM, Cell(beta=BETA)], draws)
    x1, *rest = draws[0]
    wanted = flow_matching_loss(fields[0].network, SPACE, x1, seed=ReplayedRandomness(rest))
    wanted.backward()
    torch.testing.assert_close(loss[0], wanted, rtol=1e-5, atol=1e-6)
    for mine, own in zip(gradients, own_gradients(fields[0]), strict=True):
        torch.testing.assert_close(mine[0], own, rtol=1e-5, atol=1e-6)
    assert gradients[2][1].abs().max() > 0  # the inference network of the other model is trained


@pytest.mark.parametrize("variance", ["square", "printed"])
@pytest.mark.parametrize("reduction", ["mean", "channels", "weights"])
@pytest.mark.parametrize("layers", ["all", "out"])
def test_interpretations_against_the_definition(draws, variance, reduction, layers):
    """α² is the ratio of variances of a field whose inference networks return 2 log α. The KL is summed by hand."""
    cell = Cell(variance, reduction, 1.0, BETA, layers)
    field = field_of(0)
    loss, _, ratio = stacked([field], [cell], draws)
    for noisy in field.noise.layers:
        noisy.inference.out.weight.data *= 2
        noisy.inference.out.bias.data *= 2
    x1, t, x0, *epsilon = draws[0]
    noisy_layers = LAYERS[layers]
    given = [e if i in noisy_layers else torch.zeros_like(e) for i, e in enumerate(epsilon)]
    draw = Draw(ReplayedRandomness(given))
    v = field.run(draw, x0 + t[:, None] * (x1 - x0), t)
    total = (v - (x1 - x0)).square().mean()
    for i, log_ratio in enumerate(draw.log_alphas):
        torch.testing.assert_close(ratio[0, i], log_ratio.mean())
        counted = log_ratio if variance == "square" else log_ratio / 2
        each = divergence_from_prior(counted, TINY.prior_rate, 1.0).mean(0)  # per input channel
        outputs = field.network.get_submodule(field.noise.names[i]).out_features
        kl = {"mean": each.mean(), "channels": each.sum(), "weights": each.sum() * outputs}[reduction]
        total = total + BETA * SHARE * kl * (i in noisy_layers)
    torch.testing.assert_close(loss[0], total, rtol=1e-5, atol=1e-5)


def test_factor_rescales_beta(draws):
    one, half = (stacked([field_of(0)], [Cell(factor=f, beta=b)], draws)[1] for f, b in ((1.0, 0.1), (0.5, 0.2)))
    for a, b in zip(one, half, strict=True):
        torch.testing.assert_close(a, b)


def test_bf16_is_close(draws):
    exact, rounded = (stacked([field_of(0)], [Cell(beta=BETA)], draws, half)[0] for half in (None, torch.bfloat16))
    torch.testing.assert_close(rounded, exact, rtol=2e-2, atol=0)
    assert not torch.equal(rounded, exact)


def test_models_do_not_depend_on_each_other():
    alone, others = [Models(TINY, cells, seeds, CPU, False) for cells, seeds in (
        ([LIBRARY], [7]), ([FM, PRINTED, LIBRARY], [3, 7]))]  # fmt: skip
    for _ in range(TINY.iterations):
        alone.step(), others.step()
    for mine, theirs in ((alone.weights, others.weights), (alone.average, others.average)):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a[0], b[5], rtol=1e-5, atol=1e-6)
            assert not torch.equal(b[3], b[5])


def test_adam_and_average_match_torch_and_the_library():
    models = Models(TINY, [LIBRARY, replace(LIBRARY, decay="cosine")], [0], CPU, False)
    references = [[w[i].detach().clone().requires_grad_() for w in models.weights] for i in range(2)]
    optimisers = [torch.optim.Adam(r, lr=TINY.lr) for r in references]
    average = [r.detach().clone() for r in references[0]]
    for step in range(5):
        state = [g.get_state() for g in models.generators]
        batch, (share, lr, _, _) = models.draw(), models.scalars()
        loss, _ = objective(
            models.layers, batch, models.embed(batch.t), time_features(batch.t), models.about, share, 0.3
        )
        gradients = torch.autograd.grad(loss.sum(), models.weights)
        for i, (reference, optimiser) in enumerate(zip(references, optimisers, strict=True)):
            cosine = 0.5 * (1 + math.cos(math.pi * step / TINY.iterations))
            optimiser.param_groups[0]["lr"] = TINY.lr * (cosine if i else 1)
            assert float(lr[i]) == pytest.approx(optimiser.param_groups[0]["lr"])
            for p, g in zip(reference, gradients, strict=True):
                p.grad = g[i]
            optimiser.step()
        for a, w in zip(average, references[0], strict=True):
            a.add_((w.detach() - a) * (1 - min(0.999, (1 + step) / (10 + step))))
        for generator, own in zip(models.generators, state, strict=True):
            generator.set_state(own)
        models.step()
        for i, reference in enumerate(references):
            for mine, own in zip(models.weights, reference, strict=True):
                torch.testing.assert_close(mine[i], own, rtol=1e-5, atol=1e-6)
    for mine, own in zip(models.average, average, strict=True):
        torch.testing.assert_close(mine[0], own, rtol=1e-5, atol=1e-6)


def test_samples_match_fmwc_sample():
    models = Models(TINY, [LIBRARY], [0, 1], CPU, False)
    for i, seed in enumerate((0, 1)):
        recipe = replace(TINY, seed=seed)
        own = fmwc.sample(
            recipe.attach(recipe.network()), 40, steps=6, seed=derive(seed, "evaluation") % 2**31, confidence=None
        )
        torch.testing.assert_close(models.ends(40, 6)[i], own.x, rtol=1e-5, atol=1e-5)
    drawn = models.ends(40, 6, drawn=True)
    assert not torch.equal(drawn, models.ends(40, 6))
    assert torch.equal(drawn, models.ends(40, 6, drawn=True))


def test_differences_are_paired_by_seed():
    kinds = ("raw", "averaged", "raw, drawn", "averaged, drawn", "late", "selected")
    runs = [
        {
            **vars(cell),
            "cell": cell.name,
            "seed": s,
            "iterations": 9,
            "misplacement": dict.fromkeys(kinds, s / 100 + add),
        }
        for cell, add in ((FM, 0.02), (LIBRARY, 0.01))
        for s in (3, 4, 5)
    ]
    fm, own = summary(runs)
    assert own["raw"]["fm_minus_own"]["mean"] == pytest.approx(0.01)
    assert own["raw"]["fm_minus_own"]["interval"] == [0.01, 0.01]  # seeds have different results, but equal differences
    assert fm["raw"]["interval"][1] - fm["raw"]["mean"] == pytest.approx(4.302653 * 0.01 / math.sqrt(3), abs=1e-5)
    assert spread([0.1])["interval"] is None


def test_final_rounds_take_the_best_of_the_screening():
    means = {cell.name: 1 + i for i, cell in enumerate(reversed(SCREENED))}
    rows = [{"cell": name, "late": {"mean": mean}} for name, mean in means.items()]
    rounds = finals(rows)
    assert best(rows, means) == list(means)
    assert rounds["final"] == [FM, LIBRARY, PRINTED]
    assert [cell.layers for cell in rounds["chosen"]] == ["all", "all", "out"]
    assert [cell.variance for cell in rounds["chosen"]] == ["printed", "square", "printed"]
    assert {cell.decay for cell in rounds["cosine"]} == {"cosine"}
    assert len({cell.name for cell in SCREENED}) == len(SCREENED)


def test_second_call_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(headline, "SCREENED", (FM, Cell(beta=1e-2), Cell(beta=1e-1), Cell(layers="out")))
    monkeypatch.setattr(headline, "KINDS", ("raw", "averaged", "late"))
    given = ["--tiny", "--device", "cpu", "--out", str(tmp_path)]
    headline.main(given)
    first = json.loads((tmp_path / "headline.json").read_text())
    assert list(first["rounds"]) == ["screening 1", "final", "chosen", "cosine", "tf32"]
    assert all(len(row["seeds"]) == 2 and row["raw"]["interval"] for row in first["final"])
    cut = {**first, "rounds": {**first["rounds"], "tf32": {**first["rounds"]["tf32"], "complete": False, "runs": []}}}
    (tmp_path / "headline.json").write_text(json.dumps(cut))
    monkeypatch.setattr(headline, "train", lambda *a, own=headline.train: trained.append(a[0]) or own(*a))
    trained = []
    headline.main(given)
    second = json.loads((tmp_path / "headline.json").read_text())
    assert len(trained) == 1  # only the missing part,
    assert second["final"] == first["final"]  # with the same results
    with pytest.raises(MismatchError, match="other settings"):
        headline.main(given[1:])
