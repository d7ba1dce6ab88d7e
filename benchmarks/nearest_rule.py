"""When nearest training points may be evidence: AUROC for disturbed data and for disturbed own samples, on the zoo.

python -m benchmarks.nearest_rule --flows circles,graphs --seed 7 --out OUT

The distance to training points can point the wrong way (`circles`), so `fit_confidence` tests whether it notices a
disturbance. Disturbed own samples are no good test of it if the model is weak: its samples are off the data already.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import fmwc
from benchmarks.zoo.flows import FLOWS
from benchmarks.zoo.table import auroc
from fmwc import calibration
from fmwc.files import write_json
from fmwc.provenance import Clock, pick_device, provenance
from fmwc.state import batch_size, select, tree_map

SAMPLES = 1_500


def row(name: str, seed: int, device: torch.device) -> dict[str, Any]:
    """Return the test's numbers for one flow, and the AUROC of the default and of nearest points for failures."""
    trained = FLOWS[name].train(seed, device, "")
    field = fmwc.attach(trained.network, space=trained.space)
    data, cond = trained.data, trained.cond
    reference = fmwc.fit_confidence(field, data, cond=cond, conventions=False, seed=11)
    rows = torch.arange(SAMPLES)
    given = {label: values[rows % batch_size(data)] for label, values in cond.items()}
    run = fmwc.sample(field, SAMPLES, steps=50, seed=77, cond=given)
    failed = trained.failed(run.x, run.cond).cpu().numpy().astype(bool)
    near = calibration._checks(trained.space, data, cond, next(iter(cond), ""), None, 50, None)["nearest"]
    own = slice(0, calibration.TRIED)
    states = {
        "data": _on(device, data, cond, calibration._new_rows(near, data)),
        "own samples": (select(run.x, own), {label: values[own] for label, values in run.cond.items()}),
    }
    tests = {what: calibration._disturbed(field, trained.space, *pair, 11) for what, pair in states.items()}
    score = near(field.network, trained.space, run.x, run.cond, 0, 0).score
    return {
        "flow": name,
        "failed": float(failed.mean()),
        "score": reference.score,
        "default": auroc(run.score().cpu().numpy(), failed),
        "nearest": auroc(score.cpu().numpy(), failed),
        "density": calibration._density(trained.space, near, data),
        "echo notices own samples": calibration._best_echo(fmwc.checks.Echo.planned(4), tests["own samples"])[1],
        **{f"nearest notices {what}": test.detects(near) for what, test in tests.items()},
    }


def _on(device: torch.device, data: Any, cond: dict[str, Any], rows: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    return tree_map(lambda c: c[rows].to(device), data), {label: v[rows].to(device) for label, v in cond.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flows", default=",".join(FLOWS))
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = pick_device(args.device)
    clock, rows = Clock(device), []
    for name in args.flows.split(","):
        rows.append(row(name, args.seed, device))
        print(rows[-1], flush=True)
        about = provenance(device, clock.seconds, seeds=[args.seed])
        write_json(args.out / "nearest-rule.json", {"provenance": about, "flows": rows})


if __name__ == "__main__":
    main()
