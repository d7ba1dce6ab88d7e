"""What the page shows of samples: arrays for pictures, columns, scores and their meaning, and the path of a sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmwc.cli.filter import read_run
from fmwc.cli.labels import Table, read_labels
from fmwc.cli.verbs import Filter
from fmwc.errors import UsageError
from fmwc.estimators import Linearised, Tangent
from fmwc.field import Field
from fmwc.flow import Space
from fmwc.randomness import derive
from fmwc.report.gallery import UNKNOWN, packed, plain_column
from fmwc.report.reports import kind_of as kind_of_shape
from fmwc.report.run import NAMES, describe, ordering_of
from fmwc.sampling import Trajectory
from fmwc.sampling.config import is_small
from fmwc.state import SINGLE, channels, tree_map
from fmwc.uses.edit import critical_time

__all__ = ["CHANNELS", "Content", "arrays", "kind_of_space", "read_path", "trace"]

CHANNELS = {"type": "atom types", "coord": "coordinates", "lattice": "lattice"}
LABELS = ("bad", "misplaced", "good", "correct", "metastable")  # columns of a table that say which samples failed
PROBES, READINGS = 8, 25  # of a path: random probes of the doubt of each pixel or atom, and times at which it is read
OUTSIDE = 0.1  # share of the range by which values of images in [0, 1] or [-1, 1] may lie outside
TITLES = {
    "y": "requested class",
    "rival": "rival class",
    "margin": "margin over the rival",
    "predicted": "class that the judge reads",
    "e_above_hull": "above the hull, eV/atom",
    "energy_per_atom": "energy, eV/atom",
    "problem": "problem",
}
MEANINGS = {
    "temporal_ratio": "Uncertainty late on the path divided by that early on. High: still undecided at the end.",
    "endpoint": "Uncertainty of the velocity at the last step.",
    "integrated": "Uncertainty of the velocity, summed over the path.",
    "peak": "Largest uncertainty of the velocity on the path.",
    "geometric": "Mean uncertainty of the velocity per number, over channels and time.",
    "dispersion": "Spread of the end point, if the noise of the weights is carried to t = 1.",
    "spread": "How much the predicted end point changed on the path. High: decided late.",
    "detour": "Length of the path divided by the distance between its ends. 1: a straight line.",
    "contest": "How much better another class explains the sample. High: the flow prefers another class.",
    "echo": "How badly the flow explains the sample after noise is added to it.",
    "nearest": "High: far from everything that the flow was trained on.",
}


# ---- arrays ----------------------------------------------------------------------------------------------------------


def _kind(shapes: Mapping[str, Sequence[int]]) -> str:
    if set(shapes) == set(CHANNELS):
        return "crystals"
    if set(shapes) != {SINGLE}:
        return "vectors"
    kind = kind_of_shape(tuple(shapes[SINGLE]))  # as on the pages of fmwc report
    return kind if kind in ("points", "images") else "vectors"


def kind_of_space(space: Space | None) -> str:
    """Return how samples of a space are drawn: points, images, crystals or vectors."""
    return "vectors" if space is None else _kind({name: c.shape for name, c in space.channels.items()})


def kind_of(x: Any) -> str:
    """Return how these samples are drawn."""
    return _kind({name: value.shape[1:] for name, value in channels(x).items()})


def arrays(x: Any, cond: Mapping[str, Tensor], bounds: tuple[float, float] | None = None) -> dict[str, np.ndarray]:
    """Return samples, or states on their path, as the page draws them.

    Arguments:
        x: The samples.
        cond: Their conditions; crystals need the number of atoms.
        bounds: The values of black and white in images; by default, those that suit `x`.
    """
    kind = kind_of(x)
    if kind == "crystals":
        from fmwc.crystals.structures import arrays_of, decode

        return arrays_of(decode(x, cond["atoms"]))
    if kind == "vectors":
        return {"x": torch.cat([c.flatten(1) for c in channels(x).values()], 1).detach().cpu().float().numpy()}
    values = x.detach().cpu().float()
    if kind == "points":
        return {"x": values.numpy()}
    low, high = bounds or bounds_of(values)
    shades = ((values - low) / max(high - low, 1e-12)).clamp(0, 1).mul(255).round().byte()
    if shades.ndim == 4:
        shades = shades[:, 0] if shades.shape[1] == 1 else shades.movedim(1, -1)
    return {"x": shades.contiguous().numpy()}


def bounds_of(images: Tensor) -> tuple[float, float]:
    """Return the values of black and white: 0 or -1 to 1 if that suits the images, else nearly their range."""
    low, high = np.quantile(images.detach().cpu().float().numpy(), [0.005, 0.995])
    for begin in (0.0, -1.0):
        room = OUTSIDE * (1 - begin)
        if begin - room <= low and high <= 1 + room:
            return begin, 1.0
    return float(low), float(high)


# ---- a run -----------------------------------------------------------------------------------------------------------


class Content:
    """Samples of a run, their table, and what is computed from both.

    Arguments:
        run: The samples.
        table: Their table as text, by column; `None` before they were judged.
    """

    def __init__(self, run: Trajectory, table: Table | None) -> None:
        self.run, self.table = run, table

    @classmethod
    def read(cls, file: Path) -> Content:
        """Read a samples file and the table beside it."""
        return cls(*read_run(file))

    def __len__(self) -> int:
        return len(self.run)

    @cached_property
    def score(self) -> np.ndarray | None:
        """The run's own score; `None` if it has none."""
        with suppress(UsageError):
            return self.run.score().double().cpu().numpy()
        return None

    @cached_property
    def level(self) -> tuple[np.ndarray | None, str, str]:
        """The confidence or rank in [0, 1], its name, and why there is no confidence."""
        try:
            values, label, note = ordering_of(self.run)
        except UsageError as error:
            return None, "", str(error)
        return values.cpu().numpy(), label, note

    @cached_property
    def order(self) -> np.ndarray:
        """The samples, surest first; those without a score last."""
        return np.arange(len(self)) if self.score is None else np.argsort(self.score, kind="stable")

    @cached_property
    def labels(self) -> str:
        """The column of the table that says which samples failed; empty if there is none."""
        return next((name for name in LABELS if self.table is not None and name in self.table), "")

    @cached_property
    def failed(self) -> np.ndarray | None:
        """1 for failed samples, 0 for others, NaN for those without a label; `None` if no sample has one."""
        if not self.labels:
            return None
        asked = Filter(Path(), Path(), labels=self.labels)
        bad = read_labels(asked, self.run.names, self.table).bad
        return bad if np.isfinite(bad).any() else None

    @cached_property
    def columns(self) -> dict[str, list[Any]]:
        """The columns of the table as numbers and text."""
        table = self.table or {"name": self.run.names}
        return {name: column if name == "name" else _typed(column) for name, column in table.items()}

    @cached_property
    def bounds(self) -> tuple[float, float] | None:
        return bounds_of(self.run.x) if self.kind == "images" else None

    @property
    def kind(self) -> str:
        return kind_of(self.run.x)

    def facts(self) -> dict[str, Any]:
        """Return what lists and headings show of the run."""
        _, label, note = self.level
        score = self.run.default_score
        return {
            "kind": self.kind,
            "count": len(self),
            "judged": self.failed is not None,
            "order": {"name": label, "note": note},
            "score": None
            if self.score is None
            else {"title": describe(score), "sentence": f"Ranked by {describe(score)}."},
            "channels": [{"name": name, "title": CHANNELS.get(name, name)} for name in channels(self.run.x)],
        }

    def tensors(self) -> bytes:
        """Return the samples for the gallery, as a safetensors file."""
        level, _, _ = self.level
        found = {**arrays(self.run.x, self.run.cond, self.bounds), "order": self.order}
        found |= {} if level is None else {"level": level}
        if self.failed is not None:
            found["failed"] = np.where(np.isnan(self.failed), UNKNOWN, self.failed).astype(np.uint8)
        if "e_above_hull" in self.columns:
            found["e_above_hull"] = np.array(self.columns["e_above_hull"], dtype=np.float32)
        return packed(found)

    def page_table(self) -> dict[str, Any]:
        """Return the columns for the gallery."""
        hidden = {"score", "rank", "confidence", *LABELS}
        hidden |= {name for name in self.columns if self.kind == "points" and name.startswith("x_")}
        columns = {name: plain_column(values) for name, values in self.columns.items() if name not in hidden}
        return {"columns": columns, "titles": {name: TITLES[name] for name in columns if name in TITLES}}

    # ---- one sample --------------------------------------------------------------------------------------------------

    def about(self, sample: int) -> dict[str, Any]:
        """Return what is known of one sample without computing its path."""
        level, label, _ = self.level
        failed = None if self.failed is None or np.isnan(self.failed[sample]) else bool(self.failed[sample])
        row = {name: plain_column([values[sample]])[0] for name, values in self.columns.items()}
        shown = {"name", "score", "rank", "confidence", "rival", "margin", *LABELS}
        facts = [{"title": TITLES.get(n, n.replace("_", " ")), "value": v} for n, v in row.items() if n not in shown]
        return {
            "name": self.run.names[sample],
            "failed": failed,
            label or "rank": None if level is None else float(level[sample]),
            "verdict": _verdict(row, failed),
            "rival": _rival(row),
            "scores": self._scores(sample),
            "facts": [fact for fact in facts if fact["value"] not in (None, "")],
        }

    def _scores(self, sample: int) -> list[dict[str, Any]]:
        """Return the scores of a sample, each with its place in the run and what it means."""
        default = self.run.default_score
        found = {describe(default): (self.score, _meaning(default))}
        for name, title in NAMES.items():
            with suppress(UsageError):
                found.setdefault(title, (self.run.score(name).double().cpu().numpy(), MEANINGS.get(name, "")))
        rows = []
        for title, (values, sentence) in found.items():
            if values is not None and math.isfinite(value := values[sample]):
                place = float(np.mean(values > value))
                rows.append({"title": title, "value": float(value), "place": place, "sentence": sentence})
        return rows


def _typed(column: Sequence[str]) -> list[Any]:
    """Return a column of text as numbers or Booleans if all its cells are.

    >>> _typed(["1", "", "2.5"]), _typed(["true", "false"]), _typed(["NaCl", "1"])
    ([1.0, nan, 2.5], [True, False], ['NaCl', '1'])
    """
    if all(cell in ("true", "false", "") for cell in column) and any(column):
        return [None if cell == "" else cell == "true" for cell in column]
    try:
        return [float(cell) if cell else math.nan for cell in column] if any(column) else list(column)
    except ValueError:
        return list(column)


def _meaning(score: str) -> str:
    """Return the sentence for a score; for a sum, which scores it adds."""
    return MEANINGS.get(
        score.partition("@")[0].rpartition("/")[2], "The score that samples are ranked by. High: doubtful."
    )


def _verdict(row: Mapping[str, Any], failed: bool | None) -> str:
    """Return what the judge says of a sample, as a sentence."""
    if row.get("problem"):
        return f"It could not be judged: {row['problem']}."
    if row.get("sparse_hull"):
        return f"Its energy above the hull is unknown: {row['sparse_hull']}."
    if row.get("e_above_hull") is not None:
        return f"Its energy is {row['e_above_hull']:.3f} eV/atom above the hull of known crystals."
    if "predicted" in row:
        asked, read = (int(row[name]) for name in ("y", "predicted"))
        return f"The judge reads {read}, as asked." if asked == read else f"The judge reads {read} instead of {asked}."
    if "misplaced" in row and failed is not None:
        return "It lies on an empty square." if failed else "It lies on a square that holds data."
    return ""


def _rival(row: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the class that the flow itself finds closest, as a sentence."""
    if row.get("rival") is None or row.get("margin") is None or row.get("y") is None:
        return None
    rival, asked = int(row["rival"]), int(row["y"])
    if row["margin"] < 0:
        return {"sentence": f"the flow explains this sample better as {rival} than as {asked}."}
    return {"sentence": f"the flow explains this sample best as {asked}; {rival} comes next."}


# ---- the path of one sample ------------------------------------------------------------------------------------------


def read_path(field: Field, path: Trajectory) -> Trajectory:
    """Return a path of one sample, which holds its states, with the variance of every coordinate at some steps.

    All steps are read as one batch.
    """
    assert path.states is not None
    assert field.space is not None
    steps = [*range(0, len(path.grid) - 1, -(-(len(path.grid) - 1) // READINGS))]
    x = tree_map(lambda *c: torch.cat(c), *(path.states[step] for step in steps))
    cond = {name: value.expand(len(steps), *value.shape[1:]) for name, value in path.cond.items()}
    estimator = Linearised() if is_small(field.space) else Tangent(PROBES)
    found = field.moments(x, path.grid[steps, 0], estimator, seed=derive(path.seed, "path"), cond=cond)
    mean, var = (tree_map(lambda c: c[:, None].detach(), part) for part in (found.mean, found.var))
    return replace(path, times=path.grid[steps], mean=mean, var=var, transported=None)


def trace(field: Field, path: Trajectory, bounds: tuple[float, float] | None) -> bytes:
    """Return the path of one sample as the page shows it: states, predicted end points, and doubt over time.

    Arguments:
        field: The field that drew it.
        path: The path, from :func:`read_path`.
        bounds: The values of black and white in images.
    """
    assert path.states is not None
    assert field.space is not None
    states = tree_map(lambda *c: torch.cat(c), *path.states)
    count = len(path.grid)
    cond = {name: value.expand(count, *value.shape[1:]) for name, value in path.cond.items()}
    drawn = arrays(states, cond, bounds)
    found: dict[str, np.ndarray] = {"grid": path.grid[:, 0].cpu().numpy()}
    if "lattice" in drawn:  # crystals have as many atoms at every time
        atoms = len(drawn["species"]) // count
        found |= {"lattice": drawn["lattice"], "species": drawn["species"].reshape(count, atoms)}
        found["coord"] = drawn["coord"].reshape(count, atoms, 3)
    else:
        space, mean = field.space.given(path.cond), tree_map(lambda c: c[:, 0], path.mean)
        steps = torch.searchsorted(path.grid[:, 0].contiguous(), path.times[:, 0].contiguous())
        ahead = space.advance(tree_map(lambda c: c[steps], states), mean, 1 - path.times[:, 0])
        found |= {"states": drawn["x"], "guess": arrays(ahead, cond, bounds)["x"]}
    totals = {n: c[:, 0].flatten(1).sum(1) * path.units.get(n, 1.0) for n, c in channels(path.var).items()}
    std = {f"std.{name}": value.sqrt() for name, value in totals.items() if name != SINGLE}
    found |= {name: value.cpu().numpy() for name, value in {"std": path.std[:, 0], **std}.items()}
    found |= {"times": path.times[:, 0].cpu().numpy(), "doubt": _doubt(path)}
    return packed(found, {"critical": f"{float(critical_time(path)):.6f}"})


def _doubt(path: Trajectory) -> np.ndarray:
    """Return the standard deviation of each pixel, coordinate or atom at each reading."""
    var = channels(path.var)
    if kind_of(path.x) == "crystals":
        atoms = int(path.cond["atoms"][0])
        return var["coord"][:, 0, :atoms].sum(-1).sqrt().cpu().numpy()
    each = torch.cat([value[:, 0].flatten(1) for value in var.values()], 1).sqrt()
    if kind_of(path.x) == "images":
        pixels = var[SINGLE][:, 0]
        each = (pixels if pixels.ndim == 3 else pixels.mean(1)).sqrt()
    return each.cpu().numpy()
