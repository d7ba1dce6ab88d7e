"""Compare joint training with plain flow matching on the Checkerboard: the paper's headline numbers.

    python -m benchmarks.headline --device cuda --minutes 9 --out results/checkerboard/headline

The paper prints 5.9 % misplaced samples for plain flow matching (FM) and 4.6 % for joint training. Its text does not
determine the noise and its KL (:class:`Cell`). A screening trains every interpretation for a part of the iterations on
validation seeds. The final rounds train FM, the library's interpretation, the formulas as printed and the best
interpretations of the screening for all iterations on ten fresh seeds. Raw and averaged weights come from the same
training.

Models are trained in parallel: their weights are stacked, and every product is one batched product. All cells share the
random stream of a seed, so they differ only in their interpretation, and differences are paired. The results are
written after every round. A second call with the same --out skips the finished rounds.
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

from fmwc.checkerboard.data import misplaced
from fmwc.checkerboard.recipe import PRESETS, SPACE, Checkerboard
from fmwc.errors import MismatchError, pick
from fmwc.field import Field
from fmwc.files import write_bytes, write_json, write_text
from fmwc.modes import tensor_float
from fmwc.networks import TimeEmbedding
from fmwc.noise import LOG_ALPHA_RANGE, cyclic, time_features
from fmwc.provenance import Clock, pick_device, provenance
from fmwc.randomness import derive
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
WARM = 3  # steps of a round that are not timed, because the first is compiled
HALF = {"bf16": torch.bfloat16, "tf32": None}

# Interpretations of the output s of an inference network: the variance of a weight is exp(a s) θ², and the KL takes it
# for exp(b s) θ². By name: (a, b).
VARIANCES = {
    "alpha": (1, 1),  # the ratio of variances is α, as in eqn:kl_analytical and eq:layerprop; the library's choice
    "square": (2, 2),  # the ratio of variances is α², as in eq:vad, and in the KL too
    "printed": (2, 1),  # each formula as printed: α² θ² is the variance (eq:vad), and eqn:kl_analytical has α
}
# How many times the mean over channels is counted in the KL of a layer, by its numbers of inputs and outputs.
REDUCTIONS: dict[str, Callable[[int, int], int]] = {
    "mean": lambda inputs, outputs: 1,  # the library's choice
    "channels": lambda inputs, outputs: inputs,  # a sum over the channels, which have separate α
    "weights": lambda inputs, outputs: inputs * outputs,  # a sum over all weights: the KL of the posterior
}
LAYERS = {"none": (), "all": (0, 1, 2, 3), "out": (3,)}  # the noisy layers


@dataclass(frozen=True)
class Cell:
    """One interpretation of the paper. The defaults are those of the library.

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
        noise = f"{self.variance}, KL {self.factor:g} × {self.reduction}, β {self.beta:g}"
        parts = {"none": "FM", "out": f"output only: {noise}"}.get(self.layers, noise)
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
    """The interpretations of S models as tensors, and the number of the seed of each model."""

    which: Tensor  # (S,)
    ratio: Tensor  # (S, 1, 1): the power of exp(s) that is the ratio of variances
    counted: Tensor  # (S, 1, 1): the power that the KL uses instead
    noisy: Tensor  # (S, L): 1 where the layer is noisy
    weight: Tensor  # (S, L): of the mean of the KL's bracket: β × factor × count


class Batch(NamedTuple):
    """The random numbers of a step, for each of N seeds."""

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
    """Return the interpretations of models as tensors, given the inputs and outputs of each layer."""

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
    """Return h · weight, with operands rounded to `half` if that is given."""
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
        rounded = half if number else None  # the first layer sees coordinates, which are not rounded
        h = torch.cat([c if rounded is None else c.to(rounded) for c in (x, embedded[about.which])], -1)
        y = product(h, layer.weight, rounded) + layer.bias
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
    """Return the loss of each model (`fmwc.flow.elbo` for the library's interpretation), `(S,)`, and the mean log of
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
    """S models that are trained in parallel.

    Arguments:
        recipe: The sizes, the data and the length of the training.
        cells: The interpretations.
        seeds: The seeds that every cell is trained with.
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
        """Draw the random numbers of a step, from one generator per seed."""
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
        """Return samples of every model from the noise of its seed, in full precision.

        Arguments:
            averaged: Whether to use the averaged weights.
            drawn: Whether to draw the weights at every step (the stochastic decoder) instead of using their mean.
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
    """Return the share of misplaced samples of each model, in the first and in the second half of its samples."""
    return [[float(half.mean()) for half in np.array_split(misplaced(x), 2)] for x in ends]


def train(models: Models, count: int, steps: int, until: float, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Train to the end of the plan, or until a time; return one record per model."""
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
    """Return mean, standard deviation and 95 % t-interval.

    >>> spread([0.05, 0.06, 0.07])["interval"]
    [0.03516, 0.08484]
    """
    mean, std = float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    half = float(student.ppf(0.975, len(values) - 1)) * std / math.sqrt(len(values)) if len(values) > 1 else math.nan
    interval = [round(mean - half, 5), round(mean + half, 5)] if len(values) > 1 else None
    return {"count": len(values), "mean": mean, "std": std if len(values) > 1 else None, "interval": interval}


KINDS = ("raw", "averaged", "raw, drawn", "averaged, drawn", "late", "selected")


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each cell the misplacement of each kind, and that of FM minus it, paired by seed."""
    rows = []
    for name in dict.fromkeys(run["cell"] for run in runs):
        by_seed = {run["seed"]: run for run in runs if run["cell"] == name}
        one = next(iter(by_seed.values()))
        plain = replace(FM, decay=one["decay"], precision=one["precision"]).name
        fm = {run["seed"]: run for run in runs if run["cell"] == plain}
        row: dict[str, Any] = {"cell": name, "iterations": one["iterations"], "seeds": sorted(by_seed)}
        for kind in KINDS:
            row[kind] = spread([run["misplacement"][kind] for run in by_seed.values()])
            if common := sorted(by_seed.keys() & fm.keys()):
                base = kind.removesuffix(", drawn")
                gains = [fm[s]["misplacement"][base] - by_seed[s]["misplacement"][kind] for s in common]
                row[kind]["fm_minus_own"] = spread(gains)
        rows.append(row)
    return rows


def best(rows: Sequence[dict[str, Any]], names: Iterable[str]) -> list[str]:
    """Return cells in order of the mean misplacement of late raw weights, the least first."""
    means = {row["cell"]: row["late"]["mean"] for row in rows}
    return sorted((name for name in names if name in means), key=means.__getitem__)


def finals(screening: Sequence[dict[str, Any]]) -> dict[str, list[Cell]]:
    """Return the final rounds, the most important first, given the summary of the screening."""
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
    """Return the tables as Markdown, one for each stage."""
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
    """Draw the misplacement of each cell with its interval; the line is FM of the same stage."""
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


def speed(
    recipe: Checkerboard, cells: Sequence[Cell], seeds: Sequence[int], device: torch.device
) -> tuple[float, bool]:
    """Return the seconds per step of one model, and whether a step can be compiled."""
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
        except Exception as error:  # compilers raise errors of any kind
            if not compiled:
                raise
            print(f"not compiled: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
    raise AssertionError


class Rounds:
    """The rounds of training, with the results of those that are finished.

    Arguments:
        recipe: The recipe with all its iterations.
        count, steps: Samples and Euler steps of an evaluation.
        device: Where models are trained.
        out: The folder of the results; finished rounds in it are kept.
        minutes: No round starts that would end later; `None` for no limit.
    """

    def __init__(
        self, recipe: Checkerboard, count: int, steps: int, device: torch.device, out: Path, minutes: float | None
    ) -> None:
        self.recipe, self.count, self.steps, self.device, self.out = recipe, count, steps, device, out
        self.clock = Clock(device)
        self.deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes - 5
        self.made_with = {"samples": count, "steps": steps, "recipe": asdict(recipe)}
        self.done: dict[str, Any] = {}
        if (out / "headline.json").exists():
            old = json.loads((out / "headline.json").read_text(encoding="utf-8"))
            if any(old["provenance"][name] != value for name, value in self.made_with.items()):
                raise MismatchError(f"{out} was made with other settings; delete it, or use another --out")
            self.done = {name: record for name, record in old["rounds"].items() if record["complete"]}
        self.spent = sum(record["seconds"] for record in self.done.values())
        self.overhead = {"screening": EVALUATING, "final": EVALUATING}
        self.rate, self.compiled = math.nan, False
        self.shapes: set[tuple[int, str]] = set()  # numbers of models and precisions whose step is compiled

    def say(self, text: str) -> None:
        print(f"{self.clock.seconds:6.1f} s  {text}", flush=True)

    def measure_speed(self, cells: Sequence[Cell], seeds: Sequence[int]) -> None:
        """Measure the seconds per step and model, from which the length of the rounds is planned."""
        self.rate, self.compiled = speed(self.recipe, cells, seeds, self.device)
        self.shapes = {(len(cells) * len(seeds), "bf16")}

    def screening_length(self, minutes: float) -> int:
        """Return the iterations of the screening: those of finished rounds, or as many as there is time for."""
        if known := [record["iterations"] for record in self.done.values() if record["screening"]]:
            return known[0]
        affordable = SCREENING_SHARE * 60 * minutes / self.rate / (len(SCREENED) * len(VALIDATION))
        return min(int(min(max(affordable, SCREENING[0]), SCREENING[1]) // 500 * 500), self.recipe.iterations)

    def run(self, name: str, cells: Sequence[Cell], seeds: Sequence[int], iterations: int) -> bool:
        """Train a round unless it is finished; return whether there was time for it."""
        if name in self.done:
            self.say(f"{name}: already finished")
            return True
        stage = "screening" if name.startswith("screening") else "final"
        precision, number = cells[0].precision, len(cells) * len(seeds)
        slower = 1.0 if precision == "bf16" else 2.0
        known = (number, precision) in self.shapes
        expected = self.rate * slower * number * iterations
        extra = self.overhead[stage] + COMPILING * (self.compiled and not known)
        if time.monotonic() + expected + extra > self.deadline:
            self.say(f"{name}: no time for {expected:.0f} s of training and {extra:.0f} s of compiling and evaluation")
            return False
        names = "; ".join(cell.name for cell in cells[:3]) + (" …" if len(cells) > 3 else "")
        self.say(f"{name}: {names}: {expected:.0f} s")
        begin = time.monotonic()
        models = Models(replace(self.recipe, iterations=iterations), cells, seeds, self.device, self.compiled)
        runs = train(models, self.count, self.steps, self.deadline - self.overhead[stage] / 2, self.say)
        seconds = time.monotonic() - begin
        if known:
            self.overhead[stage] = seconds - models.rate * number * models.done
        self.shapes.add((number, precision))
        self.rate = models.rate / slower
        self.done[name] = {
            "screening": stage == "screening",
            "iterations": iterations,
            "complete": models.done == iterations,
            "seconds": round(seconds, 1),
            "ms_per_step_and_model": round(1e3 * models.rate, 4),
            "compiled": self.compiled,
            "runs": runs,
        }
        self.write()
        for row in summary(runs):
            self.say(f"  {row['cell']}: raw {percent(row['raw'])}, averaged {percent(row['averaged'])}")
        return bool(self.done[name]["complete"])

    def runs(self, stage: str) -> list[dict[str, Any]]:
        """Return the records of all models of a stage, `screening` or `final`."""
        rounds = (record for record in self.done.values() if record["screening"] == (stage == "screening"))
        return [run for record in rounds for run in record["runs"]]

    def write(self) -> None:
        """Write the results so far."""
        seconds, seeds = self.spent + self.clock.seconds, {"screening": VALIDATION, "final": FRESH}
        about = provenance(self.device, seconds, seeds=seeds, **self.made_with)
        summaries = {stage: summary(self.runs(stage)) for stage in ("screening", "final")}
        result = {"provenance": about, **summaries, "rounds": self.done}
        write_json(self.out / "headline.json", result)
        write_text(self.out / "tables.md", tables(result))
        write_bytes(self.out / "headline.png", png(picture(result)))


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("results/checkerboard/headline"))
    parser.add_argument("--minutes", type=float, default=9.0, help="start no round that would end later")
    parser.add_argument("--tiny", action="store_true", help="small networks and few steps, to try the script")
    arguments = parser.parse_args(given)
    recipe, count, steps, seeds = PRESETS["paper"], 10_000, 50, FRESH
    if arguments.tiny:
        recipe = replace(recipe, points=1000, hidden=8, time_features=4, width=4, iterations=20, batch=16)
        count, steps, seeds = 50, 4, FRESH[:2]
    minutes = None if arguments.tiny else arguments.minutes
    rounds = Rounds(recipe, count, steps, pick_device(arguments.device), arguments.out, minutes)
    parts = -(-len(SCREENED) * len(VALIDATION) // ABREAST)
    screening = {f"screening {i + 1}": SCREENED[i::parts] for i in range(parts)}
    waiting = next((cells for name, cells in screening.items() if name not in rounds.done), None)
    rounds.measure_speed(waiting or (FM, LIBRARY, PRINTED), VALIDATION if waiting else seeds)
    length = rounds.screening_length(arguments.minutes)
    speed_text = f"{1e3 * rounds.rate:.3f} ms per step and model, compiled: {rounds.compiled}"
    rounds.say(f"{speed_text}; screening with {length} iterations")
    if all(rounds.run(name, cells, VALIDATION, length) for name, cells in screening.items()):
        for name, cells in finals(summary(rounds.runs("screening"))).items():
            if not rounds.run(name, cells, seeds, recipe.iterations):
                break
    rounds.write()
    rounds.say(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
