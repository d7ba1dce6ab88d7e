"""Elements as they are drawn: symbol, size, colour, and their order in a formula."""

from __future__ import annotations

from functools import reduce
from math import gcd

import numpy as np
from matplotlib.colors import to_rgb

from fmwc.data.crystals import ELEMENTS

__all__ = ["colour_of", "count_of", "formula", "parts_of", "radius_of", "symbol"]


def _row(text: str) -> list[str]:
    return text.split()


_SYMBOLS = _row("""
H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr Nb
Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au
Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs Mt Ds Rg Cn Nh Fl Mc Lv Ts
Og
""")  # of the elements 1 to 118
_RADII = _row("""
31 28 128 96 84 76 71 66 57 58 166 141 121 111 107 105 102 106 203 176 170 160 153 139 139 132 126 124 132 122
122 120 119 120 120 116 220 195 190 175 164 154 147 146 142 139 145 144 142 139 139 138 139 140 244 215 207 204
203 201 199 198 198 196 194 192 192 189 190 187 187 175 170 162 151 144 141 136 136 132 145 146 148 140 150 150
260 221 215 206 200 196 190 187 180 169
""")  # covalent, pm, to Cm (Cordero et al. 2008)
_COLOURS = _row("""
ffffff d9ffff cc80ff c2ff00 ffb5b5 909090 3050f8 ff0d0d 90e050 b3e3f5 ab5cf2 8aff00 bfa6a6 f0c8a0 ff8000 ffff30
1ff01f 80d1e3 8f40d4 3dff00 e6e6e6 bfc2c7 a6a6ab 8a99c7 9c7ac7 e06633 f090a0 50d050 c88033 7d80b0 c28f8f 668f8f
bd80e3 ffa100 a62929 5cb8d1 702eb0 00ff00 94ffff 94e0e0 73c2c9 54b5b5 3b9e9e 248f8f 0a7d8c 006985 c0c0c0 ffd98f
a67573 668080 9e63b5 d47a00 940094 429eb0 57178f 00c900 70d4ff ffffc7 d9ffc7 c7ffc7 a3ffc7 8fffc7 61ffc7 45ffc7
30ffc7 1fffc7 00ff9c 00e675 00d452 00bf38 00ab24 4dc2ff 4da6ff 2194d6 267dab 266696 175487 d0d0e0 ffd123 b8b8d0
a6544d 575961 9e4fb5 ab5c00 754f45 428296 420066 007d00 70abfa 00baff 00a1ff 008fff 0080ff 006bff 545cf2 785ce3
8a4fe3 a136d4 b31fd4 b31fba b30da6 bd0d87 c70066 cc0059 d1004f d90045 e00038 e6002e eb0026
""")  # to Mt, as Jmol paints them
_PULL = _row("""
220 0 98 157 204 255 304 344 398 0 93 131 161 190 219 258 316 0 82 100 136 154 163 166 155 183 188 191 190 165
181 201 218 255 296 300 82 95 122 133 160 216 190 220 228 220 193 169 178 196 205 210 266 260 79 89 110 112 113
114 113 117 120 120 110 122 123 124 125 110 127 130 150 236 190 220 220 228 254 200 162 233 202 200 220 220 70
90 110 130 150 138 136 128 130 130 130 130 130 130 130 130 130
""")  # electronegativity × 100, to Lr (Pauling); 0 where there is none

UNKNOWN_RADIUS, UNKNOWN_COLOUR = 1.5, (0.72, 0.72, 0.74)
SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def symbol(z: int) -> str:
    """A question mark for what is no element."""
    return _SYMBOLS[z - 1] if 1 <= z <= ELEMENTS else "?"


def radius_of(z: int) -> float:
    """Å."""
    return int(_RADII[z - 1]) / 100 if 1 <= z <= len(_RADII) else UNKNOWN_RADIUS


def pull_of(z: int) -> float:
    """Electronegativity."""
    return int(_PULL[z - 1]) / 100 if 1 <= z <= len(_PULL) else 0.0


def colour_of(z: int) -> np.ndarray:
    """Jmol's colour, a little greyer and lighter: the pure ones shout in print."""
    if not 1 <= z <= ELEMENTS:
        return np.array(UNKNOWN_COLOUR)
    pure = np.array(to_rgb("#" + _COLOURS[min(z, len(_COLOURS)) - 1]))
    return 0.84 * (0.84 * pure + 0.16 * (pure @ [0.3, 0.6, 0.1])) + 0.13


def parts_of(numbers: list[int]) -> list[tuple[int, int]]:
    """Elements and how many of each, by electronegativity, in the smallest whole numbers."""
    kinds = sorted(set(numbers), key=lambda z: (pull_of(z), z))
    counts = [numbers.count(z) for z in kinds]
    return list(zip(kinds, (n // reduce(gcd, counts) for n in counts), strict=True))


def formula(numbers: list[int]) -> str:
    """The reduced formula, metals first.

    >>> formula([8, 8, 8, 22, 56]), formula([11, 17, 11, 17]), formula([26, 125])
    ('BaTiO₃', 'NaCl', '?Fe')
    """
    return "".join(symbol(z) + count_of(n) for z, n in parts_of(numbers))


def count_of(n: int) -> str:
    """A subscript, if it is not one."""
    return f"{n}".translate(SUBSCRIPT) if n > 1 else ""
