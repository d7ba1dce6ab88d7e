"""One crystal drawn: its unit cell in parallel projection, atoms as shaded spheres, and its formula as the key.

Spheres, bonds and edges are painted into one picture with a depth for every pixel, so that they hide and intersect each
other like solids in any arrangement.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from math import isnan
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.offsetbox import AnchoredOffsetbox, DrawingArea, HPacker, TextArea
from matplotlib.patches import Circle

from fmwc.crystals.structures import ELEMENTS, Crystals, cell_matrix, key_of, need, quiet, symbol
from fmwc.report.page import FAINT, INK, styled

__all__ = ["Scene", "colour_of", "draw_crystal", "formula", "radius_of", "scene_of"]

BALL = 0.56  # radius of a sphere, in covalent radii: neighbours do not quite touch
STICK, EDGE = 0.11, 0.035  # radii of bonds and of the cell's edges, Å
BOND = (0.5, 1.15)  # range of the length of a bond, in sums of covalent radii
# One end of a bond is a non-metal or a metalloid; otherwise all neighbours in a metal would be joined.
BINDING = frozenset((1, 5, 6, 7, 8, 9, 14, 15, 16, 17, 32, 33, 34, 35, 51, 52, 53))
FACE = 0.3  # Å: an atom this close to a face is repeated on the opposite one
BACKGROUND, EDGES, BONDS = -3, -2, -1  # owners of pixels that do not belong to an atom
SMALLEST = 6.5  # Å: a smaller cell does not fill the picture
FINER = 3  # each pixel is the mean of so many squared
LIGHT = np.array([-0.42, 0.52, 0.74]) / np.linalg.norm([-0.42, 0.52, 0.74])
HALF = (LIGHT + np.array([0, 0, 1])) / np.linalg.norm(LIGHT + np.array([0, 0, 1]))  # between light and viewer
VIEWS = [(turn, lift) for turn in (10, 16, 22, 28, 34) for lift in (8, 13, 18)]  # degrees away from looking along a

WITHOUT_RADIUS = 97  # the first element without a covalent radius in ASE
LAST_COLOUR = 109  # the last element with a colour in Jmol
UNKNOWN_RADIUS, UNKNOWN_COLOUR = 1.5, (0.72, 0.72, 0.74)  # Å; light grey
SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


# ---- elements ----------------------------------------------------------------------------------------------------


def radius_of(z: int) -> float:
    """Return the covalent radius of an element in Å."""
    return float(need("ase.data").covalent_radii[z]) if 1 <= z < WITHOUT_RADIUS else UNKNOWN_RADIUS


def colour_of(z: int) -> np.ndarray:
    """Return Jmol's colour of an element, a little greyer and lighter."""
    if not 1 <= z <= ELEMENTS:
        return np.array(UNKNOWN_COLOUR)
    pure = need("ase.data.colors").jmol_colors[min(z, LAST_COLOUR)]
    return np.asarray(0.84 * (0.84 * pure + 0.16 * (pure @ [0.3, 0.6, 0.1])) + 0.13)


@cache
def _electronegativity(z: int) -> float:
    if not 1 <= z <= ELEMENTS:
        return 0.0
    with quiet():  # pymatgen warns of elements without one
        value = float(need("pymatgen.core").Element.from_Z(z).X)
    return 0.0 if isnan(value) else value


def _terms(numbers: list[int]) -> list[tuple[int, str]]:
    """Return the elements of a reduced formula by electronegativity, each with its subscript."""
    terms = sorted(key_of(numbers), key=lambda term: (_electronegativity(term[0]), term[0]))
    return [(z, f"{count}".translate(SUBSCRIPT) if count > 1 else "") for z, count in terms]


def formula(numbers: list[int]) -> str:
    """Return the reduced formula with metals first, and a question mark for an unknown element.

    >>> formula([8, 8, 8, 22, 56]), formula([11, 17, 11, 17]), formula([26, 125])
    ('BaTiO₃', 'NaCl', '?Fe')
    """
    return "".join(symbol(z) + subscript for z, subscript in _terms(numbers))


# ---- what is drawn -----------------------------------------------------------------------------------------------


class Scene(NamedTuple):
    """A crystal in the coordinates of the picture: x to the right, y up, z towards the viewer.

    Attributes:
        places: Centres of the atoms and of their images on the cell's faces, Å, `(n, 3)`.
        numbers: Their atomic numbers, n.
        corners: Corners of the cell, Å, `(8, 3)`, in the order of :func:`itertools.product`.
    """

    places: np.ndarray
    numbers: list[int]
    corners: np.ndarray

    @property
    def radii(self) -> np.ndarray:  # (n,)
        return np.array([BALL * radius_of(z) for z in self.numbers])


def scene_of(crystals: Crystals, index: int) -> Scene | None:
    """Return a crystal, rotated so that its atoms hide each other least; `None` if its lattice is not one.

    Atoms at a face, edge or corner are repeated on the opposite ones. Those without finite coordinates are left out.
    """
    cell = _cell(crystals.lengths[index].double().numpy(), crystals.angles[index].double().numpy())
    if cell is None:
        return None
    present = (crystals.numbers[index] > 0) & crystals.coords[index].isfinite().all(-1)
    fractions = crystals.coords[index][present].double().numpy() % 1.0
    volume = abs(np.linalg.det(cell))
    heights = [volume / max(np.linalg.norm(np.cross(cell[i - 2], cell[i - 1])), 1e-9) for i in range(3)]
    near = np.minimum(FACE / np.maximum(heights, 1e-9), 0.1)
    places, numbers = [], []
    for f, z in zip(fractions, crystals.numbers[index][present].tolist(), strict=True):
        shifts = [(0, 1) if u < e else (0, -1) if u > 1 - e else (0,) for u, e in zip(f, near, strict=True)]
        for shift in product(*shifts):
            places.append((f + shift) @ cell)
            numbers.append(z)
    corners = np.array(list(product((0.0, 1.0), repeat=3))) @ cell
    scene = Scene(np.array(places).reshape(-1, 3) - corners.mean(0), numbers, corners - corners.mean(0))
    turns = [_turn(*view) for view in VIEWS]
    best = min(turns, key=lambda turn: _hidden(scene.places @ turn.T, scene.radii))
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


def _hidden(places: np.ndarray, radii: np.ndarray) -> float:
    """Return how much atoms hide each other, summed over pairs."""
    apart = np.linalg.norm(places[:, None, :2] - places[None, :, :2], axis=-1)
    return float((np.maximum(0, 1 - apart / np.maximum(radii[:, None] + radii, 1e-9)) ** 2).sum())


def _bonds(scene: Scene) -> list[tuple[int, int]]:
    reach = scene.radii / BALL
    apart = np.linalg.norm(scene.places[:, None] - scene.places, axis=-1) / (reach[:, None] + reach)
    pairs = np.argwhere(np.triu((apart > BOND[0]) & (apart < BOND[1]), 1))
    return [(int(i), int(j)) for i, j in pairs if {scene.numbers[i], scene.numbers[j]} & BINDING]


# ---- how it is drawn ---------------------------------------------------------------------------------------------


class _Canvas:
    """A picture with a depth, an owner and a colour per pixel.

    Arguments:
        low, high: Its corners, Å, `(2,)`.
        scale: Pixels per Å.
    """

    def __init__(self, low: np.ndarray, high: np.ndarray, scale: float) -> None:
        wide, tall = (max(FINER, FINER * int(np.ceil(v / FINER))) for v in (high - low) * scale)
        self.low, self.scale = low, scale
        self.extent = (low[0], low[0] + wide / scale, low[1], low[1] + tall / scale)
        self.depth = np.full((tall, wide), -np.inf)
        self.owner = np.full((tall, wide), BACKGROUND)
        self.colour = np.ones((tall, wide, 3))

    def _window(self, low: np.ndarray, high: np.ndarray) -> tuple[tuple[slice, slice], np.ndarray, np.ndarray]:
        tall, wide = self.depth.shape
        (left, bottom), (right, top) = (np.clip((v - self.low) * self.scale, 0, (wide, tall)) for v in (low, high))
        rows, columns = slice(int(bottom), int(np.ceil(top))), slice(int(left), int(np.ceil(right)))
        y = (np.arange(rows.start, rows.stop)[:, None] + 0.5) / self.scale + self.low[1]
        x = (np.arange(columns.start, columns.stop)[None] + 0.5) / self.scale + self.low[0]
        return (rows, columns), x, y

    def _paint(
        self, where: tuple[slice, slice], inside: np.ndarray, z: np.ndarray, owner: int, colour: np.ndarray
    ) -> None:
        seen = inside & (z > self.depth[where])
        self.depth[where][seen] = z[seen]
        self.owner[where][seen] = owner
        self.colour[where][seen] = np.broadcast_to(colour, (*seen.shape, 3))[seen]

    def sphere(self, centre: np.ndarray, radius: float, colour: np.ndarray, owner: int) -> None:
        radius = max(radius, 2.5 * FINER / self.scale)  # still a dot in the largest cells
        where, x, y = self._window(centre[:2] - radius, centre[:2] + radius)
        u, v = np.broadcast_arrays((x - centre[0]) / radius, (y - centre[1]) / radius)
        w = np.sqrt(np.maximum(0, 1 - u**2 - v**2))
        self._paint(where, u**2 + v**2 < 1, centre[2] + radius * w, owner, _lit(np.stack([u, v, w], -1), colour))

    def stick(self, start: np.ndarray, end: np.ndarray, radius: float, colour: np.ndarray, lit: bool = True) -> None:
        radius = max(radius, 0.5 * FINER / self.scale)
        along = end - start
        length = float(along[:2] @ along[:2])
        where, x, y = self._window(np.minimum(start, end)[:2] - radius, np.maximum(start, end)[:2] + radius)
        share = np.clip(((x - start[0]) * along[0] + (y - start[1]) * along[1]) / max(length, 1e-12), 0, 1)
        u, v = (x - start[0] - share * along[0]) / radius, (y - start[1] - share * along[1]) / radius
        w = np.sqrt(np.maximum(0, 1 - u**2 - v**2))
        paint = _lit(np.stack([u, v, w], -1), colour) if lit else colour
        self._paint(where, u**2 + v**2 < 1, start[2] + share * along[2] + radius * w, BONDS if lit else EDGES, paint)

    def picture(self) -> np.ndarray:  # (H, W, 4)
        """Return the picture with outlines and paler colours in the distance, averaged over fine pixels."""
        solid = self.owner > EDGES
        drawn = np.isfinite(self.depth)
        line = np.zeros_like(drawn)
        for axis, step in product((0, 1), (-1, 1)):  # the outline belongs to the nearer of two owners
            beside, other = np.roll(self.depth, step, axis), np.roll(self.owner, step, axis)
            line |= (other != self.owner) & (self.depth > beside) & solid
        for _ in range(max(1, max(line.shape) // 900)):  # as thick in large pictures as in small ones
            thin = line.copy()
            for axis, step in product((0, 1), (-1, 1)):
                line |= np.roll(thin, step, axis) & (np.roll(self.owner, step, axis) == self.owner)
        colour = np.where(line[..., None], 0.30 * self.colour + 0.02, self.colour)
        if drawn.any():
            low, high = self.depth[drawn].min(), self.depth[drawn].max()
            far = 0.26 * np.where(drawn, high - self.depth, 0) / max(high - low, 1.0)
            colour = colour + (1 - colour) * far[..., None]
        tall, wide = drawn.shape
        blocks = (tall // FINER, FINER, wide // FINER, FINER)
        alpha = drawn.astype(float).reshape(blocks).mean((1, 3))
        ink = (colour * drawn[..., None]).reshape(*blocks, 3).mean((1, 3)) / np.maximum(alpha, 1e-9)[..., None]
        return np.clip(np.concatenate([ink, alpha[..., None]], -1), 0, 1)


def _lit(normal: np.ndarray, colour: np.ndarray) -> np.ndarray:  # (H, W, 3)
    diffuse = np.maximum(0, normal @ LIGHT)[..., None]
    shine = np.maximum(0, normal @ HALF)[..., None] ** 38
    rim = 0.80 + 0.20 * normal[..., 2:]
    return np.clip(colour * (0.52 + 0.53 * diffuse) * rim + 0.50 * shine, 0, 1)


def _render(scene: Scene, pixels: int) -> _Canvas:
    radii = scene.radii
    ends = [*(scene.places - radii[:, None]), *(scene.places + radii[:, None]), *scene.corners]
    margin = 0.02 * np.ptp(np.array(ends)[:, :2], axis=0).max() + 0.05
    low, high = np.min(ends, 0)[:2] - margin, np.max(ends, 0)[:2] + margin
    canvas = _Canvas(low, high, FINER * pixels / max(*(high - low), SMALLEST))
    back = int(scene.corners[:, 2].argmin())
    for i, j in product(range(8), repeat=2):
        if i < j and (i ^ j).bit_count() == 1:
            hidden = back in (i, j)
            colour = np.array(to_rgb("#c9ccd2" if hidden else "#5d636e"))
            canvas.stick(scene.corners[i], scene.corners[j], EDGE * (0.8 if hidden else 1), colour, lit=False)
    for i, j in _bonds(scene):
        middle = (scene.places[i] + scene.places[j]) / 2
        for one in (i, j):
            canvas.stick(scene.places[one], middle, STICK, colour_of(scene.numbers[one]))
    for i, (place, radius, z) in enumerate(zip(scene.places, radii, scene.numbers, strict=True)):
        canvas.sphere(place, float(radius), colour_of(z), i)
    return canvas


@styled
def draw_crystal(
    ax: Axes,
    crystals: Crystals,
    index: int,
    caption: str = "",
    *,
    size: float = 8.0,
    pixels: int = 320,
) -> None:
    """Draw the unit cell of a crystal, with its formula above (each element with its colour) and a caption below.

    Atoms of unknown elements are grey, with a question mark. Near pairs with a non-metal are joined by bonds.

    Arguments:
        ax: The axes.
        crystals: The set.
        index: The index of the crystal.
        caption: A line or two.
        size: Font size of the formula in points; that of the caption is a little smaller.
        pixels: Size of the longer side of the picture.
    """

    def write(y: float, text: str, va: str, fontsize: float, color: str = FAINT) -> None:
        ax.text(0.5, y, text, transform=ax.transAxes, ha="center", va=va, fontsize=fontsize, color=color)

    ax.set_axis_off()
    write(-0.02, caption, "top", size - 1.2, INK)
    numbers = [z for z in crystals.numbers[index].tolist() if z > 0]
    ax.add_artist(_key(numbers, size, ax))
    scene = scene_of(crystals, index)
    if scene is None:
        write(0.5, "not a lattice", "center", size)
        return
    canvas = _render(scene, pixels)
    ax.imshow(canvas.picture(), extent=canvas.extent, origin="lower", interpolation="antialiased")
    for i, (place, z) in enumerate(zip(scene.places, scene.numbers, strict=True)):
        row, column = ((place[1::-1] - canvas.low[::-1]) * canvas.scale).astype(int)
        if z > ELEMENTS and canvas.owner[row, column] == i:  # its centre is visible
            ax.text(place[0], place[1], "?", ha="center", va="center_baseline", fontsize=size - 1, fontweight="bold")
    if lost := sum(not place.isfinite().all() for place in crystals.coords[index][crystals.numbers[index] > 0]):
        write(0.02, f"{lost} of {len(numbers)} atoms without finite coordinates", "bottom", size - 1.2)
    left, right, bottom, top = canvas.extent
    box = ax.get_window_extent()
    shape = box.height / max(box.width, 1e-9)
    half = max(right - left, (top - bottom) / shape, SMALLEST) / 2
    x, y = (left + right) / 2, (bottom + top) / 2
    ax.set(xlim=(x - half, x + half), ylim=(y - half * shape, y + half * shape), aspect="equal")


def _key(numbers: list[int], size: float, ax: Axes) -> AnchoredOffsetbox:
    """Return the formula with a dot of its colour before each element; the sixth and later ones are left out."""
    parts = _terms(numbers)
    pieces: list[Artist] = []
    for z, subscript in parts[:5]:
        dot, colour = DrawingArea(0.62 * size, 0.62 * size, 0, 0), colour_of(z)
        style = {"facecolor": colour, "edgecolor": tuple(0.45 * colour), "linewidth": 0.5}
        dot.add_artist(Circle((0.31 * size, 0.33 * size), 0.27 * size, **style))
        words = TextArea(symbol(z) + subscript, textprops={"fontsize": size, "fontweight": "medium", "color": INK})
        pieces.append(HPacker(children=[dot, words], pad=0, sep=0.12 * size))
    if len(parts) > 5 or not parts:
        pieces.append(TextArea("…" if parts else "no atoms", textprops={"fontsize": size}))
    row = HPacker(children=pieces, pad=0, sep=0.28 * size)
    where: dict[str, Any] = {"bbox_to_anchor": (0.5, 1.02), "bbox_transform": ax.transAxes}
    return AnchoredOffsetbox(loc="lower center", child=row, frameon=False, pad=0, borderpad=0, **where)
