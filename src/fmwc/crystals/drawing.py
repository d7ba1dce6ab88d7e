"""Draw a crystal: its unit cell in parallel projection, atoms as shaded spheres, and its formula as the legend."""

from __future__ import annotations

from functools import cache
from itertools import combinations, pairwise, product
from math import isnan
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_rgb
from matplotlib.offsetbox import AnchoredOffsetbox, DrawingArea, HPacker, TextArea
from matplotlib.patches import Circle, Patch, Polygon

from fmwc.crystals.structures import ELEMENTS, Crystals, cell_matrix, key_of, need, quiet, symbol
from fmwc.report.page import FAINT, INK, styled

__all__ = ["Scene", "bonds_of", "colour_of", "draw_crystal", "formula", "radius_of", "scene_of"]

BALL = 0.56  # radius of a sphere, in covalent radii; neighbours almost touch
STICK, EDGE = 0.11, 0.035  # radii of bonds and of the cell's edges, Å
BOND = (0.5, 1.15)  # range of the length of a bond, in sums of covalent radii
# A bond needs a non-metal or a metalloid at one end; otherwise all neighbours in a metal would be joined.
BINDING = frozenset((1, 5, 6, 7, 8, 9, 14, 15, 16, 17, 32, 33, 34, 35, 51, 52, 53))
FACE = 0.3  # Å; an atom this close to a face is repeated on the opposite face
SMALLEST = 6.5  # Å; smaller cells do not fill the picture
DOT = 0.01  # smallest radius of a sphere, relative to the picture
VIEWS = [(turn, lift) for turn in (10, 16, 22, 28, 34) for lift in (8, 13, 18)]  # viewing angles, degrees from axis a
LIGHT = np.array([-0.3, 0.38])  # shift of the brightest point of a sphere, in radii
SHADES = np.linspace(0.92, 0.08, 9)  # radii of the circles that shade a sphere
PIECES = 16  # segments of an edge of the cell, each drawn at its depth

WITHOUT_RADIUS = 97  # the first element without a covalent radius in ASE
LAST_COLOUR = 109  # the last element with a colour in Jmol
UNKNOWN_RADIUS, UNKNOWN_COLOUR = 1.5, (0.72, 0.72, 0.74)  # Å; light grey
SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


# ---- elements ----------------------------------------------------------------------------------------------------


def radius_of(z: int) -> float:
    """Return the covalent radius of an element in Å."""
    return float(need("ase.data").covalent_radii[z]) if 1 <= z < WITHOUT_RADIUS else UNKNOWN_RADIUS


def colour_of(z: int) -> np.ndarray:
    """Return Jmol's colour of an element, slightly greyer and lighter."""
    if not 1 <= z <= ELEMENTS:
        return np.array(UNKNOWN_COLOUR)
    pure = need("ase.data.colors").jmol_colors[min(z, LAST_COLOUR)]
    return np.asarray(0.84 * (0.84 * pure + 0.16 * (pure @ [0.3, 0.6, 0.1])) + 0.13)


@cache
def _electronegativity(z: int) -> float:
    if not 1 <= z <= ELEMENTS:
        return 0.0
    with quiet():  # pymatgen warns of elements without a value
        value = float(need("pymatgen.core").Element.from_Z(z).X)
    return 0.0 if isnan(value) else value


def _terms(numbers: list[int]) -> list[tuple[int, str]]:
    """Return the elements of a reduced formula by electronegativity, each with its symbol and subscript."""
    terms = sorted(key_of(numbers), key=lambda term: (_electronegativity(term[0]), term[0]))
    return [(z, symbol(z) + (f"{count}".translate(SUBSCRIPT) if count > 1 else "")) for z, count in terms]


def formula(numbers: list[int]) -> str:
    """Return the reduced formula with metals first, and a question mark for an unknown element.

    >>> formula([8, 8, 8, 22, 56]), formula([11, 17, 11, 17]), formula([26, 125])
    ('BaTiO₃', 'NaCl', '?Fe')
    """
    return "".join(text for _, text in _terms(numbers))


# ---- geometry ----------------------------------------------------------------------------------------------------


class Scene(NamedTuple):
    """A crystal in the coordinates of the picture: x to the right, y up, z towards the viewer.

    Attributes:
        places: Centres of the atoms and of their periodic images on the cell's faces, Å, `(n, 3)`.
        numbers: Their atomic numbers.
        corners: Corners of the cell, Å, `(8, 3)`, in the order of :func:`itertools.product`.
    """

    places: np.ndarray
    numbers: list[int]
    corners: np.ndarray

    @property
    def radii(self) -> np.ndarray:  # (n,)
        """Radii of the spheres, Å."""
        return np.array([BALL * radius_of(z) for z in self.numbers])


def scene_of(crystals: Crystals, index: int) -> Scene | None:
    """Return a crystal, rotated to minimise the overlap of its atoms; `None` if its lattice is invalid.

    Atoms at a face, edge or corner are repeated on the opposite side. Atoms without finite coordinates are left out.
    """
    cell = _cell(crystals.lengths[index].double().numpy(), crystals.angles[index].double().numpy())
    if cell is None:
        return None
    present = (crystals.numbers[index] > 0) & crystals.coords[index].isfinite().all(-1)
    fractions = crystals.coords[index][present].double().numpy() % 1.0
    heights = 1 / np.linalg.norm(np.linalg.inv(cell), axis=0)
    near = np.minimum(FACE / heights, 0.1)
    places, numbers = [], []
    for f, z in zip(fractions, crystals.numbers[index][present].tolist(), strict=True):
        shifts = [(0, 1) if u < e else (0, -1) if u > 1 - e else (0,) for u, e in zip(f, near, strict=True)]
        for shift in product(*shifts):
            places.append((f + shift) @ cell)
            numbers.append(z)
    corners = np.array(list(product((0.0, 1.0), repeat=3))) @ cell
    centre = corners.mean(0)
    scene = Scene(np.array(places).reshape(-1, 3) - centre, numbers, corners - centre)
    best = min((_turn(*view) for view in VIEWS), key=lambda turn: _overlap(scene.places @ turn.T, scene.radii))
    return Scene(scene.places @ best.T, numbers, scene.corners @ best.T)


def _cell(lengths: np.ndarray, angles: np.ndarray) -> np.ndarray | None:  # (3,), (3,) -> (3, 3)
    """Return the cell vectors as rows, with a towards the viewer and c up; `None` if they span no volume."""
    if not (np.isfinite(lengths).all() and lengths.min() > 0 and lengths.max() < 1e4):
        return None
    cell = cell_matrix(lengths, angles)
    if not np.diag(cell).prod() > 1e-6 * lengths.prod():  # the volume; it may be NaN
        return None
    up = cell[2] / lengths[2]
    towards = cell[0] - (cell[0] @ up) * up
    towards /= np.linalg.norm(towards)
    return cell @ np.stack([towards, np.cross(up, towards), up], 1)


def _turn(turn: float, lift: float) -> np.ndarray:  # (3, 3): right, up, towards the viewer
    t, s = np.radians(turn), np.radians(lift)
    towards = np.array([np.cos(s) * np.cos(t), np.cos(s) * np.sin(t), np.sin(s)])
    right = np.array([-np.sin(t), np.cos(t), 0.0])
    return np.stack([right, np.cross(towards, right), towards])


def _overlap(places: np.ndarray, radii: np.ndarray) -> float:
    """Return the overlap of the drawn atoms, summed over pairs."""
    apart = np.linalg.norm(places[:, None, :2] - places[None, :, :2], axis=-1)
    return float((np.maximum(0, 1 - apart / (radii[:, None] + radii)) ** 2).sum())


def bonds_of(scene: Scene) -> list[tuple[int, int]]:
    """Return the pairs of atoms that are joined by a bond."""
    reach = scene.radii / BALL
    apart = np.linalg.norm(scene.places[:, None] - scene.places, axis=-1) / (reach[:, None] + reach)
    pairs = np.argwhere(np.triu((apart > BOND[0]) & (apart < BOND[1]), 1))
    return [(int(i), int(j)) for i, j in pairs if {scene.numbers[i], scene.numbers[j]} & BINDING]


# ---- drawing -----------------------------------------------------------------------------------------------------


def _sphere(centre: np.ndarray, radius: float, colour: np.ndarray) -> list[Patch]:
    """Return circles that become smaller and brighter towards the light."""
    circles = [Circle((centre[0], centre[1]), radius, facecolor=0.72 * colour, edgecolor=0.3 * colour, linewidth=0.5)]
    for share in SHADES:
        bright = 1 - share
        shade = np.clip(colour * (0.72 + 0.36 * bright) + 0.5 * bright**4, 0, 1)
        circles.append(Circle(centre + bright * radius * LIGHT, share * radius, facecolor=shade, linewidth=0))
    return [*circles]


def _stick(start: np.ndarray, end: np.ndarray, radius: float, colour: Any) -> Patch:
    along = end - start
    across = np.array([-along[1], along[0]]) * radius / max(float(np.linalg.norm(along)), 1e-9)
    outline = [start + across, end + across, end - across, start - across]
    return Polygon(outline, facecolor=colour, edgecolor=colour, linewidth=0.3)


def _patches(scene: Scene, radii: np.ndarray, thin: float) -> PatchCollection:
    """Return all shapes to draw, the most distant first, in paler colours."""
    depths = np.concatenate([scene.places, scene.corners])[:, 2]
    nearest, farthest = float(depths.max()), float(depths.min())
    drawn: list[tuple[float, list[Patch]]] = []

    def pale(colour: np.ndarray, depth: float) -> np.ndarray:
        far = 0.26 * (nearest - depth) / max(nearest - farthest, 1.0)
        return colour + (1 - colour) * far

    back = int(scene.corners[:, 2].argmin())
    for i, j in combinations(range(8), 2):
        if (i ^ j).bit_count() == 1:
            hidden = back in (i, j)
            colour = np.array(to_rgb("#c9ccd2" if hidden else "#5d636e"))
            ends = np.linspace(scene.corners[i], scene.corners[j], PIECES + 1)
            for start, end in pairwise(ends):
                middle = (start + end) / 2
                if (np.linalg.norm(scene.places - middle, axis=1) > radii).all():  # not inside an atom
                    width = max(EDGE * (0.8 if hidden else 1), thin)
                    drawn.append((middle[2], [_stick(start[:2], end[:2], width, pale(colour, middle[2]))]))
    for pair in bonds_of(scene):
        middle = scene.places[list(pair)].mean(0)
        for i in pair:
            half = middle - scene.places[i]
            start = scene.places[i] + half * min(1.0, radii[i] / np.linalg.norm(half))  # from the sphere's surface
            depth = (start + middle)[2] / 2
            colour = pale(0.85 * colour_of(scene.numbers[i]), depth)
            drawn.append((depth, [_stick(start[:2], middle[:2], max(STICK, thin), colour)]))
    for place, radius, z in zip(scene.places, radii, scene.numbers, strict=True):
        drawn.append((place[2], _sphere(place[:2], float(radius), pale(colour_of(z), place[2]))))
    ordered = [patch for _, patches in sorted(drawn, key=lambda item: item[0]) for patch in patches]
    return PatchCollection(ordered, match_original=True, rasterized=True)  # vector paths would take megabytes


@styled
def draw_crystal(ax: Axes, crystals: Crystals, index: int, caption: str = "", *, size: float = 8.0) -> None:
    """Draw the unit cell of a crystal, with its formula above (with the colour of each element) and a caption below.

    Atoms of unknown elements are grey with a question mark. Bonds join neighbours if one is a non-metal.

    Arguments:
        ax: The axes.
        crystals: The crystals.
        index: The index of the crystal.
        caption: One or two lines.
        size: Font size of the formula in points; the caption is slightly smaller.
    """

    def write(y: float, text: str, va: str, fontsize: float, color: str = FAINT) -> None:
        ax.text(0.5, y, text, transform=ax.transAxes, ha="center", va=va, fontsize=fontsize, color=color)

    ax.set_axis_off()
    write(-0.02, caption, "top", size - 1.2, INK)
    numbers = [z for z in crystals.numbers[index].tolist() if z > 0]
    ax.add_artist(_key(numbers, size, ax))
    scene = scene_of(crystals, index)
    if scene is None:
        write(0.5, "invalid lattice", "center", size)
        return
    box = ax.get_window_extent()
    shape = box.height / max(box.width, 1e-9)
    around = scene.radii[:, None]
    ends = np.concatenate([scene.places - around, scene.places + around, scene.corners])[:, :2]
    low, high = ends.min(0), ends.max(0)
    across, up = high - low
    half = max(1.04 * max(across, up / shape) + 0.1, SMALLEST) / 2
    radii = scene.radii.clip(min=DOT * 2 * half)  # at least a dot in the largest cells
    ax.add_collection(_patches(scene, radii, 0.002 * half))
    for i, (place, z) in enumerate(zip(scene.places, scene.numbers, strict=True)):
        over = np.linalg.norm(scene.places[:, :2] - place[:2], axis=1) < radii
        if z > ELEMENTS and not (over & (scene.places[:, 2] > scene.places[i, 2])).any():  # its centre is visible
            ax.text(place[0], place[1], "?", ha="center", va="center_baseline", fontsize=size - 1, fontweight="bold")
    if lost := sum(not place.isfinite().all() for place in crystals.coords[index][crystals.numbers[index] > 0]):
        write(0.02, f"{lost} of {len(numbers)} atoms without finite coordinates", "bottom", size - 1.2)
    x, y = (low + high) / 2
    ax.set(xlim=(x - half, x + half), ylim=(y - half * shape, y + half * shape), aspect="equal")


def _key(numbers: list[int], size: float, ax: Axes) -> AnchoredOffsetbox:
    """Return the formula with a coloured dot before each element. Only the first five elements are shown."""
    terms = _terms(numbers)
    pieces: list[Any] = []
    for z, text in terms[:5]:
        dot, colour = DrawingArea(0.62 * size, 0.62 * size, 0, 0), colour_of(z)
        style = {"facecolor": colour, "edgecolor": tuple(0.45 * colour), "linewidth": 0.5}
        dot.add_artist(Circle((0.31 * size, 0.33 * size), 0.27 * size, **style))
        words = TextArea(text, textprops={"fontsize": size, "fontweight": "medium", "color": INK})
        pieces.append(HPacker(children=[dot, words], pad=0, sep=0.12 * size))
    if len(terms) > 5 or not terms:
        pieces.append(TextArea("…" if terms else "no atoms", textprops={"fontsize": size}))
    row = HPacker(children=pieces, pad=0, sep=0.28 * size)
    where: dict[str, Any] = {"bbox_to_anchor": (0.5, 1.02), "bbox_transform": ax.transAxes}
    return AnchoredOffsetbox(loc="lower center", child=row, frameon=False, pad=0, borderpad=0, **where)
