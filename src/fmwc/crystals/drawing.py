"""Draw a crystal: its formula, and its atoms and unit cell by ASE."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from fmwc.crystals.structures import ELEMENTS, Crystals, candidates, formula_of, key_of, need
from fmwc.report.page import FAINT, INK, styled

__all__ = ["draw_crystal", "formula"]

VIEW = "-80x,-20y"  # a to the right, c up, slightly from above
BALL = 0.6  # radius of a sphere, in covalent radii
LONGEST = 60.0  # Å; longer cells are drawn smaller, because ASE draws each 0.3 Å of an edge
LAST_COLOUR = 109  # the last element with a colour in Jmol
SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def formula(numbers: list[int]) -> str:
    """Return the reduced formula with metals first, and a question mark for unknown elements.

    >>> formula([8, 8, 8, 22, 56]), formula([11, 17, 11, 17]), formula([26, 125])
    ('BaTiO₃', 'NaCl', '?Fe')
    """
    known = tuple((z, count) for z, count in key_of(numbers) if 1 <= z <= ELEMENTS)
    unknown = "?" if any(z > ELEMENTS for z in numbers) else ""
    return unknown + (formula_of(known).translate(SUBSCRIPT) if known else "")


@styled
def draw_crystal(ax: Axes, crystals: Crystals, index: int, caption: str = "", *, size: float = 8.0) -> None:
    """Draw the unit cell of a crystal, with its formula above and a caption below.

    Arguments:
        ax: The axes.
        crystals: The crystals.
        index: The index of the crystal.
        caption: One or two lines.
        size: Font size of the formula in points; the caption is slightly smaller.
    """

    def write(y: float, text: str, va: str, fontsize: float, color: str = INK) -> None:
        ax.text(0.5, y, text, transform=ax.transAxes, ha="center", va=va, fontsize=fontsize, color=color)

    ax.set_axis_off()
    (one,) = candidates(crystals.take([index]))
    write(1.02, formula(one.numbers.tolist()) or "no atoms", "bottom", size)
    write(-0.02, caption, "top", size - 1.2)
    lengths, positive = np.linalg.norm(one.cell, axis=1), bool((crystals.lengths[index] > 0).all())
    if not (positive and np.isfinite(one.cell).all() and one.volume > 1e-6 * lengths.prod()):
        write(0.5, "invalid lattice", "center", size, FAINT)
        return
    there = np.isfinite(one.coords).all(1)
    if lost := int((~there).sum()):
        write(0.02, f"{lost} of {len(one)} atoms without finite coordinates", "bottom", size - 1.2, FAINT)
    if not there.any():
        return
    scale = min(1.0, LONGEST / lengths.max())
    numbers = np.where(one.numbers <= ELEMENTS, one.numbers, 0)[there]
    atoms = need("ase").Atoms(numbers=numbers, scaled_positions=one.coords[there], cell=one.cell * scale)
    need("ase.visualize.plot").plot_atoms(
        atoms,
        ax,
        rotation=VIEW,
        radii=(BALL * scale * need("ase.data").covalent_radii[numbers]).tolist(),
        colors=need("ase.data.colors").jmol_colors[numbers.clip(max=LAST_COLOUR)],
    )
    box, (width, height) = ax.get_window_extent(), (ax.get_xlim()[1], ax.get_ylim()[1])
    per_pixel = max(width / box.width, height / box.height)  # so that the axes keep their size
    for at, middle, pixels in ((ax.set_xlim, width / 2, box.width), (ax.set_ylim, height / 2, box.height)):
        at(middle - per_pixel * pixels / 2, middle + per_pixel * pixels / 2)
