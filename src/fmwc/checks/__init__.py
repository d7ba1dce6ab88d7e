"""Checks: evidence from a finished sample, wherever it comes from. They need no noise model and no training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fmwc.checks.nearest import Nearest, embedded
from fmwc.checks.residuals import Contest, Echo, Found, discrete, residuals
from fmwc.conventions import check_conventions
from fmwc.errors import ShapeError, UsageError, nearest, require_finite
from fmwc.flow import Space, as_space, euclidean
from fmwc.modes import evaluating
from fmwc.state import as_state, as_whole, batch_size, blame_conditions, channels, each

__all__ = ["Check", "Contest", "Echo", "Found", "Nearest", "check", "embedded", "residuals", "run_checks", "suited"]


TOGETHER = 3  # a call of all rivals has so many times the rows of a step: the calls of the best two are smaller


@dataclass(frozen=True)
class Check:
    """What a check says of samples.

    Attributes:
        evidence: The name of the check: `contest` or `echo`.
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
    rival: Tensor | None
    margin: Tensor | None
    evaluations: int

    def __len__(self) -> int:
        return len(self.score)


def check(
    field: Any,
    x: Any,
    cond: Mapping[str, Any] | None = None,
    *,
    evaluations: int = 20,
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
        cond: The conditions of the samples, by name, one row per sample.
        evaluations: Evaluations of the network to spend per sample, at most.
        seed: Seeds the noise that samples are mixed with. A sample's noise does not depend on the batch.
        evidence: `contest`, `echo`, or a check with its options; chosen by the conditions if empty.
        rivals: The condition to contest and its values, `{"y": torch.arange(10)}`, or their number, `{"y": 10}`; by
            default the values that the field's reference or the samples themselves have. Continuous and text
            conditions need it.
        space: The space of the samples, or the shape of one; the field's, or flat space, if not given.
        batch: Samples checked together.
        first: The number of the first sample, which its noise depends on.
        progress: Called with the number of samples done since the last call.
        conventions: Whether to make sure first that the network explains the samples better than a zero velocity does.
    """
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
    evaluations, seed = as_whole(evaluations, "evaluations", 1, 10**6), as_whole(seed, "seed")
    batch, first = as_whole(batch, "batch", 1), as_whole(first, "first", 0)
    reference = getattr(field, "reference", None)
    known = getattr(reference, "checks", {})
    chosen = evidence if callable(evidence) else suited(where, given, evaluations, known, evidence, rivals or {})
    if conventions and reference is None and isinstance(network, nn.Module) and count > 1:
        check_conventions(field, where, x, given, seed=seed, refuse=False)
    parts: list[dict[str, Tensor]] = []
    for a in range(0, count, batch):
        rows = slice(a, min(a + batch, count))
        here = _taken(given, rows, count)
        part = each(lambda c: c[rows], x)  # noqa: B023
        try:
            parts.append(run_checks({chosen.name: chosen}, field, where, part, here, seed, first + a))
        except (AttributeError, IndexError, RuntimeError, TypeError) as error:
            blame_conditions(error, here, batch_size(part))
            raise
        if progress:
            progress(rows.stop - rows.start)
    found = {name: torch.cat([p[name] for p in parts]) for name in parts[0]}
    score = found[chosen.name]
    confidence, withheld = _confidence(reference, chosen, score)
    return Check(chosen.name, score, confidence, withheld, found.get("rival"), found.get("margin"), chosen.evaluations)


def _confidence(reference: Any, chosen: Any, score: Tensor) -> tuple[Tensor | None, str]:
    """The place among the reference's scores of the same check."""
    if reference is None:
        return None, "the network has no reference; fmwc.fit_confidence(field, data) makes one"
    if reference.withheld:
        return None, reference.withheld
    for part in reference.parts:
        if part.score == chosen.name and reference.checks.get(chosen.name) == chosen:
            at = torch.searchsorted(part.quantiles.to(score).contiguous(), score.contiguous(), right=True)
            return 1 - at.to(score.dtype) / len(part.quantiles), ""
    return None, f"the field's reference, {reference.score}, was not made with this check"


def suited(
    space: Space,
    cond: Mapping[str, Any],
    evaluations: int,
    known: Mapping[str, Any] | None = None,
    evidence: str = "",
    rivals: Mapping[str, Any] | None = None,
) -> Any:
    """The check that the conditions allow, with a budget.

    Arguments:
        space: The space of the samples.
        cond: Their conditions.
        evaluations: Evaluations per sample, at most.
        known: Checks of the field's reference: one with the same budget is taken as it is.
        evidence: `contest` or `echo`; chosen if empty.
        rivals: The condition to contest, with its values or their number.
    """
    if evidence not in ("", "contest", "echo"):
        raise UsageError(nearest(evidence, ("contest", "echo"), "check"))
    for name in ("contest", "echo"):
        own = (known or {}).get(name)
        if own is None or rivals or evidence not in ("", name) or own.evaluations != evaluations:
            continue
        if name == "echo" or own.cond in cond:
            return own
    if evidence == "echo":
        return Echo.planned(evaluations)
    count = next((len(v) for v in cond.values() if isinstance(v, Tensor) and v.ndim), 0)
    name, values = _rivals(space, cond, count, known or {}, rivals or {})
    if values is not None and len(values) > 1:
        return Contest.planned(name, values, evaluations)
    if evidence == "contest":
        reason = f"'{name}' has one value" if values is not None else "there is no discrete condition"
        raise UsageError(f"{reason}, so there is no contest; give rivals={{...}}, or take evidence='echo'")
    return Echo.planned(evaluations)


def _rivals(
    space: Space, cond: Mapping[str, Any], count: int, known: Mapping[str, Any], rivals: Mapping[str, Any]
) -> tuple[str, Tensor | None]:
    if len(rivals) > 1:
        raise UsageError(f"one condition is contested, got rivals of {', '.join(rivals)}")
    for name, given in rivals.items():
        if name not in cond:
            raise UsageError(nearest(name, cond, "condition") if cond else "the samples have no conditions to contest")
        like = torch.as_tensor(cond[name])
        if isinstance(given, int):
            return name, torch.arange(given, dtype=like.dtype, device=like.device)
        values = torch.as_tensor(given, device=like.device).to(like.dtype)
        if values.shape[1:] != like.shape[1:]:
            raise ShapeError(
                f"rivals of '{name}' have shape {tuple(values.shape[1:])}, and its values {like.shape[1:]}"
            )
        return name, values
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
                here = {
                    k: v[rows] if isinstance(v, Tensor) and v.ndim and len(v) == count else v for k, v in cond.items()
                }
                parts.append(own(network, space, each(lambda c: c[rows], x), here, seed, first + a))  # noqa: B023
            found[name] = torch.cat([part.score for part in parts])
            require_finite(found[name], f"the {name}")
            if parts[0].rival is not None:
                values = own.rivals.to(found[name].device)
                index = torch.cat([part.rival for part in parts])
                found["rival"] = values[index] if values.ndim == 1 else index
                found["margin"] = torch.cat([part.margin for part in parts])
    return found


def _taken(cond: Mapping[str, Any], rows: slice, count: int) -> dict[str, Any]:
    """The conditions of some of the samples."""
    return {k: v[rows] if isinstance(v, (Tensor, list, tuple)) and len(v) == count else v for k, v in cond.items()}


def _space(field: Any, x: Any, space: Any) -> Space:
    if space is not None:
        return as_space(space)
    own = getattr(field, "space", None)
    if own is not None:
        return own
    if isinstance(x, dict):
        raise UsageError("samples of several channels need their space: check(..., space=...)")
    return euclidean(x.shape[1:])


def _row(name: str, value: Any, count: int, like: Mapping[str, Tensor]) -> Any:
    """A condition as a tensor on the samples' device; text stays as it is."""
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], str):
        return value
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
