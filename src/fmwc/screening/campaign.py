"""A campaign: its identity, its segments, and what of it is done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa

from fmwc.errors import DataError
from fmwc.files import write_json
from fmwc.identity import digest
from fmwc.readers import anything, array, mapping, number, optional, read_json, record, shown, text, whole
from fmwc.screening.blocks import FOLDER, Segment, read_rows, write_rows
from fmwc.screening.keep import surest
from fmwc.screening.rows import CRYSTALS, SCORE
from fmwc.screening.stages import Stage

__all__ = ["CAMPAIGN", "Campaign", "read_campaign", "spans_of"]

CAMPAIGN, KEPT, DRIVER = "campaign.json", "kept.json", "driver.json"
TOGETHER = {CRYSTALS: 64}  # rows that are judged together
RELAXED_TOGETHER = 16
OTHERS = 256
BLOCKS, MOST_BATCHES = 256, 16  # blocks of a campaign, unless one would have more batches than this

_LAYOUT = array(array(whole(), 3, 3), 1, 100_000)  # first row, row after the last, rows per block
_IDENTITY = record(
    {
        "drawn": mapping(anything, 100),
        "kind": text(100),
        "shapes": mapping(array(whole(1), 0, 16), 100),
        "batch": whole(1),
        "first": whole(),
        "count": whole(1),
        "keep": optional(number(0)),
        "relax": whole(),
    },
    more=True,
)
_CAMPAIGN = record({"format": whole(1, 1), "identity": _IDENTITY, "layout": _LAYOUT})
MOST_BLOCKS = 200_000
_KEPT = record({"identity": text(64), "rows": whole(), "drawn": whole(), "seconds": number(0), "step": whole(1)})


def spans_of(layout: list[list[int]]) -> tuple[tuple[int, int], ...]:
    """Return the first row and the row after the last of each block.

    >>> spans_of([[0, 10, 4], [10, 14, 4]])
    ((0, 4), (4, 8), (8, 10), (10, 14))
    """
    return tuple((i, min(i + step, stop)) for start, stop, step in layout for i in range(start, stop, step))


def rows_per_block(rows: int, batch: int) -> int:
    """Return the default number of rows of a block: a whole number of batches.

    >>> rows_per_block(1000, 50), rows_per_block(10**6, 2048), rows_per_block(10**7, 50)
    (50, 4096, 800)
    """
    batches = -(-rows // batch)
    return batch * min(max(1, -(-batches // BLOCKS)), MOST_BATCHES)


@dataclass(frozen=True)
class Campaign:
    """A campaign.

    Attributes:
        folder: Its folder.
        identity: All that determines its rows. `first` and `count` are the range of rows.
        layout: The first row, the row after the last, and the rows per block, of each part.
        before: The stages before rows are kept.
        after: The stages after it; empty if nothing has to wait.
    """

    folder: Path
    identity: dict[str, Any]
    layout: list[list[int]]
    before: tuple[Stage, ...] = ()
    after: tuple[Stage, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether rows are kept by comparison with all others, so that judging waits for the last draw."""
        return self.identity["keep"] is not None

    @property
    def shared(self) -> dict[str, Any]:
        """What determines a row, whatever part it is in."""
        return {name: value for name, value in self.identity.items() if name not in ("first", "count")}

    @cached_property
    def rows(self) -> str:
        """A hash of what determines a row."""
        return digest(self.shared)

    @property
    def kind(self) -> str:
        """The name of the domain; empty for a network of your own."""
        kind: str = self.identity["kind"]
        return kind

    def save(self) -> None:
        """Write campaign.json."""
        write_json(self.folder / CAMPAIGN, {"format": 1, "identity": self.identity, "layout": self.layout})

    # ---- segments ----

    @cached_property
    def drawing(self) -> Segment:
        """The first segment."""
        batch, spans = self.identity["batch"], spans_of(self.layout)
        return Segment(self.folder, "draw", self.rows, self.before, batch, spans)

    def judging(self) -> Segment | None:
        """Return the second segment, if there is one and the rows to keep are known."""
        kept = self.kept()
        if not self.waits or kept is None:
            return None
        spans = spans_of([[0, kept["rows"], kept["step"]]])
        identity = digest([self.rows, kept["identity"]])
        return Segment(self.folder, "judge", identity, self.after, self._together, spans, "kept")

    @property
    def _together(self) -> int:
        return RELAXED_TOGETHER if self.identity["relax"] else TOGETHER.get(self.kind, OTHERS)

    @property
    def last(self) -> Segment | None:
        """The segment whose blocks are the result; `None` if it is not known yet."""
        return self.judging() if self.waits else self.drawing

    # ---- rows to keep ----

    def _identity_of_kept(self) -> str:
        missing = [span for block, span in enumerate(self.drawing.spans) if self.drawing.about(block) is None]
        return digest([self.identity, missing])

    def kept(self) -> dict[str, Any] | None:
        """Return what is known of the rows to keep, if they have been chosen."""
        try:
            kept: dict[str, Any] = read_json(self.folder / FOLDER / KEPT, _KEPT)
        except DataError:
            return None
        fits = kept["rows"] <= min(self.identity["count"], MOST_BLOCKS * kept["step"])
        return kept if fits else None

    def choose(self) -> None:
        """Choose the rows to keep among all drawn ones, and write them to files of their own."""
        begun, drawn, identity = time.perf_counter(), self.drawing, self._identity_of_kept()
        kept, known = self.kept(), self.judging()
        same = kept is not None and kept["identity"] == identity
        blocks = [*range(len(known.spans))] if known is not None else []
        if same and known is not None and all(known.about(block, known.source, whole=True) for block in blocks):
            return
        blocks = [block for block in range(len(drawn.spans)) if drawn.about(block) is not None]
        passed = sum(len(piece) for piece in self._scores(blocks))
        total = sum(stop - start for start, stop in (drawn.spans[block] for block in blocks))
        keep = self.identity["keep"]
        count = min(keep if isinstance(keep, int) else max(1, round(keep * total)), passed)
        fewest = -(-count // MOST_BLOCKS)
        step = max(rows_per_block(count, self._together), -(-fewest // self._together) * self._together)
        about = {"identity": digest([self.rows, identity]), "driver": "", "spent": {}}
        done, waiting = 0, []

        def write(rows: pa.Table) -> None:
            nonlocal done
            span = {"start": done, "stop": done + len(rows)}
            write_rows(drawn.path(done // step, "kept"), rows, {**about, **span})
            done += len(rows)

        for block, mask in zip(blocks, surest(lambda: self._scores(blocks), count), strict=True):
            waiting.append(read_rows(drawn.path(block), len(mask)).filter(pa.array(mask)))
            while (size := sum(map(len, waiting))) >= step:
                rows = pa.concat_tables(waiting)
                write(rows.slice(0, step))
                waiting = [rows.slice(step)] if size > step else []
        if waiting and sum(map(len, waiting)):
            write(pa.concat_tables(waiting))
        seconds = time.perf_counter() - begun
        content = {"identity": identity, "rows": count, "drawn": total, "seconds": seconds, "step": step}
        write_json(self.folder / FOLDER / KEPT, content)

    def _scores(self, blocks: list[int]) -> Iterator[Any]:
        for block in blocks:
            start, stop = self.drawing.spans[block]
            yield read_rows(self.drawing.path(block), stop - start, [SCORE])[SCORE].to_numpy()


def read_campaign(folder: Path) -> Campaign:
    """Return the campaign in a folder, without its stages."""
    if not (folder / CAMPAIGN).is_file():
        raise DataError(f"{shown(folder)} holds no campaign of fmwc screen: {CAMPAIGN} is missing")
    found = read_json(folder / CAMPAIGN, _CAMPAIGN)
    identity, layout = found["identity"], found["layout"]
    first, stop = identity["first"], identity["first"] + identity["count"]
    joined = all(one[1] == after[0] for one, after in pairwise(layout))
    if (
        not joined
        or (layout[0][0], layout[-1][1]) != (first, stop)
        or not all(low < high and step for low, high, step in layout)
    ):
        raise DataError(f"{shown(folder / CAMPAIGN)} does not list the rows from {first} to {stop - 1}")
    if sum(-(-(high - low) // step) for low, high, step in layout) > MOST_BLOCKS:
        raise DataError(f"{shown(folder / CAMPAIGN)} has more than {MOST_BLOCKS:,} blocks")
    return Campaign(folder, identity, layout)
