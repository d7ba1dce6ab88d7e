"""Write a report page about samples, drawn before or now (`fmwc demo`, `fmwc report`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fmwc.checkpoint import about, load
from fmwc.cli.edit import find_samples, load_checkpoint
from fmwc.cli.filter import read_run
from fmwc.cli.sample import RunRecord
from fmwc.cli.verbs import Demo, Report
from fmwc.domains import Domain, OwnDomain, Rows, ShippedDomain
from fmwc.errors import CheckpointError, UsageError
from fmwc.field import Field
from fmwc.files import fresh, moved, write_json
from fmwc.modes import one_thread
from fmwc.progress import sampling_bar, training_bar
from fmwc.provenance import Clock, pick_device, provenance
from fmwc.registry import DOMAINS, domain_named, domain_of, open_checkpoint
from fmwc.report.run import confidence_source
from fmwc.sampling import Trajectory

__all__ = ["Page", "write_demo", "write_report"]

SEED = 2026  # of the samples of a checkpoint's page


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
    with fresh(options.out, force=options.force) as folder:
        clock = Clock(device)
        if recipe is not None:
            with training_bar() as bar:
                domain.fit(recipe, folder / "model", device, bar)
        field = load(options.domain if recipe is None else folder / "model", device=device)
        with one_thread() if domain.one_thread else nullcontext():
            page = _write(options, folder, domain, field, domain.demo_run, clock)
    return _moved(page, folder, options.out)


def write_report(options: Report) -> Page:
    """Write the report page of samples in a folder, or of a checkpoint."""
    file = Path(options.source, "samples.safetensors")
    if file.is_file():
        return _write_own(options, file)
    if options.checkpoint:
        raise UsageError(
            f"--checkpoint names the checkpoint of samples, but {options.source} is not a folder of samples"
        )
    if options.out is None:
        about(options.source)  # reports a wrong name first
        raise UsageError("no folder for the page; add --out FOLDER")
    device = pick_device(options.device)
    clock = Clock(device)
    domain, field = open_checkpoint(options.source, device, options.judge, options.network)
    if isinstance(domain, ShippedDomain):
        domain.require_judge(field)
    with fresh(options.out, force=options.force) as folder:
        page = _write(options, folder, domain, field, domain.report_run, clock)
    return _moved(page, folder, options.out)


def _moved(page: Page, folder: Path, out: Path) -> Page:
    return page._replace(path=moved([page.path], folder, out)[0])


def _write_own(options: Report, file: Path) -> Page:
    """Write the page of samples that were drawn before."""
    if options.count or options.seed is not None:
        raise UsageError("--count and --seed are for the page of a checkpoint; samples in a folder are all shown")
    clock, out = Clock(device := pick_device(options.device)), options.out or file.parent / "report"
    find_samples(file, out)  # raises if the page would be written between the samples
    run, table = read_run(file)
    record = RunRecord.read(run.made, options.checkpoint)
    domain, field = _opened(record, options, file, device)
    with fresh(out, force=options.force or options.out is None) as folder:
        domain = domain.with_files(run, table or {}, file.parent, out)
        how = {"drawn with": record.checkpoint, "restricted to": record.controls, "selected": record.selected}
        rows = [*domain.numbers(run), *({"": name, "value": value} for name, value in how.items() if value)]
        origin = {name: str(value) for name, value in provenance(device, clock.seconds, seed=run.seed).items()}
        write_json(folder / "numbers.json", {"numbers": rows, "provenance": origin})
        page = Page(rows, domain.page(field, run, folder, rows, origin), clock.seconds)
    return _moved(page, folder, out)


def _opened(record: RunRecord, options: Report, file: Path, device: torch.device) -> tuple[Domain, Any]:
    """Return the domain of samples, and their field if the page needs it."""
    try:
        recipe = (about(record.checkpoint).get("recipe") or {}) if record.checkpoint else {}
        if recipe.get("name") not in DOMAINS:
            return OwnDomain(), None
        domain = domain_of(record.checkpoint, options.judge)
        if not domain.page_needs_field:
            return domain, None
        return domain, load_checkpoint(record, file, device)
    except CheckpointError as error:
        if options.checkpoint:
            raise
        raise CheckpointError(f"{error} ({file} was drawn with it; if it moved, give --checkpoint)") from error


def _write(
    options: Demo | Report, out: Path, domain: Domain, field: Field, draw: Callable[..., Trajectory], clock: Clock
) -> Page:
    count, seed = options.count or domain.count(field.device), SEED if options.seed is None else options.seed
    with sampling_bar("drawing samples with confidence", count) as bar:
        run = draw(field, count, seed, bar)
    rows = [*domain.numbers(run), {"": "checkpoint", "value": confidence_source(field.reference)}]
    origin = {name: str(value) for name, value in provenance(field.device, clock.seconds, seed=seed).items()}
    domain.write_samples(run, out)
    write_json(out / "numbers.json", {"numbers": rows, "provenance": origin})
    return Page(rows, domain.page(field, run, out, rows, origin), clock.seconds)
