"""Compare how well the default confidence, its parts, other scores and larger budgets find failures, on fresh seeds.

    python -m benchmarks.lifts draw mnist --seeds 200,201,202 --count 10000 --device cuda --out runs/lifts/mnist
    python -m benchmarks.lifts draw runs/fashion --setting mnist --judge runs/fashion-judge --data fashion.npz --refit …
    python -m benchmarks.lifts judge runs/lifts/crystals      # crystals are judged afterwards, on a CPU
    python -m benchmarks.lifts table runs/lifts --out results/lifts

`draw` writes one file per seed with every score, and the seconds that plain sampling and the default took. `--refit`
chooses the confidence again (fmwc.fit_confidence) with the given data, and writes it to `reference.json`. `--early` is
a checkpoint of the same network after a fifth of its training, for some of the scores of benchmarks/leads.py; `--leads`
computes the others too.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import leads
from fmwc import fit_confidence, load, sample
from fmwc.checkpoint import describe_reference, load_network
from fmwc.checks import Contest, Echo, run_checks
from fmwc.data import mnist
from fmwc.domains import domain_named
from fmwc.estimators import Linearised
from fmwc.files import write_json, write_text
from fmwc.provenance import Clock, provenance
from fmwc.randomness import derive
from fmwc.sampling import SamplingConfig, Schedule, Trajectory
from fmwc.sampling.trajectory import combined

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


def seconds(device: torch.device, call: Any) -> tuple[float, Any]:
    """Return the seconds that a call takes, and its result."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    found = call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun, found


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
        sample(field, min(args.count, batch), **{**how, "cond": {k: v[:batch] for k, v in cond.items()}})  # warm
        plain_s, plain = seconds(device, lambda: sample(field, args.count, confidence=None, check=False, **how))  # noqa: B023
        default_s, run = seconds(device, lambda: sample(field, args.count, **how))  # noqa: B023
        same = all(torch.equal(a, b) for a, b in zip(_parts(plain.x), _parts(run.x), strict=True))
        scores = {"default": run.score()} | {name: run.score(name) for name in FREE}
        scores |= {name: run.evidence[name] for name in ("contest", "echo", "nearest") if name in run.evidence}
        reads = Linearised(None if setting == "checkerboard" else 2)
        every = 5 if setting == "crystals" else 1
        few = {**how, "check": False, "schedule": Schedule.every(every), "transport": setting == "checkerboard"}
        few["config"] = SamplingConfig(batch=batch, record="total")
        variance_s, read = seconds(device, lambda: sample(field, args.count, confidence=reads, **few))  # noqa: B023
        scores |= {name: read.score(name) for name in VARIANCE[setting]}
        for name, own in larger(setting, field).items():
            for a in range(0, args.count, batch):
                rows = slice(a, a + batch)
                here = {k: v[rows] for k, v in cond.items()}
                part = run_checks({own.name: own}, field, field.space, _rows(run.x, rows), here, seed, a)
                scores.setdefault(name, []).append(part[own.name])  # type: ignore[union-attr]
            scores[name] = torch.cat(scores[name])  # type: ignore[arg-type]
            beside, weight = ("spread@0.3-0.8", 0.3) if own.name == "contest" else ("spread@0.6-1", 0.5)
            scores[f"{name} + {weight:g} {beside}"] = _summed([(scores[name], 1.0), (scores[beside], weight)])
        if args.leads or args.early:
            scores |= led(args, field, run, cond, batch)
        found = {f"score.{n}": v.float().cpu().numpy() for n, v in scores.items()}
        if setting == "mnist":
            from fmwc.metrics.images import failed, predictions

            found["failed"] = failed(judge, run.x, cond["y"])
            rival = run.evidence.get("rival")
            if rival is not None:
                found |= {"rival": rival.cpu().numpy(), "taken": predictions(judge, run.x).cpu().numpy()}
        elif setting == "checkerboard":
            from fmwc.metrics.points import misplaced

            found["failed"] = misplaced(run.x)
        else:
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
        np.savez_compressed(args.out / f"{seed}.npz", about=np.array(json.dumps(about)), **found)
        print(f"{args.out.name} {seed}: {json.dumps(about)}", flush=True)
    write_json(
        args.out / "provenance.json", provenance(device, clock.seconds, seeds=[int(s) for s in args.seeds.split(",")])
    )


def led(args: argparse.Namespace, field: Any, run: Trajectory, cond: dict[str, Any], batch: int) -> dict[str, Any]:
    """Read the scores of benchmarks/leads.py in batches."""
    early: Any = load(args.early, device=field.device) if args.early else None
    classes = torch.arange(field.network.config["classes"], device=field.device) if "y" in cond else None
    parts: list[leads.Found] = []
    for a in range(0, len(run), batch):
        rows = slice(a, a + batch)
        here, x0, x = {k: v[rows] for k, v in cond.items()}, _rows(run.x0, rows), _rows(run.x, rows)
        found = leads.read(field, field.space, x0, here, seed=run.seed, first=a, early=early, classes=classes)
        if "atoms" in cond:
            found |= leads.cells(field, field.space, x, here, seed=run.seed, first=a)
        parts.append(found)
    return {f"{n} ({parts[0][n][1]:.0f})": torch.cat([p[n][0] for p in parts]) for n in parts[0]}


def _rows(x: Any, rows: slice) -> Any:
    return {k: v[rows] for k, v in x.items()} if isinstance(x, dict) else x[rows]


def _parts(x: Any) -> list[torch.Tensor]:
    return list(x.values()) if isinstance(x, dict) else [x]


def _summed(scores: list[tuple[torch.Tensor, float]]) -> torch.Tensor:
    levels = torch.linspace(0, 1, 1001, device=scores[0][0].device)
    return combined([(s, w, s.quantile(levels.to(s))) for s, w in scores])


def judge(args: argparse.Namespace) -> None:
    """Judge crystals that were drawn before; those that are not metastable count as failed."""
    from fmwc.domains.crystals import CrystalDomain

    setting = CrystalDomain()
    for path in sorted(args.folder.glob("*.safetensors")):
        found = dict(np.load(path.with_suffix(".npz")))
        found["failed"] = setting.judge(Trajectory.load(path))
        np.savez_compressed(path.with_suffix(".npz"), **found)
        print(f"{path.stem}: {100 * (1 - found['failed'].mean()):.1f} % metastable", flush=True)


def table(args: argparse.Namespace) -> None:
    """Write the table of every setting below a folder."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    lines, rows = ["# Confidence as it comes, on fresh seeds", ""], []
    for folder in sorted(p for p in args.folder.iterdir() if list(p.glob("*.npz"))):
        files = [dict(np.load(path)) for path in sorted(folder.glob("*.npz"))]
        good = "crystals" in folder.name  # where most fail, a ranking is to find those that do not
        about = [json.loads(str(f["about"])) for f in files]
        rate = np.mean([1 - f["failed"].mean() if good else f["failed"].mean() for f in files])
        lines += [
            f"## {folder.name}",
            "",
            f"{'Metastable' if good else 'Failed'}: {rate:.2%}. Default: {about[0]['chosen']} ({about[0]['reason']}). "
            f"{len(files)} seeds of {about[0]['count']:,} samples. Seconds: plain "
            f"{np.mean([a['plain_s'] for a in about]):.2f}, default {np.mean([a['default_s'] for a in about]):.2f}.",
            "",
            "| score | AUROC | AUPRC | lift | "
            + ("metastable among the surest 10 %" if good else "failed of surest 80 %")
            + " |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        names = [n for n in files[0] if n.startswith("score.")]
        for name in names:
            found = []
            for f in (f for f in files if name in f):  # a lead may have been read on some of the seeds
                positive, score = (~f["failed"], -f[name]) if good else (f["failed"], f[name])
                precision = average_precision_score(positive, score)
                order = np.argsort(f[name], kind="stable")
                kept = order[: round((0.1 if good else 0.8) * len(order))]
                found.append(
                    (roc_auc_score(positive, score), precision, precision / positive.mean(), positive[kept].mean())
                )
            mean, std = np.mean(found, 0), np.std(found, 0, ddof=1) if len(found) > 1 else np.zeros(4)
            last = f"{mean[3]:.1%} ± {std[3]:.1%}" if good else f"{mean[3]:.2%} ± {std[3]:.2%}"
            cells = [f"{m:.3f} ± {s:.3f}" for m, s in zip(mean[:2], std[:2], strict=True)]
            lines.append(f"| {name[6:]} | {cells[0]} | {cells[1]} | {mean[2]:.2f} ± {std[2]:.2f} | {last} |")
            rows.append({"setting": folder.name, "score": name[6:], "mean": mean.tolist(), "std": std.tolist()})
        lines.append("")
        about_file = folder / "provenance.json"
        if about_file.exists():
            lines += [f"`{about_file.read_text().strip()}`".replace("\n", " "), ""]
    args.out.mkdir(parents=True, exist_ok=True)
    write_text(args.out / "tables.md", "\n".join(lines))
    write_json(args.out / "lifts.json", rows)
    print("\n".join(lines))


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
    one.add_argument("--early", default="", help="a checkpoint after a fifth of the training")
    one.add_argument("--leads", action="store_true", help="read the leads too")
    one.add_argument("--device", default="cpu")
    one.add_argument("--out", type=Path, required=True)
    two = verbs.add_parser("judge")
    two.set_defaults(run=judge)
    two.add_argument("folder", type=Path)
    three = verbs.add_parser("table")
    three.set_defaults(run=table)
    three.add_argument("folder", type=Path)
    three.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
