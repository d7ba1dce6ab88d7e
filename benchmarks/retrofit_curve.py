"""Measure how many steps a retrofit takes, with data and with the network's own samples, compared with joint training.

python -m benchmarks.retrofit_curve checkerboard
python -m benchmarks.retrofit_curve mnist --device cuda --data ../shared/data/mnist --every 5
python -m benchmarks.retrofit_curve crystals --device cuda --every 5 --joint FOLDER --drawn curve.safetensors
python -m benchmarks.retrofit_curve crystals --judge curve.safetensors
python -m benchmarks.retrofit_curve crystals --batch 64 --count 1000 --own 1000 --steps 0 30 100 300 \\
    --times 0.68 0.78 0.88
python -m benchmarks.retrofit_curve picture

The noise of the shipped flow is fitted again for each number of steps. All rows read the same samples along the same
trajectories (`fmwc.sampling.reread`), so they differ only in the noise. Joint training has other samples, so lifts are
compared: AUPRC divided by the share of positives, each with an interval over resampled samples. `--drawn` only writes
samples and scores, for another machine to judge; several such files of the same samples (`--fit data`,
`--fit "own samples"`) are judged together. `picture` draws all settings that were measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

import fmwc
from experiments.crystals.experiment import CrystalExperiment
from fmwc.checkerboard.data import misplaced
from fmwc.checkerboard.recipe import PRESETS as BOARD
from fmwc.checkpoint import load_network
from fmwc.crystals.recipe import READ_BY, SCORE, Mp20
from fmwc.estimators import Estimator, Linearised
from fmwc.files import write_bytes, write_json
from fmwc.metrics.ranking import auprc, bootstrap
from fmwc.mnist.classifier import predictions
from fmwc.mnist.recipe import JUDGE, WITHIN, Mnist
from fmwc.provenance import Clock, pick_device, provenance
from fmwc.registry import domain_named
from fmwc.report.page import FAINT, LINES, png, styled
from fmwc.retrofit import held_out_elbo
from fmwc.sampling import SamplingConfig, Schedule, Trajectory, reread, sample
from fmwc.state import tree_map

STEPS = (10, 30, 100, 300, 1000, 3000)
SEED, OWN_SEED, HELD_OUT = 2026, 7, 1000  # nothing was chosen on these samples
JOINT, SHIPPED, DATA, OWN = "joint", "as shipped", "data", "own samples"
Kept = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """How noise is fitted in one domain, and how samples are read and judged.

    Arguments:
        recipe: The recipe of the shipped flow, with the data that noise is fitted to.
        kept: Returns what a judge needs of the samples of a run.
        positive: Returns which of them are positives, which a score should find.
        doubtful: Whether positives should have high scores, that is, be doubtful.
        score, within, estimator: How the variance is read.
        batch, lr: Batch size and learning rate of a retrofit.
        joint: The shipped field of joint training, if there is one.
    """

    recipe: Any
    kept: Callable[[Trajectory], Kept]
    positive: Callable[[Kept], np.ndarray]
    score: str
    estimator: Estimator
    batch: int
    lr: float
    within: str | None = None
    doubtful: bool = True
    joint: str = ""


def board(data: str, device: torch.device) -> Case:
    recipe = BOARD["recommended"]
    return Case(
        recipe,
        kept=lambda run: {"x": run.x},
        positive=lambda kept: misplaced(kept["x"].cpu()),
        score="temporal_ratio",
        estimator=Linearised(None),
        batch=1024,
        lr=recipe.lr,
        joint="checkerboard-joint",
    )


def digits(data: str, device: torch.device) -> Case:
    recipe, judge = Mnist(data=data), load_network(JUDGE, device=device)
    return Case(
        recipe,
        kept=lambda run: {"taken": predictions(judge, run.x).cpu(), "y": run.cond["y"].cpu()},
        positive=lambda kept: (kept["taken"] != kept["y"]).numpy(),
        score="integrated",
        within=WITHIN,
        estimator=Linearised(2),
        batch=256,
        lr=recipe.noise_lr,
        joint="mnist-joint",
    )


def crystals(data: str, device: torch.device) -> Case:
    recipe = Mp20(data=data)
    experiment = CrystalExperiment(domain_named("crystals"), fmwc.load("crystals", device=device), data=data)
    return Case(
        recipe,
        kept=lambda run: experiment.keep(run.x, run.cond),
        positive=lambda kept: ~experiment.judge(kept)["bad"],
        doubtful=False,
        score=SCORE,
        estimator=READ_BY,
        batch=recipe.noise_batch,
        lr=recipe.noise_lr,
    )


CASES = {"checkerboard": board, "mnist": digits, "crystals": crystals}


def fitted(
    case: Case, source: str, steps: int, x: Any, cond: dict[str, Any], device: torch.device, batch: int
) -> fmwc.Field:
    """Return the shipped flow with newly fitted noise."""
    shipped = fmwc.load(source, device=device)
    shipped.noise.remove()
    options = shipped.noise.options
    field = fmwc.attach(
        shipped.network,
        include=options["include"],
        exclude=options["exclude"],
        width=options["width"],
        space=shipped.space,
        prior_rate=shipped.prior_rate,
    ).to(device)
    if steps:  # 0 is the noise that every layer is attached with
        fmwc.fit_noise(field, x, steps, batch=batch or case.batch, lr=case.lr, cond=cond, captured=True)
    return field


@dataclass
class Drawn:
    """Samples of each flow in the form that a judge needs, and rows of scores."""

    samples: dict[str, Kept]
    scores: dict[str, Tensor]
    about: dict[str, Any]

    def add(self, name: str, score: Tensor, **about: Any) -> None:
        self.scores[name], self.about["rows"][name] = score.float().cpu(), about
        print(name, about, flush=True)

    def join(self, other: Drawn) -> Drawn:
        """Add the rows of another drawing of the same samples."""
        for of, kept in other.samples.items():
            same = of not in self.samples or all(torch.equal(kept[k], v) for k, v in self.samples[of].items())
            if not same:
                raise SystemExit(f"the files hold other samples of the {of}; draw them with the same seed and count")
        rows = {**self.about["rows"], **other.about["rows"]}
        return Drawn({**self.samples, **other.samples}, {**self.scores, **other.scores}, {**self.about, "rows": rows})

    def save(self, path: Path) -> None:
        flat = {f"sample|{of}|{k}": v for of, kept in self.samples.items() for k, v in kept.items()}
        flat |= {f"score|{name}": v for name, v in self.scores.items()}
        write_bytes(
            path, save({k: v.cpu().contiguous().clone() for k, v in flat.items()}, {"about": json.dumps(self.about)})
        )

    @classmethod
    def load(cls, path: Path) -> Drawn:
        with safe_open(path, framework="pt") as file:
            made = cls({}, {}, json.loads(file.metadata()["about"]))
            for key in file.keys():  # noqa: SIM118
                kind, _, rest = key.partition("|")
                of, _, name = rest.partition("|")
                into = made.samples.setdefault(of, {}) if kind == "sample" else made.scores
                into[name or of] = file.get_tensor(key)
        return made


def draw(case: Case, arguments: Any, device: torch.device, save_to: Path | None) -> Drawn:
    clock = Clock(device)
    x, cond = case.recipe.rows()
    order = torch.randperm(len(next(iter(cond.values()), x)), generator=torch.Generator().manual_seed(SEED))
    fresh, kept_back = order[:HELD_OUT], order[HELD_OUT:]
    held = tree_map(lambda c: c[fresh].to(device), x), {k: v[fresh].to(device) for k, v in cond.items()}
    x, cond = tree_map(lambda c: c[kept_back], x), {k: v[kept_back] for k, v in cond.items()}
    make = partial(sample, steps=50, confidence=None, config=SamplingConfig(batch=arguments.read))
    when = Schedule.at(arguments.times) if arguments.times else Schedule.every(arguments.every)
    read = partial(reread, confidence=case.estimator, schedule=when, batch=arguments.read)
    flow, count = fmwc.load(arguments.setting, device=device), arguments.count

    def conditions(count: int, seed: int) -> dict[str, Tensor]:
        drawn = domain_named(arguments.setting).conditions(flow, count, seed=seed)
        return {name: value.to(device) for name, value in drawn.items()}

    own = conditions(arguments.own, OWN_SEED)
    sources = {DATA: lambda: (x, cond), OWN: lambda: (make(flow, arguments.own, seed=OWN_SEED, cond=own).x, own)}
    options = {"seed": SEED, "config": SamplingConfig(batch=arguments.read, keep_states=True)}
    run = make(flow, count, **options, cond=conditions(count, SEED))
    drawn = Drawn({"flow": case.kept(run)}, {}, {"rows": {}})

    def note(name: str, field: fmwc.Field, run: Trajectory, **about: Any) -> None:
        drawn.add(name, read(field, run).score(case.score, within=case.within), **about)
        drawn.about["provenance"] = provenance(
            device,
            clock.seconds,
            samples=count,
            seeds=[SEED],
            own_samples=arguments.own,
            batch=arguments.batch or case.batch,
        )
        if save_to:
            drawn.save(save_to)

    if source := arguments.joint or case.joint:
        joint = fmwc.load(source, device=device)
        joint_run = make(joint, count, **options, cond=conditions(count, SEED))
        drawn.samples[JOINT] = case.kept(joint_run)
        note(JOINT, joint, joint_run, of=JOINT, steps=case.recipe.iterations)
    note(SHIPPED, flow, run, of="flow", steps=case.recipe.noise_steps)
    for name in arguments.fit:
        data, with_ = sources[name]()
        for steps in arguments.steps:
            field = fitted(case, arguments.setting, steps, data, with_, device, arguments.batch)
            elbo = held_out_elbo(field, *held, 1e-3)
            note(f"{name}, {steps}", field, run, of="flow", steps=steps, held_out=elbo)
    return drawn


def judged(case: Case, drawn: Drawn) -> dict[str, Any]:
    """Return the lift of every row, and its ratio to that of joint training."""
    positives = {of: case.positive(kept) for of, kept in drawn.samples.items()}
    rows: dict[str, Any] = {}
    for name, about in drawn.about["rows"].items():
        positive = positives[about["of"]]
        score = drawn.scores[name].numpy() * (1 if case.doubtful else -1)
        read = partial(_lift, score, positive)
        rows[name] = {**about, "lift": read(np.arange(len(score))), "interval": bootstrap(read, len(score))}
        rows[name]["share"] = float(positive.mean())
    for row in rows.values():
        if JOINT in rows:
            row["of_joint"] = row["lift"] / rows[JOINT]["lift"]
    return rows


def _lift(score: np.ndarray, positive: np.ndarray, index: np.ndarray) -> float:
    positive = positive[index]
    return auprc(score[index], positive) / positive.mean() if positive.any() else float("nan")


def printed(rows: Mapping[str, Any]) -> None:
    for name, row in rows.items():
        low, high = row["interval"]
        elbo = f", held out {row['held_out']:.5f}" if "held_out" in row else ""
        print(f"{name}: lift {row['lift']:.2f} [{low:.2f}, {high:.2f}]{elbo}")


@styled
def picture(folder: Path) -> Figure:
    """Draw lift and held-out ELBO against steps, one column per setting."""
    results = {path.stem: json.loads(path.read_text())["numbers"] for path in sorted(folder.glob("*.json"))}
    figure = Figure(figsize=(4.2 * len(results), 5.2))
    columns = figure.subplots(2, len(results), sharex="col", squeeze=False).T
    for (above, below), (setting, rows) in zip(columns, results.items(), strict=True):
        for name, colour in ((DATA, LINES[0]), (OWN, LINES[1])):
            fitted_rows = [r for label, r in rows.items() if label.startswith(f"{name}, ") and r["steps"]]
            fitted_rows.sort(key=lambda r: r["steps"])
            steps, lifts, intervals, elbos = (
                [r[key] for r in fitted_rows] for key in ("steps", "lift", "interval", "held_out")
            )
            above.plot(steps, lifts, "o-", color=colour, label=f"retrofit, {name}")
            above.fill_between(steps, *zip(*intervals, strict=True), color=colour, alpha=0.12, lw=0)
            below.plot(steps, elbos, "o-", color=colour)
        if shipped := rows.get(SHIPPED):
            above.plot(shipped["steps"], shipped["lift"], "D", color=FAINT, label="retrofit, as shipped")
        if joint := rows.get(JOINT):
            above.axhline(joint["lift"], color=FAINT, ls="--", label=f"joint training, {joint['steps']:,} steps")
        above.set(title=setting, xscale="log", ylim=(0, None))
        below.set(xlabel="steps of the retrofit")
        above.legend(loc="lower right")
    columns[0][0].set_ylabel("lift: AUPRC ÷ share")
    columns[0][1].set_ylabel("held-out negative ELBO")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=[*CASES, "picture"])
    parser.add_argument("--count", type=int, default=4000, help="samples that are read")
    parser.add_argument("--own", type=int, default=10_000, help="own samples of the network that replace the data")
    parser.add_argument("--steps", type=int, nargs="+", default=list(STEPS))
    parser.add_argument("--every", type=int, default=1, help="read the variance at every k-th step")
    parser.add_argument("--times", type=float, nargs="+", help="read it at these times instead")
    parser.add_argument(
        "--fit", nargs="+", choices=[DATA, OWN], default=[DATA, OWN], help="what the noise is fitted to"
    )
    parser.add_argument(
        "--batch", type=int, default=0, help="the batch size of a retrofit; default: that of the recipe"
    )
    parser.add_argument("--read", type=int, default=1024, help="samples drawn and read together")
    parser.add_argument("--joint", default="", help="the jointly trained field; default: the shipped one")
    parser.add_argument("--data", default="")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--drawn", type=Path, help="only draw, and write the samples to judge to this file")
    parser.add_argument("--judge", type=Path, nargs="+", help="only judge the samples in such files")
    parser.add_argument("--out", type=Path, help="default: results/retrofit/SETTING.json")
    arguments = parser.parse_args()
    results = Path("results/retrofit")
    if arguments.setting == "picture":
        write_bytes(results / "curve.png", png(picture(results)))
        return
    device = pick_device(arguments.device)
    case = CASES[arguments.setting](arguments.data, device)
    if arguments.judge:
        drawn = reduce(Drawn.join, map(Drawn.load, arguments.judge))
    else:
        drawn = draw(case, arguments, device, arguments.drawn)
    if arguments.drawn:
        return
    rows = judged(case, drawn)
    printed(rows)
    out = arguments.out or results / f"{arguments.setting}.json"
    write_json(out, {"provenance": drawn.about["provenance"], "score": case.score, "numbers": rows})


if __name__ == "__main__":
    main()
