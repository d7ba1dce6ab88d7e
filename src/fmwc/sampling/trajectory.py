"""The trajectory: what one sampling run returns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmwc.errors import CheckpointError, FmwcError, UsageError, nearest, require_finite
from fmwc.estimators import Transported
from fmwc.files import read_tensors, write_tensors
from fmwc.identity import SEAL, plain
from fmwc.readers import (
    anything,
    array,
    choice,
    mapping,
    number,
    record,
    text,
    whole,
)
from fmwc.sampling.scores import (
    PER_COORDINATE,
    SCORES,
    Standard,
    names_of,
    parsed,
    require_varied,
    spread,
    standard_of,
    within_groups,
)
from fmwc.sampling.scores import score as read
from fmwc.state import SINGLE, batch_size, channels, tree_map

__all__ = ["DISPERSION", "Trajectory"]

NO_REFERENCE = "there is no reference for runs like this; fmwc.fit_confidence(field, data) makes one"
DISPERSION = "dispersion"
SPREAD = "spread"
EVIDENCE = (SPREAD, "detour", "echo", "contest", "nearest")  # scores that are read from the evidence
_ROWS_FIRST = ("x", "x0")  # the others have steps before samples


@dataclass(frozen=True)
class Trajectory:
    """What sampling gives: the samples, and the variance of the velocity along their way. R times were read.

    Attributes:
        x: Samples at t = 1, `(B, *)` or a dict of channels.
        x0: Where they started.
        times: When the variance was read, `(R, B)`.
        mean: The velocity there, `(R, B, *)`.
        var: Its variance there, `(R, B, *)`; size 1 in the last dimensions where it is one number a sample.
        grid: Every time of the run, `(steps + 1, B)`.
        transported: The endpoint's variance and its profile over steps and layers, if asked for.
        cond: What the network was given with each sample (its class), `(B, *)` each.
        reference: Sorted quantiles of the default score over reference samples, if there are any for this setting.
        standard: Makes the default score comparable between conditions, if the reference holds it.
        default_score: The score that `confidence` is made from.
        units: What a channel's variance is multiplied by before channels are added up, where that is not 1: its weight
            in the training loss, because ångström and fractions of a cell do not add up as they are.
        rows: The condition that counts a channel's rows, where samples differ in them (atoms), and how many of them are
            tied by the others: one where their mean is taken off.
        evaluations: How often the network was evaluated for the velocity, a sample.
        seed: The seed of the run.
        scores: The default score, where it was kept in place of the variance it was read from (`record="score"`).
        made: How it was made: the checkpoint, its identity and the settings, saved with the samples.
        index: The number of each sample within its run, `(B,)`, which its name is made from; 0, 1, … if `None`.
        evidence: What is known of each sample beside its variance, by name and with a row per sample: the free signals
            of its trajectory (:mod:`fmwc.sampling.sampler`), and what checks of the finished sample found.
        without: Why the run has no confidence, where it has a checkpoint's reference but cannot be compared with it.
        ranks: The sorted scores of the run that these samples were taken from, if they were.
    """

    x: Any
    x0: Any
    times: Tensor
    mean: Any
    var: Any
    grid: Tensor
    transported: Transported | None = None
    cond: dict[str, Tensor] = field(default_factory=dict)
    reference: Tensor | None = None
    standard: Standard | None = None
    default_score: str = "temporal_ratio"
    units: dict[str, float] = field(default_factory=dict)
    rows: dict[str, tuple[str, int]] = field(default_factory=dict)
    evaluations: int = 0
    seed: int = 0
    scores: Tensor | None = None
    made: dict[str, Any] = field(default_factory=dict)
    index: Tensor | None = None
    evidence: dict[str, Tensor] = field(default_factory=dict)
    without: str = ""
    ranks: Tensor | None = None
    states: list[Any] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return batch_size(self.x)

    @property
    def names(self) -> list[str]:
        """What each sample is called in tables and files, by its number within its run."""
        numbers = range(len(self)) if self.index is None else self.index.tolist()
        return [f"{i:05d}" for i in numbers]

    @property
    def std(self) -> Tensor:  # (R, B)
        """‖σ_t‖₂ over all coordinates of all channels, each in its unit."""
        totals = [self._total(name) * self.units.get(name, 1.0) for name in channels(self.var)]
        return torch.stack(totals).sum(0).sqrt()

    def _total(self, channel: str) -> Tensor:  # (R, B)
        var, mean = channels(self.var)[channel], channels(self.mean)[channel]
        return var.expand_as(mean).flatten(2).sum(2)

    @property
    def rms(self) -> Tensor:  # (R, B)
        """The geometric mean over channels of the root mean square of σ over a channel's degrees of freedom.

        A channel without any (where the only atom is, once the crystal's drift is taken off) has no say.
        """
        free = torch.stack([self._freedom(name) for name in channels(self.var)])[:, None] > 0  # (C, 1, B)
        logs = torch.stack([self._rms(name).clamp_min(1e-30).log() for name in channels(self.var)])
        mean = torch.where(free, logs, 0.0).sum(0) / free.sum(0).clamp_min(1)
        return torch.where(free.any(0), mean.exp(), 0.0)

    def _rms(self, channel: str) -> Tensor:  # (R, B)
        """Of one channel; nothing where it cannot vary, whatever an estimator that drops correlations says of it."""
        freedom = self._freedom(channel)
        return torch.where(freedom > 0, self._total(channel) / freedom.clamp_min(1), 0.0).sqrt()

    def _freedom(self, channel: str) -> Tensor:  # (B,)
        """How many numbers of a channel can vary."""
        shape = channels(self.x)[channel].shape[1:]
        if channel not in self.rows:
            return self.times.new_full((len(self),), shape.numel())
        name, tied = self.rows[channel]
        return (self.cond[name].to(self.times) - tied) * shape[1:].numel()

    @property
    def weights(self) -> Tensor:  # (R, B)
        """The time each reading stands for: until the next one, the last until t = 1."""
        return torch.cat([self.times[1:], torch.ones_like(self.times[:1])]) - self.times

    def score(
        self, name: str | None = None, *, within: str | None = None, channel: str | None = None, **options: float
    ) -> Tensor:  # (B,)
        """A score by name, high = doubtful: endpoint, integrated, temporal_ratio, peak, geometric or
        dispersion.

        `type/integrated` is the integrated score of the channel `type` alone, and `integrated@0.6-0.9` that of a window
        of time.

        Arguments:
            name: The score; the field's own choice if not given, standardised between conditions if its reference is.
            within: Standardise the score among samples with the same condition of this name (`"y"`): how doubtful a
                sample is for what was asked. Needs no label of how it turned out.
            channel: Read the variance of one channel only.
            options: `early` and `late`, the window of the temporal ratio, of integrated and of geometric.
        """
        if within is not None:
            groups = self._groups(within)
            return within_groups(within, self._raw(name or self.default_score, channel, options), groups)
        raw = self._raw(name or self.default_score, channel, options)
        if name is None and self.standard is not None:
            return self.standard(raw, self.cond[self.standard.cond])
        return raw

    def _raw(self, asked: str, channel: str | None, options: dict[str, float]) -> Tensor:
        if self.scores is not None and (asked, channel, options) == (self.default_score, None, {}):
            return self.scores
        of, name, window = parsed(asked)
        channel, options = channel or of, {**window, **options}
        if name == DISPERSION:
            if channel is not None or options:
                raise UsageError("dispersion is of the whole state at its end; leave out channel and window")
            if self.transported is None:
                raise UsageError("dispersion is read from transported variance: sample(..., transport=True)")
            # The mean over probes times the dimension: with one probe a coordinate that is the sum itself, with random
            # projections an unbiased estimate of it.
            dim = sum(c[0].numel() for c in channels(self.x).values())
            return (self.transported.var.mean(1) * dim).sqrt()
        if name in (SPREAD, *self.evidence):
            return self._evident(name, channel, options)
        if name in EVIDENCE:
            raise UsageError(f"this run did not read {name}; sample with the check that reads it (check=...)")
        if name not in SCORES:
            raise UsageError(nearest(name, [*SCORES, DISPERSION, *EVIDENCE], "score"))
        if not len(self.times):
            kept = f", but its score {self.default_score}" if self.scores is not None else ""
            why = f"confidence is withheld: {self.without}; " if self.without and asked == self.default_score else ""
            how = "sample with confidence=Linearised() and the default record"
            raise UsageError(f"{why}this run kept no variance{kept}; {how}")
        if channel is not None and channel not in channels(self.var):
            raise UsageError(nearest(channel, channels(self.var), "channel"))
        if name in PER_COORDINATE:
            std = self.rms if channel is None else self._rms(channel)
        else:
            std = self.std if channel is None else self._total(channel).sqrt()
        return read(name, std, self.times, self.weights, **options)

    def _evident(self, name: str, channel: str | None, options: dict[str, float]) -> Tensor:
        """A score that is read from the evidence."""
        if channel is not None or (options and name != SPREAD):
            raise UsageError(f"{name} is of the whole sample; leave out channel and window")
        if name == SPREAD:
            if "guess" not in self.evidence:
                raise UsageError("this run did not keep what it predicted of its end, so there is no spread")
            return spread(self.evidence["guess"], self.evidence["guess_t"], **options)
        if self.evidence[name].ndim != 1:
            raise UsageError(f"'{name}' is not one number per sample; choose another score")
        return self.evidence[name]

    def ranked_by(self, score: str, *, within: str | None = None) -> Trajectory:
        """The same run with its confidence made from another score, among its own samples (of the same condition).

        By name a score is as it was read: also the run's own, where its checkpoint made that comparable between
        conditions. Where it did not, there is nothing to change.
        """
        if within is None and score == self.default_score and self.standard is None:
            return self
        self._raw(score, None, {})  # what cannot be read is said here
        standard = None if within is None else standard_of(within, self.score(score), self._groups(within))
        found = replace(self, default_score=score, reference=None, standard=standard, ranks=None, scores=None)
        return replace(found, without=f"the run is ranked by {score}, which has no reference")

    def _groups(self, within: str) -> Tensor:
        if within not in self.cond:
            raise UsageError(nearest(within, self.cond, "condition") if self.cond else "this run had no conditions")
        return self.cond[within]

    @property
    def confidence(self) -> Tensor:  # (B,)
        """In [0, 1], high = trust it: the share of reference samples with a higher score.

        The reference is that of the checkpoint, for runs that were made as it was. For others confidence is withheld:
        this raises an error that says why, as :attr:`withheld` does. :attr:`rank` orders the samples of any run
        that has a score.
        """
        if self.withheld:
            raise UsageError(self.withheld)
        assert self.reference is not None
        return _place(self.score(), self.reference)

    @property
    def withheld(self) -> str:
        """Why this run has no confidence; empty if it has one."""
        if self.reference is not None and not self.without:
            return ""
        ranked = ""
        with suppress(UsageError):
            self.rank  # noqa: B018
            ranked = "; rank orders the samples of this run"
        return f"confidence is withheld: {self.without or NO_REFERENCE}{ranked}"

    @property
    def rank(self) -> Tensor:  # (B,)
        """In [0, 1], high = surer: the share of the samples of this run with a higher score."""
        own = self.score()
        among = own.sort().values if self.ranks is None else self.ranks
        return _place(own, require_varied(among, self.default_score))

    def compact(self) -> Trajectory:
        """The run with one variance a sample and channel in place of a velocity a coordinate: the same scores."""
        totals = {name: self._total(name)[..., None] for name in channels(self.var)}
        var = totals if isinstance(self.var, dict) else totals[SINGLE]
        return replace(self, mean=tree_map(torch.zeros_like, var), var=var, states=None)

    def scored(self, score: str = "") -> Trajectory:
        """The run with a score in place of what it was read from: its memory does not depend on the steps.

        Arguments:
            score: The name of the score; the run's own if empty.
        """
        nothing: dict[str, Any] = {n: tree_map(lambda c: c[:0], getattr(self, n)) for n in ("times", "mean", "var")}
        name = score or self.default_score
        scores = None
        with suppress(UsageError):
            scores = self._raw(name, None, {})
        few = {n: value for n, value in self.evidence.items() if n not in ("guess", "guess_t")}
        return replace(
            self, **nothing, grid=self.grid[-1:], states=None, default_score=name, scores=scores, evidence=few
        )

    def read_at(self, steps: Sequence[int]) -> Trajectory:
        """The run as it would be, had the variance been read at some of its times only."""
        index = torch.as_tensor(steps, device=self.times.device)
        fewer = {name: tree_map(lambda c: c[index], getattr(self, name)) for name in ("times", "mean", "var")}
        return replace(self, **fewer, scores=None)  # which were read at all of them

    def take(self, index: Tensor) -> Trajectory:
        """The trajectory of some of the samples."""
        changes: dict[str, Any] = {n: tree_map(lambda c: c[index], getattr(self, n)) for n in _ROWS_FIRST}
        for name in ("times", "mean", "var", "grid"):
            changes[name] = tree_map(lambda c: c[:, index], getattr(self, name))
        changes["cond"] = {name: value[index] for name, value in self.cond.items()}
        changes["evidence"] = {name: value[index] for name, value in self.evidence.items()}
        own = torch.arange(len(self)) if self.index is None else self.index
        changes["index"] = own[index.to(own.device)]
        if self.scores is not None:
            changes["scores"] = self.scores[index]
        if self.transported is not None:
            t = self.transported
            changes["transported"] = Transported(t.var[index], t.profile[:, :, index], t.layers)
        if self.states is not None:
            changes["states"] = [tree_map(lambda c: c[index], s) for s in self.states]
        if self.ranks is None:
            # Samples keep the rank they had: their place among all of this run, not among those taken.
            with suppress(UsageError):
                changes["ranks"] = self.score().sort().values
        return replace(self, **changes)

    def to(self, device: torch.device | str) -> Trajectory:
        """The trajectory with its tensors on a device."""

        def moved(value: Any) -> Any:
            return tree_map(lambda c: c.to(device), value)

        changes: dict[str, Any] = {n: moved(getattr(self, n)) for n in (*_ROWS_FIRST, "times", "mean", "var", "grid")}
        changes["cond"] = {name: value.to(device) for name, value in self.cond.items()}
        changes["evidence"] = {name: value.to(device) for name, value in self.evidence.items()}
        if self.transported is not None:
            t = self.transported
            changes["transported"] = Transported(t.var.to(device), t.profile.to(device), t.layers)
        if self.states is not None:
            changes["states"] = [moved(state) for state in self.states]
        for name in ("reference", "scores", "ranks"):
            if (value := getattr(self, name)) is not None:
                changes[name] = value.to(device)
        if self.standard is not None:
            s = self.standard
            changes["standard"] = s._replace(centre=s.centre.to(device), spread=s.spread.to(device))
        return replace(self, **changes)

    def surest(self, fraction: float, score: str | None = None, *, within: str | None = None) -> Trajectory:
        """The surest share of the samples, in their order; by the run's own score, or another (of a condition)."""
        if not 0 < fraction <= 1:
            raise UsageError(f"the fraction to keep lies in (0, 1], got {fraction}")
        keep = max(1, round(fraction * len(self)))
        own = self.score(score, within=within)
        if keep < len(self):
            require_varied(own, score or self.default_score)
        return self.take(own.argsort(stable=True)[:keep].sort().values)

    def save(self, path: str | Path) -> Path:
        """Write `samples.safetensors` (or the file named): all of it or nothing."""
        path = Path(path)
        path = path / "samples.safetensors" if path.is_dir() else path
        return write_tensors(path, self.tensors(), self.about())

    def tensors(self) -> dict[str, Tensor]:
        """What `save` writes."""
        tensors: dict[str, Tensor] = {}
        for name in ("x", "x0", "mean", "var", "times", "grid"):
            for channel, value in channels(getattr(self, name)).items():
                key = f"{name}.{channel}" if isinstance(getattr(self, name), dict) else name
                tensors[key] = value.contiguous().cpu()
        tensors |= {f"cond.{name}": value.cpu().clone().contiguous() for name, value in self.cond.items()}
        tensors |= {f"evidence.{name}": value.cpu().clone().contiguous() for name, value in self.evidence.items()}
        if self.standard is not None:
            tensors |= {f"standard.{n}": v.cpu() for n, v in self.standard._asdict().items() if isinstance(v, Tensor)}
        with suppress(UsageError):  # a run too short for its score is still worth keeping
            tensors["score"] = self.score().contiguous().cpu()
            tensors["rank"] = self.rank.contiguous().cpu()
            tensors["confidence"] = self.confidence.contiguous().cpu()
        if self.transported is not None:
            tensors["transported.var"] = self.transported.var.contiguous().cpu()
            tensors["transported.profile"] = self.transported.profile.contiguous().cpu()
        for name in ("reference", "scores", "ranks", "index"):
            if (value := getattr(self, name)) is not None:
                tensors[name] = value.cpu().clone()  # what it was ranked by may be the same numbers
        return tensors

    def about(self) -> dict[str, Any]:
        """What `save` writes beside the tensors, and their hash."""
        return {
            "seed": self.seed,
            "default_score": self.default_score,
            "evaluations": self.evaluations,
            "units": self.units,
            "rows": self.rows,
            "layers": list(self.transported.layers) if self.transported else [],
            "within": self.standard.cond if self.standard else None,
            "standardised_by": self.standard.source if self.standard else None,
            "without": self.without,
            "made": plain(self.made),
        }

    @classmethod
    def load(cls, path: str | Path) -> Trajectory:
        """Read what `save` wrote; content that was changed since, or that is not a run, is refused."""
        path = Path(path)
        path = path / "samples.safetensors" if path.is_dir() else path
        flat, about = read_tensors(path, _described, "a samples file of fmwc")
        try:
            return cls._loaded(flat, about)
        except FmwcError as error:
            raise CheckpointError(f"{path} is not a samples file of fmwc, or was changed ({error})") from error

    @classmethod
    def _loaded(cls, flat: dict[str, Tensor], about: dict[str, Any]) -> Trajectory:
        found: dict[str, Any] = {}
        for key, value in flat.items():
            name, _, channel = key.partition(".")
            if name in found and isinstance(found[name], dict) != bool(channel):
                raise CheckpointError(f"it holds both '{name}' and channels of that name")
            if channel:
                found.setdefault(name, {})[channel] = value
            else:
                found[key] = value
        _require_run(found)
        if (ends := found.pop("transported", None)) is not None:
            found["transported"] = Transported(ends["var"], ends["profile"], tuple(about["layers"]))
        if (own := found.pop("standard", None)) is not None:
            source = about.get("standardised_by") or "checkpoint"
            found["standard"] = Standard(about["within"] or "", own["centre"], own["spread"], source)
        rows = {name: (cond, tied) for name, (cond, tied) in about["rows"].items()}
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in (found | about | {"rows": rows}).items() if k in known})


def _place(score: Tensor, reference: Tensor) -> Tensor:  # (B,), (N,) -> (B,)
    """The share of a sorted reference that is higher."""
    at = torch.searchsorted(reference.to(score), score.contiguous(), right=True)
    return 1 - at.to(score.dtype) / len(reference)


# ---- what a file of samples holds --------------------------------------------------------------------------------


def _row_of(value: Any, where: str) -> Any:
    pair = array(anything, 2, 2)(value, where)
    return text(1000)(pair[0], where), whole(0, 1)(pair[1], where)


def _known_score(value: Any, where: str) -> Any:
    text(1000)(value, where)
    for name in names_of(value):
        choice(*SCORES, DISPERSION, *EVIDENCE)(parsed(name)[1], where)
    return value


_ABOUT = record(
    {
        "seed": whole(-(1 << 63), 1 << 64),
        "default_score": _known_score,
        "evaluations": whole(),
        "units": mapping(number(0, open_low=True), 100),
        "rows": mapping(_row_of, 100),
        "layers": array(text(1000), most=100_000),
    },
    {
        "within": text(1000),
        "standardised_by": choice("checkpoint", "run"),
        "without": text(10_000),
        "made": mapping(anything, 100),
        SEAL: text(64),
    },
    more=True,
)


def _described(value: Any, where: str) -> Any:
    """The description of a run. Files of older versions have no hash; those that name their checkpoint's have one."""
    found = _ABOUT(value, where)
    if (found.get("made") or {}).get("identity") and SEAL not in found:
        raise CheckpointError("its hash is missing")
    return found


def _require_run(found: dict[str, Any]) -> None:
    """Raise where tensors do not fit together, or hold NaN."""

    def need(good: bool, what: str) -> None:
        if not good:
            raise CheckpointError(what)

    for name in ("x", "x0", "mean", "var", "times", "grid"):
        need(name in found, f"it lacks '{name}'")
        need(
            isinstance(found[name], dict) == isinstance(found["x"], dict) or name in ("times", "grid"),
            f"'{name}' is odd",
        )
        for part in channels(found[name]).values():
            need(
                isinstance(part, Tensor) and part.dtype in (torch.float32, torch.float64), f"'{name}' is not of numbers"
            )
            require_finite(part, f"'{name}'")
    x, times, grid = channels(found["x"]), found["times"], found["grid"]
    sizes = {len(part) if part.ndim else 0 for part in x.values()}
    need(len(sizes) == 1 and sizes != {0}, "its channels do not have one row per sample")
    count = sizes.pop()
    need(times.ndim == 2 and times.shape[1] == count, "'times' is not one column per sample")
    need(grid.ndim == 2 and grid.shape[1] == count and len(grid) > 0, "'grid' is not one column per sample")
    need(
        bool(((times >= 0) & (times <= 1)).all()) and bool(((grid >= 0) & (grid <= 1)).all()), "a time is not in [0, 1]"
    )
    for name, part in x.items():
        need(all(name in channels(found[n]) for n in ("x0", "mean", "var")), f"channel '{name}' is not in every part")
        x0, mean, var = (channels(found[n])[name] for n in ("x0", "mean", "var"))
        need(x0.shape == part.shape, f"'x0' has another shape than 'x' in channel '{name}'")
        for other in (mean, var):
            need(
                other.ndim >= 2 and tuple(other.shape[:2]) == (len(times), count), f"channel '{name}' has odd readings"
            )
        need(
            var.ndim == mean.ndim and all(a in (1, b) for a, b in zip(var.shape, mean.shape, strict=True)), "odd 'var'"
        )
        need(not bool((var < 0).any()), "a variance is negative")
    for name in ("scores", "score", "confidence", "rank", "index"):
        value = found.get(name)
        need(
            value is None or (isinstance(value, Tensor) and value.shape == (count,)), f"'{name}' is not one per sample"
        )
        if value is not None and name != "index":
            require_finite(value, f"'{name}'")
    index = found.get("index")
    need(index is None or (index.dtype == torch.int64 and bool((index >= 0).all())), "'index' is not of whole numbers")
    for name, value in (found.get("cond") or {}).items():
        need(value.ndim > 0 and len(value) == count, f"the condition '{name}' is not one row per sample")
        require_finite(value, f"the condition '{name}'")
    for name, value in (found.get("evidence") or {}).items():
        need(value.ndim > 0 and len(value) == count, f"the evidence '{name}' is not one row per sample")
        require_finite(value, f"the evidence '{name}'")
    reference, standard, ends = (found.get(n) for n in ("reference", "standard", "transported"))
    for name, levels in (("reference", reference), ("ranks", found.get("ranks"))):
        if levels is not None:
            real = isinstance(levels, Tensor) and levels.dtype in (torch.float32, torch.float64)
            need(real and levels.ndim == 1 and len(levels) > 0, f"'{name}' is not a list of numbers")
            require_finite(levels, f"'{name}'")
            need(not bool((levels[1:] < levels[:-1]).any()), f"'{name}' is not sorted")
    if standard is not None:
        need(standard.keys() == {"centre", "spread"}, "'standard' is odd")
        need(standard["centre"].ndim == 1 and standard["centre"].shape == standard["spread"].shape, "'standard' is odd")
    if ends is not None:
        need(
            ends.keys() == {"var", "profile"} and ends["var"].ndim == 2 and len(ends["var"]) == count,
            "odd 'transported'",
        )
        need(ends["profile"].ndim == 3 and ends["profile"].shape[2] == count, "odd 'transported'")
        for value in ends.values():
            require_finite(value, "'transported'")
