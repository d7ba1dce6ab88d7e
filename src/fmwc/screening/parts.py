"""Put the parts of a campaign together (`fmwc merge`), and say how far a campaign is (`fmwc screen --status`)."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from fmwc.errors import DataError, MismatchError, UsageError
from fmwc.files import claimed, written
from fmwc.identity import require_same
from fmwc.readers import number, open_regular, read_json, record, shown, text, whole
from fmwc.screening.blocks import FOLDER, LARGEST, set_aside
from fmwc.screening.campaign import DRIVER, KEPT, MOST_BLOCKS, Campaign, read_campaign
from fmwc.screening.results import FUNNEL_FILE, Summary, segments, write_results

__all__ = ["merge", "status"]

_DRIVER = record({"driver": text(64), "pid": whole(), "host": text(255), "since": number(0)})


def merge(parts: Sequence[str | Path], *, out: str | Path, budget: int = 100, force: bool = False) -> Summary:
    """Put the parts of a campaign together: rows from the first to the last, each once.

    If rows are kept by a share or number, the same `fmwc screen` command without `--first` then chooses and judges
    them; otherwise the results are written.

    Arguments:
        parts: The folders of the parts, in any order.
        out: The folder of the whole campaign.
        budget: The number of best samples to write to files.
        force: Whether to write into a folder that is not empty.
    """
    found = sorted((read_campaign(Path(part)) for part in parts), key=lambda one: one.identity["first"])
    if not found:
        raise UsageError("name at least one part, as in fmwc merge part-0 part-1 --out campaign")
    for one in found:
        require_same(
            found[0].shared, one.shared, f"{shown(found[0].folder)} and {shown(one.folder)} do not belong together"
        )
        _require_whole(one)
    _require_no_gaps(found)
    count = sum(one.identity["count"] for one in found)
    layout = [row for one in found for row in one.layout]
    paths = [one.drawing.path(number) for one in found for number in range(len(one.drawing.spans))]
    if len(paths) > MOST_BLOCKS:
        raise DataError(
            f"the parts have {len(paths):,} blocks, more than {MOST_BLOCKS:,}; draw them with a larger --block"
        )
    whole = Campaign(Path(out), {**found[0].identity, "first": 0, "count": count}, layout)
    with claimed(whole.folder, "screen", whole.identity, force=force, resumes=True) as folder:
        whole.save()
        folder.note(*map(whole.drawing.path, range(len(paths))))  # also those that are there already
        for block, path in enumerate(paths):
            if whole.drawing.about(block, whole=True) is None:
                _copy(path, whole.drawing.path(block))
        if whole.waits:
            command = f"fmwc screen … -n {count} --out {shown(out)}"
            note = f"now keep and judge: {command}, with the other options of the parts but without --first"
            return Summary(whole.folder, [], {}, [], note)
        return write_results(whole, budget)


def _require_whole(part: Campaign) -> None:
    drawing = part.drawing
    missing = [block for block in range(len(drawing.spans)) if drawing.about(block, whole=True) is None]
    if missing:
        aside = set_aside(drawing)
        why = f"{len(aside)} set aside; add --retry to its command" if aside else "run its command again"
        raise DataError(
            f"{shown(part.folder)} is not complete: {len(missing)} of {len(drawing.spans)} blocks are missing or "
            f"damaged, the first of them {drawing.path(missing[0]).name} ({why})"
        )


def _require_no_gaps(found: Sequence[Campaign]) -> None:
    if first := found[0].identity["first"]:
        raise MismatchError(f"the rows from 0 to {first - 1} are missing; add the part that holds them")
    for one, after in pairwise(found):
        stop, start = one.identity["first"] + one.identity["count"], after.identity["first"]
        if start < stop:
            raise MismatchError(
                f"{shown(one.folder)} and {shown(after.folder)} both hold the rows from {start} on; leave out one"
            )
        if start > stop:
            raise MismatchError(f"the rows from {stop} to {start - 1} are missing; add the part that holds them")


def _copy(source: Path, path: Path) -> None:
    with open_regular(source, LARGEST) as content, written(path) as file:
        shutil.copyfileobj(content, file)


# ---- status ----------------------------------------------------------------------------------------------------------


def status(folder: str | Path) -> tuple[list[dict[str, str]], list[str]]:
    """Return what is done of a campaign: one row per segment, and remarks. Works while it runs and after a kill."""
    campaign = read_campaign(Path(folder))
    driver: dict[str, Any] = {"driver": "", "since": 0.0}
    with suppress(DataError):
        driver = read_json(campaign.folder / FOLDER / DRIVER, _DRIVER)
    rows, todo, aside = [], 0, []
    for segment in segments(campaign):
        sizes = [stop - start for start, stop in segment.spans]
        done, now, since = [], 0, driver["since"]
        failed = set_aside(segment)
        aside += [f"{segment.name} block {block} was set aside: {reason}" for block, reason in failed.items()]
        if segment.source:  # it began when the rows to keep were chosen
            since = max(since, (campaign.folder / FOLDER / KEPT).stat().st_mtime)
        latest = since
        for block, size in enumerate(sizes):
            if (about := segment.about(block)) is not None:
                done.append(size)
                if about["driver"] == driver["driver"]:
                    now, latest = now + size, max(latest, segment.path(block).stat().st_mtime)
            else:
                todo += block not in failed
        rate = now / (latest - since) if latest > since else 0.0
        left = sum(sizes) - sum(done)
        rows.append(
            {
                "": segment.name,
                "blocks": f"{len(done):,} of {len(sizes):,}",
                "rows": f"{sum(done):,} of {sum(sizes):,}",
                "rows/s": f"{rate:,.1f}" if rate else "",
                "time left": _duration(left / rate) if rate and left else "",
            }
        )
    return rows, [*_state(campaign, driver, todo, len(aside)), *aside]


def _state(campaign: Campaign, driver: dict[str, Any], todo: int, aside: int) -> list[str]:
    """Return whether a campaign is finished, or its driver runs."""
    unknown = campaign.last is None
    part = unknown and (campaign.folder / FUNNEL_FILE).exists()
    if not (campaign.folder / FOLDER).is_dir():
        return [f"{FOLDER}/ was deleted, so the command would start over; the results beside it stay valid"]
    if not todo and (part or not unknown):
        finished = f"finished, {aside} set aside; add --retry to the command to try again" if aside else "complete"
        return [finished + "; put all parts together with fmwc merge" * part]
    running = [_running(driver)] if driver["driver"] else []
    return [*running, *["the rows to keep are chosen when all are drawn"] * unknown]


def _running(driver: dict[str, Any]) -> str:
    """Return whether the last driver still runs."""
    where = f"process {driver['pid']} on {shown(driver['host'])}"
    since = f"started {_duration(time.time() - driver['since'])} ago"
    if driver["host"] != socket.gethostname() or os.name != "posix":
        return f"last run by {where}, {since}"
    try:
        os.kill(driver["pid"], 0)
    except (ProcessLookupError, OverflowError):
        return f"not running (last by {where}, {since}); repeat the command to go on"
    except PermissionError:
        pass
    return f"running ({where}, {since})"


def _duration(seconds: float) -> str:
    """Return a duration in words.

    >>> _duration(59), _duration(3725), _duration(200_000)
    ('59 s', '1 h 02 min', '2 d 07 h')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"
