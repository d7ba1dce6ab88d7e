"""Check finished samples: choose a check by their conditions, run it, and compare the scores with a reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fmwc.checks.evidence import Contest, Echo, among_rivals, discrete_conditions, is_text, run_checks, same
from fmwc.conventions import check_conventions
from fmwc.errors import FmwcError, ShapeError, UsageError, nearest, require_finite
from fmwc.flow import Space, as_space, euclidean
from fmwc.randomness import derive
from fmwc.state import (
    as_conditions,
    as_state,
    as_whole,
    batch_size,
    blame_conditions,
    channels,
    out_of_memory,
)

CHECKS = ("contest", "echo", "nearest")
EVALUATIONS = 20  # per sample, if the field's reference has no check
OUTSIDE = 1e-3  # largest distance of a sample from its manifold, relative to its largest coordinate


@dataclass(frozen=True, eq=False)
class CheckResult:
    """Result of :func:`check`.

    Attributes:
        evidence: The name of the check: `contest`, `echo` or `nearest`.
        score: One number per sample, high = doubtful.
        confidence: In [0, 1], high = trust: the position of the score among the field's reference samples. `None` if
            the field has no reference for this check.
        withheld: The reason why there is no confidence; else empty.
        rival: For a contest, the rival value of the condition that explains the sample best.
        margin: For a contest, how much better the sample's condition explains it than the rival does; negative if the
            flow prefers the rival.
        evaluations: Evaluations of the network per sample.
        error: The standard error of each score, if the check was repeated.
    """

    evidence: str
    score: Tensor
    confidence: Tensor | None
    withheld: str
    rival: Tensor | list[str] | None
    margin: Tensor | None
    evaluations: int
    error: Tensor | None = None

    def __len__(self) -> int:
        return len(self.score)


def check(
    field: Any,
    x: Any,
    cond: Mapping[str, Any] | None = None,
    *,
    evaluations: int | None = None,
    seed: int = 0,
    evidence: str | Any = "",
    rivals: Mapping[str, Any] | None = None,
    space: Space | Any = None,
    batch: int = 4096,
    first: int | None = 0,
    repeats: int = 1,
    progress: Callable[[int], None] | None = None,
    conventions: bool = True,
) -> CheckResult:
    """Score finished samples by how well a flow explains them. They may come from any generator, or be real data.

    >>> net = nn.Bilinear(2, 1, 2)
    >>> result = check(lambda x, t: net(x, t[:, None]), torch.zeros(3, 2), evaluations=4, conventions=False)
    >>> result.evidence, result.score.shape, result.evaluations
    ('echo', torch.Size([3]), 4)

    If the samples have a discrete condition (a class), the check is a *contest* between each sample's value and the
    other values, else an *echo* (:mod:`fmwc.checks.evidence`).

    Arguments:
        field: A field, or any network called as `network(x, t, **cond)`. It needs no noise model.
        x: The samples, `(B, *)` or a dict of channels.
        cond: The conditions of the samples, by name, one row per sample; texts as a list of strings.
        evaluations: The largest number of network evaluations per sample. By default, the check of the field's
            reference is used, which gives a confidence; without a reference, 20.
        seed: The seed of the noise that is mixed into the samples. It does not depend on the batch size.
        evidence: `contest`, `echo`, `nearest` (if the field's reference holds training points), or a check object such
            as `Echo(...)`. Chosen by the conditions if empty.
        rivals: The condition of the contest with its possible values, `{"y": torch.arange(10)}`, or their number,
            `{"y": 10}`. By default, the values in the field's reference or in the samples. Required for a contest of
            continuous or text conditions.
        space: The space of the samples, or the shape of one. By default that of the field, or flat space.
        batch: The number of samples checked together.
        first: The index of the first sample; the noise depends on it. `None` for noise that is the same for all
            samples, so that equal samples have equal scores.
        repeats: How often an echo is repeated with other noise. The score is the mean.
        progress: Called with the number of samples done since the last call.
        conventions: Whether to warn if the network explains the samples no better than a zero velocity, or clearly
            better at another scale. This takes a few more evaluations.
    """
    if not callable(field):
        hint = "; fmwc.load(name) opens a checkpoint" if isinstance(field, str) else ""
        raise UsageError(f"field must be a field or a network called as network(x, t, **cond), got {field!r:.60}{hint}")
    if rivals is not None and not isinstance(rivals, Mapping):
        raise UsageError(f"rivals must be a dict such as rivals={{'y': values}}, got {type(rivals).__name__}")
    network = getattr(field, "network", field)
    space, x, cond = _prepared(field, network, space, x, as_conditions(cond))
    count, seed = batch_size(x), as_whole(seed, "seed")
    batch, first = as_whole(batch, "batch", 1), None if first is None else as_whole(first, "first", 0)
    repeats = as_whole(repeats, "repeats", 1)
    reference = getattr(field, "reference", None)
    chosen: Any = evidence
    if not callable(evidence):
        chosen = choose_check(space, cond, evaluations, getattr(reference, "checks", {}), evidence, rivals or {})
    if isinstance(chosen, Contest):
        chosen = chosen.given(cond)
    try:
        if conventions and isinstance(network, nn.Module) and count > 1:
            check_conventions(field, space, x, cond, seed=seed, refuse=False)
        repeats = repeats if chosen.name == "echo" else 1  # a contest has one rival, and nearest has no noise
        seeds = [seed, *(derive(seed, "repeat", i) for i in range(1, repeats))]
        several = [
            run_checks({chosen.name: chosen}, field, space, x, cond, one, first, batch=batch, progress=progress)
            for one in seeds
        ]
    except FmwcError:
        raise
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        _blame(error, x, cond)
        raise
    results, scores = several[0], torch.stack([one[chosen.name] for one in several])
    score, rival = scores.mean(0), results.get("rival")
    noise = scores.std(0) / math.sqrt(repeats) if repeats > 1 else None
    confidence, withheld = _confidence(reference, chosen, score, field, space, cond)
    named = [chosen.rivals[i] for i in rival.tolist()] if rival is not None and is_text(chosen.rivals) else rival
    evaluations = repeats * chosen.evaluations
    return CheckResult(chosen.name, score, confidence, withheld, named, results.get("margin"), evaluations, noise)


def _confidence(
    reference: Any, chosen: Any, score: Tensor, field: Any, space: Space, cond: Mapping[str, Any]
) -> tuple[Tensor | None, str]:
    """Return the position of each score among the reference's scores of the same check, or the reason for none."""
    if reference is None:
        return None, "the network has no reference; call fmwc.fit_confidence(field, data)"
    if reference.withheld:
        return None, reference.withheld
    if why := reference.outdated(field, space) or reference.unknown(cond, len(score)):
        return None, why
    for part in reference.parts:
        if part.score == chosen.name and reference.checks.get(chosen.name) == chosen:
            at = torch.searchsorted(part.quantiles.to(score).contiguous(), score.contiguous(), right=True)
            return 1 - at.to(score.dtype) / len(part.quantiles), ""
    if not reference.checks:
        why = f"the field's reference, {reference.score}, needs trajectories; use fmwc.sample to get a confidence"
        return None, why
    return None, (
        f"the field's reference, {reference.score}, does not use this check; leave out evaluations, evidence and "
        f"rivals to use its checks ({' and '.join(reference.checks)})"
    )


# ---- the choice of a check ---------------------------------------------------------------------------------------


def choose_check(
    space: Space,
    cond: Mapping[str, Any],
    evaluations: int | None,
    known: Mapping[str, Any] | None = None,
    evidence: str = "",
    rivals: Mapping[str, Any] | None = None,
) -> Any:
    """Return the check for samples with these conditions, within a budget.

    Arguments:
        space: The space of the samples.
        cond: The conditions of the samples.
        evaluations: The largest number of evaluations per sample; if `None`, those of a known check, else 20.
        known: The checks of the field's reference. One with the same budget is used unchanged.
        evidence: `contest`, `echo` or `nearest`; chosen if empty.
        rivals: The condition of the contest, with its values or their number.
    """
    known, rivals = known or {}, rivals or {}
    if evidence not in ("", *CHECKS):
        raise UsageError(nearest(str(evidence), CHECKS, "check"))
    if evidence == "nearest":
        if "nearest" not in known:
            raise UsageError(
                "the field's reference holds no training points; give evidence=fmwc.checks.Nearest(points), or call "
                "fmwc.fit_confidence(field, data)"
            )
        return known["nearest"]
    for name in ("contest", "echo") if evaluations is not None else known:
        one = known.get(name)
        if one is None or rivals or evidence not in ("", name) or evaluations not in (None, one.evaluations):
            continue
        if getattr(one, "cond", "") in ("", *cond) and not getattr(one, "missing", ""):
            return one
    evaluations = as_whole(EVALUATIONS if evaluations is None else evaluations, "evaluations", 1, 10**6)
    if evidence == "echo":
        return Echo.planned(evaluations)
    name, values = _given_rivals(cond, rivals) if rivals else _known_rivals(space, cond, known)
    if values is not None and (rivals or len(values) > 1):
        return Contest.planned(name, values, evaluations, among_rivals(name, cond[name], values))
    if evidence == "contest":
        reason = f"'{name}' has one value" if values is not None else "the samples do not have one discrete condition"
        raise UsageError(
            f"{reason}, so there is no contest; give rivals={{...}}, which text and continuous conditions need, or "
            "use evidence='echo'"
        )
    return Echo.planned(evaluations)


def _known_rivals(space: Space, cond: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the discrete condition and its values in the reference or in the samples; `None` if there is none."""
    count = next((len(v) for v in cond.values() if isinstance(v, Tensor) and v.ndim), 0)
    names = discrete_conditions(cond, space, count)
    if "contest" in known and known["contest"].cond in names:
        return known["contest"].cond, known["contest"].rivals
    return (names[0], cond[names[0]].unique()) if len(names) == 1 else ("", None)


def _given_rivals(cond: Mapping[str, Any], rivals: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the condition of the contest and its distinct values, in the type of the samples' values."""
    if len(rivals) > 1:
        raise UsageError(f"rivals must be values of one condition, got {', '.join(rivals)}")
    ((name, given),) = rivals.items()
    if name not in cond:
        raise UsageError(
            nearest(name, cond, "condition")
            if cond
            else "the samples have no conditions, so there is no contest; give cond=, or use evidence='echo'"
        )
    if is_text(cond[name]) or is_text(given):
        if not (is_text(cond[name]) and is_text(given)):
            raise UsageError(f"rivals of a text condition must be a list of strings, {{'{name}': ['a', 'b']}}")
        return name, list(dict.fromkeys(given))
    like = torch.as_tensor(cond[name])
    if isinstance(given, (int, np.integer)):
        number = as_whole(given, f"the number of rivals of '{name}'", 2)
        kind = None if like.dtype == torch.bool else like.dtype  # bools are refused as values of a contest
        return name, torch.arange(number, dtype=kind, device=like.device)
    try:
        values = torch.as_tensor(given, device=like.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"rivals of '{name}' must be its values or their number, got {given!r:.60}") from error
    if not values.numel():
        raise UsageError(f"a contest of '{name}' needs at least 1 rival, got none; give rivals, or use evidence='echo'")
    if values.is_floating_point():
        require_finite(values, f"rivals of '{name}'")
    if not bool((values.to(like.dtype) == values).all()):
        raise UsageError(f"rivals of '{name}' must be integers, like its values; got {given!r:.60}")
    values = values.to(like.dtype)
    if not values.ndim or values.shape[1:] != like.shape[1:]:
        raise ShapeError(
            f"rivals of '{name}' have shape {tuple(values.shape[1:])}, and its values {tuple(like.shape[1:])}"
        )
    repeated = same(values, values).tril(-1).any(1)  # the order is kept, because a rival may be reported by its index
    return name, values[~repeated]


# ---- samples and conditions --------------------------------------------------------------------------------------


def _prepared(
    field: Any, network: Any, space: Any, x: Any, cond: Mapping[str, Any]
) -> tuple[Space, Any, dict[str, Any]]:
    """Return the space, and samples and conditions as tensors on the network's device; raise if they do not fit."""
    device = next((p.device for p in network.parameters()), None) if isinstance(network, nn.Module) else None
    x = as_state(x, "x", network, device)
    if not (count := batch_size(x)):
        raise ShapeError("x holds no samples; give at least 1 sample")
    space = _space_of(field, x, space)
    space.check(x)
    for name, value in channels(x).items():
        require_finite(value, f"the samples' channel '{name}'")
    given = {name: _rows(name, value, count, x) for name, value in cond.items()}
    space.check_rows(given, count)
    for name, channel in space.channels.items():
        value = channels(x)[name]
        far = (channel.manifold.projx(value) - value).abs() > OUTSIDE * value.abs().amax().clamp_min(1.0)
        if bool(far.any()):
            raise UsageError(
                f"{int(far.flatten(1).any(1).sum())} of {count} samples lie outside the space in channel '{name}'; "
                "project them onto it first"
            )
    return space, x, given


def _space_of(field: Any, x: Any, space: Any) -> Space:
    if space is not None:
        return as_space(space)
    if (known := getattr(field, "space", None)) is not None:
        return known
    if isinstance(x, dict):
        raise UsageError("samples with several channels need a space; give check(..., space=...)")
    if x.ndim < 2:
        raise ShapeError(
            f"x must have one row per sample, (B, *), got shape {tuple(x.shape)}; use x[:, None] for scalars"
        )
    return euclidean(x.shape[1:])


def _rows(name: str, value: Any, count: int, x: Any) -> Any:
    """Return a condition as a tensor with one row per sample; return lists of texts and other objects unchanged."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = torch.full((count,), value)
    if not is_text(value):
        if not isinstance(value, (list, tuple, np.ndarray, Tensor)):
            return value
        value = torch.as_tensor(value, device=next(iter(channels(x).values())).device)
        require_finite(value, f"condition '{name}'")
    if isinstance(value, Tensor) and not value.ndim:
        value = value[None]
    if len(value) != count:
        raise ShapeError(f"condition '{name}' has {len(value)} rows for {count} samples")
    return value


def _blame(error: Exception, x: Any, cond: dict[str, Any]) -> None:
    """Raise a one-line error for an exception of the network; return if the machine caused it."""
    blame_conditions(error, cond, batch_size(x))
    if out_of_memory(error) or "CUDA" in str(error):
        return
    shapes = ", ".join(f"{name} {tuple(c.shape)}" for name, c in channels(x).items())
    names = f"conditions {', '.join(cond)}" if cond else "no conditions"
    reason = (str(error).strip().splitlines() or [""])[0]
    raise UsageError(
        f"the network, called as network(x, t, **cond), failed on samples of shape {shapes} with {names}: "
        f"{type(error).__name__}: {reason}; use fmwc.adapters.adapt for networks with another signature"
    ) from error
