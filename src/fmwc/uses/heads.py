"""Learned heads: classifiers fitted to a few labelled samples (sec:method-readouts).

:func:`fit_head` fits a classifier of the variance trajectory, as in the paper. :func:`fit_evidence_head` fits a
logistic regression of all evidence of a run, which can be saved and then ranks the samples of other runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegressionCV
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fmwc.errors import DataError, MismatchError, ShapeError, UsageError, pick
from fmwc.files import write_json
from fmwc.identity import SEAL, seal, sealed
from fmwc.readers import anything, array, mapping, number, read_json, record, text, whole
from fmwc.sampling import Trajectory
from fmwc.sampling.trajectory import HEAD, within_groups
from fmwc.state import channels, require_labels

__all__ = [
    "FEWEST",
    "HEADS",
    "EvidenceHead",
    "Head",
    "checked_labels",
    "cross_validated",
    "evidence_of",
    "features",
    "fit_evidence_head",
    "fit_head",
]

COORDINATES = 16  # maximum number of features per channel and time; larger channels are averaged


def features(trajectory: Trajectory, within: str | None = None) -> np.ndarray:  # -> (B, R·C)
    """Return log σ² at every reading: per coordinate for small channels, or else averaged over the channel.

    With `within`, each feature is standardised among the samples with the same value of this condition.
    """
    if within is not None and within not in trajectory.cond:
        raise UsageError(f"the run has no condition '{within}' for within; give one of its conditions")
    columns = []
    for var in channels(trajectory.var).values():
        rows = var.movedim(0, 1).flatten(2)
        rows = rows if rows.shape[2] <= COORDINATES else rows.mean(2, keepdim=True)
        columns.append(rows.flatten(1))
    x = torch.cat(columns, 1)
    if within is None:
        return np.log(np.maximum(x.cpu().numpy(), 1e-30))
    groups = trajectory.cond[within]
    return torch.stack([within_groups(within, column, groups) for column in x.T], 1).cpu().numpy()


def _logistic(scoring: str = "average_precision", strengths: tuple[float, ...] = (0.01, 0.1, 1.0)) -> Any:
    # The strength of the penalty is chosen by cross-validation on the labelled samples.
    return LogisticRegressionCV(Cs=strengths, cv=3, penalty="l1", solver="liblinear", scoring=scoring, random_state=0)


def _l1() -> Any:
    return make_pipeline(StandardScaler(), _logistic())


def _boosting() -> Any:
    return HistGradientBoostingClassifier(learning_rate=0.05, max_iter=300, random_state=0)


HEADS: dict[str, Callable[[], Any]] = {"l1": _l1, "boosting": _boosting}


class Head:
    """A fitted head. `score(trajectory)` is the probability of the positive class, high = doubtful.

    Arguments:
        model: A fitted classifier with `predict_proba`.
        columns: The number of features of the classifier.
        within: The condition within which features are standardised.
    """

    def __init__(self, model: Any, columns: int, within: str | None = None) -> None:
        self.model, self.columns, self.within = model, columns, within

    def score(self, trajectory: Trajectory) -> np.ndarray:  # (B,)
        """Return the probability that each sample is positive."""
        x = features(trajectory, self.within)
        if x.shape[1] != self.columns:
            raise ShapeError(
                f"the head was fitted to {self.columns} features, but the run has {x.shape[1]}; "
                "sample with the same schedule"
            )
        return self.model.predict_proba(x)[:, 1]


def fit_head(trajectory: Trajectory, positive: ArrayLike, kind: str = "boosting", *, within: str | None = None) -> Head:
    """Fit a head to labelled samples.

    Arguments:
        trajectory: The run of the labelled samples.
        positive: Whether each sample should be discarded, `(B,)`.
        kind: `l1` (logistic regression) or `boosting`.
        within: The condition within which features are standardised; `None` for all samples together.
    """
    build = pick(HEADS, kind, "head")
    labels = require_labels(positive, "positive").ravel()
    if len(labels) != len(trajectory):
        raise ShapeError(f"give one label per sample; got {len(labels)} labels for {len(trajectory)} samples")
    if min(labels.sum(), (~labels).sum()) < 3:
        raise UsageError("a head needs at least 3 labelled samples of each class")
    x = features(trajectory, within)
    return Head(build().fit(x, labels), x.shape[1], within)


# ---- heads that are saved --------------------------------------------------------------------------------------------

FILE = "head.json"
FEWEST = 10  # failed and good labelled samples, each
FOLDS, REPEATS = 5, 4  # of the cross-validation
MOST = 4.0  # standard deviations; values further from the mean are clipped
STRENGTHS = (0.01, 0.1, 1.0, 10.0)  # inverse strengths of the penalty
POSITIVE = ("guess", "detour")  # signals that enter as logarithms; checks are logarithms already


def evidence_of(run: Trajectory) -> dict[str, np.ndarray]:  # (B,) each
    """Return the evidence of each sample by name: what a head is fitted to.

    This is the logarithm of the root mean square of σ, per channel and reading; the signals of the trajectory, also as
    logarithms; the checks of finished samples; and the number of rows (atoms) if it differs between samples. Values
    that are not defined are NaN.
    """
    found: dict[str, torch.Tensor] = {}
    for channel in channels(run.var) if len(run.times) else ():
        for time, row in zip(run.times.double().mean(1).tolist(), run.rms_of(channel), strict=True):
            found[f"{channel} σ@{time:.4g}".strip()] = row.log()
    for name, value in run.evidence.items():
        value = value.log() if name in POSITIVE else value
        if name == "guess":
            times = run.evidence["guess_t"].double().mean(0).tolist()
            found |= {f"guess@{time:.4g}": column for time, column in zip(times, value.T, strict=True)}
        elif value.ndim == 1 and value.is_floating_point() and name != HEAD:
            found[name] = value
    found |= {cond: run.cond[cond] for cond, _ in run.rows.values()}
    columns = {name: value.double().cpu().numpy() for name, value in found.items()}
    return {name: np.where(np.isfinite(value), value, np.nan) for name, value in columns.items()}


@dataclass(frozen=True)
class EvidenceHead:
    """A logistic regression of the evidence of a run.

    Attributes:
        columns: By the name of the evidence, its mean and standard deviation, by which it is standardised, and its
            weight in the logarithm of the odds of failure.
        intercept: The constant of this logarithm.
        labelled, failed: The number of labelled samples, and how many of them failed.
        seed: The seed of these samples.
        settings: How these samples were drawn. Samples of other settings have other evidence.
    """

    columns: dict[str, tuple[float, ...]]
    intercept: float
    labelled: int
    failed: int
    seed: int
    settings: dict[str, Any]

    def score(self, run: Trajectory) -> torch.Tensor:  # (B,)
        """Return the logarithm of the odds that each sample fails."""
        evidence = evidence_of(run)
        if missing := [name for name in self.columns if name not in evidence]:
            raise MismatchError(
                f"the head was fitted to {missing[0]}, which these samples lack; draw them as those of fmwc learn"
            )
        centre, scale, weights = np.array([*self.columns.values()]).T
        x = np.stack([evidence[name] for name in self.columns], 1)
        return torch.from_numpy(_standardised(x, centre, scale) @ weights + self.intercept)

    def ranked(self, run: Trajectory) -> Trajectory:
        """Return the run ranked by this head."""
        score = self.score(run).to(run.grid)
        return replace(run, evidence={**run.evidence, HEAD: score}).ranked_by(HEAD)

    @property
    def identity(self) -> str:
        """The hash of the content."""
        return str(self._content()[SEAL])

    def save(self, folder: str | Path) -> Path:
        """Write `head.json` to a folder, atomically."""
        return write_json(Path(folder) / FILE, self._content())

    def _content(self) -> dict[str, Any]:
        return seal({"format": 1, **asdict(self)})

    @classmethod
    def load(cls, path: str | Path) -> EvidenceHead:
        """Read `head.json` from a folder; raise if it is not a head or was modified."""
        path = Path(path) / FILE if Path(path).is_dir() else Path(path)
        content = read_json(path, _HEAD)
        if not sealed(content):
            raise DataError(f"{path} was changed after it was written; fit the head again with fmwc learn")
        columns = {name: tuple(values) for name, values in content["columns"].items()}
        rest = {name: value for name, value in content.items() if name not in ("format", "columns", SEAL)}
        return cls(columns, **rest)


_HEAD = record(
    {
        "format": whole(1, 1),
        "columns": mapping(array(number(), 3, 3)),
        "intercept": number(),
        "labelled": whole(1),
        "failed": whole(1),
        "seed": whole(-(1 << 63), 1 << 64),
        "settings": mapping(anything, 100),
        SEAL: text(64),
    }
)


def fit_evidence_head(run: Trajectory, failed: ArrayLike, settings: dict[str, Any] | None = None) -> EvidenceHead:
    """Fit a head to the evidence of labelled samples.

    Arguments:
        run: The labelled samples.
        failed: Whether each of them failed, `(B,)`.
        settings: How they were drawn.
    """
    evidence, labels = evidence_of(run), checked_labels(failed, len(run))
    if not evidence:
        raise UsageError("these samples hold no evidence; draw them with their variance (--every 5)")
    *fitted, intercept = _fitted(np.stack([*evidence.values()], 1), labels)
    columns = dict(zip(evidence, map(tuple, np.stack(fitted, 1).tolist()), strict=True))
    return EvidenceHead(columns, intercept, len(labels), int(labels.sum()), run.seed, settings or {})


def cross_validated(run: Trajectory, failed: ArrayLike, seed: int = 0) -> np.ndarray:  # (B,)
    """Return the score that a head fitted to the other samples gives to each sample, high = doubtful.

    This is the mean over several random divisions of the samples into five folds.
    """
    x, labels = np.stack(list(evidence_of(run).values()), 1), checked_labels(failed, len(run))
    total = np.zeros(len(labels))
    for repeat in range(REPEATS):
        for known, held in StratifiedKFold(FOLDS, shuffle=True, random_state=seed + repeat).split(x, labels):
            centre, scale, weights, intercept = _fitted(x[known], labels[known])
            total[held] += _standardised(x[held], centre, scale) @ weights + intercept
    return total / REPEATS


def _fitted(x: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Return mean and standard deviation of each column, and weights and intercept of the logistic regression."""
    known = np.isfinite(x)
    count = np.maximum(known.sum(0), 1)
    centre = np.where(known, x, 0).sum(0) / count
    scale = np.sqrt(np.where(known, np.square(x - centre), 0).sum(0) / count)
    scale = np.where(scale > 1e-9 * np.maximum(np.abs(centre), 1), scale, 1.0)  # constant columns stay 0
    model = _logistic("neg_log_loss", STRENGTHS).fit(_standardised(x, centre, scale), labels)
    return centre, scale, model.coef_[0], float(model.intercept_[0])


def _standardised(x: np.ndarray, centre: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return columns in standard deviations from their mean; missing values are at the mean."""
    return np.clip(np.nan_to_num((x - centre) / scale), -MOST, MOST)


def checked_labels(failed: ArrayLike, count: int) -> np.ndarray:  # (B,)
    """Return the labels as booleans; raise if there are too few of a class, or not one per sample."""
    labels = require_labels(failed, "failed").ravel()
    if len(labels) != count:
        raise ShapeError(f"give one label per sample; got {len(labels)} labels for {count} samples")
    bad, good = int(labels.sum()), int((~labels).sum())
    if min(bad, good) < FEWEST:
        raise UsageError(
            f"a head needs at least {FEWEST} failed and {FEWEST} good labelled samples, got {bad} and {good}; label "
            "more samples"
        )
    return labels
