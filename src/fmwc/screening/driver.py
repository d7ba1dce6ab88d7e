"""Run a campaign: draw → check → keep → judge → files (`fmwc screen`, :func:`screen`)."""

from __future__ import annotations

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
from fmwc.errors import OutputError, UsageError
from fmwc.identity import plain
from fmwc.modes import one_thread
from fmwc.progress import say_on_stderr, stages_bar
from fmwc.provenance import pick_device, runtime
from fmwc.readers import shown
from fmwc.report.run import confidence_source
from fmwc.screening.blocks import Outcome, Segment, run_local
from fmwc.screening.campaign import MOST_BLOCKS, Campaign, owned, rows_per_block
from fmwc.screening.results import Summary, write_results
from fmwc.screening.rows import CRYSTALS
from fmwc.screening.stages import Check, Draw, Judge, Keep, Stage
from fmwc.state import channels
from fmwc.uses.best_of import evaluations_per_candidate

__all__ = ["screen"]

NONE = "none"  # --judge none

Engine = Callable[[Segment, list[int]], Iterator[Outcome]]


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
    """Run a campaign, or what is left of it, and write its results.

    With `--share 3/10`, compute every tenth block from the third on: tasks of an array job work on one campaign at the
    same time. The results are written by the command without it.
    """
    if not options.checkpoint or options.out is None:
        raise UsageError("name a checkpoint and a folder, as in fmwc screen crystals -n 1000 --out campaign")
    share = _share(options.share)
    with one_thread():
        planned = _planned(options)
        owner = owned(planned, alone=share == (0, 1), block=options.block, force=options.force)
        with owner as campaign, _engine(options) as engine, stages_bar() as bar:
            _complete(campaign.drawing, engine, share, bar)
            if campaign.drawing.missing():
                return Summary(campaign.folder, [], [], "other tasks still draw; repeat the command when they are done")
            if campaign.waits:
                campaign.choose()
                judging = campaign.judging()
                assert judging is not None
                _complete(judging, engine, share, bar)
            if share != (0, 1):
                return Summary(campaign.folder, [], [], "this share is done; without --share, the results are written")
            return write_results(campaign, options.budget)


def _share(text: str) -> tuple[int, int]:
    """Return which blocks to compute: the number of this task from 0, and the number of tasks.

    >>> _share(""), _share("3/10")
    ((0, 1), (2, 10))
    """
    task, slash, tasks = text.partition("/")
    with suppress(ValueError):
        if not text or (slash and 1 <= int(task) <= int(tasks)):
            return (int(task) - 1, int(tasks)) if text else (0, 1)
    raise UsageError(f"--share must be a task and the number of tasks, such as 3/10; got '{text}'")


# ---- the plan --------------------------------------------------------------------------------------------------------


def _planned(options: Screen) -> Campaign:
    """Check the options, and draw one sample to learn what a row is."""
    judge = "" if options.judge == NONE else options.judge
    same = {name: getattr(options, name) for name in ("label", "network", "steps", "score", "seed", "device")}
    controls = {name: getattr(options, name) for name in ("elements", "exclude", "system", "atoms", "formula")}
    assert options.out is not None
    plan = plan_samples(Sample(options.checkpoint, options.out, count=1, judge=judge, **same, **controls))
    how, record = settled(plan, plan.record)
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
        "count": options.count,
        "keep": keep,
        "promise": None if certificate is None else certificate.as_dict(),
        "relax": options.relax,
        **(judges[0].settings() if judges else {"judge": NONE}),
        **runtime(field.device),
    }
    if options.block % drawing.batch:
        raise UsageError(f"--block must be a multiple of the batch size, {drawing.batch}; got {options.block}")
    block = options.block or rows_per_block(options.count, drawing.batch)
    if options.count > MOST_BLOCKS * block:
        raise UsageError(f"-n {options.count} makes more than {MOST_BLOCKS:,} blocks of {block} rows; add --block")
    stages = ((*before, *judges), ()) if keep is None else (before, judges)
    return Campaign(options.out, plain(identity), block, *stages)


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


def _complete(segment: Segment, engine: Engine, share: tuple[int, int], bar: Callable[..., None]) -> None:
    """Compute the blocks of a share that are not done; raise if some cannot be computed."""
    task, tasks = share
    sizes = [stop - start for start, stop in segment.spans]
    mine = {block for block in range(len(sizes)) if block % tasks == task}
    todo = [block for block in segment.missing() if block in mine]
    total = sum(sizes[block] for block in mine)
    left = sum(sizes[block] for block in todo)
    bar(segment.name, total - left, total)
    problems = dict.fromkeys(todo, "it was not computed")
    for outcome in engine(segment, todo) if todo else ():
        problems[outcome.block] = outcome.problem
        if not outcome.problem:
            left -= sizes[outcome.block]
            bar(segment.name, total - left, total)
    if failed := {block: problem for block, problem in problems.items() if problem}:
        first = min(failed)
        raise OutputError(
            f"{len(failed)} of {len(sizes)} blocks of {shown(segment.folder)} failed; the first of them, "
            f"{segment.path(first).stem}: {failed[first]}. The others are done; repeat the command to try again"
        )
