"""The results of a campaign: one table, the funnel, and files of the best samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from fmwc.files import write_json, written
from fmwc.screening.blocks import Segment, Spent, read_rows, set_aside
from fmwc.screening.campaign import Campaign
from fmwc.screening.stages import Draw

__all__ = ["Summary", "funnel", "write_results"]


@dataclass(frozen=True)
class Summary:
    """The outcome of a campaign.

    Attributes:
        folder: Its folder.
        funnel: One row per stage: its name, rows in and out, network evaluations and seconds of all workers.
        set_aside: Blocks that failed three times, and why.
        written: The files.
    """

    folder: Path
    funnel: list[dict[str, Any]]
    set_aside: dict[str, str]
    written: list[Path]


def funnel(campaign: Campaign) -> list[dict[str, Any]]:
    """Return what each stage did, over all blocks that are done."""
    spent: dict[str, Spent] = {}

    def add(segment: Segment) -> None:
        for block in range(len(segment.spans)):
            for name, one in ((segment.about(block) or {}).get("spent") or {}).items():
                spent[name] = spent.get(name, Spent()) + Spent(**one)

    add(campaign.drawing)
    if (judging := campaign.judging()) is not None and (kept := campaign.kept()) is not None:
        spent["keep"] = Spent(spent["check"].rows_out, kept["rows"], 0, kept["seconds"])
        add(judging)
    return [{"stage": name, **one._asdict()} for name, one in spent.items()]


def write_results(campaign: Campaign, budget: int, drawing: Draw) -> Summary:
    """Write results.parquet, funnel.json and the best samples."""
    rows = funnel(campaign)
    aside = {
        f"{segment.name}-{block:05d}": reason
        for segment in (campaign.drawing, campaign.judging())
        if segment is not None
        for block, reason in set_aside(campaign.folder, segment.name).items()
    }
    path, last = campaign.folder / "results.parquet", campaign.last
    files = [write_json(campaign.folder / "funnel.json", {"stages": rows, "set_aside": aside})]
    if last is not None:
        writer = None
        with written(path) as file:
            for block, (start, stop) in enumerate(last.spans):
                if last.about(block) is not None:
                    table = read_rows(last.path(block), stop - start)
                    writer = writer or pq.ParquetWriter(file, table.schema, compression="zstd")
                    writer.write_table(table)
            if writer is not None:
                writer.close()
        files.append(path)
    return Summary(campaign.folder, rows, aside, files)
