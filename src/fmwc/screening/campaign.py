"""A campaign: its identity, its segments, what of it is done, and the rows that it keeps."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout

from fmwc.errors import DataError, MismatchError, OutputError
from fmwc.files import TEMPORARY, write_json
from fmwc.identity import digest, require_same
from fmwc.readers import anything, array, mapping, number, optional, read_json, record, shown, text, whole
from fmwc.screening.blocks import FOLDER, Segment, read_rows, write_rows
from fmwc.screening.rows import CRYSTALS, SCORE
from fmwc.screening.stages import Stage

__all__ = ["CAMPAIGN", "Campaign", "owned", "read_campaign", "rows_per_block", "status", "surest"]

CAMPAIGN, KEPT, LOCK = "campaign.json", "kept.json", ".lock"
TOGETHER = {CRYSTALS: 64}  # rows that are judged together
RELAXED_TOGETHER = 16
OTHERS = 256
BLOCKS, MOST_BATCHES = 256, 16  # blocks of a campaign, unless one would have more batches than this
MOST_BLOCKS = 200_000
RECENT = 20  # blocks whose dates give the rate

_IDENTITY = record(
    {
        "drawn": mapping(anything, 100),
        "kind": text(100),
        "shapes": mapping(array(whole(1), 0, 16), 100),
        "batch": whole(1),
        "count": whole(1),
        "keep": optional(number(0)),
        "relax": whole(),
    },
    more=True,
)
_CAMPAIGN = record({"format": whole(1, 1), "identity": _IDENTITY, "block": whole(1)})
_KEPT = record({"identity": text(64), "rows": whole(), "drawn": whole(), "seconds": number(0)})


def rows_per_block(rows: int, batch: int) -> int:
    """Return the default number of rows of a block: a whole number of batches.

    >>> rows_per_block(1000, 50), rows_per_block(10**6, 2048), rows_per_block(10**7, 50)
    (50, 4096, 800)
    """
    batches = -(-rows // batch)
    return batch * min(max(1, -(-batches // BLOCKS)), MOST_BATCHES)


def _spans(rows: int, step: int) -> tuple[tuple[int, int], ...]:
    """Return the first row and the row after the last of each block.

    >>> _spans(10, 4)
    ((0, 4), (4, 8), (8, 10))
    """
    return tuple((first, min(first + step, rows)) for first in range(0, rows, step))


def surest(scores: np.ndarray, count: int) -> np.ndarray:
    """Return which numbers are among the `count` smallest; of equal numbers, the first are taken.

    >>> surest(np.array([3.0, 1.0, 2.0, 2.0]), 2).tolist()
    [False, True, True, False]
    """
    if not count:
        return np.zeros(len(scores), bool)
    value = np.partition(scores, count - 1)[count - 1]
    below, equal = scores < value, scores == value
    return below | (equal & (equal.cumsum() <= count - below.sum()))


@dataclass(frozen=True)
class Campaign:
    """A campaign.

    Attributes:
        folder: Its folder.
        identity: All that determines its rows.
        block: The number of rows of a block.
        before: The stages before rows are kept.
        after: The stages after it; empty if nothing has to wait.
    """

    folder: Path
    identity: dict[str, Any]
    block: int
    before: tuple[Stage, ...] = ()
    after: tuple[Stage, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether rows are kept by comparison with all others, so that judging waits for the last draw."""
        return self.identity["keep"] is not None

    @cached_property
    def rows(self) -> str:
        """A hash of what determines a row."""
        return digest(self.identity)

    @property
    def kind(self) -> str:
        """The name of the domain; empty for a network of your own."""
        kind: str = self.identity["kind"]
        return kind

    # ---- segments ----

    @cached_property
    def drawing(self) -> Segment:
        """The first segment."""
        spans = _spans(self.identity["count"], self.block)
        return Segment(self.folder, "draw", self.rows, self.before, self.identity["batch"], spans)

    def judging(self) -> Segment | None:
        """Return the second segment, if there is one and the rows to keep are known."""
        kept = self.kept()
        if not self.waits or kept is None:
            return None
        together = RELAXED_TOGETHER if self.identity["relax"] else TOGETHER.get(self.kind, OTHERS)
        spans = _spans(kept["rows"], rows_per_block(kept["rows"], together))
        return Segment(self.folder, "judge", self.rows, self.after, together, spans, "kept")

    def segments(self) -> list[Segment]:
        """Return the segments that are known."""
        judging = self.judging()
        return [self.drawing] if judging is None else [self.drawing, judging]

    @property
    def last(self) -> Segment | None:
        """The segment whose blocks are the result; `None` if it is not known yet."""
        return self.judging() if self.waits else self.drawing

    # ---- rows to keep ----

    def kept(self) -> dict[str, Any] | None:
        """Return what is known of the rows to keep, if they have been chosen."""
        try:
            kept: dict[str, Any] = read_json(self.folder / FOLDER / KEPT, _KEPT)
        except DataError:
            return None
        return kept if kept["identity"] == self.rows and kept["rows"] <= self.identity["count"] else None

    def choose(self) -> None:
        """Choose the rows to keep among all drawn ones, and write them to files of their own."""
        known = self.judging()
        if known is not None and all(known.about(block, known.source) for block in range(len(known.spans))):
            return
        begun, drawn, keep = time.perf_counter(), self.drawing, self.identity["keep"]
        scores = [self._scores(block) for block in range(len(drawn.spans))]
        total, passed = self.identity["count"], sum(map(len, scores))
        count = min(keep if isinstance(keep, int) else max(1, round(keep * total)), passed)
        masks = np.split(surest(np.concatenate(scores), count), np.cumsum([len(one) for one in scores])[:-1])
        content = {"identity": self.rows, "rows": count, "drawn": total, "seconds": time.perf_counter() - begun}
        kept = self._kept_rows(masks)
        write_json(self.folder / FOLDER / KEPT, content)  # says how the rows are divided into blocks
        judging = self.judging()
        assert judging is not None
        waiting: list[pa.Table] = []
        for block, (start, stop) in enumerate(judging.spans):
            while sum(map(len, waiting)) < stop - start:
                waiting.append(next(kept))
            rows = pa.concat_tables(waiting)
            about = {**judging.head(block), "spent": {}}
            write_rows(judging.path(block, "kept"), rows.slice(0, stop - start), about)
            waiting = [rows.slice(stop - start)]

    def _scores(self, block: int) -> np.ndarray:
        start, stop = self.drawing.spans[block]
        scores: np.ndarray = read_rows(self.drawing.path(block), stop - start, [SCORE])[SCORE].to_numpy()
        return scores

    def _kept_rows(self, masks: list[np.ndarray]) -> Iterator[pa.Table]:
        for block, mask in enumerate(masks):
            yield read_rows(self.drawing.path(block), len(mask)).filter(pa.array(mask))


# ---- the folder ------------------------------------------------------------------------------------------------------


def read_campaign(folder: Path) -> Campaign:
    """Return the campaign in a folder, without its stages."""
    if not (folder / CAMPAIGN).is_file():
        raise DataError(f"{shown(folder)} holds no campaign of fmwc screen: {CAMPAIGN} is missing")
    found = read_json(folder / CAMPAIGN, _CAMPAIGN)
    if found["identity"]["count"] > MOST_BLOCKS * found["block"]:
        raise DataError(f"{shown(folder / CAMPAIGN)} has more than {MOST_BLOCKS:,} blocks")
    return Campaign(folder, found["identity"], found["block"])


@contextmanager
def owned(campaign: Campaign, *, alone: bool, block: int = 0, force: bool = False) -> Iterator[Campaign]:
    """Own the folder of a campaign; yield the campaign with the blocks that the folder has already.

    Arguments:
        campaign: The campaign, with blocks of the default size.
        alone: Whether no other command may work on the folder. Tasks that share a campaign do so at the same time.
        block: The size of blocks that was asked for; 0 for none.
        force: Whether to replace another campaign, or to write into a folder with other files.
    """
    folder, where = campaign.folder, shown(campaign.folder)
    if force and not alone:
        raise OutputError("a share cannot replace another campaign; leave out --force, or --share")
    if folder.is_symlink() or (folder / FOLDER).is_symlink() or (folder.exists() and not folder.is_dir()):
        raise OutputError(f"{where} must be a folder, and neither it nor {FOLDER}/ in it a link; choose another --out")
    replaces = False
    if (folder / CAMPAIGN).exists():
        earlier = read_campaign(folder)
        try:
            asked = f"{where} holds another campaign; choose another --out, or add --force"
            require_same(earlier.identity, campaign.identity, asked)
            if block and earlier.block != block:
                raise MismatchError(f"{where} has blocks of {earlier.block} rows; leave out --block")
        except MismatchError:
            if not force:
                raise
            replaces = True
        else:
            campaign = Campaign(folder, campaign.identity, earlier.block, campaign.before, campaign.after)
    elif folder.exists() and not force and any(map(_strange, folder.iterdir())):
        raise OutputError(f"{where} is not empty; choose another --out, or add --force")
    try:
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{where} cannot be written to ({error.strerror}); choose another --out") from error
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        if alone:
            lock.acquire()
    except Timeout as error:
        raise OutputError(f"{where} is in use by another fmwc screen; wait for it, or choose another --out") from error
    try:
        if replaces:
            shutil.rmtree(folder / FOLDER)
            (folder / FOLDER).mkdir()
        if alone:  # what a killed command left behind
            for left in (*folder.glob(f"{TEMPORARY}*"), *(folder / FOLDER).glob(f"{TEMPORARY}*")):
                left.unlink(missing_ok=True)
        write_json(folder / CAMPAIGN, {"format": 1, "identity": campaign.identity, "block": campaign.block})
        yield campaign
    finally:
        lock.release()


def _strange(path: Path) -> bool:
    """Return whether a file is not of a campaign that was killed when it began."""
    return path.name not in (LOCK, FOLDER) and not path.name.startswith(TEMPORARY)


def status(folder: str | Path) -> list[dict[str, str]]:
    """Return what is done of a campaign, one row per segment. Works while it runs and after a kill.

    The rate is that of the last blocks that were written.
    """
    rows = []
    for segment in read_campaign(Path(folder)).segments():
        sizes = [stop - start for start, stop in segment.spans]
        done = sorted(set(range(len(sizes))) - set(segment.missing()), key=lambda block: _date(segment, block))
        recent = done[-RECENT:]
        seconds = _date(segment, recent[-1]) - _date(segment, recent[0]) if recent else 0.0
        rate = sum(sizes[block] for block in recent[1:]) / seconds if seconds > 0 else 0.0
        finished = sum(sizes[block] for block in done)
        rows.append(
            {
                "": segment.name,
                "blocks": f"{len(done):,} of {len(sizes):,}",
                "rows": f"{finished:,} of {sum(sizes):,}",
                "rows/s": f"{rate:,.1f}" if rate else "",
                "time left": _duration((sum(sizes) - finished) / rate) if rate and finished < sum(sizes) else "",
            }
        )
    return rows


def _date(segment: Segment, block: int) -> float:
    return segment.path(block).stat().st_mtime


def _duration(seconds: float) -> str:
    """Return a duration in words.

    >>> _duration(59), _duration(3725), _duration(200_000)
    ('59 s', '1 h 02 min', '55 h 33 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02d} min"
