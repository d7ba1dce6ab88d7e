"""Calibration: choose the evidence for the confidence of a field with a pilot run, with or without labels.

No single score works on every model. Without labels, three tests are tried in this order, and the first that passes
chooses the evidence:

1. *Are the training points dense?* If new data are much nearer to training points than to one another, the distance to
   the nearest training points detects samples off the data. (The ratio is about 0.01 on a plane, and above 0.5 for
   images.) This test needs data. The distance must also detect a disturbance (see 3), better than chance
   and as well as the echo does: of own samples, or of new data, because the samples of a weak model are off the data
   already. It is no evidence if it ignores a condition, such as a continuous one.
2. *Does the contest distinguish the classes?* The contest must detect when the model's samples are given a wrong class.
   Some samples must also lose the contest under their own class, because otherwise it does not rank them.
3. *Does the echo detect a disturbance?* The echo must detect a small amount of noise mixed into the model's samples. It
   uses the earliest times among those that detect the noise best.

The contest and the echo are combined by ranks with `spread`, a score of the trajectory that needs no evaluations. If no
test passes, confidence is withheld. `benchmarks/zoo` measures how often this choice is right on other flows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmwc.checks import Contest, Echo, Nearest, run_checks
from fmwc.checks.evidence import NEIGHBOURS, discrete_conditions, vectors
from fmwc.conventions import check_conventions
from fmwc.entry import one_line
from fmwc.errors import FmwcError, ShapeError, UsageError, require_finite
from fmwc.field import Field
from fmwc.flow import Space, path_of
from fmwc.modes import evaluating
from fmwc.randomness import Blocks, derive
from fmwc.sampling import (
    Part,
    Reference,
    SamplingConfig,
    Trajectory,
    default_estimator,
    needs_variance,
    noise,
    read_with,
    sample,
    standard_of,
)
from fmwc.sampling.confidence import EVERY_STEP
from fmwc.sampling.config import is_small
from fmwc.sampling.trajectory import EVIDENCE, FEWEST, SCORES, combined
from fmwc.state import (
    as_conditions,
    as_numbers,
    as_state,
    as_whole,
    batch_size,
    channels,
    precision_of,
    require_labels,
    select,
    tree_map,
)

__all__ = ["fit_confidence"]

# Numbers of samples, unless stated otherwise
PILOT = 1_000  # pilot run; more for many classes
FEWEST_PILOT = 8
PILOT_CPU = 200  # for large states on a CPU
LARGEST_PILOT = 2_000  # limit if the number of classes increases the pilot
POINTS, BYTES = 16_000, 1 << 22  # limits of stored training points
CHUNK = 256  # features computed at once
TRIED = 400  # samples that are disturbed or given a wrong class
EXTRA = 0.4  # evaluations of a contest, relative to the steps
ECHO = 4  # evaluations of an echo
ECHOES = ((0.5, 0.6, 0.7, 0.8), (0.6, 0.7, 0.8, 0.9), (0.8, 0.85, 0.9, 0.95))  # times that an echo may use
DISTURBED = 0.9  # time on the path to which samples are noised
LEVELS = 1001  # quantiles of a reference
# Thresholds
DENSE = 0.25  # distance from new data to training points, relative to that between data
KNOWS = 0.85  # AUROC of the contest for wrong classes
LOST, MOST_LOST = 0.005, 0.5  # share of the model's own samples that lose a contest
NOTICES = 0.6  # AUROC of the echo for disturbed samples
MOVES = 0.63  # AUROC of nearest points for disturbed samples or data
NEARLY = 0.02  # AUROC that counts as equal; also what earlier times of an echo may lose, as they test more of a sample
CHANCE = 0.5
CHANGES = 0.05  # how often labels that say nothing may choose a score
FEWEST_LABELS = 5  # failures and successes; with fewer, labels are not used

WEIGHTS = {"contest": ("spread@0.3-0.8", 0.3), "echo": ("spread@0.6-1", 0.5)}


class Candidate(NamedTuple):
    """Score that may become the evidence for confidence.

    Attributes:
        parts: The names of the combined scores, with their weights.
        why: A text with the evidence for or against the candidate.
        use: Whether the candidate may be chosen without labels.
    """

    parts: tuple[tuple[str, float], ...]
    why: str
    use: bool

    @property
    def name(self) -> str:
        """The score as text: `contest + 0.3 spread@0.3-0.8`."""
        return " + ".join(name if weight == 1 else f"{weight:g} {name}" for name, weight in self.parts)

    def score(self, run: Trajectory) -> Tensor:  # -> (B,)
        """Return the score of each sample, with the parts combined by their ranks within the run."""
        levels = torch.linspace(0, 1, LEVELS, device=run.grid.device)
        scores = [(run.score(name), weight) for name, weight in self.parts]
        return combined([(score, weight, score.quantile(levels.to(score))) for score, weight in scores])


class Disturbed(NamedTuple):
    """Pairs of states and disturbed states, on which the tests are done.

    Attributes:
        field: The field.
        space: The space of the field.
        states: Some of the model's samples, or of the data.
        disturbed: The same states with noise mixed in.
        cond: The conditions of the states.
        seed: The seed of the noise of the checks.
    """

    field: Field
    space: Space
    states: Any
    disturbed: Any
    cond: dict[str, Any]
    seed: int

    def score(self, check: Any, x: Any, seed: int, cond: dict[str, Any] | None = None) -> Tensor:
        """Return the score of a check on samples; `cond` replaces their conditions."""
        cond = self.cond if cond is None else cond
        return run_checks({check.name: check}, self.field, self.space, x, cond, seed, 0)[check.name]

    def detects(self, check: Any) -> float:
        """Return the AUROC with which a check separates disturbed from undisturbed states."""
        seed = derive(self.seed, "disturbed")
        return auroc(*(self.score(check, x, seed) for x in (self.disturbed, self.states)))


def fit_confidence(
    field: Field,
    data: Any = None,
    labels: Callable[..., Any] | None = None,
    *,
    cond: Mapping[str, Any] | None = None,
    features: Callable[[Any], Tensor] | None = None,
    judged: int = 100,
    evaluations: int | None = None,
    steps: int = 50,
    stepper: str = "euler",
    pilot: int | None = None,
    seed: int = 0,
    batch: int = 4096,
    keep_data: bool = True,
    conventions: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Reference:
    """Choose the evidence for the confidence of a field, and store the reference that samples are compared with.

    >>> field = fmwc.attach(net, space=(2,))  # doctest: +SKIP
    >>> fmwc.fit_confidence(field, data).reason  # doctest: +SKIP
    >>> fmwc.sample(field, 1).confidence  # doctest: +SKIP

    The noise model need not be fitted, because the variance is only used with labels. The result is stored in
    `field.reference`, saved with the field, and used by :func:`fmwc.sample`.

    Arguments:
        field: A field. If its space is not set, it is taken from the data.
        data: Training data, `(N, *)` or a dict of channels, if available.
        labels: A function `(x, cond) -> (B,)` that returns which samples failed. If given, every score is a candidate,
            including those of the variance. Another score replaces the choice without labels if its AUROC on `judged`
            samples is significantly higher; if none is better than chance, confidence is withheld
            (:func:`fmwc.calibration.labels_choose`).
        cond: The conditions of the data, by name, with one row per sample. Without data, the conditions of the pilot
            samples.
        features: A function of states that returns one vector per sample, `(B, D)`, in which similar samples are near
            one another. Distances to training points are then computed between these vectors, also for samples with
            different numbers of rows (crystals). A checkpoint cannot store the function, so a loaded field withholds a
            confidence based on these distances until `fit_confidence` is called again.
        judged: The number of samples passed to `labels`.
        evaluations: The largest number of network evaluations per sample in a check. By default, 0.4 times the number
            of steps for a contest, and 4 for an echo.
        steps, stepper: The settings with which samples will be drawn later.
        pilot: The number of pilot samples; increased up to 2,000 if there are many classes. A condition that needs a
            larger pilot, or that has a different value in most rows of the data (an id), is not used as a class.
        seed: The seed of the pilot run.
        batch: The number of samples drawn together.
        keep_data: Whether the field may store training points to compare samples with (at most 16,000, and 4 MiB).
        conventions: Whether to check first that the network is called as in its training (:mod:`fmwc.conventions`).
            Needs data.
        progress: Called with the number of pilot samples done since the last call.
    """
    if evaluations is not None:
        evaluations = as_whole(evaluations, "evaluations", 1, 10**6)
    judged, seed = as_whole(judged, "judged", 1), as_whole(seed, "seed")
    for name, function, takes in (("labels", labels, "(x, cond)"), ("features", features, "states")):
        if function is not None and not callable(function):
            raise UsageError(f"{name} must be a function of {takes}, got {type(function).__name__}")
    if features is not None and (data is None or not keep_data):
        raise UsageError("features= needs training points to compare with; give data, and leave out keep_data=False")
    data, given = _inputs(field, data, as_conditions(cond), features)
    space, device = _space_of(field), field.device
    useless = ""
    if data is not None and conventions:
        useless = check_conventions(field, space, data, given, seed=seed).withheld  # on random rows
    count = _pilot_size(field, pilot)
    classes, unused = _classes(given, space, count, data is not None)
    within = classes[0] if len(classes) == 1 else ""
    values = given[within].unique() if within else torch.empty(0)
    count = max(count, FEWEST * len(values))
    checks = _checks(space, data if keep_data else None, given, within, evaluations, steps, features)
    reads = None if labels is None else default_estimator(space)
    old, field.reference = field.reference, None
    try:
        run = sample(
            field,
            count,
            steps=steps,
            seed=derive(seed, "pilot"),
            cond={name: value.to(device) for name, value in pilot_conditions(given, within, count, seed).items()},
            confidence=reads,
            schedule=EVERY_STEP,
            check=False,
            progress=progress,
            config=SamplingConfig(stepper=stepper, batch=batch),
        )
    finally:
        field.reference = old
    few = slice(0, min(TRIED, len(run)))
    tried = _disturbed(field, space, select(run.x, few), {k: v[few] for k, v in run.cond.items()}, seed)
    checks["echo"], by_echo = _best_echo(checks["echo"], tried)
    candidates = []
    if "nearest" in checks and (ignored := _ignored(space, given, checks["nearest"])):
        why = f"the distance to training points does not depend on '{ignored}'"
        candidates.append(Candidate((("nearest", 1.0),), why, False))
        del checks["nearest"]
    evidence = run_checks(checks, field, space, run.x, run.cond, derive(seed, "check"), 0, batch=batch)
    run = replace(run, evidence={**run.evidence, **evidence})
    if (near := checks.get("nearest")) is not None:
        new = _new_rows(near, data)
        unseen = tree_map(lambda c: c[new].to(device), data), {k: v[new].to(device) for k, v in given.items()}
        noticed = max(tried.detects(near), _disturbed(field, space, *unseen, seed).detects(near))
        candidates.append(_near(space, near, data, noticed, by_echo))
    if within:
        candidates.append(_contest(run, tried, checks.get("contest"), within, len(values)))
    candidates += [Candidate((("contest", 1.0),), why, False) for why in unused]
    candidates.append(_echo(by_echo))
    chosen = next((c for c in candidates if c.use), candidates[-1])
    reason, rows = chosen.why, [{"score": c.name, "why": c.why, "usable": c.use} for c in candidates]
    if labels is not None:
        chosen, reason, rows = _by_labels(run, candidates, chosen, labels, min(judged, count))
    withheld = "" if chosen.use else f"no evidence is better than chance on this model ({chosen.why})"
    if labels is None:  # which show whether the evidence finds failures
        withheld = useless or withheld
    field.reference = _reference(run, chosen, checks, reads, steps, stepper, within)._replace(
        reason=reason,
        withheld=withheld,
        candidates=tuple(rows),
        classes={name: tuple(given[name].unique().tolist()) for name in classes},
        weights=field.checksum(),
        space=space,
    )
    return field.reference


# ---- the inputs --------------------------------------------------------------------------------------------------


def _inputs(field: Field, data: Any, cond: Mapping[str, Any], features: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return data and conditions as tensors; set the field's space if it has none. Raise if they do not fit."""
    if not isinstance(field, Field):
        raise UsageError(f"field must be a field, got {type(field).__name__}; use fmwc.attach(network)")
    if data is not None:
        data = as_state(data, "the data", field.network)
        if not batch_size(data):
            raise ShapeError("the data hold no samples")
        for name, value in channels(data).items():
            require_finite(value, "the data" if isinstance(data, Tensor) else f"the data's channel '{name}'")
        field.learn_space(data)
        data = data if features is None else tree_map(lambda c: c.to(field.device), data)
    given = {name: as_numbers(value, f"the condition '{name}'") for name, value in cond.items()}
    for name, value in given.items():
        if data is not None and len(value) != batch_size(data):
            raise ShapeError(
                f"the condition '{name}' has {len(value)} rows for {batch_size(data)} samples; give one per sample"
            )
        require_finite(value, f"the condition '{name}'")
    if not given:
        _try_without_conditions(field)
    return data, given


def _space_of(field: Field) -> Space:
    if field.space is None:
        raise UsageError("the shape of a sample is not known; give data, or attach(space=...)")
    return field.space


def _try_without_conditions(field: Field) -> None:
    """Raise a one-line error if the network needs conditions."""
    space = _space_of(field)
    if any(channel.rows for channel in space.channels.values()):
        return  # the space raises its own error for the condition that counts rows
    x = tree_map(lambda c: c.to(precision_of(field.network)), noise(space, 2, 0, field.device))
    value = next(iter(channels(x).values()))
    try:
        with evaluating(field.network), torch.no_grad():
            field.network(x, value.new_full((2,), 0.5))
    except FmwcError:
        raise
    except Exception as error:  # user code may raise anything
        network: Any = field.network
        while hasattr(network, "passed_on"):  # an adapter, whose own signature has no names
            network = network.network
        parameters = inspect.signature(network.forward).parameters.values()
        takes = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)][2:]
        named = f"; its other arguments are {', '.join(takes)}" if takes else ""
        raise UsageError(
            f"the network does not run as network(x, t) without conditions ({one_line(error)}){named}; give "
            "cond={name: values}, with one row per sample"
        ) from error


# ---- the pilot ---------------------------------------------------------------------------------------------------


def _pilot_size(field: Field, pilot: int | None) -> int:
    if pilot is not None:
        return as_whole(pilot, "pilot", FEWEST_PILOT)
    return PILOT_CPU if field.device.type == "cpu" and not is_small(_space_of(field)) else PILOT


def _classes(cond: Mapping[str, Tensor], space: Space, count: int, of_data: bool) -> tuple[list[str], list[str]]:
    """Return the conditions used as classes, and for each other discrete condition the reason why it is not.

    Arguments:
        cond: The conditions, with one row per sample.
        space: The space of the samples.
        count: The number of pilot samples, before it is increased for the classes.
        of_data: Whether the conditions are those of data, in which each class must occur more than once.
    """
    rows = len(next(iter(cond.values()), ()))
    largest = max(count, LARGEST_PILOT)
    so = "so it is not used as a class (for a contest, or to compare samples within it)"
    classes, unused = [], []
    for name in discrete_conditions(cond, space, rows):
        values = len(cond[name].unique())
        if of_data and rows > 1 and 2 * values > rows:
            unused.append(f"'{name}' has {values:,} values in {rows:,} rows of data, {so}")
        elif FEWEST * values > largest:
            unused.append(
                f"'{name}' has {values:,} values and a pilot of {FEWEST} per value has more than {largest:,} samples, "
                f"{so}; give pilot={FEWEST * values} to use it"
            )
        else:
            classes.append(name)
    return classes, unused


def pilot_conditions(cond: Mapping[str, Tensor], within: str, count: int, seed: int) -> dict[str, Tensor]:
    """Return conditions of random rows of the data for the pilot, with each class equally often.

    The rows are random because data may be sorted, for example by size.
    """
    if not cond:
        return {}
    order = torch.randperm(
        len(next(iter(cond.values()))), generator=torch.Generator().manual_seed(derive(seed, "pilot rows"))
    )
    rows = order[torch.arange(count) % len(order)]
    if within:
        label = cond[within].cpu()[order]
        members = [order[label == one] for one in label.unique()]
        turns = torch.arange(-(-count // len(members)))
        rows = torch.stack([of[turns % len(of)] for of in members], 1).flatten()[:count]
    return {name: value[rows.to(value.device)] for name, value in cond.items()}


def _checks(
    space: Space,
    data: Any,
    cond: Mapping[str, Tensor],
    within: str,
    evaluations: int | None,
    steps: int,
    features: Callable[[Any], Tensor] | None,
) -> dict[str, Any]:
    """Return the checks to try, by name."""
    checks: dict[str, Any] = {"echo": Echo.planned(ECHO if evaluations is None else min(evaluations, 10**4))}
    if within:
        values = cond[within].unique()
        budget = max(1, int(EXTRA * steps)) if evaluations is None else evaluations
        if 2 <= len(values) <= budget:
            checks["contest"] = Contest.planned(within, values, budget)
    ragged = any(channel.rows for channel in space.channels.values())
    if data is not None and (features is not None or not ragged):
        near = _points(space, data, cond.get(within), within, features)
        few = [len(near.points)] if near.labels is None else near.labels.unique(return_counts=True)[1].tolist()
        if min(few) >= NEIGHBOURS:
            checks["nearest"] = near
    return checks


def _points(
    space: Space, data: Any, labels: Tensor | None, within: str, features: Callable[[Any], Tensor] | None = None
) -> Nearest:
    """Return a check with as many training points as allowed, by class if each class has enough of them."""
    total, size = batch_size(data), vectors(space, select(data, slice(1)), features).shape[1]
    rows = _shuffled(total)[: min(POINTS, BYTES // (4 * size), total - total // 10)]
    points = _vectors(space, data, rows, features)
    kinds = () if labels is None else labels.unique()
    if labels is None or len(kinds) < 2 or min(labels[rows].eq(label).sum() for label in kinds) < NEIGHBOURS:
        return Nearest(points, features=features)
    return Nearest(points, labels[rows], within, features)


def _vectors(space: Space, data: Any, rows: Tensor, features: Callable[[Any], Tensor] | None) -> Tensor:
    """Return some of the data as vectors. Features may take much memory, so they are computed in chunks."""
    parts = rows.split(CHUNK if features is not None else max(1, len(rows)))
    return torch.cat([vectors(space, select(data, part), features).float() for part in parts])


def _shuffled(total: int) -> Tensor:
    """Return the rows of the data in a fixed random order; the first are stored as points, the next are new data."""
    return torch.randperm(total, generator=torch.Generator().manual_seed(0))


def _ignored(space: Space, cond: Mapping[str, Tensor], near: Nearest) -> str:
    """Return a condition that differs between samples and that distances ignore; empty if there is none."""
    counted = {channel.rows for channel in space.channels.values()}
    names = (name for name in cond if name not in counted and name != near.cond)
    return next((name for name in names if len(cond[name].unique(dim=0)) > 1), "")


# ---- the questions -----------------------------------------------------------------------------------------------


def _near(space: Space, check: Nearest, data: Any, noticed: float, by_echo: float) -> Candidate:
    """Return the candidate `nearest`, usable if training points are dense and detect disturbances."""
    share = _density(space, check, data)
    why = (
        f"the distance from new data to the training points is {share:.2f} of that between data (at most {DENSE} is "
        f"required), and it detects a disturbance with AUROC {noticed:.2f} (the echo: {by_echo:.2f})"
    )
    least = min(MOVES, max(CHANCE, by_echo - NEARLY))  # better than chance, and not behind the echo
    return Candidate((("nearest", 1.0),), why, share <= DENSE and noticed >= least)


def _new_rows(near: Nearest, data: Any) -> Tensor:
    """Return some rows of the data that are not among the training points of a check."""
    return _shuffled(batch_size(data))[len(near.points) :][:TRIED]


def _density(space: Space, near: Nearest, data: Any) -> float:
    """Return the median distance from new data to the training points, relative to that between data."""
    rows = _new_rows(near, data)
    if len(rows) < 2:
        return 1.0
    new = _vectors(space, data, rows, near.features).to(near.points)
    apart = torch.cdist(new, new)[~torch.eye(len(new), dtype=torch.bool)].median()
    return float(torch.cdist(new, near.points).amin(1).median() / apart.clamp_min(1e-12))


def _contest(run: Trajectory, tried: Disturbed, check: Contest | None, within: str, kinds: int) -> Candidate:
    """Return the candidate `contest`, usable if it detects wrong classes and some samples lose it."""
    if check is None:
        why = f"a contest between {kinds} classes needs more evaluations; give evaluations={kinds} or more"
        if kinds == 1:
            why = f"'{within}' has only one value, so there is no contest"
        return Candidate((("contest", 1.0),), why, False)
    score, seed, label = run.evidence["contest"], derive(tried.seed, "asked"), tried.cond[within]
    lost = float((score > 0).float().mean())
    values = check.rivals.to(label)
    number = (label[:, None] == values).float().argmax(1)
    shift = torch.randint(1, len(values), number.shape, generator=torch.Generator().manual_seed(seed)).to(number)
    wrong = {**tried.cond, within: values[(number + shift) % len(values)]}
    knows = auroc(tried.score(check, tried.states, seed, wrong), score[: len(label)])
    why = (
        f"the contest detects wrong classes with AUROC {knows:.2f} (at least {KNOWS} is required), and {lost:.1%} of "
        f"the samples lose it (at least {LOST:.1%})"
    )
    return Candidate((("contest", 1.0), WEIGHTS["contest"]), why, knows >= KNOWS and LOST <= lost <= MOST_LOST)


def _echo(noticed: float) -> Candidate:
    """Return the candidate `echo`, usable if it detects disturbances."""
    why = f"the echo detects disturbed samples with AUROC {noticed:.2f} (at least {NOTICES} is required)"
    return Candidate((("echo", 1.0), WEIGHTS["echo"]), why, noticed >= NOTICES)


def _disturbed(field: Field, space: Space, x: Any, cond: dict[str, Any], seed: int) -> Disturbed:
    """Return states, and the same states noised to a time before the end of their path."""
    given, like = space.given(cond), next(iter(channels(x).values()))
    randomness = Blocks(derive(seed, "disturbed"), 0, len(like))
    x0 = tree_map(lambda c: c.to(like.dtype), given.noise(len(like), randomness, like.device))
    disturbed, _ = path_of(field, given)(x0, x, like.new_full((len(like),), DISTURBED))
    return Disturbed(field, space, x, disturbed, cond, seed)


def _best_echo(check: Echo, tried: Disturbed) -> tuple[Echo, float]:
    """Return the echo at the earliest times among those that detect disturbed samples best, with its AUROC."""
    values = {times: tried.detects(Echo(times)) for times in (several[: len(check.times)] for several in ECHOES)}
    times = next(times for times, value in values.items() if value >= max(values.values()) - NEARLY)
    return Echo(times, check.draws), values[times]


def auroc(high: Tensor, low: Tensor) -> float:
    """Return the probability that a value of the first tensor is higher than one of the second."""
    both = torch.cat([high, low]).double()
    order = both.sort().values
    first = torch.searchsorted(order, both)
    ranks = (first + torch.searchsorted(order, both, right=True) + 1) / 2.0
    return float((ranks[: len(high)].sum() - len(high) * (len(high) + 1) / 2) / (len(high) * len(low)))


def labels_choose(scores: Mapping[str, Tensor], failed: Tensor, default: str = "") -> tuple[str, dict[str, float]]:
    """Return the score that labels choose, or `""` if none is better than chance, and the AUROC of each score.

    A score is better than *chance* if its AUROC exceeds 0.5 by z standard errors. The standard error is that of Hanley
    and McNeil at an AUROC of 0.5, √((m + n + 1) / 12mn) for m failures and n successes, which is exact for a score that
    says nothing. A score is better than the *default* if the difference of their AUROCs exceeds z standard errors of
    this difference (DeLong), which takes into account that both are of the same samples. z is the normal quantile of
    :data:`CHANGES`, one-sided and divided by the number of scores (Bonferroni). The default alone, which was chosen
    before, is compared with chance at the quantile for one score.

    So the default stays if it is better than chance and no other score is better than it. Otherwise, the best score
    takes its place if it is better than chance.

    Arguments:
        scores: The scores of the labelled samples, by name, `(B,)` each.
        failed: Which of them failed, `(B,)`.
        default: The score that is chosen without labels; none if empty.
    """
    bad = int(failed.sum())
    good = len(failed) - bad
    values = {name: auroc(score[failed], score[~failed]) for name, score in scores.items()}
    best = max(values, key=lambda name: values[name])
    chance = ((bad + good + 1) / (12 * bad * good)) ** 0.5
    clear = values[best] - 0.5 > _quantile(len(scores)) * chance
    if default in values and values[default] - 0.5 > _quantile(1) * chance:
        error = _error_of_difference(scores[best], scores[default], failed)
        better = clear and values[best] - values[default] > _quantile(len(scores) - 1) * error
        return best if better else default, values
    return best if clear else "", values


def _quantile(count: int) -> float:
    """Return by how many standard errors the best of several comparisons must differ."""
    return float(torch.special.ndtri(torch.tensor(1 - CHANGES / max(1, count), dtype=torch.float64)))


def _error_of_difference(score: Tensor, other: Tensor, failed: Tensor) -> float:
    """Return DeLong's standard error of the difference of two AUROCs on the same samples."""
    ours, theirs = _placements(score, failed), _placements(other, failed)
    return float(sum((a - b).var() / len(a) for a, b in zip(ours, theirs, strict=True))) ** 0.5


def _placements(score: Tensor, failed: Tensor) -> tuple[Tensor, Tensor]:  # -> (M,), (N,)
    """Return for each failure the share of successes below it, and for each success the share of failures above it."""
    high, low = score[failed].double(), score[~failed].double()

    def below(values: Tensor, among: Tensor) -> Tensor:
        ordered = among.sort().values
        first, last = (torch.searchsorted(ordered, values, right=right) for right in (False, True))
        return (first + last) / (2 * len(among))

    return below(high, low), 1 - below(low, high)


def _by_labels(
    run: Trajectory, candidates: Sequence[Candidate], chosen: Candidate, labels: Callable[..., Any], judged: int
) -> tuple[Candidate, str, list[dict[str, Any]]]:
    """Return the candidate that labels choose (:func:`labels_choose`), the reason, and all candidates."""
    failed = _failures(run.take(torch.arange(judged, device=run.grid.device)), labels)
    bad = int(failed.sum())
    few = min(bad, judged - bad) < FEWEST_LABELS
    others = [Candidate(((name, 1.0),), "", True) for name in (*SCORES, *EVIDENCE)]
    rows: list[dict[str, Any]] = []
    scored: dict[str, Tensor] = {}
    by_name: dict[str, Candidate] = {}
    for candidate in (*candidates, *others):
        row = {"score": candidate.name, "why": candidate.why, "usable": candidate.use}
        try:
            score = candidate.score(run)[:judged]
        except UsageError:  # the run lacks the score
            rows += [{**row, "usable": False}] if candidate.why else []
            continue
        rows.append(row)
        if candidate.name not in scored:
            scored[candidate.name], by_name[candidate.name] = score, candidate
    if few:
        why = f"{bad} of the {judged} labels are failures; labels are used from {FEWEST_LABELS} of each kind"
        return chosen, f"{why}; {chosen.why}", rows
    name, values = labels_choose(scored, failed, chosen.name if chosen.use else "")
    rows = [{**row, "auroc": round(values[row["score"]], 4)} if row["score"] in values else row for row in rows]
    told = f"of {judged} labels with {bad} failures"
    if not name:
        known = max(values, key=lambda name: values[name])
        reason = f"{told}, no score is better than chance: {known} has AUROC {values[known]:.2f}"
        if chosen.name in values and chosen.name != known:
            reason += f", {chosen.name} {values[chosen.name]:.2f}"
        return chosen._replace(why=reason, use=False), reason, rows
    if name == chosen.name and chosen.use:
        reason = f"{judged} labels with {bad} failures (AUROC {values[name]:.2f}) do not prefer another score"
        return chosen, f"{reason}; {chosen.why}", rows
    reason = f"{told}, {name} has AUROC {values[name]:.2f}"
    return by_name[name]._replace(why=reason, use=True), reason, rows


def _failures(run: Trajectory, labels: Callable[..., Any]) -> Tensor:  # -> (B,)
    """Return which samples failed, according to the user's function."""
    found = torch.from_numpy(require_labels(labels(run.x, run.cond), "the result of labels")).to(run.grid.device)
    if found.shape != (len(run),):
        raise ShapeError(f"labels must return one value per sample, ({len(run)},), got shape {tuple(found.shape)}")
    return found


# ---- the reference -----------------------------------------------------------------------------------------------


def _reference(
    run: Trajectory,
    chosen: Candidate,
    checks: Mapping[str, Any],
    estimator: Any,
    steps: int,
    stepper: str,
    within: str,
) -> Reference:
    """Return the reference with the quantiles of the pilot's scores; scores of the variance are compared by class."""
    levels = torch.linspace(0, 1, LEVELS, device=run.grid.device)
    parts, scores = [], []
    for name, weight in chosen.parts:
        raw, standard = run.score(name), None
        if within and needs_variance(name):
            standard = standard_of(within, raw, run.cond[within])
            raw = standard(raw, run.cond[within])
            standard = standard._replace(source="checkpoint")
        quantiles = raw.quantile(levels.to(raw))
        parts.append(Part(name, weight, quantiles, standard))
        scores.append((raw, weight, quantiles))
    total = combined(scores)
    names = {name.partition("@")[0] for name, _ in chosen.parts}
    used = {name: check for name, check in checks.items() if name in names}
    made = None
    if names - used.keys():  # some scores come from the trajectory
        made = read_with(estimator if needs_variance(chosen.name) else None, steps, stepper)
    return Reference(chosen.name, made, total.quantile(levels.to(total)), None, tuple(parts), used)
