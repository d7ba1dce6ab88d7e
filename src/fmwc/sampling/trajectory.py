"""The trajectory: what one sampling run returns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from fmwc.errors import CheckpointError, UsageError, nearest
from fmwc.files import write_bytes
from fmwc.propagate import Transported
from fmwc.sampling.scores import PER_COORDINATE, SCORES, Standard, parsed, standard_of, within_groups
from fmwc.sampling.scores import score as read
from fmwc.state import SINGLE, batch_size, channels, each

__all__ = ["DISPERSION", "Trajectory"]

DISPERSION = "dispersion"
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
        made: How it was made, where somebody wrote that down to go on from it later: words and numbers, saved with it.
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
    states: list[Any] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return batch_size(self.x)

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
        of, name, window = parsed(asked)
        if self.scores is not None:
            if (asked, channel, options) != (self.default_score, None, {}):
                raise UsageError(f"this run kept its score {self.default_score} alone; sample with record='full'")
            return self.scores
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
        if name not in SCORES:
            raise UsageError(nearest(name, [*SCORES, DISPERSION], "score"))
        if not len(self.times):
            raise UsageError("this run kept no variance; sample with confidence=True")
        if channel is not None and channel not in channels(self.var):
            raise UsageError(nearest(channel, channels(self.var), "channel"))
        if name in PER_COORDINATE:
            std = self.rms if channel is None else self._rms(channel)
        else:
            std = self.std if channel is None else self._total(channel).sqrt()
        return read(name, std, self.times, self.weights, **options)

    def ranked_by(self, score: str, *, within: str | None = None) -> Trajectory:
        """The same run with its confidence made from another score, among its own samples (of the same condition).

        By name a score is as it was read: also the run's own, where its checkpoint made that comparable between
        conditions. Where it did not, there is nothing to change.
        """
        if within is None and score == self.default_score and self.standard is None:
            return self
        self._raw(score, None, {})  # what cannot be read is said here
        standard = None if within is None else standard_of(within, self.score(score), self._groups(within))
        return replace(self, default_score=score, reference=None, standard=standard)

    def _groups(self, within: str) -> Tensor:
        if within not in self.cond:
            raise UsageError(nearest(within, self.cond, "condition") if self.cond else "this run had no conditions")
        return self.cond[within]

    @property
    def confidence(self) -> Tensor:  # (B,)
        """In [0, 1], high = trust it: the share of reference samples with a higher score.

        The reference is the checkpoint's where it was read in the same setting, else this run itself.
        """
        own = self.score()
        reference = own.sort().values if self.reference is None else self.reference.to(own)
        rank = torch.searchsorted(reference, own.contiguous(), right=True)
        return 1 - rank.to(own.dtype) / len(reference)

    def compact(self) -> Trajectory:
        """The run with one variance a sample and channel in place of a velocity a coordinate: the same scores."""
        totals = {name: self._total(name)[..., None] for name in channels(self.var)}
        var = totals if isinstance(self.var, dict) else totals[SINGLE]
        return replace(self, mean=each(torch.zeros_like, var), var=var, states=None)

    def scored(self, score: str) -> Trajectory:
        """The run with a score in place of what it was read from: its memory does not depend on the steps."""
        nothing: dict[str, Any] = {n: each(lambda c: c[:0], getattr(self, n)) for n in ("times", "mean", "var")}
        scores = self._raw(score, None, {}) if len(self.times) else None
        return replace(self, **nothing, grid=self.grid[-1:], states=None, default_score=score, scores=scores)

    def read_at(self, steps: Sequence[int]) -> Trajectory:
        """The run as it would be, had the variance been read at some of its times only."""
        index = torch.as_tensor(steps, device=self.times.device)
        fewer = {name: each(lambda c: c[index], getattr(self, name)) for name in ("times", "mean", "var")}
        return replace(self, **fewer)

    def take(self, index: Tensor) -> Trajectory:
        """The trajectory of some of the samples."""
        changes: dict[str, Any] = {n: each(lambda c: c[index], getattr(self, n)) for n in _ROWS_FIRST}
        for name in ("times", "mean", "var", "grid"):
            changes[name] = each(lambda c: c[:, index], getattr(self, name))
        changes["cond"] = {name: value[index] for name, value in self.cond.items()}
        if self.scores is not None:
            changes["scores"] = self.scores[index]
        if self.transported is not None:
            t = self.transported
            changes["transported"] = Transported(t.var[index], t.profile[:, :, index], t.layers)
        if self.states is not None:
            changes["states"] = [each(lambda c: c[index], s) for s in self.states]
        if self.reference is None:
            # Samples keep the confidence they had: their place among all of this run, not among those taken.
            with suppress(UsageError):
                changes["reference"] = self.score().sort().values
        return replace(self, **changes)

    def to(self, device: torch.device | str) -> Trajectory:
        """The trajectory with its tensors on a device."""

        def moved(value: Any) -> Any:
            return each(lambda c: c.to(device), value)

        changes: dict[str, Any] = {n: moved(getattr(self, n)) for n in (*_ROWS_FIRST, "times", "mean", "var", "grid")}
        changes["cond"] = {name: value.to(device) for name, value in self.cond.items()}
        if self.transported is not None:
            t = self.transported
            changes["transported"] = Transported(t.var.to(device), t.profile.to(device), t.layers)
        if self.states is not None:
            changes["states"] = [moved(state) for state in self.states]
        for name in ("reference", "scores"):
            if (value := getattr(self, name)) is not None:
                changes[name] = value.to(device)
        if self.standard is not None:
            s = self.standard
            changes["standard"] = Standard(s.cond, s.centre.to(device), s.spread.to(device))
        return replace(self, **changes)

    def surest(self, fraction: float, score: str | None = None, *, within: str | None = None) -> Trajectory:
        """The surest share of the samples, in their order; by the run's own score, or another (of a condition)."""
        if not 0 < fraction <= 1:
            raise UsageError(f"the fraction to keep lies in (0, 1], got {fraction}")
        keep = max(1, round(fraction * len(self)))
        return self.take(self.score(score, within=within).argsort(stable=True)[:keep].sort().values)

    def save(self, path: str | Path) -> Path:
        """Writes `samples.safetensors` (or the file named): whole or not at all."""
        path = Path(path)
        path = path / "samples.safetensors" if path.is_dir() else path
        return write_bytes(path, save(self.tensors(), self.about()))

    def tensors(self) -> dict[str, Tensor]:
        """What `save` writes."""
        tensors: dict[str, Tensor] = {}
        for name in ("x", "x0", "mean", "var", "times", "grid"):
            for channel, value in channels(getattr(self, name)).items():
                key = f"{name}.{channel}" if isinstance(getattr(self, name), dict) else name
                tensors[key] = value.contiguous().cpu()
        tensors |= {f"cond.{name}": value.cpu().clone().contiguous() for name, value in self.cond.items()}
        if self.standard is not None:
            tensors |= {f"standard.{n}": v.cpu() for n, v in self.standard._asdict().items() if isinstance(v, Tensor)}
        with suppress(UsageError):  # a run too short for its score is still worth keeping
            tensors["score"] = self.score().contiguous().cpu()
            tensors["confidence"] = self.confidence.contiguous().cpu()
        if self.transported is not None:
            tensors["transported.var"] = self.transported.var.contiguous().cpu()
            tensors["transported.profile"] = self.transported.profile.contiguous().cpu()
        for name in ("reference", "scores"):
            if (value := getattr(self, name)) is not None:
                tensors[name] = value.cpu().clone()  # what it was ranked by may be the same numbers
        return tensors

    def about(self) -> dict[str, str]:
        """What `save` writes beside the tensors."""
        about = {
            "seed": self.seed,
            "default_score": self.default_score,
            "evaluations": self.evaluations,
            "units": self.units,
            "rows": self.rows,
            "layers": list(self.transported.layers) if self.transported else [],
            "within": self.standard.cond if self.standard else None,
            "made": self.made,
        }
        return {"fmwc": json.dumps(about)}

    @classmethod
    def load(cls, path: str | Path) -> Trajectory:
        """Reads what `save` wrote."""
        path = Path(path)
        path = path / "samples.safetensors" if path.is_dir() else path
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["fmwc"])
                flat = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except Exception as error:
            raise CheckpointError(f"{path} is not a samples file of fmwc, or is cut off ({error})") from error
        found: dict[str, Any] = {}
        for key, value in flat.items():
            name, _, channel = key.partition(".")
            if channel and name != "transported":
                found.setdefault(name, {})[channel] = value
            else:
                found[key] = value
        if "transported.var" in found:
            layers = tuple(about["layers"])
            found["transported"] = Transported(found["transported.var"], found["transported.profile"], layers)
        if "standard" in found:
            found["standard"] = Standard(about["within"], found["standard"]["centre"], found["standard"]["spread"])
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in (found | about).items() if k in known})
