"""Draw samples and write a report page about them (`fmwc demo`, `fmwc report`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from fmwc.checkpoint import about, load
from fmwc.cli.verbs import Demo, Report
from fmwc.domains import Domain, Rows, ShippedDomain
from fmwc.errors import UsageError
from fmwc.field import Field
from fmwc.files import claimed, write_json
from fmwc.modes import one_thread
from fmwc.progress import sampling_bar, training_bar
from fmwc.provenance import Clock, pick_device, provenance
from fmwc.registry import domain_named, open_checkpoint
from fmwc.report.run import confidence_source
from fmwc.sampling import Trajectory

__all__ = ["Page", "write_demo", "write_report"]


class Page(NamedTuple):
    """A report page.

    Attributes:
        rows: The short table.
        path: The file.
        seconds: Time of sampling and, if any, of training.
    """

    rows: Rows
    path: Path
    seconds: float


def write_demo(options: Demo) -> Page:
    """Draw samples from the shipped weights of a domain, or from a newly trained small model; write a report page."""
    domain, device = domain_named(options.domain), pick_device(options.device)
    if options.changes and not options.train:
        raise UsageError("--set changes training, but the demo uses shipped weights; add --train")
    changes = [f"seed={options.seed}", *(options.changes or [])]
    recipe = domain.demo_recipe(changes) if options.train else None  # raises before anything is written
    with claimed(options.out, "demo", force=options.force, again=True) as folder:
        clock = Clock(device)
        if recipe is not None:
            with training_bar() as bar:
                domain.fit(recipe, folder.path / "model", device, bar, force=True)
        field = load(options.domain if recipe is None else folder.path / "model", device=device)
        with one_thread() if domain.one_thread else nullcontext():
            return _write(options, options.out, domain, field, domain.demo_run, clock)


def write_report(options: Report) -> Page:
    """Draw samples from a checkpoint and write a report page."""
    if options.out is None:
        about(options.checkpoint)  # reports a wrong name first
        raise UsageError("no folder for the page; add --out FOLDER")
    device = pick_device(options.device)
    clock = Clock(device)
    domain, field = open_checkpoint(options.checkpoint, device, options.judge, options.network)
    if isinstance(domain, ShippedDomain):
        domain.require_judge(field)
    with claimed(options.out, "report", force=options.force):
        return _write(options, options.out, domain, field, domain.report_run, clock)


def _write(
    options: Demo | Report, out: Path, domain: Domain, field: Field, draw: Callable[..., Trajectory], clock: Clock
) -> Page:
    count = options.count or domain.count(field.device)
    with sampling_bar("drawing samples with confidence", count) as bar:
        run = draw(field, count, options.seed, bar)
    rows = [*domain.numbers(run), {"": "checkpoint", "value": confidence_source(field.reference)}]
    origin = {name: str(value) for name, value in provenance(field.device, clock.seconds, seed=options.seed).items()}
    domain.write_samples(run, out)
    write_json(out / "numbers.json", {"numbers": rows, "provenance": origin})
    return Page(rows, domain.page(field, run, out, rows, origin), clock.seconds)
