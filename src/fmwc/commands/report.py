"""Report pages of checkpoints: what `fmwc demo` and `fmwc report` do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from fmwc.checkpoint import load
from fmwc.domains import domain_named, open_checkpoint
from fmwc.domains.domain import Domain, Rows, ShippedDomain
from fmwc.errors import UsageError
from fmwc.field import Field
from fmwc.files import claimed, write_json
from fmwc.modes import one_thread
from fmwc.progress import sampling_bar, training_bar
from fmwc.provenance import Clock, pick_device, provenance
from fmwc.report.run import confidence_source
from fmwc.sampling import Trajectory

__all__ = ["Page", "write_demo", "write_report"]


class Page(NamedTuple):
    """A report page that was written.

    Attributes:
        rows: The short table.
        page: The file.
        seconds: How long it took.
    """

    rows: Rows
    page: Path
    seconds: float


def write_demo(
    domain: str = "checkerboard",
    out: Path = Path("demo"),
    *,
    train: bool = False,
    seed: int = 0,
    changes: Sequence[str] = (),
    device: str | torch.device = "auto",
    count: int = 0,
    force: bool = False,
) -> Page:
    """Draw samples of a domain's shipped weights and write samples, numbers and a report page.

    Arguments:
        domain: The domain.
        out: The folder; files of an earlier demonstration are replaced.
        train: Train a small model first, with `key=value` changes of its recipe.
        seed: Seeds training and samples.
        changes: Changes of the recipe.
        device: Where to compute.
        count: The number of samples; 0 is the domain's default.
        force: Write into a folder that is not empty.
    """
    chosen, where = domain_named(domain), pick_device(device)
    _require_count(count)
    if changes and not train:
        raise UsageError("--set changes training, but the demonstration uses shipped weights; add --train")
    recipe = chosen.demo_recipe([f"seed={seed}", *changes]) if train else None  # raises before anything is written
    with claimed(out, "demo", force=force, again=True) as folder:
        clock = Clock(where)
        if recipe is not None:
            with training_bar() as bar:
                chosen.fit(recipe, folder.path / "model", where, bar, force=True)
        field = load(domain if recipe is None else folder.path / "model", device=where)
        with one_thread() if chosen.one_thread else nullcontext():
            return _write(chosen, field, folder.path, seed, count, clock, chosen.demo_run)


def write_report(
    checkpoint: str,
    out: Path,
    *,
    count: int = 0,
    seed: int = 2026,
    judge: str = "",
    network: str = "",
    device: str | torch.device = "auto",
    force: bool = False,
) -> Page:
    """Draw samples of a checkpoint and write samples, numbers and a report page.

    Arguments:
        checkpoint: A shipped name or a folder.
        out: The folder to write to.
        count: The number of samples; 0 is the domain's default.
        seed: Seeds the samples.
        judge: Your own judge.
        network: `module:function` that builds the network, for a network of your own.
        device: Where to compute.
        force: Write into a folder that is not empty.
    """
    _require_count(count)
    where = pick_device(device)
    clock = Clock(where)
    chosen, field = open_checkpoint(checkpoint, where, judge, network)
    if isinstance(chosen, ShippedDomain):
        chosen.require_judge(field)
    with claimed(out, "report", force=force) as folder:
        return _write(chosen, field, folder.path, seed, count, clock, chosen.report_run)


def _require_count(count: int) -> None:
    if count < 0:
        raise UsageError(f"-n must be at least 1, or 0 for the default number; got {count}")


def _write(
    chosen: Domain, field: Field, out: Path, seed: int, count: int, clock: Clock, draw: Callable[..., Trajectory]
) -> Page:
    count = count or chosen.count(field.device)
    with sampling_bar("drawing samples with confidence", count) as bar:
        run = draw(field, count, seed, bar)
    rows = [*chosen.numbers(run), {"": "in this checkpoint", "value": confidence_source(field.reference)}]
    about = {k: str(v) for k, v in provenance(field.device, clock.seconds, seed=seed).items()}
    chosen.write_samples(run, out)
    write_json(out / "numbers.json", {"numbers": rows, "provenance": about})
    return Page(rows, chosen.page(field, run, out, rows, about), clock.seconds)
