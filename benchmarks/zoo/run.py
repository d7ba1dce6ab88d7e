"""Train the small flows of the zoo, score their samples, and write the table and the picture.

python -m benchmarks.zoo --out runs/zoo --jobs 2            # eleven flows, three seeds
python -m benchmarks.zoo --flows fresh3 --seeds 0           # names separated by commas, or a half
python -m benchmarks.zoo --out results/zoo --only tables    # table.md and scores.png from table.json

`FLOW-SEED.json` holds the share of failures, and AUROC, AUPRC and lift of each score; existing files are kept.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from sklearn.metrics import average_precision_score, roc_auc_score

import fmwc
from benchmarks.zoo.flows import FLOWS, Flow
from fmwc.calibration import POINTS
from fmwc.checks import Contest, Echo, Nearest, embedded, run_checks
from fmwc.files import write_json, write_text
from fmwc.flow import couple
from fmwc.provenance import Clock, pick_device, provenance
from fmwc.randomness import derive
from fmwc.report.page import styled
from fmwc.sampling import SamplingConfig
from fmwc.sampling.config import is_small
from fmwc.sampling.trajectory import DISPERSION, SCORES
from fmwc.training import TrainingConfig, train

STEPS, NOISE_STEPS, PILOT, BATCH = 50, 1_000, 1_000, {"cpu": 500, "cuda": 1_500}
FREE = ("spread", "spread@0.3-0.8", "spread@0.6-1", "detour")
SHOWN = ("default", "nearest", "echo", "contest", "spread", "temporal_ratio", "integrated", "dispersion")


def trained(
    name: str, seed: int, device: torch.device
) -> tuple[torch.nn.Module, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the trained network of a flow, its data and their classes."""
    flow = FLOWS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, name, "weights"))
        network = flow.network().to(device).eval()
    drawn = flow.data(10_000, torch.Generator().manual_seed(derive(seed, name, "data")))
    data, y = drawn if flow.classes else (drawn, None)
    cond = {} if y is None else {"y": y.to(device)}

    def loss(x1: torch.Tensor, randomness: Any, beta: Any, cond: dict[str, torch.Tensor]) -> torch.Tensor:
        x0 = couple(flow.pairs, flow.space, x1, randomness)
        t = randomness.uniform(torch.empty(len(x1), device=x1.device))
        if objective := getattr(network, "objective", None):
            return objective(flow.space, x0, x1, t, randomness, **cond)
        x_t, u_t = flow.space.path(x0, x1, t)
        return flow.space.squared_error(network(x_t, t, **cond), u_t)

    how = {"seed": derive(seed, name, "train"), "captured": flow.pairs is None}  # an assignment is solved on the CPU
    train(network, loss, data.to(device), TrainingConfig(flow.steps, flow.batch, flow.lr, "cosine", **how), cond=cond)
    network.zero_grad()
    return network, data.to(device), cond


def scores(flow: Flow, network: Any, data: Any, cond: Any, seed: int, count: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Draw samples; return which of them failed, and their scores."""
    field = fmwc.attach(network, space=flow.space).to(data.device)
    options: dict[str, Any] = {"captured": flow.pairs is None, "confidence": False, "pairs": flow.pairs}
    fmwc.fit_noise(field, data, NOISE_STEPS, batch=256, seed=derive(seed, "noise"), cond=cond, **options)
    wanted = {"y": torch.arange(count, device=data.device) % flow.classes} if flow.classes else {}
    batch = BATCH[data.device.type]
    how = {"steps": STEPS, "seed": derive(seed, "zoo"), "cond": wanted}
    read = SamplingConfig(batch=batch)
    run = fmwc.sample(field, count, transport=is_small(flow.space), config=read, **how)
    names = (*SCORES, *FREE, *([DISPERSION] if run.transported is not None else []))
    found = {name: run.score(name) for name in names}
    points = embedded(flow.space, data[:POINTS])
    checks: dict[str, Any] = {"echo": Echo.planned(4), "nearest": Nearest(points)}
    if flow.classes:
        checks["nearest"] = Nearest(points, cond["y"][:POINTS].to(points.device), "y")
        checks["contest"] = Contest.planned("y", cond["y"].unique(), 20)
    for name, check in checks.items():
        found[name] = run_checks({check.name: check}, network, flow.space, run.x, wanted, run.seed, 0)[check.name]
    for name, given in (("default", data), ("default, no data", None)):
        pilot = {"steps": STEPS, "pilot": PILOT, "seed": run.seed, "conventions": flow.pairs is None}
        fmwc.fit_confidence(field, given, cond=cond, **pilot)
        found[name] = fmwc.sample(field, x0=run.x0, config=SamplingConfig(batch=batch), **how).score()
    failed = flow.failed(run.x.cpu(), *(value.cpu() for value in wanted.values()))
    return failed.numpy(), {name: score.detach().cpu().double().numpy() for name, score in found.items()}


def one(task: tuple[str, int], device: str, out: Path, count: int) -> None:
    """Train and score one flow and seed."""
    name, seed = task
    if (path := out / f"{name}-{seed}.json").exists():
        return
    torch.set_num_threads(1)
    failed, found = scores(FLOWS[name], *trained(name, seed, torch.device(device)), seed, count)
    rows = {
        score: {"auroc": roc_auc_score(failed, values), "auprc": average_precision_score(failed, values)}
        for score, values in found.items()
        if 0 < failed.mean() < 1
    }
    write_json(path, {"failed": float(failed.mean()), "scores": rows})
    print(f"{name} {seed}: {failed.mean():.1%} failed, default {rows.get('default')}", flush=True)


def collected(out: Path) -> dict[str, Any]:
    """Return the means over seeds by flow and score."""
    flows: dict[str, Any] = {}
    for name, flow in FLOWS.items():
        if runs := [json.loads(path.read_text()) for path in sorted(out.glob(f"{name}-[0-9]*.json"))]:
            means = {
                score: {m: float(np.mean([run["scores"][score][m] for run in runs])) for m in rows}
                for score, rows in runs[0]["scores"].items()
            }
            failed = float(np.mean([run["failed"] for run in runs]))
            about = {"half": flow.half, "about": flow.about, "runs": len(runs), "failed": failed}
            flows[name] = {**about, "scores": means}
    return flows


def table(flows: dict[str, Any]) -> str:
    """Return the table: the AUROC of the default, of the best score (picked with the labels), and of each shown one."""
    head = ("flow", "half", "runs", "failed, %", "best score", *SHOWN)
    lines = [
        "# The zoo",
        "",
        "AUROC for the failed samples, mean over runs. NOTES.md says what was tuned on which half.",
    ]
    lines += ["", f"| {' | '.join(head)} |", f"|---|---|---:|---:|---|{'---:|' * len(SHOWN)}"]
    for name, flow in flows.items():
        auroc = {score: row["auroc"] for score, row in flow["scores"].items()}
        best = max((score for score in auroc if not score.startswith("default")), key=auroc.__getitem__)
        cells = (name, flow["half"], str(flow["runs"]), f"{100 * flow['failed']:.1f}", f"{best} {auroc[best]:.2f}")
        shown = (f"{auroc[score]:.2f}" if score in auroc else "–" for score in SHOWN)
        lines.append(f"| {' | '.join((*cells, *shown))} |")
    return "\n".join([*lines, "", *(f"- **{name}**: {flow['about']}" for name, flow in flows.items()), ""])


@styled
def picture(flows: dict[str, Any]) -> Figure:
    """Draw one row per score and one column per flow; empty cells were not measured."""
    shown = sorted(flows, key=lambda name: -flows[name]["scores"]["default"]["auroc"])
    values = np.array([[flows[f]["scores"].get(s, {}).get("auroc", np.nan) for f in shown] for s in SHOWN])
    figure = Figure(figsize=(10.5, 3.4), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values, cmap="PuOr", norm=TwoSlopeNorm(0.5, 0, 1), aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            colour = "white" if abs(value - 0.5) > 0.35 else "black"
            axes.text(column, row, f"{value:.2f}".removeprefix("0"), ha="center", va="center", size=6, color=colour)
    axes.set_xticks(range(len(shown)), shown, rotation=60, ha="right", rotation_mode="anchor", size=7)
    axes.set_yticks(range(len(SHOWN)), [score.replace("_", " ") for score in SHOWN], size=8)
    figure.colorbar(image, pad=0.01, label="AUROC (0.5: chance)")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flows", default=",".join(FLOWS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/zoo"))
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with one thread")
    parser.add_argument("--count", type=int, default=3_000, help="samples of each flow and seed")
    parser.add_argument("--only", choices=["tables"], help="only write the table and the picture from table.json")
    given = parser.parse_args()
    if not given.only:
        device = pick_device(given.device)
        clock = Clock(device)
        given.out.mkdir(parents=True, exist_ok=True)
        names = [name for name, flow in FLOWS.items() if flow.half == given.flows] or given.flows.split(",")
        tasks = [(name, int(seed)) for seed in given.seeds.split(",") for name in names]
        with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
            list(pool.map(partial(one, device=str(device), out=given.out, count=given.count), tasks))
        about = provenance(device, clock.seconds, samples=given.count)
        write_json(given.out / "table.json", {"provenance": about, "flows": collected(given.out)})
    flows = json.loads((given.out / "table.json").read_text())["flows"]
    write_text(given.out / "table.md", table(flows))
    picture(flows).savefig(given.out / "scores.png", dpi=150)
