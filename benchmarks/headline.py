"""The paper's headline on the Checkerboard: does joint training place more samples than plain flow matching?

    python -m benchmarks.headline --device cuda --minutes 9 --out results/checkerboard/headline

The paper prints 5.9 % misplaced samples for plain flow matching (FM) and 4.6 % for joint training, and its text leaves
open how the noise and its KL are meant (:class:`Cell`). A screening trains every reading for a part of the iterations
on validation seeds. The final rounds train FM, the library's reading, the formulas as printed and the best readings of
the screening for all iterations on ten fresh seeds. Raw and averaged weights come from the same training.

Models are trained side by side: their weights are stacked, and every product is one batched product. Each seed has a
random stream of its own, which all cells share: cells differ in nothing but the reading, and differences are paired.
The results are written after every round. A second call with the same --out skips the finished rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from scipy.stats import t as student
from torch import Tensor

from fmwc.errors import MismatchError, pick
from fmwc.field import Field
from fmwc.files import write_bytes, write_json, write_text
from fmwc.metrics.points import misplaced
from fmwc.modes import tensor_float
from fmwc.networks import TimeEmbedding
from fmwc.noise import LOG_ALPHA_RANGE, cyclic, time_features
from fmwc.provenance import Clock, pick_device, provenance
from fmwc.randomness import derive
from fmwc.recipes.checkerboard import PRESETS, SPACE, Checkerboard
from fmwc.report.page import png, styled
from fmwc.sampling import noise
from fmwc.training import DECAYS

PAPER = {"fm": 0.059, "joint": 0.046}
VALIDATION, FRESH = (100, 101, 102), tuple(range(10))
BETAS = (1e-4, 1e-3, 1e-2, 1e-1)
AVERAGE = 0.999  # of the weights
LATE = (0.8, 0.85, 0.9, 0.95, 1.0)  # shares of the iterations after which raw weights are evaluated
SCREENING = (2_000, 5_000)  # iterations of the screening, at least and at most
SCREENING_SHARE = 0.2  # of the time
ABREAST = 30  # models of a round of the screening: as many as in a final round, so that one compiled step serves both
SLOTS = 10  # seeds that a step has room for, likewise
EVALUATING, COMPILING = 20.0, 45.0  # seconds allowed for the evaluation of a round, and for a step of a new shape
WARM = 3  # steps of a round that are not timed: the first is compiled
HALF = {"bf16": torch.bfloat16, "tf32": None}

# How the output s of an inference network is read: the variance of a weight is exp(a s) θ², and the KL is computed as
# if it were exp(b s) θ². By name: (a, b).
VARIANCES = {
    "alpha": (1, 1),  # α is the ratio of variances, as in eqn:kl_analytical and eq:layerprop; the library's reading
    "square": (2, 2),  # α² is, as in eq:vad, and in the KL too
    "printed": (2, 1),  # each formula as printed: α² θ² is the variance (eq:vad), and eqn:kl_analytical has α
}
# How many times the mean over channels is counted in the KL of a layer, by its numbers of inputs and outputs.
REDUCTIONS: dict[str, Callable[[int, int], int]] = {
    "mean": lambda inputs, outputs: 1,  # the library's reading
    "channels": lambda inputs, outputs: inputs,  # a sum over the channels that have an α of their own
    "weights": lambda inputs, outputs: inputs * outputs,  # a sum over all weights: the KL of the posterior
}
LAYERS = {"none": (), "all": (0, 1, 2, 3), "out": (3,)}  # the noisy layers


@dataclass(frozen=True)
class Cell:
    """One reading of the paper's text. The defaults are the library's.

    Arguments:
        variance: A name of `VARIANCES`.
        reduction: A name of `REDUCTIONS`.
        factor: The leading factor of the KL. Only its product with β matters: 1 at β is ½ at 2 β.
        beta: The weight of the KL.
        layers: A name of `LAYERS`; `none` is plain flow matching.
        decay: The schedule of the learning rate; the paper's is constant.
        precision: Of the products: a name of `HALF`. The library trains in TF32.
    """

    variance: str = "alpha"
    reduction: str = "mean"
    factor: float = 0.5
    beta: float = 1e-3
    layers: str = "all"
    decay: str = "constant"
    precision: str = "bf16"

    def __post_init__(self) -> None:
        for table, name in ((VARIANCES, "variance"), (REDUCTIONS, "reduction"), (LAYERS, "layers"), (DECAYS, "decay")):
            pick(table, getattr(self, name), name)
        pick(HALF, self.precision, "precision")

    @property
    def name(self) -> str:
        own = f"{self.variance}, KL {self.factor:g} × {self.reduction}, β {self.beta:g}"
        parts = {"none": "FM", "out": f"output only: {own}"}.get(self.layers, own)
        return ", ".join(
            [parts, *(v for v, usual in ((self.decay, "constant"), (self.precision, "bf16")) if v != usual)]
        )


FM = Cell(layers="none")
LIBRARY = Cell()
PRINTED = Cell("printed", "channels", 1.0)
SCREENED = (
    FM,
    *(Cell(v, r, beta=b) for v in VARIANCES for r in ("mean", "channels") for b in BETAS),
    *(Cell(v, "weights") for v in VARIANCES),
    Cell(layers="out"),
    replace(PRINTED, layers="out"),
)


class Layer(NamedTuple):
    """The stacked weights of one layer and its inference network, transposed: `(S, inputs, outputs)`."""

    weight: Tensor
    bias: Tensor
    hidden_weight: Tensor
    hidden_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor


class Reading(NamedTuple):
    """The readings of S models as tensors, and which of the seeds each model has."""

    which: Tensor  # (S,)
    ratio: Tensor  # (S, 1, 1): the power of exp(s) that is the ratio of variances
    counted: Tensor  # (S, 1, 1): the power that the KL takes for it
    noisy: Tensor  # (S, L): 1 where the layer is noisy
    weight: Tensor  # (S, L): of the mean of the KL's bracket: β × factor × count


class Batch(NamedTuple):
    """What a step draws for each of N seeds."""

    t: Tensor  # (N, B)
    x_t: Tensor  # (N, B, 2)
    u_t: Tensor  # (N, B, 2)
    epsilon: list[Tensor]  # (N, B, outputs) for each layer


def stack(fields: Sequence[Field], device: torch.device) -> list[Layer]:
    """Stack the weights of fields."""
    found = []
    for number, name in enumerate(fields[0].noise.names):
        rows = []
        for field in fields:
            layer, net = field.network.get_submodule(name), field.noise.layers[number].inference
            rows.append([p for part in (layer, net.hidden, net.out) for p in (part.weight.T, part.bias[None])])
        found.append(Layer(*(torch.stack(c).detach().to(device).contiguous() for c in zip(*rows, strict=True))))
    return found


def reading(cells: Sequence[Cell], which: Sequence[int], shapes: Sequence[tuple[int, int]], device: Any) -> Reading:
    """Return the readings of models as tensors, given the inputs and outputs of each layer."""

    def column(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float32, device=device)[:, None, None]

    noisy = [[float(i in LAYERS[cell.layers]) for i in range(len(shapes))] for cell in cells]
    weight = [[cell.beta * cell.factor * REDUCTIONS[cell.reduction](*shape) for shape in shapes] for cell in cells]
    return Reading(
        torch.tensor(which, device=device),
        column(VARIANCES[cell.variance][0] for cell in cells),
        column(VARIANCES[cell.variance][1] for cell in cells),
        torch.tensor(noisy, device=device),
        torch.tensor(weight, device=device) * torch.tensor(noisy, device=device),
    )


def product(h: Tensor, weight: Tensor, half: torch.dtype | None) -> Tensor:
    """h · weight, of operands rounded to `half`, if it is given."""
    return torch.bmm(h, weight) if half is None else torch.bmm(h.to(half), weight.to(half)).float()


def velocity(
    layers: Sequence[Layer],
    x: Tensor,  # (S, B, 2)
    embedded: Tensor,  # (N, B, F)
    features: Tensor,  # (N, B, 16)
    about: Reading,
    epsilon: Sequence[Tensor] | None = None,
    half: torch.dtype | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return the velocities of S models, and log α of each layer if weights are drawn (eqn:local-reparam)."""
    log_alphas = []
    for number, layer in enumerate(layers):
        own = half if number else None  # the first layer sees coordinates, which are not rounded
        h = torch.cat([c if own is None else c.to(own) for c in (x, embedded[about.which])], -1)
        y = product(h, layer.weight, own) + layer.bias
        if epsilon is not None:
            seen = torch.cat([h, features[about.which].to(h.dtype)], -1)
            hidden = F.silu(product(seen, layer.hidden_weight, half) + layer.hidden_bias)
            log_alpha = (product(hidden, layer.out_weight, half) + layer.out_bias).clamp(*LOG_ALPHA_RANGE)
            var = product((about.ratio * log_alpha).exp() * h.float().square(), layer.weight.square(), half)
            std = var.clamp_min(torch.finfo(torch.float32).tiny).sqrt()
            y = y + about.noisy[:, number, None, None] * std * epsilon[number][about.which]
            log_alphas.append(log_alpha)
        x = F.silu(y) if number < len(layers) - 1 else y
    return x, log_alphas


def objective(
    layers: Sequence[Layer],
    batch: Batch,
    embedded: Tensor,
    features: Tensor,
    about: Reading,
    share: Tensor,
    prior_rate: float,
    half: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each model (`fmwc.flow.elbo` for the library's reading), `(S,)`, and the mean of the log of
    the ratio of variances in each layer, `(S, L)`."""
    r = prior_rate / (1 - prior_rate)
    v, log_alphas = velocity(layers, batch.x_t[about.which], embedded, features, about, batch.epsilon, half)
    loss = (v - batch.u_t[about.which]).square().mean((1, 2))
    for number, log_alpha in enumerate(log_alphas):
        counted = about.counted * log_alpha
        bracket = (counted.exp() + 1) / r - 1 + math.log(r) - counted
        loss = loss + share * about.weight[:, number] * bracket.mean((1, 2))
    return loss, torch.stack([(about.ratio * a.detach()).mean((1, 2)) for a in log_alphas], 1)


@torch.no_grad()
def update(
    weights: list[Tensor],
    gradients: Sequence[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    average: list[Tensor],
    lr: Tensor,  # (S, 1, 1)
    corrections: Tensor,  # 1 − β₁ⁿ, 1 − β₂ⁿ
    rate: Tensor,
) -> None:
    """Adam with a learning rate per model, and the moving average of the weights."""
    for w, g, m, v, a in zip(weights, gradients, first, second, average, strict=True):
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.999).add_(g * g, alpha=0.001)
        w.sub_(lr / corrections[0] * m / (v.sqrt() / corrections[1].sqrt() + 1e-8))
        a.add_((w - a) * rate)


class Models:
    """S models that train side by side.

    Arguments:
        recipe: The sizes, the data and the length of the training.
        cells: The readings.
        seeds: Every cell is trained at each of these.
        compiled: Whether a step is compiled.
    """

    def __init__(
        self, recipe: Checkerboard, cells: Sequence[Cell], seeds: Sequence[int], device: torch.device, compiled: bool
    ) -> None:
        self.recipe, self.cells, self.seeds, self.device, self.done = recipe, cells, seeds, device, 0
        self.rate = math.nan  # seconds per step and model, once trained
        (precision,) = {cell.precision for cell in cells}
        self.half = HALF[precision] if device.type == "cuda" else None
        fields = [(own := replace(recipe, method="joint", seed=s)).attach(own.network()) for s in seeds]
        self.each = [cell for cell in cells for _ in seeds]
        self.layers = [Layer(*(p.repeat(len(cells), 1, 1) for p in layer)) for layer in stack(fields, device)]
        shapes = [(layer.weight.shape[1], layer.weight.shape[2]) for layer in self.layers]
        self.about = reading(self.each, [i for _ in cells for i in range(len(seeds))], shapes, device)
        self.weights = [p.requires_grad_() for layer in self.layers for p in layer]
        self.first, self.second = ([torch.zeros_like(p) for p in self.weights] for _ in range(2))
        self.average = [p.detach().clone() for p in self.weights]
        self.embed = TimeEmbedding(recipe.time_features).to(device)
        self.data = recipe.rows()[0].to(device)
        self.generators = [torch.Generator(device).manual_seed(derive(s, "headline")) for s in seeds]
        rows = (max(len(seeds), SLOTS), recipe.batch)
        self.t, self.x0, self.x1 = (torch.zeros(*rows, *more, device=device) for more in ((), (2,), (2,)))
        self.epsilon = [torch.zeros(*rows, outputs, device=device) for _, outputs in shapes]
        self.decaying = torch.tensor([cell.decay != "constant" for cell in self.each], device=device)[:, None, None]
        self.log_ratio = torch.zeros(len(self.each), len(shapes))
        self.objective, self.update = (
            (torch.compile(f, dynamic=False) for f in (objective, update)) if compiled else (objective, update)
        )

    def draw(self) -> Batch:
        """Draw what a step needs, for each seed from its own generator."""
        for i, generator in enumerate(self.generators):
            rows = torch.randint(len(self.data), (self.recipe.batch,), generator=generator, device=self.device)
            self.x1[i] = self.data[rows]
            self.t[i].uniform_(generator=generator)
            for tensor in (self.x0, *self.epsilon):
                tensor[i].normal_(generator=generator)
        x_t = self.x0 + self.t[..., None] * (self.x1 - self.x0)
        return Batch(self.t, x_t, self.x1 - self.x0, self.epsilon)

    def scalars(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the share of β, the learning rates, Adam's corrections and the rate of the average at this step."""
        plan, n = self.recipe.plan, self.done
        share = cyclic(n, plan.iterations, plan.cycles, plan.warmup)
        constant, cosine = (plan.lr * DECAYS[name](n / plan.iterations) for name in ("constant", "cosine"))
        rate = 1 - min(AVERAGE, (1 + n) / (10 + n))
        numbers = torch.tensor([share, constant, cosine, 1 - 0.9 ** (n + 1), 1 - 0.999 ** (n + 1), rate])
        numbers = numbers.to(self.device, non_blocking=True)
        return numbers[0], torch.where(self.decaying, numbers[2], numbers[1]), numbers[3:5], numbers[5]

    def step(self) -> Tensor:
        """Take one step; return the loss of each model."""
        batch, (share, lr, corrections, rate) = self.draw(), self.scalars()
        embedded, features = self.embed(batch.t), time_features(batch.t)
        with tensor_float(self.device.type == "cuda"):  # as the library trains
            loss, self.log_ratio = self.objective(
                self.layers, batch, embedded, features, self.about, share, self.recipe.prior_rate, self.half
            )
            gradients = torch.autograd.grad(loss.sum(), self.weights)
        self.update(self.weights, gradients, self.first, self.second, self.average, lr, corrections, rate)
        self.done += 1
        return loss.detach()

    @torch.no_grad()
    def ends(self, count: int, steps: int, averaged: bool = False, drawn: bool = False) -> Tensor:  # (S, count, 2)
        """Samples of every model from the noise of its seed, in full precision.

        Arguments:
            averaged: With the averaged weights.
            drawn: With one draw of the weights per step (the stochastic decoder), in place of the mean weights.
        """
        source = iter(self.average if averaged else self.weights)
        layers = [Layer(*(next(source) for _ in layer)) for layer in self.layers]
        fresh = [derive(seed, "evaluation") % 2**31 for seed in self.seeds]  # as in python -m experiments reproduce
        x = torch.stack([noise(SPACE, count, seed, self.device) for seed in fresh])[self.about.which]
        generators = [torch.Generator(self.device).manual_seed(derive(seed, "weights")) for seed in fresh]
        shape, epsilon = (len(self.seeds), count), None
        for k in range(steps):
            t = torch.full(shape, k / steps, device=self.device)
            if drawn:
                epsilon = [torch.empty(*shape, e.shape[2], device=self.device) for e in self.epsilon]
                for tensor in epsilon:
                    for i, generator in enumerate(generators):
                        tensor[i].normal_(generator=generator)
            x = x + velocity(layers, x, self.embed(t), time_features(t), self.about, epsilon)[0] / steps
        return x


def shares(ends: Tensor) -> list[list[float]]:
    """The share of misplaced samples of each model, in the first and in the second half of its samples."""
    bad = [misplaced(own) for own in ends]
    return [[float(half.mean()) for half in np.array_split(own, 2)] for own in bad]


def train(models: Models, count: int, steps: int, until: float, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Train to the end of the plan, or until the clock says so; return one record per model."""
    total, begin = models.recipe.iterations, time.monotonic()
    late: list[list[list[float]]] = []
    started, evaluated = begin, 0.0
    while models.done < total and time.monotonic() < until:
        loss = models.step()
        if models.done == WARM:
            float(loss.sum())  # waits for the device
            started = time.monotonic()
        if models.done % 500 == 0 or models.done == total:
            mean = float(loss.mean())
            say(f"{models.done} of {total} steps, {time.monotonic() - begin:.0f} s, mean loss {mean:.4f}")
        if models.done in {round(share * total) for share in LATE}:
            float(loss.sum())
            evaluated -= time.monotonic()
            late.append(shares(models.ends(count, steps)))
            evaluated += time.monotonic()
    models.rate = (time.monotonic() - started - evaluated) / max(models.done - WARM, 1) / len(models.each)
    if models.done < total:
        late.append(shares(models.ends(count, steps)))
    averaged, drawn = shares(models.ends(count, steps, True)), shares(models.ends(count, steps, drawn=True))
    averaged_drawn = shares(models.ends(count, steps, True, True))
    ratio = models.log_ratio.exp().tolist()
    return [
        {
            "cell": cell.name,
            **asdict(cell),
            "seed": models.seeds[i % len(models.seeds)],
            "iterations": models.done,
            "misplacement": {
                "raw": float(np.mean(late[-1][i])),
                "averaged": float(np.mean(averaged[i])),
                "raw, drawn": float(np.mean(drawn[i])),
                "averaged, drawn": float(np.mean(averaged_drawn[i])),
                "late": float(np.mean([snapshot[i] for snapshot in late])),
                # The paper selects checkpoints by validation: chosen on one half of the samples, read on the other.
                "selected": min((snapshot[i] for snapshot in late), key=lambda halves: halves[0])[1],
            },
            "snapshots": [float(np.mean(snapshot[i])) for snapshot in late],
            "variance_ratio": [round(v, 5) for v in ratio[i]],
        }
        for i, cell in enumerate(models.each)
    ]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation and 95 % t-interval.

    >>> spread([0.05, 0.06, 0.07])["interval"]
    [0.03516, 0.08484]
    """
    mean, std = float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    half = float(student.ppf(0.975, len(values) - 1)) * std / math.sqrt(len(values)) if len(values) > 1 else math.nan
    interval = [round(mean - half, 5), round(mean + half, 5)] if len(values) > 1 else None
    return {"count": len(values), "mean": mean, "std": std if len(values) > 1 else None, "interval": interval}


KINDS = ("raw", "averaged", "raw, drawn", "averaged, drawn", "late", "selected")


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each cell: the misplacement of each kind, and FM's minus its own, paired by seed."""
    found = []
    for name in dict.fromkeys(run["cell"] for run in runs):
        own = {run["seed"]: run for run in runs if run["cell"] == name}
        one = next(iter(own.values()))
        plain = replace(FM, decay=one["decay"], precision=one["precision"]).name
        fm = {run["seed"]: run for run in runs if run["cell"] == plain}
        row: dict[str, Any] = {"cell": name, "iterations": one["iterations"], "seeds": sorted(own)}
        for kind in KINDS:
            row[kind] = spread([run["misplacement"][kind] for run in own.values()])
            if common := sorted(own.keys() & fm.keys()):
                base = kind.removesuffix(", drawn")
                gains = [fm[s]["misplacement"][base] - own[s]["misplacement"][kind] for s in common]
                row[kind]["fm_minus_own"] = spread(gains)
        found.append(row)
    return found


def best(rows: Sequence[dict[str, Any]], names: Iterable[str]) -> list[str]:
    """Cells in order of the mean misplacement of late raw weights, the least first."""
    means = {row["cell"]: row["late"]["mean"] for row in rows}
    return sorted((name for name in names if name in means), key=means.__getitem__)


def finals(screening: Sequence[dict[str, Any]]) -> dict[str, list[Cell]]:
    """The final rounds, the most important first, given the screening's summary."""
    known = {cell.name: cell for cell in SCREENED}
    order = [known[name] for name in best(screening, known)]
    multi = [cell for cell in order if cell.layers == "all" and cell != LIBRARY]
    out = next(cell for cell in order if cell.layers == "out")
    main = [FM, LIBRARY, PRINTED]
    return {
        "final": main,
        "chosen": [*multi[:2], out],
        "cosine": [replace(cell, decay="cosine") for cell in (FM, LIBRARY, multi[0])],
        "tf32": [replace(cell, precision="tf32") for cell in main],
    }


def percent(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    text = f"{100 * row['mean']:.2f}"
    return text if row["interval"] is None else text + " [{:.2f}, {:.2f}]".format(*(100 * v for v in row["interval"]))


def tables(result: dict[str, Any]) -> str:
    """Markdown: one table for each stage."""
    about = result["provenance"]
    lines = [
        f"Misplaced samples in percent: {about['samples']:,} samples, {about['steps']} Euler steps; mean over seeds",
        "and 95 % t-interval. *Averaged*: EMA of the weights at rate 0.999. *Drawn*: one draw of the weights per",
        "step. *Late*: mean over the raw weights after 80, 85, 90, 95 and 100 % of the iterations. *Selected*: the",
        "best of these on half of the samples, read on the other half. *Gain*: FM's raw minus the cell's raw (or",
        "averaged) misplacement, paired by seed, in points.",
        f"Paper: FM {PAPER['fm']:.1%}, joint {PAPER['joint']:.1%}. {about['device']}, commit {about['commit']}.",
    ]
    for stage in ("final", "screening"):
        rows = result[stage]
        if not rows:
            continue
        ordered = rows if stage == "final" else sorted(rows, key=lambda row: row["late"]["mean"])
        head = ["reading", "seeds", "iterations", *KINDS, "gain", "gain, averaged"]
        lines += ["", f"## {stage.capitalize()}", "", f"| {' | '.join(head)} |", f"|---{'|---:' * (len(head) - 1)}|"]
        for row in ordered:
            gains = [percent(row[kind].get("fm_minus_own")) for kind in ("raw", "averaged")]
            parts = [row["cell"], len(row["seeds"]), row["iterations"], *(percent(row[k]) for k in KINDS), *gains]
            lines.append(f"| {' | '.join(map(str, parts))} |")
    return "\n".join(lines) + "\n"


@styled
def picture(result: dict[str, Any]) -> Figure:
    """Misplacement of each cell with its interval; the line is FM of the same stage."""
    stages = [stage for stage in ("final", "screening") if result[stage]]
    figure = Figure(figsize=(12, 1.5 + 0.27 * max(len(result[s]) for s in stages)))
    for axes, stage in zip(np.atleast_1d(figure.subplots(1, len(stages), squeeze=False)[0]), stages, strict=True):
        rows = sorted(result[stage], key=lambda row: -row["late"]["mean"])
        places = np.arange(len(rows))
        kinds = (("raw", "#d1495b", 0.16), ("averaged", "#00798c", -0.16))
        for kind, colour, shift in kinds:
            means = [100 * row[kind]["mean"] for row in rows]
            halves = [
                100 * (row[kind]["interval"][1] - row[kind]["mean"]) if row[kind]["interval"] else 0 for row in rows
            ]
            axes.errorbar(
                means, places + shift, xerr=halves, fmt="o", ms=4, lw=1.2, color=colour, label=f"{kind} weights"
            )
            for row in rows:
                if row["cell"] == FM.name:
                    axes.axvline(100 * row[kind]["mean"], color=colour, lw=1, ls=":")
        for name, value in PAPER.items():
            axes.axvline(100 * value, color="#8a8f99", lw=0.8)
            axes.text(100 * value, -0.4, f"paper, {name}", rotation=90, va="bottom", ha="right", size=7)
        axes.set_yticks(places, [row["cell"] for row in rows], size=7)
        counts = ", ".join(sorted({str(len(row["seeds"])) for row in rows}))
        steps = ", ".join(sorted({f"{row['iterations']:,}" for row in rows}))
        axes.set(xlabel="misplaced samples, %", title=f"{stage}: {counts} seeds, {steps} iterations", xscale="log")
        ticks = [t for t in (2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50) if axes.get_xlim()[0] <= t <= axes.get_xlim()[1]]
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.minorticks_off()
    figure.axes[0].legend(loc="upper right")
    return figure


def write(out: Path, rounds: dict[str, Any], made_with: dict[str, Any], clock: Clock, spent: float) -> None:
    """Write the results of the rounds that there are."""
    runs = {
        stage: [run for name, own in rounds.items() if name.startswith("screening") == first for run in own["runs"]]
        for stage, first in (("screening", True), ("final", False))
    }
    about = provenance(
        clock.device, spent + clock.seconds, seeds={"screening": VALIDATION, "final": FRESH}, **made_with
    )
    result = {"provenance": about, **{stage: summary(own) for stage, own in runs.items()}, "rounds": rounds}
    write_json(out / "headline.json", result)
    write_text(out / "tables.md", tables(result))
    write_bytes(out / "headline.png", png(picture(result)))


def speed(
    recipe: Checkerboard, cells: Sequence[Cell], seeds: Sequence[int], device: torch.device
) -> tuple[float, bool]:
    """Seconds per step of one model, and whether a step can be compiled."""
    for compiled in (device.type == "cuda", False):
        try:
            models = Models(recipe, cells, seeds, device, compiled)
            for _ in range(WARM):
                models.step()
            clock = Clock(device)
            start = clock.seconds
            for _ in range(10):
                models.step()
            return (clock.seconds - start) / 10 / len(models.each), compiled
        except Exception as error:  # whatever a compiler raises
            if not compiled:
                raise
            print(f"not compiled: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
    raise AssertionError


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("results/checkerboard/headline"))
    parser.add_argument("--minutes", type=float, default=9.0, help="start no round that would end later")
    parser.add_argument("--tiny", action="store_true", help="small networks and few steps, to try the script")
    arguments = parser.parse_args(given)
    device, out = pick_device(arguments.device), arguments.out
    clock = Clock(device)
    deadline = time.monotonic() + 60 * arguments.minutes - 5
    recipe, count, steps, seeds = PRESETS["paper"], 10_000, 50, FRESH
    if arguments.tiny:
        recipe = replace(recipe, points=1000, hidden=8, time_features=4, width=4, iterations=20, batch=16)
        count, steps, seeds = 50, 4, FRESH[:2]
    made_with = {"samples": count, "steps": steps, "recipe": asdict(recipe)}
    rounds: dict[str, Any] = {}
    if (out / "headline.json").exists():
        old = json.loads((out / "headline.json").read_text(encoding="utf-8"))
        if any(old["provenance"][name] != value for name, value in made_with.items()):
            raise MismatchError(f"{out} was made with other settings; delete it, or use another --out")
        rounds = {name: own for name, own in old["rounds"].items() if own["complete"]}
    spent = sum(own["seconds"] for own in rounds.values())

    def say(text: str) -> None:
        print(f"{clock.seconds:6.1f} s  {text}", flush=True)

    parts = -(-len(SCREENED) * len(VALIDATION) // ABREAST)
    pieces = {f"screening {i + 1}": SCREENED[i::parts] for i in range(parts)}
    waiting = next((cells for name, cells in pieces.items() if name not in rounds), None)
    shape = (waiting or (FM, LIBRARY, PRINTED), VALIDATION if waiting else seeds)
    rate, compiled = speed(recipe, *shape, device)
    shapes = {(len(shape[0]) * len(shape[1]), "bf16")}
    models_screened = len(SCREENED) * len(VALIDATION)
    affordable = SCREENING_SHARE * 60 * arguments.minutes / rate / models_screened
    length = int(min(max(affordable, SCREENING[0]), SCREENING[1]) // 500 * 500)
    length = next((own["iterations"] for own in rounds.values() if own["screening"]), min(length, recipe.iterations))
    say(f"{1e3 * rate:.3f} ms per step and model, compiled: {compiled}; screening with {length} iterations")
    overhead = {"screening": EVALUATING, "final": EVALUATING}

    def run(name: str, cells: Sequence[Cell], own_seeds: Sequence[int], iterations: int) -> bool:
        """Train a round, unless it is there; return whether there was time for it."""
        nonlocal rate
        if name in rounds:
            say(f"{name}: there already")
            return True
        first = name.startswith("screening")
        stage = "screening" if first else "final"
        own_shape = (len(cells) * len(own_seeds), cells[0].precision)
        number, slower = len(cells) * len(own_seeds), 1.0 if cells[0].precision == "bf16" else 2.0
        expected = rate * slower * number * iterations
        beside = overhead[stage] + COMPILING * (compiled and own_shape not in shapes)
        if not arguments.tiny and time.monotonic() + expected + beside > deadline:
            say(f"{name}: no time for {expected:.0f} s of training and {beside:.0f} s beside it")
            return False
        say(f"{name}: {'; '.join(cell.name for cell in cells[:3])}{' …' if len(cells) > 3 else ''}: {expected:.0f} s")
        begin = time.monotonic()
        models = Models(replace(recipe, iterations=iterations), cells, own_seeds, device, compiled)
        runs = train(models, count, steps, deadline - overhead[stage] / 2, say)
        seconds = time.monotonic() - begin
        if own_shape in shapes:
            overhead[stage] = seconds - models.rate * number * models.done
        shapes.add(own_shape)
        rate = models.rate / slower
        rounds[name] = {
            "screening": first,
            "iterations": iterations,
            "complete": models.done == iterations,
            "seconds": round(seconds, 1),
            "ms_per_step_and_model": round(1e3 * models.rate, 4),
            "compiled": compiled,
            "runs": runs,
        }
        write(out, rounds, made_with, clock, spent)
        for row in summary(runs):
            say(f"  {row['cell']}: raw {percent(row['raw'])}, averaged {percent(row['averaged'])}")
        return rounds[name]["complete"]

    if all(run(name, cells, VALIDATION, length) for name, cells in pieces.items()):
        screened = [r for own in rounds.values() if own["screening"] for r in own["runs"]]
        for name, cells in finals(summary(screened)).items():
            if not run(name, cells, seeds, recipe.iterations):
                break
    write(out, rounds, made_with, clock, spent)
    say(f"wrote {out}")


if __name__ == "__main__":
    main()
