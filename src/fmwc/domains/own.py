"""Networks of your own: fmwc sample, check and report need no more than their samples."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fmwc.domains.domain import Domain, Rows
from fmwc.entry import try_once
from fmwc.errors import UsageError
from fmwc.field import Field
from fmwc.files import write_bytes
from fmwc.report.reports import samples_page
from fmwc.report.table import Table
from fmwc.sampling import Trajectory, noise

__all__ = ["OwnDomain"]


class OwnDomain(Domain):
    name = "this network"

    def conditions(self, field: Field, count: int, label: int | None = None, seed: int = 0) -> dict[str, Tensor]:
        """Return the classes of the reference in turn; other conditions are not known here."""
        if field.space is None:
            raise UsageError("the shape of a sample is not known: let the function return (network, space)")
        cond = self._classes(field, count, label)
        few = {name: value[:1].to(field.device) for name, value in cond.items()}
        try:
            try_once(field, noise(field.space, 1, 0, field.device, cond=few), few)
        except UsageError as error:
            raise UsageError(
                f"{error} (to pass conditions other than classes, use Python: fmwc.sample(field, n, cond=…))"
            ) from error
        return cond

    def _classes(self, field: Field, count: int, label: int | None) -> dict[str, Tensor]:
        standard, classes = (getattr(field.reference, name, None) for name in ("standard", "classes"))
        if standard is not None:
            classes = {standard.cond: (~standard.spread.isnan()).nonzero()[:, 0].tolist()}
        if not classes:
            return super().conditions(field, count, label)
        ((name, values),) = classes.items()
        if label is not None and label not in values:
            raise UsageError(f"--label must be one of the classes {', '.join(map(str, values))}; got {label}")
        known = torch.tensor(values)
        return {name: known[torch.arange(count) % len(known)] if label is None else torch.full((count,), label)}

    def numbers(self, run: Trajectory) -> Rows:
        low, middle, high = np.quantile(run.score().cpu().numpy(), [0.1, 0.5, 0.9])
        within = f" within {run.standard.cond}" if run.standard is not None else ""
        compared = "one another" if run.withheld else "the checkpoint's reference"
        return [
            {"": "samples", "value": f"{len(run):,}"},
            {"": "ranked by", "value": f"{run.default_score}{within}, among {compared}"},
            {"": "score, median (80 % of samples)", "value": f"{middle:.4g} ({low:.4g} to {high:.4g})"},
            *self.notes(run),
        ]

    def page(self, field: Field, run: Trajectory, out: Path, numbers: Rows, about: dict[str, str]) -> Path:
        return samples_page(out, run, numbers=numbers, provenance=about)

    def write_samples(self, run: Trajectory, out: Path, format: str = "") -> list[Path]:
        """Also write the table as Parquet if pyarrow is installed."""
        paths = super().write_samples(run, out, format)
        with suppress(ImportError):
            paths.append(write_bytes(out / "samples.parquet", Table.from_columns(self.table(run)).parquet()))
        return paths
