"""Control which crystals are drawn: elements, chemical system, number of atoms, and composition."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fmwc.crystals.structures import ELEMENTS, need
from fmwc.errors import UsageError
from fmwc.randomness import derive

__all__ = ["Controls"]

UNSEEN = {18, *range(84, 89), *range(95, ELEMENTS + 1)}  # elements in no training crystal of MP-20
# Metastable crystals of 50 each, in %, under the controls of `python -m experiments control`
FREELY, BY_SYSTEM, BY_ELEMENTS = 40, 2, 16
UNITS_SEEN = 4  # formula units in a cell, which are common: a fifth of MP-20, though it has at most 20 atoms in a cell
# The share of MP-20's training crystals with 1, 2, … formula units, by the number of atoms per unit (1 to 10).
UNITS = (
    (0.27, 0.27, 0.11, 0.19, 0, 0.03, 0, 0.07, 0, 0, 0, 0.01, 0, 0, 0, 0.02, 0, 0, 0, 0.03),
    (0.50, 0.24, 0.04, 0.13, 0, 0.03, 0, 0.05, 0, 0.01),
    (0.16, 0.40, 0.11, 0.31, 0, 0.02),
    (0.67, 0.23, 0.01, 0.08, 0),
    (0.40, 0.32, 0.02, 0.26),
    (0.47, 0.49, 0.04),
    (0.32, 0.68),
    (0.43, 0.57),
    (0.36, 0.64),
    (0.61, 0.39),
)


@dataclass(frozen=True)
class Controls:
    """Restrictions of the crystals to draw. They hold exactly for every crystal.

    >>> Controls(formula="LiFePO4").counts
    {3: 1, 26: 1, 15: 1, 8: 4}
    >>> Controls(elements="Li,Fe,P,O", atoms="8-16").sizes
    (8, 16)

    Arguments:
        elements: The elements that may occur, as symbols separated by commas.
        exclude: Elements that must not occur.
        system: A chemical system, such as `Li-Fe-P-O`: all of these elements occur, and no others.
        atoms: The number of atoms in the cell, or a range such as `8-16`.
        formula: The composition: the cell holds this formula unit once or several times.
    """

    elements: str = ""
    exclude: str = ""
    system: str = ""
    atoms: str = ""
    formula: str = ""

    def __post_init__(self) -> None:
        fixed = next((name for name in ("formula", "system") if getattr(self, name)), "")
        for name in ("elements", "exclude", "system") if fixed else ():
            if name != fixed and getattr(self, name):
                raise UsageError(f"{fixed} already fixes the elements; leave out {name}")
        listed, excluded = _symbols(self.elements, "elements"), _symbols(self.exclude, "exclude")
        if both := [symbol for symbol in listed if symbol in excluded]:
            raise UsageError(f"{both[0]} is both in elements and in exclude; name it only once")
        _, high = self.sizes
        if self.system and high and high < len(self.allowed):
            raise UsageError(f"a crystal of {self.system} has at least {len(self.allowed)} atoms, not {self.atoms}")
        if unseen := [symbol for symbol, z in self.named.items() if z in UNSEEN]:
            warnings.warn(
                f"no training crystal of MP-20 contains {', '.join(unseen)}; do not trust crystals with it",
                stacklevel=3,
            )

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name))

    @cached_property
    def counts(self) -> dict[int, int]:
        """The number of atoms of each element in the formula; empty without a formula."""
        return _counts(self.formula) if self.formula else {}

    @cached_property
    def named(self) -> dict[str, int]:
        """The atomic numbers of the elements that crystals are asked to contain, by symbol."""
        if self.formula:
            return {symbol: z for symbol, z in _numbers().items() if z in self.counts}
        return _symbols(self.elements, "elements") or _symbols(self.system, "system", "-")

    @cached_property
    def allowed(self) -> tuple[int, ...]:
        """The atomic numbers that may occur."""
        excluded = set(_symbols(self.exclude, "exclude").values())
        return tuple(self.named.values()) or tuple(z for z in range(1, ELEMENTS + 1) if z not in excluded)

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """The smallest and the largest number of atoms; (1, 0) without a restriction."""
        if not self.atoms:
            return 1, 0
        parts = re.fullmatch(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", str(self.atoms))
        low, high = (int(parts[1]), int(parts[2] or parts[1])) if parts else (1, 0)
        if not 1 <= low <= high:
            raise UsageError(f"atoms must be a number or a rising range such as 8-16; got '{self.atoms}'")
        return low, high

    def effect(self, field: Any) -> list[str]:
        """Return how the controls take effect on the samples of a field, and what they cost, as sentences."""
        network, remarks = getattr(field, "network", field), list[str]()
        if self.formula:
            given = getattr(network, "given", 0)
            remarks.append(
                f"the types of {self.formula} are given to the network, which was trained with given types"
                if given
                else f"the types are restricted to {self.formula}, because the network was not trained with given types"
            )
            unit, most = sum(self.counts.values()), network.width
            if unit * UNITS_SEEN > most:
                remarks.append(
                    f"warning: cells of this network hold at most {most} atoms, so no crystal has {UNITS_SEEN} units "
                    f"of {self.formula} ({UNITS_SEEN * unit} atoms), as many ground states do"
                )
        if self.system or self.elements:
            share, which = (BY_SYSTEM, "of Li-Fe-P-O") if self.system else (BY_ELEMENTS, "of 20 elements")
            remarks.append(
                f"warning: a choice of elements costs quality: {share} % of crystals {which} were metastable, and "
                f"{FREELY} % without controls (50 crystals each, results/crystals/NOTES.md); --exclude costs little"
            )
        return remarks

    def conditions(self, field: Any, count: int, seed: int = 0) -> dict[str, Tensor]:
        """Return the conditions of `count` crystals for :func:`fmwc.sample`.

        Without `atoms`, numbers of atoms have the frequencies of the training data, among those that are possible. With
        `formula`, numbers of formula units have the frequencies of MP-20.

        Arguments:
            field: The field that draws the crystals, or its network.
            count: The number of crystals.
            seed: The seed of the numbers of atoms.
        """
        network = getattr(field, "network", field)
        atoms = network.draw_sizes(count, derive(seed, "atoms"), self._weights(network))
        cond = {"atoms": atoms}
        if self.formula:
            unit = torch.tensor([z for z, number in self.counts.items() for _ in range(number)])
            each = torch.arange(network.width)
            cond["types"] = unit[each % len(unit)] * (each < atoms[:, None])
        elif self.system:  # one atom of each element; the flow chooses the others
            cond["types"] = torch.zeros(count, network.width, dtype=torch.long)
            cond["types"][:, : len(self.allowed)] = torch.tensor(self.allowed)
        if not self.formula and (self.named or self.exclude):
            cond["elements"] = torch.zeros(count, ELEMENTS, dtype=torch.long)
            cond["elements"][:, torch.tensor(self.allowed) - 1] = 1
        return cond

    def _weights(self, network: Any) -> Tensor | None:
        """Return the weights of 0, 1, … atoms; `None` for those of the network."""
        if not (self.atoms or self.formula or self.system):
            return None
        most, (low, high) = network.width, self.sizes
        if high > most:
            raise UsageError(f"atoms must be at most {most}, the largest cell of this network; got {self.atoms}")
        number = torch.arange(most + 1)
        possible = (number >= max(low, len(self.allowed) if self.system else 1)) & (number <= (high or most))
        weights = network.sizes.double().cpu()
        if self.formula:
            unit = sum(self.counts.values())
            if unit > most:
                raise UsageError(f"{self.formula} has {unit} atoms, but cells of this network hold at most {most}")
            if not bool((possible & (number % unit == 0)).any()):
                sizes = " or ".join(map(str, range(unit, most + 1, unit)))
                raise UsageError(f"a cell of {self.formula} has {sizes} atoms, not {self.atoms}")
            possible &= number % unit == 0
            weights = torch.zeros(most + 1, dtype=torch.float64)
            shares = UNITS[unit - 1] if unit <= len(UNITS) else (1.0,)
            for units, share in enumerate(shares, 1):
                if units * unit <= most:
                    weights[units * unit] = share
        weights = weights * possible
        return weights if bool((weights > 0).any()) else possible.double()


def _symbols(text: str, name: str, separator: str = ",") -> dict[str, int]:
    """Return the atomic numbers of a list of symbols, by symbol."""
    if not text:
        return {}
    known = _numbers()
    parts = [part.strip() for part in text.split(separator)]
    for part in parts:
        if part not in known:
            raise UsageError(
                f"{name}: '{part[:40]}' is not the symbol of an element; separate symbols by '{separator}'"
            )
    if len(set(parts)) < len(parts):
        raise UsageError(f"{name} names an element twice: {text[:100]}")
    return {part: known[part] for part in parts}


def _counts(formula: str) -> dict[int, int]:
    """Return the number of atoms of each element in a formula unit, which is not reduced."""
    known = _numbers()
    try:
        counts = {known[symbol]: count for symbol, count in need("ase.formula").Formula(formula).count().items()}
    except (ValueError, KeyError):
        counts = {}
    if not counts or min(counts.values()) < 1:
        raise UsageError(f"'{formula[:100]}' is not a formula of elements and whole numbers, such as Fe2O3")
    return counts


def _numbers() -> dict[str, int]:
    """Return the atomic numbers of all elements by symbol."""
    return {symbol: z for symbol, z in need("ase.data").atomic_numbers.items() if 1 <= z <= ELEMENTS}
