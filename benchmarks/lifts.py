"""Compare how well the default confidence, its parts, other scores and larger budgets find failures, on fresh seeds.

    python -m benchmarks.lifts draw mnist --seeds 200,201,202 --count 10000 --device cuda --out runs/lifts/mnist
    python -m benchmarks.lifts draw runs/fashion --setting mnist --judge runs/fashion-judge --data fashion.npz --refit …
    python -m benchmarks.lifts judge runs/lifts/crystals      # crystals are judged afterwards, on a CPU
    python -m benchmarks.lifts table runs/lifts --out results/lifts
    python -m benchmarks.lifts figure results/lifts           # lift and evaluations of the checks: checks.png

`draw` writes one file per seed with every score, and the seconds that plain sampling and the default took. `--refit`
chooses the confidence again (fmwc.fit_confidence) with the given data, and writes it to `reference.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from fmwc import fit_confidence, load, sample
from fmwc.checkerboard.data import misplaced
from fmwc.checkpoint import describe_reference, load_network
from fmwc.checks import Contest, Echo, run_checks
from fmwc.estimators import Linearised
from fmwc.files import write_bytes, write_json, write_text
from fmwc.mnist import data as mnist
from fmwc.mnist.classifier import failed, predictions
from fmwc.provenance import Clock, provenance
from fmwc.randomness import derive
from fmwc.registry import domain_named
from fmwc.report.page import png, styled
from fmwc.sampling import SamplingConfig, Schedule, Trajectory
from fmwc.sampling.trajectory import combined
from fmwc.state import channels, select

BATCH = {"mnist": 2500, "crystals": 1000, "checkerboard": 10_000}
VARIANCE = {
    "mnist": ("integrated", "temporal_ratio", "peak"),
    "crystals": ("geometric@0.6-0.9", "integrated"),
    "checkerboard": ("temporal_ratio", "integrated", "dispersion"),
}
FREE = ("spread", "spread@0.3-0.8", "spread@0.6-1", "detour")


def conditions(field: Any, setting: str, count: int, seed: int) -> dict[str, Any]:
    """Return the conditions of fresh samples, as `fmwc sample` draws them."""
    cond = domain_named(setting).conditions(field, count, seed=seed)
    return {name: value.to(field.device) for name, value in cond.items()}


def larger(setting: str, field: Any) -> dict[str, Any]:
    """Return checks with larger budgets than the default."""
    if setting == "mnist":
        values = torch.arange(field.network.config["classes"])
        return {f"contest, {n}": Contest.planned("y", values, n) for n in (10, 40, 120)}
    if setting == "crystals":
        late = (0.5, 0.6, 0.7, 0.75)
        return {f"echo, {4 * n}": Echo(late, n) for n in (1, 6, 12)} | {"echo, 2": Echo((0.7, 0.8))}
    return {}


def seconds(device: torch.device, call: Callable[..., Any], *args: Any, **options: Any) -> tuple[float, Any]:
    """Return the seconds that a call takes, and its result."""
    clock = Clock(device)
    begun = clock.seconds
    result = call(*args, **options)
    return clock.seconds - begun, result


def draw(args: argparse.Namespace) -> None:
    """Draw fresh samples, and read every score."""
    device, setting = torch.device(args.device), args.setting or args.checkpoint
    clock = Clock(device)
    field: Any = load(args.checkpoint, device=device)
    args.out.mkdir(parents=True, exist_ok=True)
    batch = args.batch or BATCH[setting]
    if args.refit:
        options: dict[str, Any] = {"pilot": args.pilot, "batch": batch, "seed": derive(0, "reference")}
        data = mnist.load(args.data, "train", own=True) if setting == "mnist" else None
        if data is not None:
            options |= {"data": mnist.unit(data.x[:20_000]), "cond": {"y": data.y[:20_000]}}
        if setting == "crystals":
            options["cond"] = {"atoms": field.network.draw_sizes(args.pilot, derive(0, "atoms"))}
        fit_confidence(field, conventions=False, **options)
        write_json(args.out / "reference.json", describe_reference(field.reference, "the reference"))
    judge = load_network(args.judge, device=device) if setting == "mnist" else None
    for seed in (int(s) for s in args.seeds.split(",")):
        cond = conditions(field, setting, args.count, seed)
        how: dict[str, Any] = {"steps": 50, "seed": seed, "cond": cond, "config": SamplingConfig(batch=batch)}
        draw_timed = partial(seconds, device, sample, field)
        draw_timed(min(args.count, batch), **{**how, "cond": {k: v[:batch] for k, v in cond.items()}})  # warm up
        plain_s, plain = draw_timed(args.count, confidence=None, check=False, **how)
        default_s, run = draw_timed(args.count, **how)
        same = all(torch.equal(c, channels(run.x)[name]) for name, c in channels(plain.x).items())
        scores = {"default": run.score()} | {name: run.score(name) for name in FREE}
        scores |= {name: run.evidence[name] for name in ("contest", "echo", "nearest") if name in run.evidence}
        reads = Linearised(None if setting == "checkerboard" else 2)
        every = 5 if setting == "crystals" else 1
        few = {**how, "check": False, "schedule": Schedule.every(every), "transport": setting == "checkerboard"}
        few["config"] = SamplingConfig(batch=batch)
        variance_s, read = draw_timed(args.count, confidence=reads, **few)
        scores |= {name: read.score(name) for name in VARIANCE[setting]}
        scores |= with_larger_budgets(setting, field, run, cond, batch, scores)
        arrays = {f"score.{n}": v.float().cpu().numpy() for n, v in scores.items()} | outcomes(setting, judge, run)
        if setting == "crystals":  # judged later
            run.compact().to("cpu").save(args.out / f"{seed}.safetensors")
        about = {
            "plain_s": plain_s,
            "default_s": default_s,
            "variance_s": variance_s,
            "chosen": field.reference.score,
            "reason": field.reference.reason,
            "checkpoint": Path(args.checkpoint).name,
            "count": args.count,
            "same": same,
            "extra": sum(check.evaluations for check in field.reference.checks.values()),
        }
        np.savez_compressed(args.out / f"{seed}.npz", about=np.array(json.dumps(about)), **arrays)
        print(f"{args.out.name} {seed}: {json.dumps(about)}", flush=True)
    write_json(
        args.out / "provenance.json", provenance(device, clock.seconds, seeds=[int(s) for s in args.seeds.split(",")])
    )


def with_larger_budgets(
    setting: str, field: Any, run: Trajectory, cond: dict[str, Any], batch: int, scores: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the scores of checks with larger budgets, alone and combined with the spread."""
    found: dict[str, torch.Tensor] = {}
    for name, check in larger(setting, field).items():
        parts = []
        for first in range(0, len(run), batch):
            rows = slice(first, first + batch)
            of_batch = select(run.x, rows), {k: v[rows] for k, v in cond.items()}, run.seed, first
            parts.append(run_checks({check.name: check}, field, field.space, *of_batch)[check.name])
        found[name] = torch.cat(parts)
        spread, weight = ("spread@0.3-0.8", 0.3) if check.name == "contest" else ("spread@0.6-1", 0.5)
        found[f"{name} + {weight:g} {spread}"] = _summed([(found[name], 1.0), (scores[spread], weight)])
    return found


def outcomes(setting: str, judge: Any, run: Trajectory) -> dict[str, np.ndarray]:
    """Return which samples failed, and for digits the classes that contest and judge see; crystals are judged later."""
    if setting == "checkerboard":
        return {"failed": misplaced(run.x)}
    if setting == "crystals":
        return {}
    found = {"failed": failed(judge, run.x, run.cond["y"])}
    rival = run.evidence.get("rival")
    if rival is not None:
        found |= {"rival": rival.cpu().numpy(), "taken": predictions(judge, run.x).cpu().numpy()}
    return found


def _summed(scores: list[tuple[torch.Tensor, float]]) -> torch.Tensor:
    levels = torch.linspace(0, 1, 1001, device=scores[0][0].device)
    return combined([(s, w, s.quantile(levels.to(s))) for s, w in scores])


def judge(args: argparse.Namespace) -> None:
    """Judge crystals that were drawn before; those that are not metastable count as failed."""
    from fmwc.crystals.domain import CrystalDomain

    setting = CrystalDomain()
    for path in sorted(args.folder.glob("*.safetensors")):
        found = dict(np.load(path.with_suffix(".npz")))
        found["failed"] = setting.judge(Trajectory.load(path))
        np.savez_compressed(path.with_suffix(".npz"), **found)
        print(f"{path.stem}: {100 * (1 - found['failed'].mean()):.1f} % metastable", flush=True)


def quality(result: dict[str, np.ndarray], name: str, good: bool) -> tuple[float, ...]:
    """Return AUROC, AUPRC, lift and the share of positives among the samples that the score keeps."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    positive, score = (~result["failed"], -result[name]) if good else (result["failed"], result[name])
    precision = average_precision_score(positive, score)
    kept = np.argsort(result[name], kind="stable")[: round((0.1 if good else 0.8) * len(score))]
    return roc_auc_score(positive, score), precision, precision / positive.mean(), positive[kept].mean()


def table(args: argparse.Namespace) -> None:
    """Write the table of every setting below a folder."""
    lines, rows = ["# Default confidence on fresh seeds", ""], []
    for folder in sorted(p for p in args.folder.iterdir() if list(p.glob("*.npz"))):
        results = [dict(np.load(path)) for path in sorted(folder.glob("*.npz"))]
        good = "crystals" in folder.name  # most crystals fail, so the others are the positives
        about = [json.loads(str(result["about"])) for result in results]
        rate = np.mean([1 - r["failed"].mean() if good else r["failed"].mean() for r in results])
        plain, default = (np.mean([a[name] for a in about]) for name in ("plain_s", "default_s"))
        last = "metastable among the surest 10 %" if good else "failed of surest 80 %"
        lines += [
            f"## {folder.name}",
            "",
            f"{'Metastable' if good else 'Failed'}: {rate:.2%}. Default: {about[0]['chosen']} ({about[0]['reason']}). "
            f"{len(results)} seeds of {about[0]['count']:,} samples. "
            f"Seconds: plain {plain:.2f}, default {default:.2f}.",
            "",
            f"| score | AUROC | AUPRC | lift | {last} |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        for name in (n for n in results[0] if n.startswith("score.")):
            numbers = [quality(r, name, good) for r in results if name in r]  # some scores lack some seeds
            mean, std = np.mean(numbers, 0), np.std(numbers, 0, ddof=1) if len(numbers) > 1 else np.zeros(4)
            formats = (".3f", ".3f", ".2f", ".1%" if good else ".2%")
            cells = [f"{m:{f}} ± {s:{f}}" for m, s, f in zip(mean, std, formats, strict=True)]
            lines.append(f"| {name[6:]} | {' | '.join(cells)} |")
            rows.append({"setting": folder.name, "score": name[6:], "mean": mean.tolist(), "std": std.tolist()})
        lines.append("")
        about_file = folder / "provenance.json"
        if about_file.exists():
            lines += [f"`{about_file.read_text().strip()}`".replace("\n", " "), ""]
    args.out.mkdir(parents=True, exist_ok=True)
    write_text(args.out / "tables.md", "\n".join(lines))
    write_json(args.out / "lifts.json", rows)
    print("\n".join(lines))


FIGURES = {  # setting: title, the variance's score, and checks by their number of evaluations
    "mnist": (
        "MNIST, contest",
        "integrated",
        {10: "contest, 10", 19: "contest", 40: "contest, 40", 120: "contest, 120"},
    ),
    "fashion": (
        "Fashion-MNIST, contest",
        "integrated",
        {10: "contest, 10", 19: "contest", 40: "contest, 40", 120: "contest, 120"},
    ),
    "crystals": ("crystals, echo", "geometric@0.6-0.9", {2: "echo, 2", 4: "echo", 24: "echo, 24", 48: "echo, 48"}),
}


@styled
def draw_figure(folder: Path) -> Figure:
    """Draw the lift of checks by their number of evaluations, from the committed numbers."""
    rows = {(row["setting"], row["score"]): row for row in json.loads((folder / "lifts.json").read_text())}
    shown = Figure(figsize=(10.5, 3.2), layout="constrained")
    for axes, (name, (title, variance, scores)) in zip(shown.subplots(1, 3), FIGURES.items(), strict=True):
        lifts, deviations = (np.array([rows[name, s][k][2] for s in scores.values()]) for k in ("mean", "std"))
        axes.errorbar(list(scores), lifts, deviations, marker="o", capsize=3, label="check")
        axes.axhline(rows[name, variance]["mean"][2], linestyle="--", color="C1", label="variance, every step")
        axes.axhline(1, linestyle=":", color="0.5", label="random order")
        axes.set(title=title, xscale="log", xlabel="evaluations per sample", ylim=(0, None))
        axes.set_xticks(list(scores), [str(n) for n in scores])
        axes.minorticks_off()
    shown.axes[0].set_ylabel("lift")
    shown.axes[0].legend(frameon=False)
    return shown


def figure(args: argparse.Namespace) -> None:
    """Write the figure of the checks."""
    write_bytes(args.folder / "checks.png", png(draw_figure(args.folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    one = verbs.add_parser("draw")
    one.set_defaults(run=draw)
    one.add_argument("checkpoint")
    one.add_argument("--setting", default="", choices=["", *BATCH])
    one.add_argument("--judge", default="mnist-judge")
    one.add_argument("--data", default="")
    one.add_argument("--seeds", default="200,201,202")
    one.add_argument("--count", type=int, default=10_000)
    one.add_argument("--pilot", type=int, default=2_000)
    one.add_argument("--batch", type=int, default=0)
    one.add_argument("--refit", action="store_true")
    one.add_argument("--device", default="cpu")
    one.add_argument("--out", type=Path, required=True)
    two = verbs.add_parser("judge")
    two.set_defaults(run=judge)
    two.add_argument("folder", type=Path)
    four = verbs.add_parser("figure")
    four.set_defaults(run=figure)
    four.add_argument("folder", type=Path)
    three = verbs.add_parser("table")
    three.set_defaults(run=table)
    three.add_argument("folder", type=Path)
    three.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
