"""A network of the user's own under the verbs that need no more than its samples: sample and report."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from fmwc.errors import UsageError
from fmwc.field import Field
from fmwc.files import write_bytes
from fmwc.recipes.named import try_once
from fmwc.report.crystal_files import parquet_bytes
from fmwc.report.own import write_report
from fmwc.sampling import Trajectory, noise
from fmwc.settings.setting import Rows, Setting, Show

__all__ = ["OwnSetting"]


class OwnSetting(Setting):
    name = "this network"

    def conditions(self, field: Field, count: int, label: int | None = None, seed: int = 0) -> dict[str, Tensor]:
        """The classes that the reference knows, in turn; what else a network takes is not known here."""
        if field.space is None:
            raise UsageError("the shape of a sample is not known: let the function return (network, space)")
        cond = self._classes(field, count, label)
        few = {name: value[:1].to(field.device) for name, value in cond.items()}
        try:
            try_once(field, noise(field.space, 1, 0, field.device, **few), few)  # type: ignore[arg-type]
        except UsageError as error:
            raise UsageError(f"{error} (what is no class is given from Python: fmwc.sample(field, n, …))") from error
        return cond

    def _classes(self, field: Field, count: int, label: int | None) -> dict[str, Tensor]:
        standard, classes = (getattr(field.reference, name, None) for name in ("standard", "classes"))
        if standard is not None:
            classes = {standard.cond: (~standard.spread.isnan()).nonzero()[:, 0].tolist()}
        if not classes:
            return super().conditions(field, count, label)
        ((name, values),) = classes.items()
        if label is not None and label not in values:
            raise UsageError(f"--label is one of the classes {', '.join(map(str, values))}, got {label}")
        known = torch.tensor(values)
        return {name: known[torch.arange(count) % len(known)] if label is None else torch.full((count,), label)}

    def count(self, device: torch.device) -> int:
        return 1_000 if device.type == "cuda" else 100

    def batch(self, device: torch.device) -> int:
        return 256

    def pilot(self, device: torch.device) -> int:
        return self.count(device)

    def judge(self, trajectory: Trajectory) -> np.ndarray:
        """None is known to be bad: nobody judges them."""
        return np.zeros(len(trajectory), bool)

    def shown(self, field: Field, count: int, seed: int, progress: Show) -> Trajectory:
        return self.draw(field, count, seed, progress)

    def numbers(self, run: Trajectory, bad: np.ndarray) -> Rows:
        low, middle, high = np.quantile(run.score().cpu().numpy(), [0.1, 0.5, 0.9])
        within = f" within {run.standard.cond}" if run.standard is not None else ""
        compared = "one another" if run.withheld else "the checkpoint's reference"
        return [
            {"": "samples", "value": f"{len(run):,}"},
            {"": "ranked by", "value": f"{run.default_score}{within}, among {compared}"},
            {"": "score, median (80 % of samples)", "value": f"{middle:.4g} ({low:.4g} to {high:.4g})"},
            *self.noted(run),
        ]

    def page(self, field: Field, run: Trajectory, out: Path, numbers: Rows, about: dict[str, str]) -> Path:
        return write_report(out, run, numbers=numbers, provenance=about)

    def write_samples(self, run: Trajectory, out: Path, format: str = "") -> list[Path]:
        """Also the table as Parquet, where pyarrow is there."""
        written = super().write_samples(run, out, format)
        with suppress(UsageError):
            written.append(write_bytes(out / "samples.parquet", parquet_bytes(self.table(run))))
        return written

    def _from_python(self, *args: Any, **options: Any) -> NoReturn:
        raise UsageError("for a network of your own, go on from Python")

    changes = changed = draw_edits = evaluate = reproduce = subject = tables = _from_python
