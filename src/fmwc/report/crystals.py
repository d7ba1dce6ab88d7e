"""The report of a run of crystals: the structures in the order the model trusts them, and what that order is worth."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fmwc.data.crystals import Crystals
from fmwc.errors import CheckpointError, DataError, ShapeError, UsageError
from fmwc.files import write_bytes
from fmwc.metrics.crystals import Judgement
from fmwc.metrics.headline import ranking_text, rate, rate_kept
from fmwc.readers import read_csv
from fmwc.recipes.comparing import cells, from_results
from fmwc.recipes.crystals.reading import CHANNELS, crystals_of
from fmwc.recipes.crystals.recipe import SCORE
from fmwc.report import crystals_drawn, figures, tables
from fmwc.report.crystals_drawn import METASTABLE
from fmwc.report.elements import formula
from fmwc.report.page import Section, tiles, write_page
from fmwc.report.paper.table import NONE, dig
from fmwc.report.plates import ENOUGH, Plate, closing, noted, tile
from fmwc.report.run import NAMES, level_of
from fmwc.sampling import SCORES, Trajectory
from fmwc.sampling.scores import names_of
from fmwc.state import channels

__all__ = ["write_figures", "write_report"]

KEPT = 0.1  # the headline's share: what a laboratory can afford to check
SUREST, DOUBTFUL = 20, 10  # structures listed from either end
RULES = {"distances_ok": "distances", "charge_ok": "charge", "density_ok": "density"}  # of being valid


class Ranked(NamedTuple):
    """A run of crystals made ready to report on.

    Attributes:
        crystals: The structures.
        scores: High = doubtful, `(N,)` each, by a reader's name; the run's own comes first.
        confidence: In [0, 1], `(N,)`: the rank within the run where confidence is withheld.
        energy: Above the hull, eV/atom, `(N,)`; NaN where there is none.
        apart: Which have no atoms inside one another, `(N,)`.
        times: When the variance was read, `(R, N)`.
        std: ‖σ_t‖ there by channel, `(R, N)` each.
        by: What it is ranked by, in words.
        called, note: What `confidence` is, and why, as :class:`fmwc.report.run.Level` has it.
    """

    crystals: Crystals
    scores: dict[str, np.ndarray]
    confidence: np.ndarray
    energy: np.ndarray
    apart: np.ndarray
    times: np.ndarray
    std: dict[str, np.ndarray]
    by: str
    called: str = "confidence"
    note: str = ""

    @classmethod
    def read(cls, run: Trajectory, energy: Sequence[float], apart: Sequence[bool]) -> Ranked:
        if "atoms" not in run.cond:
            raise UsageError("this report needs the number of atoms of each structure: sample(..., atoms=counts)")
        if not len(run) == len(energy) == len(apart):
            raise ShapeError(f"one judgement a structure: {len(run)} structures, {len(energy)} judgements")
        present = [channel for channel in CHANNELS if len(run.times) and channel in channels(run.var)]
        level = level_of(run)
        return cls(
            crystals_of(run),
            {name: _array(score) for name, score in _scores(run, present).items()},
            _array(level.values),
            np.asarray(energy, dtype=float),
            np.asarray(apart, dtype=bool),
            _array(run.times),
            {channel: _array(run._total(channel).sqrt()) for channel in present},
            _by(run),
            level.called,
            level.note,
        )

    @property
    def score(self) -> np.ndarray:
        """The run's own choice, high = doubtful."""
        return next(iter(self.scores.values()))

    @property
    def good(self) -> np.ndarray:
        """The metastable ones; what could not be judged is none."""
        return self.energy <= METASTABLE

    @property
    def order(self) -> np.ndarray:
        """Surest first. By the score: confidence itself has ties."""
        return np.argsort(self.score, kind="stable")


def _array(tensor: Any) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def _scores(run: Trajectory, present: Sequence[str]) -> dict[str, Tensor]:
    """The run's own score, and beside it the same reading of every channel alone and of all together."""
    channel, score = _parted(run.default_score)
    words = crystals_drawn.CHANNELS
    single = score if score.partition("@")[0] in SCORES else "integrated"  # what is read off one channel
    found = {f"the run's own: {words.get(channel, channel) or 'all channels'}": run.score()}
    found |= {words[c]: run.score(single, channel=c) for c in present if run.standard or c != channel}
    return found if not channel or not present else {**found, "all channels": run.score(single)}


def _parted(score: str) -> tuple[str, str]:
    """The channel that a score reads, if it is one, and the rest of its name; a sum of scores is of no channel."""
    channel, _, rest = ("", "", score) if len(names_of(score)) > 1 else score.rpartition("/")
    return channel, rest


def _by(run: Trajectory) -> str:
    """What the run is ranked by, in words."""
    channel, score = _parted(run.default_score)
    kind, _, window = score.partition("@")
    name = NAMES.get(kind, kind)
    if window and kind == "integrated":
        name = f"uncertainty from t = {window.replace('-', ' to ')}"
    of = f" of the {crystals_drawn.CHANNELS.get(channel, channel)}" if channel else ""
    among = f", among those of the same {run.standard.cond}" if run.standard is not None else ""
    return f"{name}{of}{among}"


def _plates(run: Ranked) -> list[Plate]:
    return [
        Plate(
            "crystals",
            "Structures in the order of the model's confidence",
            "Read it like text: the model is surest of the first structure and doubts the last one most; the small "
            "number is its place in the ranking. A frame says what an energy model makes of the structure as it was "
            f"generated: metastable, at most {METASTABLE} eV/atom above the convex hull of known crystals, or higher, "
            "or neither: a structure with atoms inside one another counts as invalid here, whatever its energy. Below, "
            "the same for all structures: where confidence is worth something, the energy rises from left to right "
            "and the share of metastable ones falls.",
            "Unit cells of generated structures from the surest to the most doubtful, framed by their energy above the "
            "hull; below, that energy and the share of metastable structures along the ranking.",
            crystals_drawn.sorted_by_confidence(
                run.crystals, run.confidence, run.energy, run.apart, score=run.score, rows=4, called=run.called
            ),
        ),
        *_precision(run),
        *_channels(run),
    ]


def _channels(run: Ranked) -> list[Plate]:
    """The variance over time, if it was read."""
    if not len(run.times):
        return []
    return [
        Plate(
            "channels",
            "When the model is unsure, channel by channel",
            "Atom types, coordinates and lattice come out of the noise together, and are not decided at the same time. "
            "A dot marks the time at which the doubt about one is greatest.",
            "Uncertainty of the velocity of atom types, coordinates and lattice over time.",
            crystals_drawn.channel_variances(run.times, run.std, run.confidence),
        ),
    ]


def _precision(run: Ranked) -> list[Plate]:
    """The precision among the surest, if there are enough structures for a curve of it."""
    if len(run.good) < ENOUGH:
        return []
    return [
        Plate(
            "precision",
            "What the surest are worth",
            "Of the structures you would check if you could check that many, how many are metastable. The further to "
            f"the left, the pickier you are; a confidence that knew nothing would follow the dashed line. This run is "
            f"ranked by its {run.by}; beside it stands the doubt about other parts of a structure.",
            "Share of metastable structures among those kept, against the share kept.",
            crystals_drawn.precision_curve(run.scores, run.good),
        ),
    ]


def _lead(run: Ranked) -> str:
    """The page's first words and its main numbers, as HTML."""
    good, known = run.good, run.energy[np.isfinite(run.energy)]
    what = f"{len(good):,} generated structures, each with the {run.called} the model itself puts in it."
    if not len(known):
        none = f"{what} None of them could be judged, so there is nothing to hold the {run.called} against."
        return f"{_words(none)}{noted(run.note)}"
    mean = ("", f"{known.mean():.2f}", f"eV/atom above the hull, mean of the {len(known):,} that could be judged")
    if not good.any():
        none = f"None of them is within {METASTABLE} eV/atom of the hull, so there is no good one for it to find."
        return f"{_words(f'{what} {none}')}{noted(run.note)}\n{tiles([mean])}"
    among = rate_kept(run.score, good, KEPT)
    lift = ranking_text(-run.score, good, "metastable", "lift")
    sentence = (
        f"{what} {good.mean():.1%} of them are metastable, at most {METASTABLE} eV/atom above the hull; of the "
        f"{KEPT:.0%} it is surest of, {among.split()[0]} are. The energy model had no say in the ranking."
    )
    numbers = [
        tile("", rate(good), f"metastable, of all {len(good):,} structures"),
        tile("sure", among, f"metastable, of the surest {KEPT:.0%}"),
        tile("", lift, f"lift: AUPRC over that of a random order (best {1 / good.mean():.1f})"),
        mean,
    ]
    return f"{_words(sentence)}{noted(run.note)}\n{tiles(numbers)}"


def _words(text: str) -> str:
    return f'<p class="lead">{escape(text)}</p>'


def _list(run: Ranked, judgement: Judgement) -> list[Section]:
    """The surest structures and the most doubtful ones, a line each; all of them where they are few."""

    def line(place: int, index: int) -> dict[str, str]:
        count = int(run.crystals.atoms[index])
        broken = [words for rule, words in RULES.items() if not judgement[rule][index]]
        energy = run.energy[index]
        return {
            "place": f"{place + 1:,}",
            "name": str(judgement["name"][index]),
            "formula": formula(run.crystals.numbers[index, :count].tolist()) or NONE,
            "atoms": f"{count}",
            run.called: f"{run.confidence[index]:.3f}",
            "eV/atom above hull": f"{energy:.3f}".replace("-", "−") if np.isfinite(energy) else NONE,
            "valid": "yes" if judgement["valid"][index] else f"no: {', '.join(broken)}" if broken else "no",
            "problem": shorten(judgement["problem"][index] or "", 64, placeholder=" …"),  # the table of files has all
        }

    lines = [line(place, int(index)) for place, index in enumerate(run.order)]
    caption = (
        "Names count the structures as they were drawn. Valid: no atoms inside one another, charges that can "
        "balance, and a density between 0.01 and 25 g/cm³."
    )
    if len(lines) <= SUREST + DOUBTFUL:
        return [Section("All structures, the surest first", tables.html(lines, _columns(lines)), caption)]
    sure, doubtful = lines[:SUREST], lines[-DOUBTFUL:]
    return [
        Section(f"The {SUREST} surest", tables.html(sure, _columns(sure)), caption),
        Section(f"The {DOUBTFUL} most doubtful", tables.html(doubtful, _columns(doubtful))),
    ]


def _columns(lines: list[dict[str, str]]) -> list[str]:
    return [name for name in lines[0] if name != "problem" or any(line["problem"] for line in lines)]


def write_report(
    out: Path,
    run: Trajectory,
    judgement: Judgement,
    *,
    numbers: list[dict[str, str]],
    provenance: dict[str, str],
) -> Path:
    """Writes `report.html` into the folder `out`.

    Arguments:
        out: The folder.
        run: Structures with their variance and the numbers of atoms, `atoms`; ranked by its own default score.
        judgement: What an energy model says of them, in the same order.
        numbers: Rows of the table, each from column to cell.
        provenance: Where the numbers come from: commit, device, seed, time.
    """
    ranked = Ranked.read(run, judgement["e_above_hull"], judgement["distances_ok"])
    sections = [
        *[plate.section for plate in _plates(ranked)],
        *_list(ranked, judgement),
        *closing(numbers, _LIMITS, provenance),
    ]
    return write_page(out / "report.html", "Crystals: how far to trust each structure", _lead(ranked), sections)


_LIMITS = """\
<li>The energies are an energy model's, of structures as they were generated, not relaxed. It is a judge with errors of
its own, largest where atoms sit as they do in no crystal it has seen; a structure that it finds high may relax to a
good one.</li>
<li>The hull is made of a part of the Materials Project. Where it lacks a competing phase, a structure looks more stable
than it is.</li>
<li>One ranking holds structures of different size and chemistry. A score that prefers few atoms or common elements
gains by that alone: hold it against a ranking by the number of atoms.</li>
<li>This is one run with one seed. It does not show how far the numbers move between seeds.</li>"""


# ---- a results folder --------------------------------------------------------------------------------------------


def _judged(path: Path) -> tuple[list[float], list[bool]]:
    """Energies above the hull, and which structures keep the distance rule, from the table of the judged."""
    try:
        head, *rows = read_csv(path)
        above, distances = head.index("e_above_hull"), head.index("distances_ok")
        return [float(r[above] or "nan") for r in rows], [r[distances] == "true" for r in rows]
    except (DataError, IndexError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a table of judged structures ({error!r}); run fmwc reproduce crystals to the end"
        ) from error


@from_results
def write_figures(out: Path) -> list[Path]:
    """Writes the figures of a results folder as PNG files into `out/figures`, from its first cell and its draws."""
    cell = cells(out)[0]
    points, name = dig(cell, "numbers/hutchinson") or [], f"retrofit-{cell.get('seed', 0)}"
    run = Trajectory.load(out / "draws" / f"{name}.safetensors").ranked_by(SCORE)
    drawn = {p.name: p.figure for p in _plates(Ranked.read(run, *_judged(out / "judged" / f"{name}.csv")))}
    # Whole estimators only, which cost something: a mark for each of their channels would bury them.
    if whole := [p for p in points if p.get("flops") and (p.get("K") is not None or "," not in p["name"])]:
        drawn["hutchinson"] = crystals_drawn.hutchinson(whole)
    return [write_bytes(out / "figures" / f"{name}.png", figures.png(figure)) for name, figure in drawn.items()]
