"""The results of a campaign: one table, the funnel, files of the best samples, and a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fmwc.cli.sample import write_rows
from fmwc.crystals.files import links_to, write_structures
from fmwc.crystals.matching import unique
from fmwc.crystals.structures import arrays_of, refusal
from fmwc.files import note, write_bytes, write_json, written
from fmwc.metrics.ranking import rate
from fmwc.provenance import commit
from fmwc.report import images
from fmwc.report.gallery import UNKNOWN, gallery
from fmwc.report.page import Section, Tile, png, write_page
from fmwc.report.reports import closing, kind_of
from fmwc.report.table import Table
from fmwc.screening.blocks import Segment, Spent, read_rows, set_aside
from fmwc.screening.campaign import Campaign
from fmwc.screening.rows import CONFIDENCE, CRYSTALS, INDEX, SCORE, candidates_of, crystals_in, names_of, samples_of
from fmwc.state import SINGLE

__all__ = ["GOOD", "Summary", "funnel", "write_results"]

GOOD = {CRYSTALS: "metastable"}  # the column of the judge's verdict, by domain
ENERGY = "e_above_hull"
LISTED = 50  # rows of the ranking on the page
FUNNEL = {
    "stage": "stage",
    "rows_in": "rows in",
    "rows_out": "rows out",
    "evaluations": "network evaluations",
    "seconds": "worker seconds",
}
_LIMITS = (
    "The best samples were selected by the numbers shown, so these numbers look better than those of a new "
    "measurement: the more samples were screened, the more so.",
)


@dataclass(frozen=True)
class Summary:
    """The outcome of a campaign.

    Attributes:
        folder: Its folder.
        funnel: What each stage did: its name, rows in and out, network evaluations, and seconds of all workers. The
            last row says how many samples the judge found good.
        set_aside: Blocks that failed three times, and why.
        written: The files.
        note: What is left to do; empty if the campaign is complete.
    """

    folder: Path
    funnel: list[dict[str, Any]]
    set_aside: dict[str, str]
    written: list[Path]
    note: str = ""

    def rows(self) -> list[dict[str, str]]:
        """Return the funnel as text."""

        def shown(value: Any) -> str:
            if value is None or isinstance(value, str):
                return value or ""
            return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"

        return [{words: shown(row[name]) for name, words in FUNNEL.items()} for row in self.funnel]


def segments(campaign: Campaign) -> list[Segment]:
    """Return the segments of a campaign that are known."""
    judging = campaign.judging()
    return [campaign.drawing, *([judging] if judging is not None else [])]


def aside(campaign: Campaign) -> dict[str, str]:
    """Return the blocks that were set aside, and why."""
    return {
        f"{segment.name}-{block:05d}": reason
        for segment in segments(campaign)
        for block, reason in set_aside(campaign.folder, segment.name).items()
    }


def funnel(campaign: Campaign) -> list[dict[str, Any]]:
    """Return what each stage did, over all blocks that are done."""
    spent: dict[str, Spent] = {}
    for segment in segments(campaign):
        if segment.source and (kept := campaign.kept()) is not None:
            spent["keep"] = Spent(spent["check"].rows_out if spent else 0, kept["rows"], 0, kept["seconds"])
        for block in range(len(segment.spans)):
            for name, one in ((segment.about(block) or {}).get("spent") or {}).items():
                spent[name] = spent.get(name, Spent()) + Spent(**one)
    return [{"stage": name, **one._asdict()} for name, one in spent.items()]


def results(campaign: Campaign) -> Iterator[pa.Table]:
    """Yield the rows of the result, block by block."""
    last = campaign.last
    for block, (start, stop) in enumerate(last.spans if last is not None else ()):
        if last is not None and last.about(block) is not None:
            yield read_rows(last.path(block), stop - start)


def write_results(campaign: Campaign, budget: int) -> Summary:
    """Write results.parquet, funnel.json, ranked.csv, the best samples and report.html."""
    folder, stages, missing = campaign.folder, funnel(campaign), aside(campaign)
    if campaign.last is None:
        written_files = [write_json(folder / "funnel.json", {"stages": stages, "set_aside": missing})]
        return Summary(folder, stages, missing, written_files, "a part: put all parts together with fmwc merge")
    best, good = _write_table(campaign, budget)
    if good is not None:
        stages.append({"stage": GOOD.get(campaign.kind, "good"), "rows_in": good[1], "rows_out": good[0]})
        stages[-1] |= {"evaluations": None, "seconds": None}
    files = [folder / "results.parquet", write_json(folder / "funnel.json", {"stages": stages, "set_aside": missing})]
    summary = Summary(folder, stages, missing, files)
    if budget and best is not None and len(best):
        files += _write_best(campaign, best)
        files.append(_write_page(campaign, best, summary, good))
    return summary


def _write_table(campaign: Campaign, budget: int) -> tuple[pa.Table | None, tuple[int, int] | None]:
    """Write results.parquet block by block; return the best rows, and how many are good of how many judged."""
    best, writer, counts = None, None, np.zeros(2, int)
    verdict = GOOD.get(campaign.kind, "good")
    with written(campaign.folder / "results.parquet") as file:
        for rows in results(campaign):
            if writer is None:
                writer, best = pq.ParquetWriter(file, rows.schema, compression="zstd"), rows.slice(0, 0)
            writer.write_table(rows)
            best = _first(pa.concat_tables([best, rows]), budget)
            if verdict in rows.column_names:
                counts += pc.sum(rows[verdict]).as_py() or 0, len(rows)
        if writer is None:
            writer = pq.ParquetWriter(file, pa.schema({INDEX: pa.int64()}))
        writer.close()
    return best, tuple(counts.tolist()) if best is not None and verdict in best.column_names else None


def _first(rows: pa.Table, count: int) -> pa.Table:
    """Return the best rows, the best first: by energy above the hull if there is one, or else good ones by score."""
    keys = {}
    if ENERGY in rows.column_names:
        keys[ENERGY] = pc.if_else(pc.is_finite(rows[ENERGY]), rows[ENERGY], np.inf)
    elif "good" in rows.column_names:
        keys["failed"] = pc.invert(rows["good"])
    keys |= {SCORE: rows[SCORE], INDEX: rows[INDEX]}
    order = pc.sort_indices(pa.table(keys), [(name, "ascending") for name in keys])
    return rows.take(order.slice(0, count))


# ---- the best --------------------------------------------------------------------------------------------------------


def _write_best(campaign: Campaign, best: pa.Table) -> list[Path]:
    """Write ranked.csv, and the best samples in the format of their domain."""
    folder, shapes = campaign.folder, campaign.identity["shapes"]
    columns = ranking(campaign, best)
    files = [write_rows(folder / "ranked.csv", columns)]
    if campaign.kind == CRYSTALS:
        return [*files, *write_structures(folder, candidates_of(best), columns)]
    note(path := folder / "best.npz")
    with written(path) as file:
        np.savez_compressed(file, **{INDEX: best[INDEX].to_numpy()}, **samples_of(best, shapes))  # type: ignore[arg-type]
    files.append(path)
    if (x := _pictures(best, shapes)) is not None:
        level = -np.arange(len(best), dtype=float)
        failed = ~best["good"].to_numpy() if "good" in best.column_names else np.zeros(len(best), bool)
        asked = best["y"].to_numpy() if "y" in best.column_names else np.zeros(len(best), int)
        grid = images.sorted_grid(x, level, failed, asked)
        files.append(write_bytes(folder / "best.png", png(grid)))
    return files


def ranking(campaign: Campaign, best: pa.Table) -> dict[str, list[Any]]:
    """Return the columns of ranked.csv: place, name, and all columns with one value per row."""
    columns: dict[str, list[Any]] = {"place": [*range(1, len(best) + 1)], "name": [*names_of(best)]}
    for name, kind in zip(best.column_names, best.schema.types, strict=True):
        if not pa.types.is_nested(kind):
            columns[name] = best[name].to_pylist()
        elif name == SINGLE and pa.types.is_fixed_size_list(kind) and kind.list_size <= 32:
            x = samples_of(best, {SINGLE: (kind.list_size,)})[SINGLE]
            columns |= {f"{SINGLE}_{i}": column.tolist() for i, column in enumerate(x.T)}
    if campaign.kind == CRYSTALS:
        given = candidates_of(best)
        columns["unique"] = unique(given, [not refusal(one) for one in given])
    return columns


def _pictures(best: pa.Table, shapes: Mapping[str, Sequence[int]]) -> np.ndarray | None:  # (B, H, W)
    """Return grey images scaled to [0, 1], if samples are some."""
    shape = tuple(shapes.get(SINGLE, ()))
    if len(shape) != 3 or shape[0] != 1 or kind_of(shape) != "images":
        return None
    return np.clip(samples_of(best, shapes)[SINGLE][:, 0], 0, 1)


# ---- the page --------------------------------------------------------------------------------------------------------


def _write_page(campaign: Campaign, best: pa.Table, summary: Summary, good: tuple[int, int] | None) -> Path:
    stages = {row["stage"]: row for row in summary.funnel}
    identity = campaign.identity
    drawn, kept = stages["draw"]["rows_out"], next(iter(results_rows(summary)), 0)
    tiles = [Tile(f"{drawn:,}", "drawn"), Tile(f"{kept:,}", "kept and judged" if good else "kept", "sure")]
    if good and good[1]:
        share = np.arange(good[1]) < good[0]
        word = GOOD.get(campaign.kind, "good")
        value = rate(share) if good[1] <= 10**6 else f"{good[0] / good[1]:.1%}"
        tiles.append(Tile(value.partition(" ")[0], f"{word} among those judged {value.partition(' ')[2]}"))
    by = "energy above the hull" if ENERGY in best.column_names else "score, surest first"
    lead = [
        f"{drawn:,} samples drawn, {kept:,} kept, the best {len(best):,} written to files, ranked by {by}.",
        *([f"{len(summary.set_aside)} blocks were set aside; their samples are missing."] if summary.set_aside else []),
    ]
    columns = ranking(campaign, best)
    rows = Table.from_columns({name: list(values)[:LISTED] for name, values in columns.items()})
    facts = {"checkpoint": identity["drawn"].get("checkpoint", ""), "seed": identity["seed"], "commit": commit()}
    facts |= {name: identity[name] for name in ("batch", "judge", "device", "torch", "fmwc")}
    shown = _gallery(campaign, best, columns)
    sections = [
        Section("Funnel", "Seconds are summed over all workers.", tables=[Table(summary.rows())]),
        *([shown] if shown is not None else []),
        Section("Ranking", f"The best {min(LISTED, len(best))}; ranked.csv holds all.", tables=[rows]),
        *closing([], _LIMITS, {name: str(value) for name, value in facts.items()}),
    ]
    return write_page(campaign.folder / "report.html", "Screening", sections, lead=lead, tiles=tiles)


def results_rows(summary: Summary) -> Iterator[int]:
    """Yield the number of rows after the last stage that drops some."""
    for name in ("keep", "check"):
        yield from (row["rows_out"] for row in summary.funnel if row["stage"] == name)


def _gallery(campaign: Campaign, best: pa.Table, columns: Mapping[str, Sequence[Any]]) -> Section | None:
    """Return the best samples as an interactive gallery; `None` for states of several channels."""
    shapes, verdict = campaign.identity["shapes"], GOOD.get(campaign.kind, "good")
    links: list[str] = []
    if campaign.kind == CRYSTALS:
        kind, samples = "crystals", arrays_of(crystals_in(best))
        links = links_to(campaign.folder, campaign.folder, names_of(best))
    elif (x := _pictures(best, shapes)) is not None:
        kind, samples = "images", {"x": (255 * x).round().astype(np.uint8)}
    elif [*shapes] == [SINGLE]:
        flat = samples_of(best, shapes)[SINGLE].reshape(len(best), -1)
        kind, samples = "points" if flat.shape[1] == 2 else "vectors", {"x": flat}
    else:
        return None
    score, label = best[SCORE].to_numpy(), CONFIDENCE if CONFIDENCE in best.column_names else "rank"
    level = best[CONFIDENCE].to_numpy() if label == CONFIDENCE else 1 - score.argsort().argsort() / len(score)
    failed = None
    if verdict in best.column_names:
        failed = np.array([UNKNOWN if good is None else not good for good in best[verdict].to_pylist()])
    hidden = ("place", INDEX, SCORE, CONFIDENCE, "x_0", "x_1")
    caption = f"The best samples, ordered by {label}. As they were drawn, before any relaxation."
    return gallery(
        "The best samples",
        caption,
        kind,
        samples,
        score=score,
        level=level,
        label=label,
        failed=failed,
        word=f"not {verdict}",
        columns={name: list(values) for name, values in columns.items() if name not in hidden},
        links=links,
    )
