"""Choose the confidence of a shipped checkpoint again, and write its reference to its folder.

    python -m benchmarks.refit_reference mnist-joint --data DIR --device cuda
    python -m benchmarks.refit_reference mnist-joint --data DIR --references 80 --out /tmp/mnist-joint

Runs `fmwc.fit_confidence` with the recipe of the checkpoint, its training data and its seed, as training does at the
end. The weights do not change. Other data than the training data are refused. A reference that holds training points is
saved with the weights in a separate file.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import fmwc
from fmwc.checkpoint import about, shipped, update
from fmwc.errors import DataError, FmwcError, UsageError
from fmwc.provenance import Clock, describe_device, pick_device, provenance
from fmwc.recipes import RENAMED, data_of

RECIPES = {name: f"fmwc.{name}.recipe" for name in ("checkerboard", "mnist", "crystals")}
KEPT = ("data", "metrics", "trained")  # entries of a record that do not change


def recipe_of(record: dict[str, Any], data: str = "", references: int = 0) -> Any:
    """Return the recipe of a checkpoint.

    Arguments:
        record: The checkpoint's record.
        data: The folder of the training data; `FMWC_DATA` or the cache if empty.
        references: The number of pilot samples; 0 for that of the recipe.
    """
    recipe = import_module(RECIPES[record["recipe"]["name"]]).PRESETS["recommended"]
    known = {field.name for field in fields(recipe)}
    recorded = {RENAMED.get(name, name): value for name, value in record["recipe"].items()}
    values = {name: value for name, value in recorded.items() if name in known}
    for name, value in {"data": data, "references": references}.items():
        if value and name not in known:
            raise UsageError(f"the recipe of {record['recipe']['name']} takes no {name}; leave out --{name}")
        values |= {name: value} if value else {}
    return replace(recipe, **values)


def refit(name: str, out: Path, device: str = "auto", data: str = "", references: int = 0) -> fmwc.Field:
    """Fit the reference of a checkpoint again and write it into a folder.

    Arguments:
        name: The checkpoint: a shipped name, or a folder.
        out: The folder of the checkpoint, or a new folder, into which the checkpoint is copied first.
        device: Where to draw the pilot samples.
        data, references: See :func:`recipe_of`.
    """
    where, record = pick_device(device), about(name)
    recipe, clock = recipe_of(record, data, references), Clock(where)
    fingerprint = data_of(recipe)
    if fingerprint != record["data"]["fingerprint"]:
        raise DataError(f"{name} was trained on data {record['data']['fingerprint']}, and these are {fingerprint}")
    field = fmwc.load(name, device=where)
    reference, _ = recipe.reference(field)
    field.reference = reference
    made = provenance(where, clock.seconds)
    drawn = f"{getattr(recipe, 'references', 10_000):,} samples, {describe_device(where)}, commit {made['commit']}"
    about_it = {**record["provenance"], "reference": drawn}
    if not out.exists():
        shutil.copytree(shipped().get(name, name), out)
    if "nearest" in reference.checks:
        kept = {key: record[key] for key in KEPT if key in record}
        fmwc.save(field, out, recipe=record["recipe"], **kept, provenance=about_it)
    else:
        update(out, reference=reference, provenance=about_it)
    return field


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[name for name in shipped() if about(name).get("noise")])
    parser.add_argument("--data", default="", help="the folder of the training data; default: FMWC_DATA")
    parser.add_argument("--references", type=int, default=0, help="pilot samples; default: the number of the recipe")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="the folder of the checkpoint; default: the shipped one")
    arguments = parser.parse_args()
    out = arguments.out or shipped()[arguments.name]
    try:
        field = refit(arguments.name, out, arguments.device, arguments.data, arguments.references)
    except FmwcError as error:
        raise SystemExit(f"error: {error}") from error
    assert field.reference is not None
    for row in field.reference.candidates:
        print(f"{row['score']}: {row['why']}{'' if row['usable'] else ' (not used)'}")
    print(f"{arguments.name}: {field.reference.withheld or field.reference.score}; wrote {out}")


if __name__ == "__main__":
    main()
