"""What confidence is worth before and after relaxation: selections, rank correlations, and both at equal sizes.

An *order* ranks structures by a key, lowest first. A selection keeps the first of them. Ties at its edge count in part,
so that a key with few values, such as the number of atoms, is not decided by the order of the draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import rankdata

from fmwc.metrics.ranking import bootstrap_all

__all__ = [
    "GOAL",
    "ORDERS",
    "PLAIN",
    "QUANTITIES",
    "SHARES",
    "Columns",
    "Quantity",
    "correlations",
    "keys_of",
    "partial",
    "selections",
]

SHARES = (0.05, 0.1, 0.2, 0.5, 1.0)
FEWEST = 5  # structures with a correlation
GOAL = 0.2  # the share at which selections are compared with all

Columns = Mapping[str, Sequence[Any]]


class Quantity(NamedTuple):
    """A quantity of each structure.

    Attributes:
        label: Its name in tables.
        stage: Whether it belongs to the `drawn` or to the `relaxed` structure.
        column: Its column. In a selection, `unique` and what depends on it count the first of a kind in the selection.
        better: Whether higher (+1) or lower (−1) values are better; 0 if neither.
        factor, digits: How its mean is printed.
    """

    label: str
    stage: str
    column: str
    better: int = 1
    factor: float = 100.0
    digits: int = 1


def _of_stage(stage: str, name: str) -> dict[str, Quantity]:
    shares = {
        "apart_ok": "structurally valid, %",
        "smact_ok": "compositionally valid, %",
        "metastable": "metastable, %",
        "stable": "stable, %",
        "stable_unknown": "stability unknown, %",
        "unique": "unique, %",
        "novel": "novel, %",
        "sun": "S.U.N., %",
        "msun": "metastable S.U.N., %",
    }
    if stage == "relaxed":
        del shares["smact_ok"]  # relaxation does not change it
    made = {
        f"{column}_{stage}": Quantity(f"{name}: {label}", stage, column, 0 if column == "stable_unknown" else 1)
        for column, label in shares.items()
    }
    energy = Quantity(f"{name}: energy above the hull, eV/atom", stage, "e_above_hull", -1, 1.0, 3)
    return {**made, f"e_above_hull_{stage}": energy}


QUANTITIES: dict[str, Quantity] = {
    **_of_stage("drawn", "as drawn"),
    **_of_stage("relaxed", "relaxed"),
    "converged": Quantity("relaxation: converged, %", "relaxed", "converged"),
    "relax_steps": Quantity("relaxation: steps", "relaxed", "relax_steps", -1, 1.0, 1),
    "rmsd": Quantity("relaxation: RMSD, Å", "relaxed", "rmsd", -1, 1.0, 3),
    "energy_drop": Quantity("relaxation: energy drop, eV/atom", "relaxed", "energy_drop", -1, 1.0, 3),
}

ORDERS = {
    "confidence": "surest first",
    "new": "surest first, known last",
    "atoms": "fewest atoms first",
    "energy": "lowest energy as drawn",
    "new energy": "lowest energy as drawn, known last",
}
PLAIN = ("confidence", "energy")  # orders that are also compared at equal sizes


def keys_of(drawn: Columns) -> dict[str, np.ndarray]:
    """Return the key of each order; a structure without energy comes last.

    Structures that are known, or that repeat a surer one, need no relaxation. `known last` puts them behind the others.
    """
    energy, doubt = (rankdata(np.array(drawn[name], float), nan_policy="omit") for name in ("e_above_hull", "doubt"))
    energy = np.where(np.isfinite(energy), energy, len(energy))
    orders = {"confidence": doubt, "atoms": np.array(drawn["atoms"], float), "energy": energy}
    for order, key in {"new": doubt, "new energy": energy}.items():
        new = first_of_kind(drawn["alike"], key) & np.array([value is True for value in drawn["novel"]])
        orders[order] = key + 2 * len(key) * ~new
    return orders


# ---- quantities of each structure ------------------------------------------------------------------------------------


def first_of_kind(alike: Sequence[int], key: np.ndarray) -> np.ndarray:
    """Return which structures are the first of their kind in the order of a key.

    Arguments:
        alike: The index of another structure of the same kind, the same for all of a kind; −1 if not compared.
        key: The order.
    """
    seen, first = set(), np.zeros(len(key), bool)
    for i in np.argsort(key, kind="stable").tolist():
        if alike[i] >= 0 and alike[i] not in seen:
            seen.add(alike[i])
            first[i] = True
    return first


def values_of(tables: Mapping[str, Columns], names: Sequence[str], key: np.ndarray) -> np.ndarray:  # -> (Q, N)
    """Return quantities of each structure as numbers; NaN if missing. What is unknown does not count as good."""
    rows = []
    for name in names:
        quantity = QUANTITIES[name]
        table, column = tables[quantity.stage], quantity.column
        if column in ("unique", "sun", "msun"):
            good = first_of_kind(table["alike"], key)
            for part in {"unique": (), "sun": ("stable", "novel"), "msun": ("metastable", "novel")}[column]:
                good = good & np.array([value is True for value in table[part]])
            rows.append(good.astype(float))
        elif column == "stable_unknown":
            rows.append(np.array([value is None for value in table["stable"]], float))
        elif quantity.factor == 100:
            rows.append(np.array([value is True for value in table[column]], float))
        else:
            rows.append(np.array(table[column], float))
    return np.array(rows)


# ---- selections ------------------------------------------------------------------------------------------------------


def _first(key: np.ndarray, shares: Sequence[float]) -> np.ndarray:  # (N,) -> (S, N)
    """Return how far each structure is part of the first share of all; ties at the edge count in part."""
    ordered, rows = np.sort(key), []
    for share in shares:
        kept = max(1, round(share * len(key)))
        edge = ordered[kept - 1]
        below, tied = key < edge, key == edge
        rows.append(below + tied * (kept - below.sum()) / tied.sum())
    return np.array(rows)


def _first_of_each_size(key: np.ndarray, atoms: np.ndarray, shares: Sequence[float]) -> np.ndarray:  # -> (S, N)
    """Return how far each structure is part of the first share of those with as many atoms.

    The selection has the same distribution of sizes as all structures.
    """
    order = np.lexsort((key, atoms))
    _, start, counts = np.unique(atoms[order], return_index=True, return_counts=True)
    place, total = np.empty(len(key)), np.empty(len(key))
    place[order] = np.arange(len(key)) - np.repeat(start, counts)
    total[order] = np.repeat(counts, counts)
    return np.array([np.clip(share * total - place, 0, 1) for share in shares])


def _means(values: np.ndarray, weights: np.ndarray) -> np.ndarray:  # (Q, N), (S, N) -> (Q, S)
    known = np.isfinite(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (np.where(known, values, 0) @ weights.T) / (known @ weights.T)


def selections(
    tables: Mapping[str, Columns],
    names: Sequence[str],
    key: np.ndarray,
    atoms: np.ndarray | None = None,
    shares: Sequence[float] = SHARES,
) -> dict[str, Any]:
    """Return the mean of quantities over the first structures of an order, with 90 % bootstrap intervals.

    Arguments:
        tables: The columns of the `drawn` and the `relaxed` structures.
        names: The quantities.
        key: The order.
        atoms: The numbers of atoms, to select the same share of each size.
        shares: The shares that are selected; the last one must be 1.

    Returns:
        For each quantity its `means` and `intervals` (one per share), and the `ratio` and `difference` of the share
        `GOAL` and of all, each with its interval.
    """
    values = values_of(tables, names, key)
    goal = list(shares).index(GOAL)

    def read(index: np.ndarray) -> np.ndarray:  # (Q, S + 2)
        some = key[index]
        weights = _first(some, shares) if atoms is None else _first_of_each_size(some, atoms[index], shares)
        means = _means(values[:, index], weights)
        chosen, whole = means[:, goal], means[:, -1]
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.column_stack([means, chosen / whole, chosen - whole])

    found, (low, high) = read(np.arange(len(key))), bootstrap_all(read, len(key))
    return {
        name: {
            "means": _plain(found[i, :-2]),
            "intervals": [_plain(pair) for pair in zip(low[i, :-2], high[i, :-2], strict=True)],
            **{
                label: _plain([found[i, at], low[i, at], high[i, at]])
                for label, at in {"ratio": -2, "difference": -1}.items()
            },
        }
        for i, name in enumerate(names)
    }


# ---- rank correlations -----------------------------------------------------------------------------------------------


def partial(xy: Any, xz: Any, yz: Any) -> Any:
    """Return the partial correlation of x and y given z.

    >>> round(float(partial(0.5, 0.5, 0.5)), 3), float(partial(0.25, 0.5, 0.5))
    (0.333, 0.0)
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        return (xy - xz * yz) / np.sqrt((1 - xz**2) * (1 - yz**2))


def correlations(
    tables: Mapping[str, Columns], names: Sequence[str], key: np.ndarray, atoms: np.ndarray
) -> dict[str, Any]:
    """Return Spearman's correlation of an order with quantities, plain and with the number of atoms partialled out.

    A positive correlation means that structures at the front of the order have high values. Structures with a missing
    value of any quantity are left out; if fewer than `FEWEST` remain, there is no correlation.

    Returns:
        For each quantity `spearman` and `partial`, each with the ends of its 90 % bootstrap interval.
    """
    values = values_of(tables, names, key)
    known = np.isfinite(values).all(0) & np.isfinite(key)
    rows = np.vstack([-key, atoms, values])[:, known]
    if rows.shape[1] < FEWEST:
        return {name: {"spearman": [None] * 3, "partial": [None] * 3} for name in names}

    def read(index: np.ndarray) -> np.ndarray:  # (2, Q)
        with np.errstate(invalid="ignore", divide="ignore"):  # a constant quantity has no correlation
            matrix = np.corrcoef(rankdata(rows[:, index], axis=1))
        of_order, of_size = matrix[0, 2:], matrix[1, 2:]
        return np.array([of_order, partial(of_order, matrix[0, 1], of_size)])

    found, (low, high) = read(np.arange(rows.shape[1])), bootstrap_all(read, rows.shape[1])
    return {
        name: {
            label: _plain([part[kind, i] for part in (found, low, high)])
            for kind, label in enumerate(("spearman", "partial"))
        }
        for i, name in enumerate(names)
    }


def _plain(values: Any) -> list[float | None]:
    """Return numbers for a JSON file."""
    return [float(value) if np.isfinite(value) else None for value in values]
