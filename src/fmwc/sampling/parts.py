"""The batches of a run, kept as they are drawn, so that an interrupted run draws only the rest."""

from __future__ import annotations

from pathlib import Path

import torch

from fmwc.errors import FmwcError
from fmwc.sampling.trajectory import Trajectory

__all__ = ["Parts"]


class Parts:
    """A folder with one file per batch of a run.

    The caller makes sure that it belongs to the run (:func:`fmwc.files.claimed`). A file that cannot be read counts as
    missing, so that its batch is drawn again.

    Arguments:
        folder: The folder; created when the first batch is saved.
        compact: Keep one variance per sample and channel in place of one per coordinate.
    """

    def __init__(self, folder: str | Path, *, compact: bool = False) -> None:
        self.folder, self.compact = Path(folder), compact

    def get(self, first: int, most: int, device: torch.device | str = "cpu") -> Trajectory | None:
        """Return the batch that begins with sample `first`, if it is there and holds at most `most` samples."""
        path = self._path(first)
        if not path.is_file():
            return None
        try:
            part = Trajectory.load(path)
        except FmwcError:
            return None
        whole = part.index is not None and torch.equal(part.index, torch.arange(first, first + len(part)))
        return part.to(device) if whole and len(part) <= most else None

    def put(self, part: Trajectory) -> Trajectory:
        """Save a batch; return it as it was saved."""
        part = part.compact() if self.compact else part
        assert part.index is not None
        part.save(self._path(int(part.index[0])))
        return part

    def _path(self, first: int) -> Path:
        return self.folder / f"{first:09d}.safetensors"
