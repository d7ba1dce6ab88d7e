"""Compare the confidence of drawn crystals with that of the same crystals read back from their CIF files.

python -m benchmarks.own_cells --count 30 --seed 77 --out OUT

`reduced`: every file is read as its Niggli cell, with atoms sorted by element. `kept`: as `fmwc check` reads files,
which keeps cells that are nearly Niggli cells, and the order of the atoms. `elements`: the drawn state with its bits
rounded to those of its elements, which is all that a file can hold. `noise`: the drawn state, checked with other noise.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fmwc
from fmwc.crystals.files import cif_text
from fmwc.crystals.sandbox import cells
from fmwc.crystals.structures import candidates, crystals_of, encode, from_cells
from fmwc.files import write_json
from fmwc.provenance import Clock, provenance
from fmwc.registry import domain_named
from fmwc.state import select


def confidence(field: Any, x: Any, atoms: Tensor, first: int, seed: int = 0) -> float:
    found = fmwc.check(field, x, {"atoms": atoms}, conventions=False, first=first, seed=seed).confidence
    assert found is not None
    return float(found[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=77)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    domain, field = domain_named("crystals"), fmwc.load("crystals")
    clock = Clock(field.device)
    run = domain.draw(field, options.count, options.seed, None, check=False)
    rows = []
    for i, one in enumerate(candidates(crystals_of(run))):
        x, atoms, text = select(run.x, slice(i, i + 1)), run.cond["atoms"][i : i + 1], cif_text(one)
        row = {
            "drawn": confidence(field, x, atoms, i),
            "elements": confidence(field, {**x, "type": x["type"].sign()}, atoms, i),
            "noise": confidence(field, x, atoms, i, seed=1),
        }
        for name, keep in (("reduced", False), ("kept", True)):
            (cell,) = cells([text], keep=keep)
            if not isinstance(cell, str):
                row[name] = confidence(field, *encode(from_cells({one.name: cell}, x["type"].shape[1])), i)
        rows.append(row)
    summary = {}
    for name in ("reduced", "kept", "elements", "noise"):
        found = torch.tensor([abs(row[name] - row["drawn"]) for row in rows if name in row])
        summary[name] = {"mean": float(found.mean()), "largest": float(found.max()), "crystals": len(found)}
    about = provenance(field.device, clock.seconds, seed=options.seed, count=options.count)
    print(
        write_json(options.out / "own_cells.json", {"difference": summary, "rows": rows, "provenance": about}), summary
    )


if __name__ == "__main__":
    main()
