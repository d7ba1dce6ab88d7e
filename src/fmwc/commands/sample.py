"""Drawing samples into a folder: what `fmwc sample` does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fmwc.checkpoint import identity
from fmwc.commands.check import planned_check
from fmwc.commands.config import RunRecord, window_of
from fmwc.compiled import Compiled
from fmwc.domains import open_checkpoint
from fmwc.domains.domain import Domain, ShippedDomain
from fmwc.errors import CheckpointError, UsageError, pick
from fmwc.field import Field
from fmwc.files import Folder, claimed
from fmwc.progress import sampling_bar, say_on_stderr
from fmwc.provenance import pick_device, runtime
from fmwc.readers import shown
from fmwc.references import Schedule
from fmwc.report.run import confidence_source
from fmwc.sampling import SCORES, Controller, Parts, SamplingConfig, Trajectory, Uniform, needs_variance, read_times
from fmwc.sampling.controllers import foreseen
from fmwc.sampling.scores import names_of, parsed
from fmwc.sampling.scores import score as read_score
from fmwc.sampling.trajectory import DISPERSION, EVIDENCE
from fmwc.uses.best_of import (
    MOST,
    candidate_seed,
    candidates_within,
    checks_of,
    evaluations_per_candidate,
    ranked_by_check,
    surest_of,
)

__all__ = ["draw_samples"]

CHECKS = ("contest", "echo")


def draw_samples(
    checkpoint: str,
    out: Path,
    *,
    device: str | torch.device = "auto",
    count: int = 1000,
    label: int | None = None,
    judge: str = "",
    network: str = "",
    steps: int = 50,
    stepper: str = "euler",
    propagation: str = "",
    controller: str = "uniform",
    guide: float = 0.0,
    guide_window: str = "",
    every: int = 0,
    adaptive: bool = False,
    transport: bool = False,
    score: str = "",
    keep: float = 1.0,
    check: bool | int = True,
    best_of: int = 1,
    budget: int = 0,
    compiled: bool = False,
    format: str = "",
    seed: int = 0,
    force: bool = False,
) -> list[Path]:
    """Draw samples with their confidence and write them to a folder; return the files.

    What the options can be refused for is checked before anything is drawn. Batches are kept as they are drawn: an
    interrupted run that is called again draws only the rest, and writes the same files.

    Arguments:
        checkpoint: A shipped name or a folder.
        out: The folder to write to.
        count: The number of samples.
        label: The class to draw; every class in turn if `None`.
        judge: A judge of the user's own.
        network: `module:function` that builds the network, where that is the user's own.
        steps, stepper, controller, guide, guide_window: How the flow is integrated (:class:`RunRecord`).
        propagation: The estimator of the variance; if empty, what the checkpoint's reference was read by, if by any.
        every: Read the variance at every k-th step; 0 is as the checkpoint's reference was read.
        adaptive: Read the variance at the few times of the checkpoint's schedule, or at those that a pilot run chooses.
        transport: Add the transported dispersion.
        score: What confidence is made from; the checkpoint's own if empty.
        keep: The share of the samples to keep, the surest first.
        check: The checks of finished samples: those of the checkpoint's confidence (`True`), none (`False`), or one
            with a number of evaluations per sample.
        best_of: The number of candidates per sample, of which the surest is kept.
        budget: In place of `best_of`, the evaluations per sample.
        compiled: Compile the field first.
        format: The format of structure files.
        seed: Seeds the samples.
        force: Write into a folder that is not empty.
    """
    device = pick_device(device)
    if guide_window and not guide:
        raise UsageError("--guide-window says when to steer; add --guide and how strongly")
    window = window_of(guide_window) if guide_window else (0.0, 1.0)
    way = RunRecord(checkpoint, stepper, propagation or "linearised", controller, guide, window)
    way.check(every, transport, adaptive)
    if not 0 < keep <= 1:
        raise UsageError(f"--keep lies in (0, 1], got {keep}")
    if keep < 1 and propagation == "none" and not transport:
        raise UsageError("--keep needs a confidence to go by; leave out --propagation none")
    channel, named, _ = parsed(score)  # type/integrated@0.6-0.9: of a channel, in a window
    if score:
        pick(dict.fromkeys([*SCORES, DISPERSION, *EVIDENCE]), named, "score")
    if adaptive and score:
        raise UsageError("--adaptive reads what the checkpoint's own score takes; leave out --score, or say --every 1")
    if named == DISPERSION and not transport:
        raise UsageError("--score dispersion is read from transported variance; add --transport")
    for option, value, least, most in (
        ("-n", count, 1, 10**9),
        ("--steps", steps, 1, 10**5),
        ("--every", every, 0, 10**5),
        ("--check", int(check), 0, 10**5),
        ("--best-of", best_of, 1, MOST),
        ("--budget", budget, 0, 10**7),
    ):
        if not least <= value <= most:
            raise UsageError(f"{option} lies between {least} and {most:,}, got {value}")
    field: Any
    chosen, field = open_checkpoint(checkpoint, device, judge, network)
    if compiled:
        field = Compiled(field, say=say_on_stderr, cuda_graph=not network)
    chosen.conditions(field, 1, label)  # a class that does not exist is refused before a folder is made
    chosen.check_format(format)
    if channel is not None and field.space is not None:
        pick(field.space.channels, channel, "channel")
    if isinstance(chosen, ShippedDomain) and (judge or chosen.judges):
        chosen.require_judge(field)
    if best_of > 1 and budget:
        raise UsageError("--best-of says how many candidates, and --budget how many evaluations; give one")
    if (best_of > 1 or budget) and propagation == "none" and not score and isinstance(check, bool):
        raise UsageError(
            "--best-of and --budget need a score to choose by; leave out --propagation none, or add --check 20"
        )
    way, every, few = _usual(
        chosen, field, way, steps, every, propagation, own=not (adaptive or score or way.kind.reads)
    )
    confidence = way.confidence(chosen.estimator(field))
    checked = planned_check(chosen, field, check) if check is not True and check else check
    if named in CHECKS and named not in checks_of(field, {"check": checked, "confidence": confidence}):
        raise UsageError(f"--score {named} is read from a check that this run does not make; add --check 20")
    if budget:
        each = evaluations_per_candidate(
            field,
            {"steps": steps, "check": checked, "config": SamplingConfig(stepper=stepper, decoder=way.decoder(field))},
        )
        best_of = candidates_within(budget, each)
    suited = way.suits(field, steps, confidence)
    if adaptive and not suited and field.reference is not None and not needs_variance(field.reference.score):
        raise UsageError(f"--adaptive is for scores of the variance, and not for {field.reference.score}; leave it out")
    way = replace(
        way,
        few=adaptive or bool(few),
        identity=identity(checkpoint),
        steps=steps,
        label=label,
        transport=transport,
        selected=", ".join([f"best of {best_of}"] * (best_of > 1) + [f"surest {keep:g}"] * (keep < 1)),
        checked="" if checked is True else f"{checked.name}, {checked.evaluations} evaluations" if checked else "none",
    )
    if not way.few and way.propagation:
        by = score or (chosen.transported if transport else "")
        every = _readings(field, way, chosen, every, by, required=bool(score) or keep < 1)
    asked = {  # everything that changes the files
        **{n: v for n, v in way.record().items() if n not in ("checkpoint", "read_at", "pilot")},
        "every": every,
        "adaptive": adaptive,
        "count": count,
        "seed": seed,
        "score": score,
        "keep": keep,
        "format": format,
        "judge": _content(judge),
        "network": network,
        "compiled": compiled,
        "batch": chosen.batch(device),
        **({} if best_of == 1 else {"best_of": best_of}),
        **runtime(device),
    }
    with claimed(out, "sample", asked, force=force, resumes=True) as folder:
        if folder.finished:
            say_on_stderr(f"{shown(out)} holds these samples already")
            return []
        if folder.resumed:
            say_on_stderr(f"resuming in {shown(out)}")
        return _draw(
            folder, chosen, field, way, confidence, few, asked, checked, best_of, piloted=adaptive and not suited
        )


def _usual(
    chosen: Domain, field: Any, way: RunRecord, steps: int, every: int, propagation: str, *, own: bool
) -> tuple[RunRecord, int, tuple[float, ...]]:
    """Return how a run reads what the checkpoint's reference is made from, if nothing else is asked for.

    That is the way, k of "every k-th step" or 0 for the setting's own choice, and else the times to read at, if any.
    """
    options: dict[str, Any] = {"steps": steps}
    if way.controller != "uniform" or every or propagation or not own or not chosen.reads_as_reference(field, options):
        return way, every, ()
    if not needs_variance(field.reference.score):
        return replace(way, propagation=""), 0, ()
    times = field.reference.read_with.times
    return way, 0, () if times == read_times(steps, Schedule.every(chosen.every)) else times


def _content(judge: str) -> str:
    """Return what tells a judge from others: the content of a checkpoint, or the name of an energy model."""
    try:
        return identity(judge) if judge else ""
    except CheckpointError:
        return judge


def _draw(
    folder: Folder,
    chosen: Domain,
    field: Any,
    way: RunRecord,
    confidence: Any,
    few: tuple[float, ...],
    asked: dict[str, Any],
    check: Any,
    best_of: int,
    *,
    piloted: bool,
) -> list[Path]:
    """Draw and write what was asked for, which was checked before.

    Arguments:
        few: The times to read the variance at, where they are neither every k-th nor those of a schedule.
    """
    out, count, seed, label = folder.path, asked["count"], asked["seed"], way.label
    score, keep = asked["score"], asked["keep"]
    profile = None
    schedule = Schedule.at(few) if few else Schedule.adaptive() if way.few else None
    if schedule is None and asked["every"]:
        schedule = Schedule.every(asked["every"])
    if way.kind.piloted or piloted:
        with sampling_bar("pilot run: where the variance is", chosen.pilot(field.device)) as bar:
            if way.kind.piloted:
                profile = chosen.survey(field, seed, bar, label)
            else:
                how = {"steps": way.steps, "confidence": confidence, "config": SamplingConfig(stepper=way.stepper)}
                # Its times alone: a pilot is too small to be a reference, so confidence is among the samples drawn.
                schedule = Schedule.at(chosen.fit_schedule(field, seed, bar, label, **how).times)
        way = replace(way, pilot=seed)
    when = field.schedule if schedule is not None and schedule.is_adaptive else schedule
    way = replace(way, read_at=0 if when is None else when.times or when.stride)
    parts = Parts(folder.work / "parts", compact=chosen.compact)
    options = {
        "steps": way.steps if way.controller == "uniform" else None,
        "schedule": schedule,
        "confidence": confidence,
        "check": check,
        "config": replace(way.sampling(field, profile), parts=parts),
    }
    said, made = confidence_source(field.reference), way.record()
    made |= {"made_from": said}
    together = way.transport or score or keep < 1 or best_of > 1
    if not together and chosen.streams(field, count, label, **options):
        with sampling_bar("drawing samples", count) as bar:
            drawn = chosen.stream(field, count, seed, bar, label, **options)
            files = chosen.write_stream((replace(p, made=made) for p in drawn), count, out)
        say_on_stderr(said if confidence is not None else "these samples have no confidence: none was asked for")
        return files
    by = score or (chosen.transported if way.transport else "")
    with sampling_bar("drawing samples", count * best_of) as bar:
        cond = {k: v.to(field.device) for k, v in chosen.conditions(field, count, label, seed).items()}

        def candidate(number: int) -> Trajectory:
            how = {**options, "cond": cond, "transport": way.transport}
            if number:
                parts = Parts(folder.work / f"parts-{number}", compact=chosen.compact)
                how["config"] = replace(options["config"], parts=parts)
            return chosen.draw(field, count, candidate_seed(seed, number), bar, label, **how)

        runs = (candidate(j) if by else ranked_by_check(candidate(j), check) for j in range(best_of))
        run = candidate(0) if best_of == 1 else surest_of(runs, by or None)[0]
    run = replace(run, made=made)
    if by:
        run = run.ranked_by(by)
    elif label is None and len(run.times) and getattr(field.reference, "standard", None) and run.standard is None:
        say_on_stderr("too few samples of each class to compare them within it: ranked across classes")
    say_on_stderr(run.withheld or said)
    return chosen.write_samples(run.surest(keep) if keep < 1 else run, out, asked["format"])


def _readings(field: Field, way: RunRecord, chosen: Domain, every: int, score: str, *, required: bool) -> int:
    """Return k of "every k-th step": as asked, or the setting's own choice, or 1 where that does not tell the score.

    Arguments:
        score: The score that the run is ranked by; the field's own if empty.
        required: Whether to refuse a run whose score cannot be read, in place of drawing it without a confidence.
    """
    usual = every or (1 if way.kind.reads else chosen.every)
    name = score or getattr(field.reference, "score", "temporal_ratio")
    if way.propagation == "none" or way.controller != "uniform":  # other controllers do not know their times yet
        return usual
    problem = _problem(name, Uniform(way.steps), usual)
    if problem and not every and not _problem(name, Uniform(way.steps), 1):
        say_on_stderr(f"with {way.steps} steps the variance is read at every step, which {name} needs")
        return 1
    if problem and required:
        raise UsageError(f"{name} cannot be read in {way.steps} steps: {problem}")
    if problem:
        say_on_stderr(f"these samples will have neither confidence nor rank: {problem}")
    return usual


def _problem(name: str, controller: Controller, every: int) -> str:
    """Return why a score cannot be read at every k-th step of a run; empty if it can."""
    parts = [part[1:] for part in map(parsed, names_of(name)) if part[1] in SCORES]
    times = [torch.zeros(1)]
    for step in range(controller.steps - 1):
        times.append(controller.next_time(step, times[-1], times[0], None))
    steps = foreseen(Schedule.every(every), controller, times[0]) or set()
    read = torch.stack([times[step] for step in sorted(steps)])
    spans = torch.cat([read[1:], torch.ones_like(read[:1])]) - read
    try:
        for plain, window in parts:
            read_score(plain, torch.ones_like(read), read, spans, **window)
    except UsageError as error:
        return str(error)
    return ""
