"""Draw samples into a folder and record how they were drawn (`fmwc sample`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, fields, replace
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmwc.checkpoint import identity
from fmwc.checks import choose_check
from fmwc.checks.evidence import discrete_conditions
from fmwc.cli.verbs import Sample
from fmwc.domains import Domain, ShippedDomain
from fmwc.errors import UsageError, pick
from fmwc.estimators import ESTIMATORS, as_estimator
from fmwc.field import Field
from fmwc.files import fresh, moved, write_text
from fmwc.progress import sampling_bar, say_on_stderr
from fmwc.provenance import pick_device
from fmwc.readers import array, boolean, check, number, record, text, whole
from fmwc.registry import open_checkpoint
from fmwc.report.run import confidence_source
from fmwc.report.table import Table
from fmwc.sampling import (
    SCORES,
    STEPPERS,
    AsReference,
    Controller,
    Damped,
    Ema,
    Extrapolated,
    Grid,
    SamplingConfig,
    Schedule,
    Trajectory,
    Uniform,
    needs_variance,
    read_times,
)
from fmwc.sampling.config import is_small
from fmwc.sampling.trajectory import DISPERSION, EVIDENCE, names_of, parsed, variance_score
from fmwc.uses.best_of import (
    candidate_seed,
    candidates_within,
    checks_of,
    evaluations_per_candidate,
    ranked_by_check,
    require_evidence,
    surest_of,
)
from fmwc.uses.guidance import Guidance

__all__ = [
    "CONTROLLERS",
    "Plan",
    "RunRecord",
    "classes_of",
    "draw",
    "draw_samples",
    "plan_samples",
    "settled",
    "write",
    "write_rows",
]

CHECKS = ("contest", "echo")
CONTROLS = ("elements", "exclude", "system", "atoms", "formula")  # options that restrict the samples
CLASS_SAMPLES = 1000  # conditions that are drawn to find the classes
GUIDE_PROBES = 4  # random probes of the gradient per step, unless a state has only a few coordinates


# ---- the record of a run ---------------------------------------------------------------------------------------------


class ControllerKind(NamedTuple):
    """A step-size controller that can be chosen by name.

    Attributes:
        make: A function of the number of steps; `None` if the controller is fitted to a pilot run.
        reads_variance: Whether it needs the variance at every step.
        changes_velocity: Whether it changes the velocity, so that the times alone do not determine the trajectory.
    """

    make: Callable[[int], Controller] | None
    reads_variance: bool = False
    changes_velocity: bool = False


CONTROLLERS: dict[str, ControllerKind] = {
    "uniform": ControllerKind(Uniform),
    "ema": ControllerKind(Ema, reads_variance=True),
    "damped": ControllerKind(Damped, reads_variance=True, changes_velocity=True),
    "grid": ControllerKind(None),
    "extrapolated": ControllerKind(lambda steps: Extrapolated(Uniform(steps)), changes_velocity=True),
}


def _read_at(value: Any, where: str) -> Any:
    return (array(number(0, 1)) if isinstance(value, list) else whole())(value, where)


def _checked(default: Any, check: Any) -> Any:
    """Declare a field with a default and a check for values from files."""
    return dataclass_field(default=default, metadata={"check": check})


@dataclass(frozen=True)
class RunRecord:
    """The settings with which samples were drawn. They are stored with the samples for later commands.

    Arguments:
        checkpoint: A shipped name or a folder.
        stepper: The name of the stepper.
        propagation: The name of the estimator of the variance. `none`: the variance was not computed; empty: it was not
            computed because the checkpoint's score does not use it.
        controller: The name of the step-size controller.
        guide: The strength of guidance towards low variance.
        window: The times between which guidance acts.
        by: The command that made the samples. Only samples of `sample` can be recomputed from their noise.
        few: Whether the variance was computed at a few times only, which suffice for the checkpoint's score only.
        identity: The checkpoint's content hash.
        steps: The number of steps.
        read_at: The variance was computed at every k-th step, or at these times.
        label: The class of all samples; `None`: every class in turn.
        transport: Whether the variance was transported.
        pilot: The seed of the pilot run that chose times or steps, if there was one.
        selected: How samples were selected after drawing; empty if all were kept.
        checked: The check that replaced the checkpoint's, with its evaluations, or `none`.
        controls: Restrictions of the samples: `formula=LiFePO4, atoms=14`.
    """

    checkpoint: str = _checked("", text())
    stepper: str = _checked("euler", text(100))
    propagation: str = _checked("linearised", text(100))
    controller: str = _checked("uniform", text(100))
    guide: float = _checked(0.0, number(0))
    window: tuple[float, float] = _checked((0.0, 1.0), array(number(0, 1), 2, 2, rising=True))
    by: str = _checked("sample", text(100))
    few: bool = _checked(False, boolean)
    identity: str = _checked("", text(64, "([0-9a-f]{64})?"))
    steps: int = _checked(0, whole())
    read_at: int | tuple[float, ...] = _checked(0, _read_at)
    label: int | None = _checked(None, whole())
    transport: bool = _checked(False, boolean)
    pilot: int | None = _checked(None, whole(-(1 << 63)))
    selected: str = _checked("", text(1000))
    checked: str = _checked("", text(1000))
    controls: str = _checked("", text(5000))

    def __post_init__(self) -> None:
        pick(STEPPERS, self.stepper, "stepper")
        if self.propagation not in ("", "none"):
            pick(ESTIMATORS, self.propagation, "propagation")
        pick(CONTROLLERS, self.controller, "controller")

    @classmethod
    def read(cls, made: dict[str, Any], checkpoint: str = "") -> RunRecord:
        """Read the record of a run; other entries are ignored.

        Arguments:
            made: :attr:`fmwc.Trajectory.made`.
            checkpoint: The checkpoint, if it is not the recorded one.
        """
        readers = {field.name: field.metadata["check"] for field in fields(cls)}
        made = check(made, record({}, readers, more=True), "the record of how these samples were drawn")
        known = {name: made[name] for name in readers if made.get(name) is not None}
        known |= {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        return cls(**{**known, **({"checkpoint": checkpoint} if checkpoint else {})})

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    def made(self) -> dict[str, Any]:
        """Return the record as :attr:`fmwc.Trajectory.made` holds it, with the full path of a checkpoint folder."""
        folder = Path(self.checkpoint)
        local = (folder / "recipe.json").is_file()
        return {**self.as_dict(), "checkpoint": str(folder.resolve()) if local else self.checkpoint}

    @property
    def kind(self) -> ControllerKind:
        """The properties of the step-size controller."""
        return CONTROLLERS[self.controller]

    def estimator(self, default: Any) -> Any:
        """Return the estimator as :func:`fmwc.sample` takes it; `default` is used for `linearised`."""
        known = {"": AsReference(), "none": None, "linearised": default}
        return known[self.propagation] if self.propagation in known else as_estimator(self.propagation)

    def decoder(self, field: Field) -> str | Guidance:
        """Return the decoder, which applies guidance if there is any."""
        if not self.guide:
            return "map"
        exact = field.space is not None and is_small(field.space)
        return Guidance(self.guide, *self.window, probes=None if exact else GUIDE_PROBES)


# ---- options ---------------------------------------------------------------------------------------------------------


def draw_samples(options: Sample) -> list[Path]:
    """Draw samples with their confidence and write them to a folder; return the files."""
    plan = plan_samples(options)
    with fresh(options.out, force=options.force) as folder:
        written = write(plan, draw(plan), folder)
    return moved(written, folder, options.out)


def plan_samples(options: Sample, opened: tuple[Domain, Any] | None = None) -> Plan:
    """Check the options and decide how the samples will be drawn.

    Arguments:
        options: The options of the command.
        opened: The domain and the field of the checkpoint, if they are already loaded.
    """
    window = _window(options.guide_window) if options.guide_window else (0.0, 1.0)
    record = RunRecord(
        options.checkpoint,
        options.stepper,
        options.propagation or "linearised",
        options.controller,
        options.guide,
        window,
        steps=options.steps,
        label=options.label,
        transport=options.transport,
        controls=", ".join(f"{name}={value}" for name, value in _controls(options).items()),
    )
    _require_valid(options, record)
    domain, field = opened or _open(options)
    if controls := _controls(options):
        domain = domain.with_controls(controls)
    _require_possible(options, domain, field)
    return _planned(options, record, domain, field)


def _window(times: str) -> tuple[float, float]:
    """Return the two times of a window.

    >>> _window("0.5-0.9")
    (0.5, 0.9)
    """
    try:
        early, late = (float(part) for part in times.split("-"))
    except ValueError as error:
        raise UsageError(f"--guide-window must be two times, as in 0.5-0.9; got '{times}'") from error
    if not 0 <= early < late <= 1:
        raise UsageError(f"--guide-window must be two rising times in [0, 1]; got '{times}'")
    return early, late


def _require_valid(options: Sample, record: RunRecord) -> None:
    """Raise if an option is wrong or two options contradict each other."""
    _, score_name, _ = parsed(options.score)  # a score of one channel in a window: type/integrated@0.6-0.9
    if options.score:
        pick(dict.fromkeys([*SCORES, DISPERSION, *EVIDENCE]), score_name, "score")
    kind, guide, transport, keep = record.kind, options.guide, options.transport, options.keep
    no_variance = options.propagation == "none"
    controller, several = f"--controller {options.controller}", options.best_of > 1 or options.budget
    no_score = no_variance and not options.score and not options.check
    evaluations = STEPPERS[options.stepper].evaluations
    errors: list[tuple[Any, str]] = [
        (not 0 <= guide < math.inf, f"--guide must be a finite strength of at least 0; got {guide}"),
        (options.guide_window and not guide, "--guide-window needs a strength; add --guide"),
        (kind.reads_variance and no_variance, f"{controller} needs the variance; leave out --propagation none"),
        (
            kind.reads_variance and options.every > 1,
            f"{controller} needs the variance at every step; leave out --every",
        ),
        (
            kind.changes_velocity and evaluations > 1,
            f"{controller} needs euler steps; leave out --stepper {options.stepper}",
        ),
        (kind.changes_velocity and transport, f"{controller} does not support transport; leave out --transport"),
        (guide and transport, "--guide does not support transport; leave out --transport"),
        (not 0 < keep <= 1, f"--keep must be in (0, 1]; got {keep}"),
        (keep < 1 and no_variance and not transport, "--keep needs a confidence; leave out --propagation none"),
        (score_name == DISPERSION and not transport, "--score dispersion needs transported variance; add --transport"),
        (options.check and options.no_check, "--check and --no-check contradict each other; give only one"),
        (options.best_of > 1 and options.budget, "--best-of and --budget contradict each other; give only one"),
        (
            several and no_score,
            "--best-of and --budget need a score; leave out --propagation none, or add --check 20",
        ),
    ]
    for wrong, message in errors:
        if wrong:
            raise UsageError(message)


# ---- the plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before the first sample is drawn.

    Attributes:
        options: The options of the command.
        record: How the samples will be drawn.
        domain, field: The domain and the field of the checkpoint.
        estimator, check, schedule: Options of :func:`fmwc.sample`. Schedule `None`: the domain's default.
        candidates: The number of candidates per sample.
    """

    options: Sample
    record: RunRecord
    domain: Domain
    field: Any
    estimator: Any
    check: Any
    schedule: Schedule | None
    candidates: int

    @property
    def rank_by(self) -> str:
        """The score that the samples are ranked by; empty: the field's default."""
        return self.options.score or (self.domain.transported if self.options.transport else "")


def _controls(options: Sample) -> dict[str, str]:
    """Return the restrictions of the samples that were given."""
    values = {name: getattr(options, name) for name in CONTROLS}
    return {name: value for name, value in values.items() if value}


def _open(options: Sample) -> tuple[Domain, Any]:
    """Load the checkpoint."""
    device = pick_device(options.device)
    return open_checkpoint(options.checkpoint, device, options.judge, options.network)


def _require_possible(options: Sample, domain: Domain, field: Any) -> None:
    """Raise if the requested class, format, channel or judge does not exist."""
    domain.conditions(field, 1, options.label)
    domain.check_format(options.format, options.symmetrise, options.atom_doubt)
    channel = parsed(options.score)[0]
    if channel is not None and field.space is not None:
        pick(field.space.channels, channel, "channel")
    if isinstance(domain, ShippedDomain) and (options.judge or domain.judges):
        domain.require_judge(field)


def _planned(options: Sample, record: RunRecord, domain: Domain, field: Any) -> Plan:
    """Decide when the variance is computed, which check follows, and how many candidates are drawn."""
    schedule: Schedule | None = None
    if _as_reference(options, domain, field):
        if not needs_variance(field.reference.score):
            record = replace(record, propagation="")
        elif (times := field.reference.read_with.times) != read_times(options.steps, Schedule.every(domain.every)):
            schedule = Schedule.at(times)
    few = schedule is not None
    estimator = record.estimator(domain.estimator(field))
    check: Any = _planned_check(domain, field, options.check) if options.check else not options.no_check
    required = {"check": check, "confidence": estimator}
    if parsed(options.score)[1] in CHECKS and parsed(options.score)[1] not in checks_of(field, required):
        raise UsageError(f"--score {options.score} needs a check that this run does not include; add --check 20")
    candidates = options.best_of
    if (candidates > 1 or options.budget) and not options.score and check is True:
        require_evidence(field)
    if options.budget:
        config = SamplingConfig(stepper=options.stepper, decoder=record.decoder(field))
        cost = evaluations_per_candidate(field, {"steps": options.steps, "check": check, "config": config})
        candidates = candidates_within(options.budget, cost)
    selected = [f"best of {candidates}"] * (candidates > 1) + [f"surest {options.keep:g}"] * (options.keep < 1)
    record = replace(
        record,
        few=few,
        identity=identity(options.checkpoint),
        selected=", ".join(selected),
        checked=f"{check.name}, {check.evaluations} evaluations" if options.check else "none" if not check else "",
    )
    plan = Plan(options, record, domain, field, estimator, check, schedule, candidates)
    return plan if few or not record.propagation else replace(plan, schedule=Schedule.every(_stride(plan)))


def _as_reference(options: Sample, domain: Domain, field: Any) -> bool:
    """Return whether the variance is computed as for the checkpoint's reference: no option changes it."""
    if options.controller != "uniform" or options.every or options.propagation or options.score:
        return False
    return domain.reads_as_reference(field, {"steps": options.steps})


def _stride(plan: Plan) -> int:
    """Return the number of steps between variances: as requested, the domain's default, or 1 if the score needs it."""
    options, record = plan.options, plan.record
    stride = options.every or (1 if record.kind.reads_variance else plan.domain.every)
    name = plan.rank_by or getattr(plan.field.reference, "score", "temporal_ratio")
    if (
        record.propagation == "none" or record.controller != "uniform"
    ):  # other controllers choose their times during sampling
        return stride
    problem = _score_problem(name, options.steps, stride)
    if problem and not options.every and not _score_problem(name, options.steps, 1):
        say_on_stderr(f"with {options.steps} steps, {name} needs the variance at every step")
        return 1
    if problem and (options.score or options.keep < 1):
        raise UsageError(f"{name} cannot be computed in {options.steps} steps: {problem}")
    if problem:
        say_on_stderr(f"these samples will have neither confidence nor rank: {problem}")
    return stride


def _score_problem(name: str, steps: int, stride: int) -> str:
    """Return why a score cannot be computed from the variance at every k-th step; empty if it can."""
    times = torch.tensor(read_times(steps, Schedule.every(stride)))[:, None]
    spans = torch.cat([times[1:], torch.ones_like(times[:1])]) - times
    try:
        for _, part, window in map(parsed, names_of(name)):
            if part in SCORES:
                variance_score(part, torch.ones_like(times), times, spans, **window)
    except UsageError as error:
        return str(error)
    return ""


def classes_of(domain: Domain, field: Any) -> dict[str, Tensor]:
    """Return the discrete conditions of a domain's network with their possible values."""
    if getattr(field, "space", None) is None:
        return {}
    with suppress(UsageError):  # a network whose conditions are not known
        cond = domain.conditions(field, CLASS_SAMPLES)
        return {name: cond[name].unique() for name in discrete_conditions(cond, field.space, CLASS_SAMPLES)}
    return {}


def _planned_check(domain: Domain, field: Any, evaluations: int) -> Any:
    """Return the check of finished samples with a given number of evaluations."""
    cond = {name: values for name, values in classes_of(domain, field).items() if len(values) > 1}
    known = getattr(getattr(field, "reference", None), "checks", {})
    return choose_check(field.space, cond, evaluations, known, rivals=cond if len(cond) == 1 else {})


# ---- drawing ---------------------------------------------------------------------------------------------------------


Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]  # a progress bar: of what, and how many


def draw(
    plan: Plan, bar: Bar = sampling_bar, on_step: Callable[[int, Tensor, Any], None] | None = None
) -> Trajectory | Iterator[Trajectory]:
    """Run the pilot, if one is needed, and draw the samples. A very large run is returned batch by batch.

    Arguments:
        plan: How to draw.
        bar: Shows the progress.
        on_step: As in :class:`fmwc.SamplingConfig`.
    """
    options, domain, field = plan.options, plan.domain, plan.field
    for remark in domain.effect_of_controls(field):
        say_on_stderr(remark)
    grid, record = _pilot(plan, bar)
    source = confidence_source(field.reference)
    how, record = settled(plan, record, grid)
    made = {**record.made(), "made_from": source}
    how["config"] = replace(how["config"], compact=domain.compact, on_step=on_step)
    compares_all = record.transport or options.score or options.keep < 1 or plan.candidates > 1
    if not compares_all and domain.streams(field, options.count, options.label, **how):
        say_on_stderr(source if plan.estimator is not None else "these samples have no confidence (--propagation none)")
        return _streamed(plan, how, made, bar)
    run = replace(_candidates(plan, how, bar), made=made)
    if plan.rank_by:
        run = run.ranked_by(plan.rank_by)
    elif (
        options.label is None and len(run.times) and getattr(field.reference, "standard", None) and run.standard is None
    ):
        say_on_stderr("there are too few samples per class to compare within classes; ranked across classes")
    say_on_stderr(run.withheld or source)
    run = run.surest(options.keep) if options.keep < 1 else run
    if not options.atom_doubt:
        return run
    with bar("computing the doubt of each atom", len(run)) as show:
        return domain.with_doubt(field, run, show)


def settled(plan: Plan, record: RunRecord, grid: Grid | None = None) -> tuple[dict[str, Any], RunRecord]:
    """Return the options of :meth:`Domain.draw` and the record of the run.

    Arguments:
        plan: How to draw.
        record: The settings so far.
        grid: The times of steps that a pilot run chose, if there was one.
    """
    uniform, make, schedule = record.controller == "uniform", record.kind.make, plan.schedule
    record = replace(record, read_at=0 if schedule is None else schedule.times or schedule.stride)
    config = SamplingConfig(
        stepper=record.stepper,
        decoder=record.decoder(plan.field),
        controller=None if uniform else make(record.steps) if make else grid,
    )
    how = {
        "steps": record.steps if uniform else None,
        "schedule": schedule,
        "confidence": plan.estimator,
        "check": plan.check,
        "config": config,
    }
    return how, record


def _streamed(plan: Plan, how: dict[str, Any], made: dict[str, Any], bar: Bar) -> Iterator[Trajectory]:
    """Draw a large run batch by batch."""
    options = plan.options
    with bar("drawing samples", options.count) as show:
        for part in plan.domain.stream(plan.field, options.count, options.seed, show, options.label, **how):
            yield replace(part, made=made)


def write(plan: Plan, samples: Trajectory | Iterator[Trajectory], folder: Path) -> list[Path]:
    """Write the files of a run that :func:`draw` returned."""
    if isinstance(samples, Trajectory):
        return plan.domain.write_samples(samples, folder, plan.options.format, plan.options.symmetrise)
    return plan.domain.write_stream(samples, plan.options.count, folder)


def _pilot(plan: Plan, bar: Bar) -> tuple[Grid | None, RunRecord]:
    """Run a pilot to place the steps, if the controller needs it."""
    options, record, domain, field = plan.options, plan.record, plan.domain, plan.field
    if record.kind.make:
        return None, record
    with bar("pilot run to measure the variance", domain.pilot(field.device)) as show:
        grid = domain.fit_grid(field, record.steps, options.seed, show, options.label)
    return grid, replace(record, pilot=options.seed)


def _candidates(plan: Plan, how: dict[str, Any], bar: Bar) -> Trajectory:
    """Draw the samples; if there are several candidates per sample, keep the most confident."""
    options, domain, field, count = plan.options, plan.domain, plan.field, plan.options.count
    with bar("drawing samples", count * plan.candidates) as show:
        cond = domain.conditions(field, count, options.label, options.seed)
        how |= {"cond": {k: v.to(field.device) for k, v in cond.items()}, "transport": options.transport}

        def candidate(number: int) -> Trajectory:
            seed = candidate_seed(options.seed, number) if number else options.seed
            return domain.draw(field, count, seed, show, options.label, **how)

        if plan.candidates == 1:
            return candidate(0)
        runs = map(candidate, range(plan.candidates))
        if plan.rank_by:
            return surest_of(runs, plan.rank_by)[0]
        return surest_of(ranked_by_check(run, plan.check) for run in runs)[0]


def write_rows(path: Path, table: dict[str, list[Any]]) -> Path:
    """Write a table as CSV, with six significant digits."""
    short = {n: [float(f"{v:.6g}") if isinstance(v, float) else v for v in column] for n, column in table.items()}
    return write_text(path, Table.from_columns(short).csv())
