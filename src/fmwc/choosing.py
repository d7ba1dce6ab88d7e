"""Choosing what confidence is made from: which evidence a model has, by a pilot run, with or without labels.

No single score works on every model. Without labels, the choice asks three questions that have answers on the model's
own samples, in this order:

1. *Are the training points dense?* If new data lie much nearer to training points than to one another (a hundredth of
   the distance on a plane, more than half of it for images), the distance to the nearest training points tells samples
   that lie off the data. It is not asked where no data are given. A distance can still point the wrong way, so it
   has to notice a disturbance (see 3), or nearly as much of it as the echo does.
2. *Does the contest know its classes?* Own samples are asked for a wrong class: the contest has to notice it. It also
   has to be lost by some samples as they are: where the condition decides everything, none turns into a rival.
3. *Does the echo notice a disturbance?* Own samples are mixed with a little noise: the echo has to notice it. Its times
   are the earliest of those that notice it best.

The contest and the echo are combined with the free `spread` of the trajectory, by ranks. If no question is answered
with yes, confidence is withheld. `benchmarks/zoo` says how often this chose right on flows that it was not made for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmwc.checks import Contest, Echo, Nearest, run_checks
from fmwc.checks.nearest import NEIGHBOURS, vectors
from fmwc.checks.residuals import discrete
from fmwc.conventions import check_conventions
from fmwc.entry import one_line
from fmwc.errors import FmwcError, ShapeError, UsageError, require_finite
from fmwc.field import Field, Part, Reference
from fmwc.flow import Space, path_of
from fmwc.modes import evaluating
from fmwc.randomness import Blocks, derive
from fmwc.sampling import Trajectory, default_estimator, needs_variance, noise, read_with, sample, standard_of
from fmwc.sampling.adaptive import FEW, numbers
from fmwc.sampling.scores import FEWEST, SCORES, combined
from fmwc.state import as_numbers, as_state, as_whole, batch_size, channels, each, precision_of

__all__ = ["Candidate", "fit_confidence"]

PILOT = 1_000  # samples; more where there are more classes
FEWEST_PILOT = 8
PILOT_CPU = 200  # of states that are more than a few numbers, on a CPU
LARGEST_PILOT = 2_000  # samples, at most, that a pilot grows to because of its classes
POINTS = 16_000  # training points that are kept, at most,
BYTES = 1 << 22  # and what they may take
TOGETHER = 256  # samples whose features are computed together
TRIED = 400  # samples that are disturbed or asked for a wrong class
EXTRA = 0.4  # of the steps: evaluations that a contest may take
ECHO = 4  # evaluations of an echo
ECHOES = ((0.5, 0.6, 0.7, 0.8), (0.6, 0.7, 0.8, 0.9), (0.8, 0.85, 0.9, 0.95))  # times that an echo may take
DENSE = 0.25  # of the distance between data: how near training points are where they are dense
KNOWS = 0.85  # AUROC of the contest for wrong classes
LOST = 0.005  # share of own samples that lose a contest
NOTICES = 0.6  # AUROC of the echo, and of nearest points, for disturbed samples
BEHIND = 0.1  # of AUROC: how much less than the echo nearest points may notice, where they notice less than that
NEARLY = 0.02  # of AUROC: earlier times are taken if they notice it nearly as well, because they see more of a sample
DISTURBED = 0.9  # the time on the path to which samples are put back
WEIGHTS = {"contest": ("spread@0.3-0.8", 0.3), "echo": ("spread@0.6-1", 0.5)}
LEVELS = 1001
SURE = 1.0  # standard errors by which labels have to prefer another candidate,
CLEARLY = 2.7  # and by which the best of all has to be better than chance where nothing was usable without labels
FEWEST_LABELS = 5  # failures, and others, that it takes


class Candidate(NamedTuple):
    """A score that confidence may be made from.

    Attributes:
        parts: The names of its scores with their weights.
        why: What speaks for it, or against it, in words.
        use: Whether it may be chosen without labels.
    """

    parts: tuple[tuple[str, float], ...]
    why: str
    use: bool

    @property
    def name(self) -> str:
        """The score in words: `contest + 0.3 spread@0.3-0.8`."""
        return " + ".join(name if weight == 1 else f"{weight:g} {name}" for name, weight in self.parts)


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
    """Choose what the confidence of a field is made from, and leave the reference that one sample alone is placed in.

    >>> field = fmwc.attach(net, space=(2,))  # doctest: +SKIP
    >>> fmwc.fit_confidence(field, data).reason  # doctest: +SKIP
    >>> fmwc.sample(field, 1).confidence  # doctest: +SKIP

    It needs no fitted noise; without labels it reads no variance. The choice is kept in `field.reference`, saved with
    the field, and used by :func:`fmwc.sample`.

    Arguments:
        field: A field that knows its space, or learns it from the data.
        data: Training data, `(N, *)` or a dict of channels, if it is at hand.
        labels: A function `(x, cond) -> (B,)` that says which samples failed. With it every score is a candidate, also
            those of the variance, and the choice is by AUROC on `judged` samples: another score has to be better than
            the choice without labels by more than the standard error.
        cond: The conditions of the data, by name, one row each; without data, conditions to draw samples under.
        features: A function of states that gives one vector per sample, `(B, D)`, in which samples that are alike are
            near one another. Distances to training points are then computed there, also for samples that differ in
            their number of rows (crystals). A checkpoint cannot hold the function: a field that is loaded withholds its
            confidence, if it is made from these distances, until it is fitted again.
        judged: How many samples the labels are asked for.
        evaluations: Evaluations per sample that a check may take; 0.4 times the steps for a contest and 4 for an echo
            if not given.
        steps, stepper: How samples will be drawn.
        pilot: The number of pilot samples; more if there are many classes, up to 2,000. A condition that needs a larger
            pilot, or that has a value of its own in most rows of the data (an id), is not used as a class.
        seed: Seeds the pilot run.
        batch: Samples drawn together.
        keep_data: Whether the field may keep training points (at most 16,000, and 4 MiB) to compare samples with.
        conventions: Whether to make sure first that the network is called as it was trained, where data are given.
        progress: Called with the number of pilot samples done since the last call.
    """
    if not isinstance(field, Field):
        raise UsageError(f"confidence is fitted to a field, got {type(field).__name__}; fmwc.attach(network) makes one")
    evaluations = None if evaluations is None else as_whole(evaluations, "evaluations", 1, 10**6)
    judged, seed = as_whole(judged, "judged", 1), as_whole(seed, "seed")
    for name, function, takes in (("labels", labels, "(x, cond)"), ("features", features, "states")):
        if function is not None and not callable(function):
            raise UsageError(f"{name} is a function of {takes}, got {type(function).__name__}")
    if features is not None and (data is None or not keep_data):
        raise UsageError("features= compares samples with training points; give data, and leave out keep_data=False")
    if data is not None:
        data = as_state(data, "the data", field.network)
        if not batch_size(data):
            raise ShapeError("the data hold no samples")
        for name, value in channels(data).items():
            require_finite(value, "the data" if isinstance(data, Tensor) else f"the data's channel '{name}'")
        field.learn_space(data)
        data = data if features is None else each(lambda c: c.to(field.device), data)
    if field.space is None:
        raise UsageError("the shape of a sample is not known; give data, or space=(...) to attach")
    space, device = field.space, field.device
    given = {k: as_numbers(v, f"the condition '{k}'") for k, v in (cond or {}).items()}
    if data is not None and any(len(v) != batch_size(data) for v in given.values()):
        raise ShapeError(f"a condition has one row for each of the {batch_size(data)} data")
    for name, value in given.items():
        require_finite(value, f"the condition '{name}'")
    if not given:
        _try_without_conditions(field)
    if data is not None and conventions:
        few = each(lambda c: c[:1024].to(device), data)
        check_conventions(field, space, few, {k: v[:1024].to(device) for k, v in given.items()}, seed=seed)
    count = _count(field, pilot)
    classes, ids = _classes(given, space, count, data is not None)
    within = classes[0] if len(classes) == 1 else ""
    count = max(count, FEWEST * len(given[within].unique())) if within else count
    drawn: dict[str, Any] = {k: v.to(device) for k, v in _conditions(given, within, count).items()}
    checks = _checks(field, data, given, within, evaluations, steps, keep_data, features)
    options: dict[str, Any] = {"steps": steps, "stepper": stepper, "batch": batch, "check": False, "progress": progress}
    old, field.reference = field.reference, None
    try:
        reads: Any = False if labels is None else default_estimator(space)
        record = "full" if labels is None else "total"
        run = sample(
            field, count, seed=derive(seed, "pilot"), confidence=reads, schedule=1, record=record, **options, **drawn
        )
    finally:
        field.reference = old
    pair = _disturbed(field, run, derive(seed, "disturbed"))
    checks["echo"], noticed = _echo(checks["echo"], field, pair, seed)
    found = _run(checks, field, run, derive(seed, "check"), batch)
    candidates = []
    if "nearest" in checks:
        near = _notices(checks["nearest"], field, pair, seed)
        candidates.append(_near(field.space, checks["nearest"], data, near, noticed))
    if "contest" in checks:
        candidates.append(_contest(field, run, checks["contest"], found["contest"], within, derive(seed, "asked")))
    elif within:
        kinds = len(given[within].unique())
        why = f"a contest between {kinds} classes does not fit in the evaluations; give evaluations={kinds} or more"
        why = why if kinds > 1 else f"'{within}' has one value, so there is no other class to contest it"
        candidates.append(Candidate((("contest", 1.0),), why, False))
    candidates += [Candidate((("contest", 1.0),), why, False) for why in ids.values()]
    why = f"the echo tells disturbed samples from own ones with AUROC {noticed:.2f} (at least {NOTICES} is asked for)"
    candidates.append(Candidate((("echo", 1.0), WEIGHTS["echo"]), why, noticed >= NOTICES))
    run = Trajectory(**{**vars(run), "evidence": {**run.evidence, **found}})
    chosen = next((c for c in candidates if c.use), candidates[-1])
    rows = [{"score": c.name, "why": c.why, "usable": c.use} for c in candidates]
    reason = chosen.why
    if labels is not None:
        chosen, reason, rows = _by_labels(run, candidates, chosen, labels, min(judged, count))
    reference = _reference(run, chosen, checks, reads, steps, stepper, within)
    blind = "" if chosen.use else f"no evidence is better than chance on this model ({chosen.why})"
    known = {within: tuple(given[within].unique().tolist())} if within else {}
    field.reference = reference._replace(reason=reason, withheld=blind, candidates=tuple(rows), classes=known)
    return field.reference


def _try_without_conditions(field: Field) -> None:
    """Raise in one line where a network needs conditions, of which none were given."""
    space: Any = field.space
    if any(channel.rows for channel in space.channels.values()):
        return  # which takes a condition, as the space says
    x = each(lambda c: c.to(precision_of(field.network)), noise(space, 2, 0, field.device))
    value = next(iter(channels(x).values()))
    try:
        with evaluating(field.network), torch.no_grad():
            field.network(x, value.new_full((2,), 0.5))
    except FmwcError:
        raise
    except Exception as error:  # whatever the user's own code raises
        takes = list(inspect.signature(field.network.forward).parameters)[2:]
        named = f"; its other arguments are {', '.join(takes)}" if takes else ""
        raise UsageError(
            f"the network does not run as network(x, t) without conditions ({one_line(error)}){named}; give "
            "cond={name: values}, one row for each of the data"
        ) from error


# ---- the pilot ---------------------------------------------------------------------------------------------------


def _count(field: Field, pilot: int | None) -> int:
    """The number of pilot samples that is asked for, or that the device affords."""
    assert field.space is not None
    small = field.device.type == "cpu" and numbers(field.space) > FEW
    return as_whole(pilot, "pilot", FEWEST_PILOT) if pilot is not None else PILOT_CPU if small else PILOT


def _classes(cond: Mapping[str, Tensor], space: Space, count: int, of_data: bool) -> tuple[list[str], dict[str, str]]:
    """The conditions that are classes, and why others of whole numbers are none.

    Arguments:
        cond: The conditions, one row each.
        space: The space of the samples.
        count: The number of pilot samples, before it grows with the classes.
        of_data: Whether the conditions are those of data: classes then occur more than once.
    """
    rows = len(next(iter(cond.values()), ()))
    classes, ids = [], {}
    for name in discrete(cond, space, rows):
        values = len(cond[name].unique())
        so = "so it is not used as a class: there is no contest, and samples are not compared within it"
        if of_data and rows > 1 and 2 * values > rows:
            ids[name] = f"'{name}' has {values:,} values in {rows:,} rows of data, {so}"
        elif FEWEST * values > max(count, LARGEST_PILOT):
            least = f"a pilot of {FEWEST} per value has more than {max(count, LARGEST_PILOT):,} samples"
            ids[name] = f"'{name}' has {values:,} values and {least}, {so}; give pilot={FEWEST * values} to use it"
        else:
            classes.append(name)
    return classes, ids


def _conditions(cond: Mapping[str, Tensor], within: str, count: int) -> dict[str, Tensor]:
    """Conditions of the data for the pilot: classes in turn, as many of each however rare it is."""
    if not cond:
        return {}
    total = len(next(iter(cond.values())))
    rows = torch.arange(count) % total
    if within:
        members = [(cond[within] == label).nonzero()[:, 0] for label in cond[within].unique()]
        each_class = -(-count // len(members))
        rows = torch.stack([of[torch.arange(each_class) % len(of)] for of in members], 1).flatten()[:count]
    return {name: value[rows] for name, value in cond.items()}


def _checks(
    field: Field,
    data: Any,
    cond: Mapping[str, Tensor],
    within: str,
    evaluations: int | None,
    steps: int,
    keep: bool,
    features: Callable[[Any], Tensor] | None,
) -> dict[str, Any]:
    """The checks to try, by name."""
    assert field.space is not None
    found: dict[str, Any] = {"echo": Echo.planned(ECHO if evaluations is None else min(max(1, evaluations), 10**4))}
    if within:
        values = cond[within].unique()
        budget = max(1, int(EXTRA * steps)) if evaluations is None else evaluations
        if 2 <= len(values) <= budget:
            found["contest"] = Contest.planned(within, values, budget)
    ragged = any(channel.rows for channel in field.space.channels.values())
    if data is not None and keep and (features is not None or not ragged):
        near = _points(field.space, data, cond.get(within) if within else None, within, features)
        few = [len(near.points)] if near.labels is None else near.labels.unique(return_counts=True)[1].tolist()
        if min(few) >= NEIGHBOURS:
            found["nearest"] = near
    return found


def _points(
    space: Space,
    data: Any,
    labels: Tensor | None,
    within: str,
    features: Callable[[Any], Tensor] | None = None,
) -> Nearest:
    """Some of the training points, and as many as may be kept; by class where each has enough of them."""
    total, each_one = batch_size(data), vectors(space, each(lambda c: c[:1], data), features).shape[1]
    rows = _shuffled(total)[: min(POINTS, BYTES // (4 * each_one), total - total // 10)]
    points = _vectors(space, data, rows, features)
    kinds = () if labels is None else labels.unique()
    if labels is None or len(kinds) < 2 or min(labels[rows].eq(label).sum() for label in kinds) < NEIGHBOURS:
        return Nearest(points, features=features)
    return Nearest(points, labels[rows], within, features)


def _vectors(space: Space, data: Any, rows: Tensor, features: Callable[[Any], Tensor] | None) -> Tensor:
    """Some of the data as vectors; features may take much memory, so they are computed of a few at a time."""
    parts = rows.split(TOGETHER if features is not None else max(1, len(rows)))
    return torch.cat([vectors(space, each(lambda c: c[part], data), features).float() for part in parts])  # noqa: B023


def _shuffled(total: int) -> Tensor:
    """The rows of the data in a random order, always the same: the first are kept, the next are new to them."""
    return torch.randperm(total, generator=torch.Generator().manual_seed(0))


def _run(checks: Mapping[str, Any], field: Field, run: Trajectory, seed: int, batch: int) -> dict[str, Tensor]:
    parts = []
    for a in range(0, len(run), batch):
        rows = slice(a, min(a + batch, len(run)))
        cond = {k: v[rows] for k, v in run.cond.items()}
        parts.append(run_checks(checks, field, field.space, each(lambda c: c[rows], run.x), cond, seed, a))  # type: ignore[arg-type]  # noqa: B023
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


# ---- the questions -----------------------------------------------------------------------------------------------


def _near(space: Space, check: Nearest, data: Any, noticed: float, by_echo: float) -> Candidate:
    """Nearest training points, with how dense they are and how well they notice a disturbance, beside the echo."""
    share = _density(space, check, data)
    why = (
        f"new data lie {share:.2f} of the distance between data away from the training points (at most {DENSE}), and "
        f"that distance tells disturbed samples from own ones with AUROC {noticed:.2f} (the echo: {by_echo:.2f})"
    )
    return Candidate((("nearest", 1.0),), why, share <= DENSE and noticed >= min(NOTICES, by_echo - BEHIND))


def _contest(field: Field, run: Trajectory, check: Contest, found: Tensor, within: str, seed: int) -> Candidate:
    """The contest, with how well it tells wrong classes, and how many samples lose it."""
    lost = float((found > 0).float().mean())
    few = slice(0, min(TRIED, len(run)))
    values = check.rivals.to(run.cond[within])
    own = (run.cond[within][few, None] == values).float().argmax(1)
    shift = torch.randint(1, len(values), own.shape, generator=torch.Generator().manual_seed(seed)).to(own)
    wrong = {**{k: v[few] for k, v in run.cond.items()}, within: values[(own + shift) % len(values)]}
    space: Any = field.space
    changed = run_checks({"contest": check}, field, space, each(lambda c: c[few], run.x), wrong, seed, 0)["contest"]
    knows = _auroc(changed, found[few])
    why = (
        f"the contest tells wrong classes from those asked for with AUROC {knows:.2f} (at least {KNOWS}), and "
        f"{lost:.1%} of the samples lose it (at least {LOST:.1%})"
    )
    return Candidate((("contest", 1.0), WEIGHTS["contest"]), why, knows >= KNOWS and LOST <= lost <= 0.5)


def _density(space: Space, near: Nearest, data: Any) -> float:
    """How far data are from the training points, of the distance that they are from one another."""
    rows = _shuffled(batch_size(data))[len(near.points) :][:TRIED]
    if len(rows) < 2:
        return 1.0
    new = _vectors(space, data, rows, near.features).to(near.points)
    apart = torch.cdist(new, new)[~torch.eye(len(new), dtype=torch.bool)].median()
    return float(torch.cdist(new, near.points).amin(1).median() / apart.clamp_min(1e-12))


class Pair(NamedTuple):
    """Own samples, the same samples disturbed, and their conditions."""

    own: Any
    disturbed: Any
    cond: dict[str, Any]


def _disturbed(field: Field, run: Trajectory, seed: int) -> Pair:
    """Some of the samples, and the same put back on their path to a time before the end."""
    few = slice(0, min(TRIED, len(run)))
    cond = {k: v[few] for k, v in run.cond.items()}
    own = each(lambda c: c[few], run.x)
    space: Any = field.space
    given, like = space.given(cond), next(iter(channels(own).values()))
    count = len(like)
    noise = each(lambda c: c.to(like.dtype), given.noise(count, Blocks(seed, 0, count), like.device))
    disturbed, _ = path_of(field, given)(noise, own, like.new_full((count,), DISTURBED))
    return Pair(own, disturbed, cond)


def _notices(check: Any, field: Field, pair: Pair, seed: int) -> float:
    """How well a check tells disturbed samples from own ones."""
    space: Any = field.space
    at = derive(seed, "disturbed")
    scores = [
        run_checks({check.name: check}, field, space, x, pair.cond, at, 0)[check.name]
        for x in (pair.disturbed, pair.own)
    ]
    return _auroc(*scores)


def _echo(check: Echo, field: Field, pair: Pair, seed: int) -> tuple[Echo, float]:
    """The echo at the times at which it tells disturbed samples best, and how well."""
    tried = [several[: len(check.times)] for several in ECHOES]
    found = [(times, _notices(Echo(times), field, pair, seed)) for times in tried]
    most = max(notices for _, notices in found)
    times, notices = next(one for one in found if one[1] >= most - NEARLY)
    return Echo(times, check.draws), notices


def _auroc(high: Tensor, low: Tensor) -> float:
    """The chance that a number of the first is higher than one of the second."""
    both = torch.cat([high, low]).double()
    order = both.sort().values
    first = torch.searchsorted(order, both)
    ranks = (first + torch.searchsorted(order, both, right=True) + 1) / 2.0
    return float((ranks[: len(high)].sum() - len(high) * (len(high) + 1) / 2) / (len(high) * len(low)))


def _by_labels(
    run: Trajectory, candidates: Sequence[Candidate], chosen: Candidate, labels: Callable[..., Any], judged: int
) -> tuple[Candidate, str, list[dict[str, Any]]]:
    """The candidate that labels prefer, if they do so by more than the standard error."""
    few = run.take(torch.arange(judged, device=run.grid.device))
    said = torch.as_tensor(labels(few.x, few.cond)).to(few.grid.device)
    if said.is_floating_point():
        require_finite(said, "what labels say")
    failed = said.bool()
    if failed.shape != (judged,):
        raise ShapeError(f"labels say of each of {judged} samples whether it failed, got shape {tuple(failed.shape)}")
    bad = int(failed.sum())
    names = (*SCORES, "spread", "detour", "echo", "contest", "nearest")
    others = [Candidate(((name, 1.0),), "", True) for name in names]
    every = [*candidates, *others]
    rows: list[dict[str, Any]] = []
    scored: list[tuple[float, Candidate]] = []
    for candidate in every:
        try:
            score = _summed(run, candidate)[:judged]
        except UsageError:  # this run did not read it
            rows += [{"score": candidate.name, "why": candidate.why, "usable": False}] if candidate.why else []
            continue
        value = _auroc(score[failed], score[~failed]) if 0 < bad < judged else 0.5
        rows.append({"score": candidate.name, "why": candidate.why, "usable": candidate.use, "auroc": round(value, 4)})
        scored.append((value, candidate))
    if not 0 < bad < judged:
        reason = f"{bad} of the {judged} labels are failures, which tells nothing; {chosen.why}"
        return chosen, reason, rows
    own = next((value for value, candidate in scored if candidate.name == chosen.name), 0.5)
    best, better = max(scored, key=lambda pair: pair[0])
    least = min(bad, judged - bad)
    capped = min(best, 1 - 1 / (2 * least))  # a few labels can be told apart by chance
    error = (capped * (1 - capped) / least) ** 0.5
    if best - SURE * error > own or not chosen.use:
        use = least >= FEWEST_LABELS and best - CLEARLY * error > 0.5
        reason = f"of {judged} labels with {bad} failures, {better.name} has AUROC {best:.2f}"
        return better._replace(why=reason, use=use), reason, rows
    reason = f"{judged} labels with {bad} failures (AUROC {own:.2f}) do not prefer another score; {chosen.why}"
    return chosen, reason, rows


# ---- the reference -----------------------------------------------------------------------------------------------


def _summed(run: Trajectory, candidate: Candidate) -> Tensor:
    levels = torch.linspace(0, 1, LEVELS, device=run.grid.device)
    scores = [(run.score(name), weight) for name, weight in candidate.parts]
    return combined([(s, weight, s.quantile(levels.to(s))) for s, weight in scores])


def _reference(
    run: Trajectory,
    chosen: Candidate,
    checks: Mapping[str, Any],
    estimator: Any,
    steps: int,
    stepper: str,
    within: str,
) -> Reference:
    """The scores of the pilot's samples; those of the variance are compared within a class."""
    levels = torch.linspace(0, 1, LEVELS, device=run.grid.device)
    parts, scores = [], []
    for name, weight in chosen.parts:
        raw = run.score(name)
        standard = standard_of(within, raw, run.cond[within]) if within and needs_variance(name) else None
        raw = raw if standard is None else standard(raw, run.cond[within])
        quantiles = raw.quantile(levels.to(raw))
        parts.append(Part(name, weight, quantiles, standard and standard._replace(source="checkpoint")))
        scores.append((raw, weight, quantiles))
    total = combined(scores)
    names = {name.partition("@")[0] for name, _ in chosen.parts}
    used = {name: own for name, own in checks.items() if name in names}
    variance = needs_variance(chosen.name)
    made = None
    if names - used.keys():  # a part of it is of the trajectory
        made = read_with(estimator if variance else None, steps, stepper)
    return Reference(chosen.name, made, total.quantile(levels.to(total)), None, tuple(parts), used)
