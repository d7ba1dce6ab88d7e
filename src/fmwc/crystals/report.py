"""The report of a run of crystals: structures sorted by confidence, and the quality of the ranking."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten

import numpy as np

from fmwc.crystals import Judgement, figures
from fmwc.crystals.drawing import formula
from fmwc.crystals.figures import METASTABLE
from fmwc.crystals.structures import CHANNELS, DOUBT, Crystals, arrays_of, crystals_of
from fmwc.errors import ShapeError, UsageError
from fmwc.metrics.ranking import ranking_text, rate, rate_kept
from fmwc.report.gallery import UNKNOWN, gallery, packed_curves
from fmwc.report.page import Picture, Section, Tile, write_page
from fmwc.report.reports import ENOUGH, closing, tile
from fmwc.report.run import array, describe, ordering_of
from fmwc.report.table import MISSING, Table
from fmwc.sampling import SCORES, Trajectory
from fmwc.sampling.trajectory import names_of
from fmwc.state import channels

__all__ = ["Ranked", "sections", "write_report"]

KEPT = 0.1  # share of the structures in the main numbers, which a laboratory could check
SUREST, DOUBTFUL = 20, 10  # structures listed from each end
RULES = {"distances_ok": "distances", "charge_ok": "charge", "density_ok": "density"}  # rules of validity


class Ranked:
    """A run of crystals prepared for a report.

    Attributes:
        crystals: The structures.
        energy: Energy above the hull, eV/atom, `(N,)`; NaN if there is none.
        apart: Whether no atoms overlap, `(N,)`.
        ordering: The confidence, or the rank within the run.
        scores: Scores by readable name, `(N,)` each; higher is more doubtful. The run's default score comes first.
        times: Times of the readings, `(R, N)`.
        std: ‖σ_t‖ at these times by channel, `(R, N)` each.
        doubt: The share of all atoms with less doubt, for each atom of all structures; `None` if it was not computed.
        by: The readable name of the default score.
    """

    def __init__(self, run: Trajectory, energy: Sequence[float], apart: Sequence[bool]) -> None:
        if "atoms" not in run.cond:
            raise UsageError("a report needs the number of atoms of each structure; sample with cond={'atoms': counts}")
        if not len(run) == len(energy) == len(apart):
            raise ShapeError(
                f"a report needs one judgement per structure; got {len(run)} structures and {len(energy)} judgements"
            )
        self.crystals = crystals_of(run)
        self.energy, self.apart = np.asarray(energy, dtype=float), np.asarray(apart, dtype=bool)
        self.ordering = ordering_of(run)
        self.confidence = array(self.ordering.values)
        present = [channel for channel in CHANNELS if len(run.times) and channel in channels(run.var)]
        self.scores, self.by = _scores(run, present)
        self.score = next(iter(self.scores.values()))
        self.order = np.argsort(self.score, kind="stable")  # by the score, because confidences have ties
        self.good = self.energy <= METASTABLE
        self.doubt = _doubt(run, self.crystals)
        self.times = array(run.times)
        self.std = {channel: array(run._total(channel).sqrt()) for channel in present}


def _doubt(run: Trajectory, crystals: Crystals) -> np.ndarray | None:
    if DOUBT not in run.evidence:
        return None
    values = run.evidence[DOUBT].cpu()[crystals.numbers > 0]
    return array(values.argsort().argsort().double() / max(1, len(values) - 1))


def _scores(run: Trajectory, present: Sequence[str]) -> tuple[dict[str, np.ndarray], str]:
    """Return the scores to compare, by readable name, and the readable name of the default score.

    The default score is compared with the same score of each channel alone and of all channels together.
    """
    words = figures.CHANNELS
    single = len(names_of(run.default_score)) == 1
    channel, _, score = run.default_score.rpartition("/") if single else ("", "", run.default_score)
    kind, _, window = score.partition("@")
    compared = score if kind in SCORES else "integrated"  # a score that each channel has
    scores = {f"default: {words.get(channel, channel) or 'all channels'}": run.score()}
    scores |= {words[c]: run.score(compared, channel=c) for c in present if run.standard or c != channel}
    if channel and present:
        scores["all channels"] = run.score(compared)
    name = describe(run.default_score)
    if window and kind == "integrated":
        name = f"uncertainty from t = {window.replace('-', ' to ')}"
    of = f" of the {words.get(channel, channel)}" if channel else ""
    among = f", among structures with the same {run.standard.cond}" if run.standard is not None else ""
    return {label: array(values) for label, values in scores.items()}, f"{name}{of}{among}"


def sections(run: Ranked) -> list[Section]:
    """Return the sections with figures: structures, precision, and variance by channel."""
    return [_sheet(run), *_curves(run)]


def _sheet(run: Ranked) -> Section:
    label = run.ordering.label
    order = run.crystals, run.confidence, run.energy, run.apart, run.score
    caption = (
        "Structures from the surest to the most doubtful, row by row; the small number is the rank. The colour of the "
        f"frame shows the energy of the structure as generated: metastable (at most {METASTABLE} eV/atom above the "
        "convex hull of known crystals), higher, or invalid. Structures with overlapping atoms are invalid, whatever "
        "their energy. The curves below cover all structures. If the confidence is useful, the energy rises and the "
        "share of metastable structures falls from left to right."
    )
    alt = (
        "Unit cells of generated structures from the surest to the most doubtful, framed by their energy above the "
        "hull; below, that energy and the share of metastable structures along the ranking."
    )
    figure = figures.sorted_by_confidence(*order, rows=4, label=label)
    return Section(f"Structures by {label}", caption, pictures=[Picture("crystals", alt, figure)])


def _curves(run: Ranked) -> list[Section]:
    drawn = []
    if len(run.good) >= ENOUGH:
        caption = (
            "The share of metastable structures if only the surest are kept. A random order follows the dashed line. "
            f"The run is ranked by {run.by}; other scores are shown for comparison."
        )
        alt = "Share of metastable structures among those kept, against the share kept."
        picture = Picture("precision", alt, figures.precision_curve(run.scores, run.good))
        drawn.append(Section("Share of metastable structures among the surest", caption, pictures=[picture]))
    if len(run.times):
        caption = (
            "Atom types, coordinates and lattice are generated together but determined at different times. A dot "
            "marks the time at which the uncertainty of a channel is highest."
        )
        alt = "Uncertainty of the velocity of atom types, coordinates and lattice over time."
        picture = Picture("channels", alt, figures.channel_variances(run.times, run.std, run.confidence))
        drawn.append(Section("Uncertainty over time, by channel", caption, pictures=[picture]))
    return drawn


def _gallery(run: Ranked, judgement: Judgement, links: Sequence[str]) -> Section:
    words = {"e_above_hull": "energy above the hull, eV/atom", "atoms": "atoms", "problem": "problem"}
    problems = [shorten(problem or "", 200, placeholder=" …") for problem in judgement["problem"]]
    formulas = [
        formula(numbers[:count].tolist())
        for numbers, count in zip(run.crystals.numbers, run.crystals.atoms.tolist(), strict=True)
    ]
    return gallery(
        f"Structures by {run.ordering.label}",
        "Structures from the surest to the most doubtful, with their energy above the convex hull of known crystals. A "
        f"ring marks metastable structures (at most {METASTABLE} eV/atom above the hull), a cross all others; those "
        "whose hull is unknown have no mark. Select a structure to turn its cell; move the slider to discard the most "
        "doubtful ones.",
        "crystals",
        {**arrays_of(run.crystals), "e_above_hull": run.energy, **({} if run.doubt is None else {"doubt": run.doubt})},
        score=run.score,
        level=run.confidence,
        label=run.ordering.label,
        failed=np.where([value is None for value in judgement["metastable"]], UNKNOWN, ~run.good),
        word="not metastable",
        columns={
            "formula": formulas,
            "name": judgement["name"],
            "e_above_hull": run.energy,
            "atoms": run.crystals.atoms.tolist(),
            "valid": judgement["valid"],
            **{
                name: judgement[name]
                for name in ("decomposition", "sparse_hull", "twin")
                if any(judgement.columns.get(name, ()))
            },
            **({"problem": problems} if any(problems) else {}),
        },
        titles=words,
        links=links,
        curves=packed_curves(run.times, run.std, run.score) if run.std else None,
    )


def _lead(run: Ranked) -> tuple[list[str], list[Tile]]:
    """Return the first paragraphs of the page and its main numbers."""
    good, known = run.good, run.energy[np.isfinite(run.energy)]
    lead = [f"{len(good):,} generated structures, each with its {run.ordering.label}.", f"The ranking is by {run.by}."]
    lead += [f"Ordered by {run.ordering.note}."] if run.ordering.note else []
    if not len(known):
        return [f"{lead[0]} None of them could be judged.", *lead[1:]], []
    mean = Tile(f"{known.mean():.2f}", f"eV/atom above the hull, mean of the {len(known):,} judged structures")
    if not good.any():
        return [f"{lead[0]} None of them is within {METASTABLE} eV/atom of the hull.", *lead[1:]], [mean]
    lift = ranking_text(-run.score, good, "metastable", "lift")
    return lead, [
        tile(rate(good), f"metastable among all {len(good):,} structures"),
        tile(rate_kept(run.score, good, KEPT), f"metastable among the surest {KEPT:.0%}", "sure"),
        tile(lift, f"lift: AUPRC relative to a random order (best {1 / good.mean():.1f})"),
        mean,
    ]


def _list(run: Ranked, judgement: Judgement) -> Section:
    """Return tables of the surest and the most doubtful structures, or of all structures if there are few."""
    level = "confidence" if run.ordering.label == "confidence" else "rank in [0, 1]"

    def line(place: int, index: int) -> dict[str, str]:
        count = int(run.crystals.atoms[index])
        broken = [words for rule, words in RULES.items() if not judgement[rule][index]]
        energy = run.energy[index]
        return {
            "rank": f"{place + 1:,}",
            "name": str(judgement["name"][index]),
            "formula": formula(run.crystals.numbers[index, :count].tolist()) or MISSING,
            "atoms": f"{count}",
            level: f"{run.confidence[index]:.3f}",
            "eV/atom above hull": f"{energy:.3f}".replace("-", "−") if np.isfinite(energy) else MISSING,
            "valid": "yes" if judgement["valid"][index] else f"no: {', '.join(broken)}" if broken else "no",
            "problem": shorten(
                judgement["problem"][index] or "", 64, placeholder=" …"
            ),  # the CSV table has the full text
        }

    lines = [line(place, int(index)) for place, index in enumerate(run.order)]
    caption = (
        "Structures are named by their number in the order of sampling. A valid structure satisfies three rules, each "
        "a column of the table: no two atoms are closer than half the sum of their radii (distances_ok), charges "
        "balance by SMACT's rules (charge_ok), and the density lies between 0.01 and 25 g/cm³ (density_ok). The column "
        "apart_ok is CDVAE's weaker rule: no two atoms closer than 0.5 Å."
    )
    if not any(line["problem"] for line in lines):
        lines = [{name: cell for name, cell in line.items() if name != "problem"} for line in lines]
    if len(lines) <= SUREST + DOUBTFUL:
        return Section("All structures, surest first", caption, tables=[Table(lines)])
    ends = [Table(lines[:SUREST], f"The {SUREST} surest"), Table(lines[-DOUBTFUL:], f"The {DOUBTFUL} most doubtful")]
    return Section("Surest and most doubtful structures", caption, tables=ends)


def write_report(
    out: Path,
    run: Trajectory,
    judgement: Judgement,
    *,
    numbers: list[dict[str, str]],
    provenance: dict[str, str],
    links: Sequence[str] = (),
) -> Path:
    """Write `report.html` of a run of crystals.

    Arguments:
        out: The folder.
        run: Structures with their variance and their numbers of atoms, `atoms`.
        judgement: The results of the judge, in the same order.
        numbers: Rows of the table.
        provenance: Commit, device, seed and time.
        links: The address of a file of each structure.
    """
    ranked = Ranked(run, judgement["e_above_hull"], judgement["distances_ok"])
    lead, tiles = _lead(ranked)
    return write_page(
        out / "report.html",
        "Crystals: confidence of each structure",
        [
            _gallery(ranked, judgement, links),
            *_curves(ranked),
            _list(ranked, judgement),
            *closing(numbers, _LIMITS, provenance),
        ],
        lead=lead,
        tiles=tiles,
    )


_LIMITS = (
    "Energies are predictions of an energy model for the structures as generated, without relaxation. Its errors are "
    "largest for unusual arrangements of atoms. A structure with a high energy may relax to a good one.",
    "The hull contains a part of the Materials Project. If it lacks a competing phase, a structure looks more stable "
    "than it is.",
    "The ranking mixes structures of different size and chemistry. A score that favours few atoms or common elements "
    "benefits from that alone; compare it with a ranking by the number of atoms.",
    "The numbers come from one run with one seed and do not show the variation between seeds.",
)
