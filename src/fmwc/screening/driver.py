"""Run a campaign: draw → check → keep → judge → files (`fmwc screen`, :func:`screen`)."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from fmwc.cli.filter import population_of, read_certificate
from fmwc.cli.sample import Plan, plan_samples, settled
from fmwc.cli.verbs import Sample, Screen
from fmwc.crystals import mp20
from fmwc.crystals.judge import require_cut
from fmwc.domains import ShippedDomain
from fmwc.entry import source_of
from fmwc.errors import MismatchError, OutputError, UsageError
from fmwc.files import Folder, claimed, write_json, write_text
from fmwc.identity import plain, require_same
from fmwc.modes import one_thread
from fmwc.progress import say_on_stderr, stages_bar
from fmwc.provenance import pick_device, runtime
from fmwc.readers import shown
from fmwc.report.run import confidence_source
from fmwc.screening.blocks import FOLDER, MOST, Outcome, Segment, run_local, set_aside
from fmwc.screening.campaign import CAMPAIGN, DRIVER, MOST_BLOCKS, Campaign, read_campaign, rows_per_block
from fmwc.screening.results import Summary, write_results
from fmwc.screening.rows import CRYSTALS
from fmwc.screening.stages import Check, Draw, Judge, Keep, Stage
from fmwc.state import channels
from fmwc.uses.best_of import evaluations_per_candidate

__all__ = ["screen"]

NONE = "none"  # --judge none

Engine = Callable[[Segment, list[int], str], Iterator[Outcome]]


def screen(checkpoint: str, count: int = 1000, *, out: str | Path, **options: Any) -> Summary:
    """Draw many samples, keep the surest, judge them, and write the best; resumes if interrupted.

    The same as `fmwc screen`, in blocks on disk. Rows depend on the checkpoint, the seed and their index only: any
    number of workers and any size of the blocks give the same table. Until it returns, torch uses one CPU thread.

    Arguments:
        checkpoint: A shipped name, or the folder of a checkpoint.
        count: The number of samples.
        out: The folder of the campaign.
        options: The options of `fmwc screen` by name, such as `keep=0.1`, `budget=50` and `workers=4`.
    """
    known = {name for name in Screen.__dataclass_fields__ if name not in ("status", "checkpoint", "out", "count")}
    if unknown := options.keys() - known:
        raise UsageError(f"screen has no option '{min(unknown)}'; known: {', '.join(sorted(known))}")
    keep = options.get("keep")
    given: dict[str, Any] = {**options, "count": count, "keep": "" if keep is None else str(keep)}
    return run(Screen(checkpoint, Path(out), **given))


def run(options: Screen) -> Summary:
    """Run a campaign, or what is left of it, and write its results."""
    if not options.checkpoint or options.out is None:
        raise UsageError("name a checkpoint and a folder, as in fmwc screen crystals -n 1000 --out campaign")
    with one_thread():
        campaign = _resumed(_planned(options), options)
        adds = () if options.force else (CAMPAIGN,)  # also to a finished campaign: blocks may have been set aside
        claim = claimed(campaign.folder, "screen", campaign.identity, force=options.force, adds=adds)
        with claim as folder, _engine(options) as engine:
            campaign.save()
            if options.retry:
                _forget(campaign)
            driver = _begin(campaign)
            with stages_bar() as bar:
                _complete(campaign.drawing, engine, driver, folder, bar)
                if campaign.waits and options.first is None:
                    campaign.choose()
                    judging = campaign.judging()
                    assert judging is not None
                    _complete(judging, engine, driver, folder, bar)
            return write_results(campaign, options.budget)


# ---- the plan --------------------------------------------------------------------------------------------------------


def _planned(options: Screen) -> Campaign:
    """Check the options, and draw one sample to learn what a row is."""
    judge = "" if options.judge == NONE else options.judge
    same = {name: getattr(options, name) for name in ("label", "network", "steps", "score", "seed", "device")}
    controls = {name: getattr(options, name) for name in ("elements", "exclude", "system", "atoms", "formula")}
    assert options.out is not None
    plan = plan_samples(Sample(options.checkpoint, options.out, count=1, judge=judge, **same, **controls))
    how, record = settled(plan, plan.record, plan.schedule)
    domain, field = plan.domain, plan.field
    for remark in domain.effect_of_controls(field):
        say_on_stderr(remark)
    made = {**record.made(), "made_from": confidence_source(field.reference)}
    kind = domain.name if isinstance(domain, ShippedDomain) else ""
    drawing = Draw(
        made["checkpoint"],
        record.identity,
        kind,
        options.network,
        field.device.type,
        options.seed,
        options.batch or domain.batch(field.device),
        options.label,
        {name: value for name, value in controls.items() if value},
        options.score,
        how,
        evaluations_per_candidate(field, how),
    )
    one = replace(drawing.run(domain, field, 0, 1), made=plain(made))
    if one.withheld and not options.score:
        reason = one.withheld.partition("; rank")[0]
        raise UsageError(f"{reason}; add --score NAME, such as integrated, to rank by a score")
    population = population_of(one, "")
    certificate = read_certificate(options.promise, population) if options.promise is not None else None
    shapes = {} if kind == CRYSTALS else {name: tuple(value.shape[1:]) for name, value in channels(one.x).items()}
    judges = _judge(options, plan, shapes, kind, judge)
    keep = _keep(options)
    before: tuple[Stage, ...] = (drawing, Check(kind))
    if certificate is not None:
        before += (Keep(certificate.threshold),)
    identity = {
        "drawn": population,
        "kind": kind,
        "shapes": shapes,
        "seed": options.seed,
        "batch": drawing.batch,
        "network": options.network,
        "network_source": source_of(options.network),
        "first": options.first or 0,
        "count": options.count,
        "keep": keep,
        "promise": None if certificate is None else certificate.as_dict(),
        "relax": options.relax,
        **(judges[0].settings() if judges else {"judge": NONE}),
        **runtime(field.device),
    }
    layout = _layout(options, drawing.batch)
    stages = ((*before, *judges), ()) if keep is None else (before, judges)
    return Campaign(options.out, plain(identity), layout, *stages)


def _layout(options: Screen, batch: int) -> list[list[int]]:
    first = options.first or 0
    if first % batch:
        raise UsageError(f"--first must be a multiple of the batch size, {batch}; got {first}")
    if options.block % batch:
        raise UsageError(f"--block must be a multiple of the batch size, {batch}; got {options.block}")
    size = options.block or rows_per_block(options.count, batch)
    if options.count > MOST_BLOCKS * size:
        raise UsageError(f"-n {options.count} makes more than {MOST_BLOCKS:,} blocks of {size} rows; add --block")
    return [[first, first + options.count, size]]


def _keep(options: Screen) -> float | int | None:
    """Return the share or the number of rows to keep."""
    if not options.keep:
        return None
    if options.promise is not None:
        raise UsageError("--keep and --promise contradict each other; give only one")
    with suppress(ValueError):
        if (count := int(options.keep)) > 0:
            return count
    with suppress(ValueError):
        if 0 < (share := float(options.keep)) < 1:
            return share
    raise UsageError(f"--keep must be a share below 1, such as 0.1, or a whole number of samples; got '{options.keep}'")


def _judge(options: Screen, plan: Plan, shapes: dict[str, Any], kind: str, judge: str) -> tuple[Judge, ...]:
    """Return the stage that judges, if samples are judged."""
    domain = plan.domain
    if kind != CRYSTALS and options.relax:
        raise UsageError(f"only crystals can be relaxed; leave out --relax for {domain.name}")
    if not isinstance(domain, ShippedDomain) or not domain.has_judge or options.judge == NONE:
        if options.relax:
            raise UsageError("--relax needs a judge; leave out --judge none")
        return ()
    domain.require_judge(plan.field)
    if kind == CRYSTALS:
        require_cut(options.cut)
    data = str(mp20.folder_given(options.data) or "") if kind == CRYSTALS else options.data
    settings = pick_device(options.judge_device).type, options.relax, data, options.cut
    return (Judge(plan.options.checkpoint, kind, judge, shapes, *settings),)


def _resumed(campaign: Campaign, options: Screen) -> Campaign:
    """Return the campaign with the blocks that its folder already has; raise if the folder has another campaign."""
    if options.force or not (campaign.folder / CAMPAIGN).exists():
        return campaign
    earlier, where = read_campaign(campaign.folder), shown(campaign.folder)
    require_same(
        earlier.identity, campaign.identity, f"{where} holds another campaign; choose another --out, or add --force"
    )
    if options.block and earlier.layout != campaign.layout:
        raise MismatchError(f"{where} has blocks of {earlier.layout[0][2]} rows; leave out --block")
    return replace(campaign, layout=earlier.layout)


# ---- the driver ------------------------------------------------------------------------------------------------------


def _engine(options: Screen) -> AbstractContextManager[Engine]:
    """Return the engine that computes blocks: Ray for several workers or a cluster, else this process."""
    workers, address = options.workers, options.address
    if workers < 2 and not address:
        say_on_stderr("computing in this process (for several, add --workers N or --address)")
        return nullcontext(run_local)
    on = f"Ray at {shown(address)}" if address else "Ray on this machine"
    say_on_stderr(f"computing with {on}, {workers or 'one worker per CPU'}" + " workers" * bool(workers))
    connected: Any = import_module("fmwc.screening.ray_engine").connected
    return connected(workers, address)


def _begin(campaign: Campaign) -> str:
    """Record this run of the driver for `fmwc screen --status`; return its name."""
    driver = f"{secrets.token_hex(8)}-{os.getpid()}"
    owner = {"driver": driver, "pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    write_json(campaign.folder / FOLDER / DRIVER, owner)
    return driver


def _forget(campaign: Campaign) -> None:
    for segment in filter(None, (campaign.drawing, campaign.judging())):
        for block in set_aside(segment):
            segment.forget(block)


def _complete(segment: Segment, engine: Engine, driver: str, folder: Folder, bar: Callable[..., None]) -> None:
    """Compute the blocks of a segment that are not done, until each is done or set aside."""
    sizes = [stop - start for start, stop in segment.spans]
    folder.note(*map(segment.path, range(len(sizes))))
    left = {block for block in range(len(sizes)) if segment.about(block, whole=True) is None}
    _settle(segment)
    total, done = sum(sizes), sum(sizes) - sum(sizes[block] for block in left)
    alike: dict[str, set[int]] = {}  # blocks by the reason that they failed
    bar(segment.name, done, total)
    while todo := _todo(segment, left):
        began = {block: len(segment.attempts(block)) for block in todo}
        for outcome in engine(segment, todo, driver):
            if not outcome.problem:
                left.discard(outcome.block)
                done += sizes[outcome.block]
                bar(segment.name, done, total)
            elif not done:
                alike.setdefault(outcome.problem, set()).add(outcome.block)
                _require_different(segment, alike)
        if all(block in left and len(segment.attempts(block)) == began[block] for block in todo):
            raise OutputError(f"no block of {shown(segment.folder)} could be begun; see the messages above")


def _require_different(segment: Segment, alike: dict[str, set[int]]) -> None:
    """Raise if the first blocks fail for the same reason, which is then no fault of theirs; forget their attempts."""
    for reason, blocks in alike.items():
        if len(blocks) == MOST:
            for block in blocks:
                segment.forget(block)
            raise OutputError(
                f"the first {MOST} blocks of {shown(segment.folder)} failed for the same reason: {reason}"
            )


def _todo(segment: Segment, left: set[int]) -> list[int]:
    """Return the blocks to compute, those that failed before last."""
    tries = {block: (segment.alone(block).exists(), len(segment.attempts(block))) for block in left}
    return sorted((block for block in left if tries[block][1] < MOST), key=lambda block: (tries[block], block))


def _settle(segment: Segment) -> None:
    """Forget the attempts whose driver died: a driver that is killed must not set aside blocks that are good.

    A block that was computed in the driver's own process may have ended it, so it is computed alone next time.
    """
    for block in range(len(segment.spans)):
        found = segment.attempts(block)
        if found and not found[-1]["reason"]:
            if found[-1]["driver"].endswith(f"-{found[-1].get('pid')}"):
                write_text(segment.alone(block), "")
            else:
                segment.alone(block).unlink(missing_ok=True)
            segment.forget(block, len(found) - 1)
