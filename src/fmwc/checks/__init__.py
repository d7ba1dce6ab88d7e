"""Checks: evidence from a finished sample, wherever it comes from. They need no noise model and no training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fmwc.checks.nearest import Nearest, embedded
from fmwc.checks.residuals import Contest, Echo, Found, as_values, discrete, is_text, residuals, same, taken
from fmwc.conventions import check_conventions
from fmwc.errors import FmwcError, ShapeError, UsageError, nearest, require_finite
from fmwc.flow import Space, as_space, euclidean
from fmwc.modes import evaluating
from fmwc.state import as_state, as_whole, batch_size, blame_conditions, channels, each, out_of_memory

__all__ = ["Check", "Contest", "Echo", "Found", "Nearest", "check", "embedded", "residuals", "run_checks", "suited"]


EVALUATIONS = 20  # per sample, where the field's reference has no check
TOGETHER = 3  # a call of all rivals has so many times the rows of a step: the calls of the best two are smaller


@dataclass(frozen=True)
class Check:
    """What a check says of samples.

    Attributes:
        evidence: The name of the check: `contest`, `echo` or `nearest`.
        score: One number per sample, high = doubtful.
        confidence: In [0, 1], high = trust it: the place of the score among the field's reference samples; `None` where
            the field has no reference for this check, as `withheld` says.
        withheld: Why there is no confidence; else empty.
        rival: For a contest, the value of the condition that came nearest to the one asked for.
        margin: For a contest, how much better the condition asked for explains the sample than the rival does;
            negative where the flow itself prefers the rival.
        evaluations: Evaluations of the network per sample.
    """

    evidence: str
    score: Tensor
    confidence: Tensor | None
    withheld: str
    rival: Tensor | list[str] | None
    margin: Tensor | None
    evaluations: int

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
    first: int = 0,
    progress: Callable[[int], None] | None = None,
    conventions: bool = True,
) -> Check:
    """Ask a flow for its own opinion of finished samples: of a file, of another sampler or generator, or real data.

    >>> net = nn.Bilinear(2, 1, 2)
    >>> found = check(lambda x, t: net(x, t[:, None]), torch.zeros(3, 2), evaluations=4, conventions=False)
    >>> found.evidence, found.score.shape, found.evaluations
    ('echo', torch.Size([3]), 4)

    Where the samples have a discrete condition (a class), the check is a *contest* of the condition that was asked for
    with the others; else it is an *echo* (:mod:`fmwc.checks.residuals`).

    Arguments:
        field: A field, or any network called as `network(x, t, **cond)`: nothing needs to be attached or trained.
        x: The samples, `(B, *)` or a dict of channels.
        cond: The conditions of the samples, by name, one row per sample; texts as a list of strings.
        evaluations: Evaluations of the network to spend per sample, at most. By default the check is that of the
            field's reference, so that there is a confidence; where there is none, it spends 20.
        seed: Seeds the noise that samples are mixed with. A sample's noise does not depend on the batch.
        evidence: `contest`, `echo`, `nearest` (where the field's reference holds training points), or a check with
            its options; chosen by the conditions if empty.
        rivals: The condition to contest and its values, `{"y": torch.arange(10)}`, or their number, `{"y": 10}`; by
            default the values that the field's reference or the samples themselves have. Continuous and text
            conditions need it.
        space: The space of the samples, or the shape of one; the field's, or flat space, if not given.
        batch: Samples checked together.
        first: The number of the first sample, which its noise depends on.
        progress: Called with the number of samples done since the last call.
        conventions: Whether to warn if the network explains the samples no better than a zero velocity does. A field
            with a reference is not asked.
    """
    if not callable(field):
        hint = "; fmwc.load(name) opens a checkpoint" if isinstance(field, str) else ""
        raise UsageError(
            f"a check takes a field or a network, called as network(x, t, **cond), got {field!r:.60}{hint}"
        )
    if cond is not None and not isinstance(cond, Mapping):
        raise UsageError(f"conditions are given by name, cond={{'y': y}}, got {type(cond).__name__}")
    if rivals is not None and not isinstance(rivals, Mapping):
        raise UsageError(f"rivals are given by name, rivals={{'y': values}}, got {type(rivals).__name__}")
    network = getattr(field, "network", field)
    device = next((p.device for p in network.parameters()), None) if isinstance(network, nn.Module) else None
    x = as_state(x, "x", network, device)
    count = batch_size(x)
    if not count:
        raise ShapeError("a check takes at least 1 sample")
    where = _space(field, x, space)
    where.check(x)
    for name, value in channels(x).items():
        require_finite(value, f"the samples' channel '{name}'")
    given = {k: _row(k, v, count, channels(x)) for k, v in (cond or {}).items()}
    where.check_rows(given, count)
    _require_inside(where, x)
    seed = as_whole(seed, "seed")
    batch, first = as_whole(batch, "batch", 1), as_whole(first, "first", 0)
    reference = getattr(field, "reference", None)
    known = getattr(reference, "checks", {})
    chosen = evidence if callable(evidence) else suited(where, given, evaluations, known, evidence, rivals or {})
    spent = chosen.given(given).evaluations if isinstance(chosen, Contest) else chosen.evaluations
    parts: list[dict[str, Tensor]] = []
    try:
        if conventions and reference is None and isinstance(network, nn.Module) and count > 1:
            check_conventions(field, where, x, given, seed=seed, refuse=False)
        for a in range(0, count, batch):
            rows = slice(a, min(a + batch, count))
            part = each(lambda c: c[rows], x)  # noqa: B023
            parts.append(
                run_checks({chosen.name: chosen}, field, where, part, taken(given, rows, count), seed, first + a)
            )
            if progress:
                progress(rows.stop - rows.start)
    except FmwcError:
        raise
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        _blame(error, x, given)
        raise
    found = {name: torch.cat([p[name] for p in parts]) for name in parts[0]}
    score, rival = found[chosen.name], found.get("rival")
    confidence, withheld = _confidence(reference, chosen, score, given)
    named = [chosen.rivals[i] for i in rival.tolist()] if rival is not None and is_text(chosen.rivals) else rival
    return Check(chosen.name, score, confidence, withheld, named, found.get("margin"), spent)


def _blame(error: Exception, x: Any, cond: dict[str, Any]) -> None:
    """Raise an error of one line for what a network raised; return where the machine is to blame."""
    blame_conditions(error, cond, batch_size(x))
    if out_of_memory(error) or "CUDA" in str(error):
        return
    shapes = ", ".join(f"{name} {tuple(c.shape)}" for name, c in channels(x).items())
    names = f"conditions {', '.join(cond)}" if cond else "no conditions"
    reason = (str(error).strip().splitlines() or [""])[0]
    raise UsageError(
        f"the network, called as network(x, t, **cond), fails on samples of shape {shapes} with {names}: "
        f"{type(error).__name__}: {reason}; fmwc.adapters.adapt is for networks that are called otherwise"
    ) from error


def _confidence(reference: Any, chosen: Any, score: Tensor, cond: Mapping[str, Any]) -> tuple[Tensor | None, str]:
    """The place among the reference's scores of the same check."""
    if reference is None:
        return None, "the network has no reference; fmwc.fit_confidence(field, data) makes one"
    if reference.withheld:
        return None, reference.withheld
    for part in reference.parts:
        if part.score == chosen.name and reference.checks.get(chosen.name) == chosen:
            at = torch.searchsorted(part.quantiles.to(score).contiguous(), score.contiguous(), right=True)
            return 1 - at.to(score.dtype) / len(part.quantiles), ""
    if not reference.checks:
        return None, f"the field's reference, {reference.score}, is of trajectories; fmwc.sample gives confidence by it"
    for one in reference.checks.values():
        if getattr(one, "missing", ""):
            return None, one.missing
        if (name := getattr(one, "cond", "")) and cond.get(name) is None:
            return (
                None,
                f"the reference compares samples by '{name}', which these have not; give cond={{'{name}': ...}}",
            )
    own = " and ".join(reference.checks)
    return None, (
        f"the field's reference, {reference.score}, was not made with this check; leave out evaluations, evidence and "
        f"rivals to take its own ({own})"
    )


def suited(
    space: Space,
    cond: Mapping[str, Any],
    evaluations: int | None,
    known: Mapping[str, Any] | None = None,
    evidence: str = "",
    rivals: Mapping[str, Any] | None = None,
) -> Any:
    """The check that the conditions allow, with a budget.

    Arguments:
        space: The space of the samples.
        cond: Their conditions.
        evaluations: Evaluations per sample, at most; `None` for those of a check that is known, else 20.
        known: Checks of the field's reference: one with the same budget is taken as it is.
        evidence: `contest`, `echo` or `nearest`; chosen if empty.
        rivals: The condition to contest, with its values or their number.
    """
    known = known or {}
    if evidence not in ("", "contest", "echo", "nearest"):
        raise UsageError(nearest(str(evidence), ("contest", "echo", "nearest"), "check"))
    if evidence == "nearest":
        if "nearest" not in known:
            raise UsageError(
                "the field's reference holds no training points; give evidence=fmwc.checks.Nearest(points), or make "
                "one with fmwc.fit_confidence(field, data)"
            )
        return known["nearest"]
    for name in ("contest", "echo") if evaluations is not None else known:
        own = known.get(name)
        if own is None or rivals or evidence not in ("", name) or evaluations not in (None, own.evaluations):
            continue
        here = not getattr(own, "cond", "") or own.cond in cond
        if here and not getattr(own, "missing", ""):
            return own
    evaluations = as_whole(EVALUATIONS if evaluations is None else evaluations, "evaluations", 1, 10**6)
    if evidence == "echo":
        return Echo.planned(evaluations)
    count = next((len(v) for v in cond.values() if isinstance(v, Tensor) and v.ndim), 0)
    name, values = _rivals(space, cond, count, known, rivals or {})
    if values is not None and (rivals or len(values) > 1):
        return Contest.planned(name, values, evaluations, _listed(cond[name], values))
    if evidence == "contest":
        reason = f"'{name}' has one value" if values is not None else "there is no one discrete condition"
        raise UsageError(
            f"{reason}, so there is no contest; give rivals={{...}}, which text and continuous conditions need, or "
            "take evidence='echo'"
        )
    return Echo.planned(evaluations)


def _listed(own: Any, rivals: Any) -> bool:
    """Whether the samples' own values are among the rivals; `True` where they are not known yet."""
    if not is_text(own) and not (isinstance(own, Tensor) and own.ndim):
        return True
    value, others, _ = as_values(own, rivals)
    return bool(same(value, others).any())


def _rivals(
    space: Space, cond: Mapping[str, Any], count: int, known: Mapping[str, Any], rivals: Mapping[str, Any]
) -> tuple[str, Any]:
    if len(rivals) > 1:
        raise UsageError(f"one condition is contested, got rivals of {', '.join(rivals)}")
    for name, given in rivals.items():
        if name not in cond:
            raise UsageError(nearest(name, cond, "condition") if cond else "the samples have no conditions to contest")
        if is_text(cond[name]) or is_text(given):
            if not (is_text(cond[name]) and is_text(given)):
                raise UsageError(f"rivals of a text condition are a list of strings, {{'{name}': ['a', 'b']}}")
            return name, list(dict.fromkeys(given))
        like = torch.as_tensor(cond[name])
        if isinstance(given, (int, np.integer)):
            number = as_whole(given, f"the number of rivals of '{name}'", 2)
            return name, torch.arange(number, dtype=like.dtype, device=like.device)
        try:
            values = torch.as_tensor(given, device=like.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"rivals of '{name}' are its values or their number, got {given!r:.60}") from error
        if not values.numel():
            raise UsageError(f"a contest of '{name}' takes at least 1 rival, got none; the echo needs none")
        if values.is_floating_point():
            require_finite(values, f"rivals of '{name}'")
        if not bool((values.to(like.dtype) == values).all()):
            raise UsageError(f"rivals of '{name}' are whole numbers as its values are, got {given!r:.60}")
        values = values.to(like.dtype)
        if not values.ndim or values.shape[1:] != like.shape[1:]:
            raise ShapeError(
                f"rivals of '{name}' have shape {tuple(values.shape[1:])}, and its values {tuple(like.shape[1:])}"
            )
        earlier = same(values, values).tril(-1).any(1)  # the order is the user's: a rival may be named by its number
        return name, values[~earlier]
    names = discrete(cond, space, count)
    if "contest" in known and known["contest"].cond in names:
        return known["contest"].cond, known["contest"].rivals
    if len(names) != 1:
        return "", None
    return names[0], cond[names[0]].unique()


def run_checks(
    checks: Mapping[str, Any], network: Any, space: Space, x: Any, cond: Mapping[str, Any], seed: int, first: int
) -> dict[str, Tensor]:
    """Run checks on a batch of samples; return evidence by name, a row per sample."""
    count, found = batch_size(x), dict[str, Tensor]()
    with evaluating(network), torch.no_grad():
        for name, own in checks.items():
            several = len(own.rivals) if isinstance(own, Contest) else 1
            size = -(-TOGETHER * count // several)
            parts = []
            for a in range(0, count, size):
                rows = slice(a, min(a + size, count))
                here = taken(cond, rows, count)
                parts.append(own(network, space, each(lambda c: c[rows], x), here, seed, first + a))  # noqa: B023
            found[name] = torch.cat([part.score for part in parts])
            require_finite(found[name], f"the {name}")
            if parts[0].rival is not None:
                index = torch.cat([part.rival for part in parts])
                plain = isinstance(own.rivals, Tensor) and own.rivals.ndim == 1
                found["rival"] = own.rivals.to(index.device)[index] if plain else index
                found["margin"] = torch.cat([part.margin for part in parts])
    return found


def _space(field: Any, x: Any, space: Any) -> Space:
    if space is not None:
        return as_space(space)
    own = getattr(field, "space", None)
    if own is not None:
        return own
    if isinstance(x, dict):
        raise UsageError("samples of several channels need their space: check(..., space=...)")
    if x.ndim < 2:
        raise ShapeError(
            f"x has a row per sample, (B, *), got shape {tuple(x.shape)}; x[:, None] if each is one number"
        )
    return euclidean(x.shape[1:])


def _row(name: str, value: Any, count: int, like: Mapping[str, Tensor]) -> Any:
    """A condition as a tensor on the samples' device; text stays as it is."""
    if is_text(value):
        if len(value) != count:
            raise ShapeError(f"condition '{name}' has {len(value)} rows for {count} samples")
        return list(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = torch.full((count,), value)
    if isinstance(value, (list, tuple, np.ndarray, Tensor)):
        found = torch.as_tensor(value, device=next(iter(like.values())).device)
        if not found.ndim or len(found) != count:
            raise ShapeError(f"condition '{name}' has {len(found) if found.ndim else 1} rows for {count} samples")
        if found.is_floating_point():
            require_finite(found, f"condition '{name}'")
        return found
    return value


def _require_inside(space: Space, x: Any) -> None:
    """Raise where samples are not on their manifolds."""
    for name, channel in space.channels.items():
        value = channels(x)[name]
        off = (channel.manifold.projx(value) - value).abs()
        scale = value.abs().amax().clamp_min(1.0)
        if bool((off > 1e-3 * scale).any()):
            bad = int((off > 1e-3 * scale).flatten(1).any(1).sum())
            raise UsageError(
                f"{bad} of {len(value)} samples lie outside the space in channel '{name}'; put them on it first"
            )
