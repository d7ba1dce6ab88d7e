"""Learned heads: classifiers of the variance trajectory, fitted to a few labelled samples (sec:method-readouts)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegressionCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fmwc.errors import ShapeError, UsageError, pick
from fmwc.sampling import Trajectory
from fmwc.sampling.trajectory import within_groups
from fmwc.state import channels, require_labels

__all__ = ["HEADS", "Head", "features", "fit_head"]

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


def _l1() -> Any:
    # The strength of the penalty is chosen by cross-validation on the labelled samples.
    model = LogisticRegressionCV(
        Cs=(0.01, 0.1, 1.0), cv=3, penalty="l1", solver="liblinear", scoring="average_precision", random_state=0
    )
    return make_pipeline(StandardScaler(), model)


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
