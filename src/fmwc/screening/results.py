"""The results of a campaign: one table, the funnel, files of the best samples, and a page."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from fmwc.cli.sample import write_rows
from fmwc.crystals.files import links_to, write_structures
from fmwc.crystals.matching import unique
from fmwc.crystals.structures import Candidate, refusal
from fmwc.files import write_bytes, write_json, written
from fmwc.metrics.ranking import rate_of
from fmwc.provenance import commit
from fmwc.report import images
from fmwc.report.gallery import UNKNOWN, gallery
from fmwc.report.page import Section, Tile, png, write_page
from fmwc.report.reports import closing, kind_of
from fmwc.report.table import Table
from fmwc.sampling.trajectory import ranked_among
from fmwc.screening.blocks import Spent, read_rows
from fmwc.screening.campaign import Campaign
from fmwc.screening.rows import CONFIDENCE, CRYSTALS, INDEX, SCORE, candidates_of, names_of, samples_of
from fmwc.state import SINGLE

__all__ = ["Summary", "funnel", "write_results"]

WIDE = 32  # tables list coordinates only if a sample has at most this many
ENERGY = "e_above_hull"
LISTED = 50  # rows of the ranking on the page
NOT_LISTED = (  # columns that ranked.csv has in addition
    *(INDEX, "energy_per_atom", "energy_raw", "competing_phases", "own_phases", "decomposition", "sparse_hull", "twin"),
    *("twin_split", "distances_ok", "apart_ok", "charge_ok", "density_ok", "problem", "converged", "rmsd"),
)
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
        written: The files.
        note: What is left to do; empty if the campaign is complete.
    """

    folder: Path
    funnel: list[dict[str, Any]]
    written: list[Path]
    note: str = ""

    def rows(self) -> list[dict[str, str]]:
        """Return the funnel as text."""

        def shown(value: Any) -> str:
            if value is None or isinstance(value, str):
                return value or ""
            return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"

        return [{words: shown(row[name]) for name, words in FUNNEL.items()} for row in self.funnel]


def funnel(campaign: Campaign) -> list[dict[str, Any]]:
    """Return what each stage did, over all blocks that are done."""
    spent: dict[str, Spent] = {}
    for segment in campaign.segments():
        if segment.source and (kept := campaign.kept()) is not None:
            spent["keep"] = Spent(spent["check"].rows_out if spent else 0, kept["rows"], 0, kept["seconds"])
        for block in range(len(segment.spans)):
            for name, one in ((segment.about(block) or {}).get("spent") or {}).items():
                spent[name] = spent.get(name, Spent()) + Spent(**one)
    return [{"stage": name, **one._asdict()} for name, one in spent.items()]


def results(campaign: Campaign) -> Iterator[pa.Table]:
    """Yield the rows of the result, block by block."""
    last = campaign.last
    assert last is not None  # every block is done
    for block, (start, stop) in enumerate(last.spans):
        yield read_rows(last.path(block), stop - start)


class Best(NamedTuple):
    """What is known after one pass over the results.

    Attributes:
        rows: The best rows, the best first.
        columns: Those of their columns that have one value per row, and their places and names.
        total: The number of all rows.
        good: The number of good rows; `None` if they were not judged.
    """

    rows: pa.Table
    columns: dict[str, list[Any]]
    total: int
    good: int | None


def write_results(campaign: Campaign, budget: int) -> Summary:
    """Write results.parquet, funnel.json, ranked.csv, the best samples and report.html."""
    folder, stages = campaign.folder, funnel(campaign)
    best = _write_table(campaign, budget)
    if best.good is not None:
        judged = {"stage": _verdict(campaign), "rows_in": best.total, "rows_out": best.good}
        stages.append({**dict.fromkeys(Spent._fields), **judged})
    files = [folder / "results.parquet", write_json(folder / "funnel.json", {"stages": stages})]
    summary = Summary(folder, stages, files)
    if len(best.rows):
        files += [write_rows(folder / "ranked.csv", best.columns), *_write_best(campaign, best)]
        files.append(_write_page(campaign, best, summary))
    return summary


def _verdict(campaign: Campaign) -> str:
    """Return the column of the judge's verdict."""
    return "metastable" if campaign.kind == CRYSTALS else "good"


def _write_table(campaign: Campaign, budget: int) -> Best:
    """Write results.parquet block by block; return the best rows."""
    best, count, good, writer = None, 0, 0, None
    with written(campaign.folder / "results.parquet") as file, ExitStack() as stack:
        for rows in results(campaign):
            writer = writer or stack.enter_context(pq.ParquetWriter(file, rows.schema, compression="zstd"))
            writer.write_table(rows)
            best = rows.slice(0, 0) if best is None else best
            best, count = _first(pa.concat_tables([best, rows]), budget), count + len(rows)
            if _verdict(campaign) in rows.column_names:
                good += pc.sum(rows[_verdict(campaign)]).as_py() or 0
        if writer is None or best is None:  # no row was kept
            best = pa.table({INDEX: pa.array([], pa.int64())})
            stack.enter_context(pq.ParquetWriter(file, best.schema))
    judged = _verdict(campaign) in best.column_names
    return Best(best, _columns(campaign, best) if len(best) else {}, count, good if judged else None)


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


def _columns(campaign: Campaign, best: pa.Table) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {"place": [*range(1, len(best) + 1)], "name": [*names_of(best)]}
    for name, kind in zip(best.column_names, best.schema.types, strict=True):
        if not pa.types.is_nested(kind):
            columns[name] = best[name].to_pylist()
        elif name == SINGLE and kind.list_size <= WIDE:
            x = samples_of(best, {SINGLE: (kind.list_size,)})[SINGLE]
            columns |= {f"{SINGLE}_{i}": column.tolist() for i, column in enumerate(x.T)}
    if campaign.kind == CRYSTALS:
        given = candidates_of(best)
        columns["unique"] = unique(given, [not refusal(one) for one in given])
    return columns


def _write_best(campaign: Campaign, best: Best) -> list[Path]:
    """Write the best samples in the format of their domain."""
    folder, rows, shapes = campaign.folder, best.rows, campaign.identity["shapes"]
    if campaign.kind == CRYSTALS:
        return write_structures(folder, candidates_of(rows), best.columns)
    content = io.BytesIO()
    np.savez_compressed(content, **{INDEX: rows[INDEX].to_numpy()}, **samples_of(rows, shapes))  # type: ignore[arg-type]
    files = [write_bytes(folder / "best.npz", content.getvalue())]
    if (x := _pictures(rows, shapes)) is not None:
        failed = ~np.array(best.columns.get("good", [True] * len(rows)))
        asked = best.columns.get("y", [0] * len(rows))
        grid = images.sorted_grid(x, -np.arange(len(rows), dtype=float), failed, asked)
        files.append(write_bytes(folder / "best.png", png(grid)))
    return files


def _pictures(rows: pa.Table, shapes: Mapping[str, Sequence[int]]) -> np.ndarray | None:  # (B, H, W)
    """Return grey images with values in [0, 1], if samples are some."""
    shape = tuple(shapes.get(SINGLE, ()))
    if len(shape) != 3 or shape[0] != 1 or kind_of(shape) != "images":
        return None
    return np.clip(samples_of(rows, shapes)[SINGLE][:, 0], 0, 1)


# ---- the page --------------------------------------------------------------------------------------------------------


def _write_page(campaign: Campaign, best: Best, summary: Summary) -> Path:
    identity, size, drawn = campaign.identity, len(best.rows), summary.funnel[0]["rows_out"]
    judged = best.good is not None
    tiles = [Tile(f"{drawn:,}", "drawn"), Tile(f"{best.total:,}", "kept and judged" if judged else "kept", "sure")]
    if best.good is not None:
        share, _, interval = rate_of(best.good, best.total).partition(" ")
        tiles.append(Tile(share, f"{_verdict(campaign)} among those judged, 90 % interval {interval}"))
    by = "energy above the hull" if ENERGY in best.columns else "score, the surest first"
    lead = [f"{drawn:,} samples drawn, {best.total:,} kept. The best {size:,} are in files, ranked by {by}."]
    shown = {n: [_word(v) for v in values] for n, values in best.columns.items() if n not in NOT_LISTED}
    listed = Table.from_columns({name: values[:LISTED] for name, values in shown.items()})
    facts = {"checkpoint": identity["drawn"].get("checkpoint", ""), "seed": identity["seed"], "commit": commit()}
    facts |= {name: identity[name] for name in ("batch", "judge", "device", "torch", "fmwc")}
    seconds = "Seconds are summed over all workers. Network evaluations are those of the flow."
    sections = [
        Section("Funnel", seconds, tables=[Table(summary.rows())]),
        *_gallery(campaign, best, shown),
        Section("Ranking", f"The best {min(LISTED, size)} of {best.total:,}.", tables=[listed]),
        *closing([], _LIMITS, {name: str(value) for name, value in facts.items()}),
    ]
    return write_page(campaign.folder / "report.html", "Screening", sections, lead=lead, tiles=tiles)


def _word(value: Any) -> Any:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value


def _gallery(campaign: Campaign, best: Best, columns: Mapping[str, Sequence[Any]]) -> list[Section]:
    """Return the best samples as an interactive gallery; none for states of several channels."""
    shapes, verdict, rows = campaign.identity["shapes"], _verdict(campaign), best.rows
    links: list[str] = []
    if campaign.kind == CRYSTALS:
        kind, samples = "crystals", _cells(candidates_of(rows))
        samples |= {ENERGY: np.array(best.columns[ENERGY], float)} if ENERGY in best.columns else {}
        links = links_to(campaign.folder, campaign.folder, names_of(rows))
    elif (x := _pictures(rows, shapes)) is not None:
        kind, samples = "images", {"x": (255 * x).round().astype(np.uint8)}
    elif [*shapes] == [SINGLE]:
        flat = samples_of(rows, shapes)[SINGLE].reshape(len(rows), -1)
        kind, samples = "points" if flat.shape[1] == 2 else "vectors", {"x": flat}
    else:
        return []
    score, label = rows[SCORE].to_numpy(), CONFIDENCE if CONFIDENCE in best.columns else "rank"
    if label == CONFIDENCE:
        level = rows[CONFIDENCE].to_numpy()
    else:
        values = torch.tensor(score)
        level = ranked_among(values, values.sort().values).numpy()
    failed = None
    if best.good is not None:
        failed = np.array([UNKNOWN if good is None else not good for good in best.columns[verdict]])
    relaxed = ", after relaxation" * ("relaxed_cell" in rows.column_names)
    caption = f"The best samples{relaxed}, here ordered by {label}. Select one to see more of it."
    options: dict[str, Any] = {"score": score, "level": level, "label": label, "failed": failed, "links": links}
    options |= {"word": f"not {verdict}", "columns": columns}
    return [gallery("The best samples", caption, kind, samples, **options)]


def _cells(given: Sequence[Candidate]) -> dict[str, np.ndarray]:
    """Return structures as the arrays of a gallery; see :func:`fmwc.crystals.structures.arrays_of`."""
    return {
        "lattice": np.array([one.cell for one in given], np.float32),
        "first": np.cumsum([0, *map(len, given)]),
        "species": np.concatenate([one.numbers for one in given]).astype(np.uint8),
        "coord": np.concatenate([one.coords for one in given]).astype(np.float32),
    }
