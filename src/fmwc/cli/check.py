"""Check finished samples from any source with a flow model (`fmwc check`).

Samples are read from files of fmwc, arrays, images in folders named by class, or CIF files.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmwc.checkpoint import identity
from fmwc.checks import CheckResult, check
from fmwc.cli.sample import RunRecord, classes_of, write_rows
from fmwc.cli.verbs import Check
from fmwc.crystals.parsers import CIF_BYTES, cells, read_text_of
from fmwc.crystals.structures import encode, from_cells
from fmwc.data import arrays
from fmwc.domains import Domain, Rows
from fmwc.entry import build, try_once
from fmwc.errors import CheckpointError, DataError, FmwcError, MismatchError, OutputError, UsageError
from fmwc.files import fresh, moved, write_json
from fmwc.mnist import data as mnist
from fmwc.progress import sampling_bar, say_on_stderr
from fmwc.provenance import Clock, pick_device, provenance
from fmwc.readers import shown
from fmwc.registry import open_checkpoint
from fmwc.report.images import contest_text
from fmwc.report.reports import checks_page
from fmwc.report.run import confidence_source
from fmwc.sampling import Trajectory
from fmwc.sampling.trajectory import ranked_among, require_varied
from fmwc.state import State, batch_size, tree_map

__all__ = ["KINDS", "Inputs", "check_samples", "kind_of", "read_inputs"]

REPEATS = 16  # of the check of a crystal: the same crystal in another cell meets other noise
SHOWN = 5  # samples in the printed table, least confident first


def check_samples(options: Check) -> tuple[Rows, list[Path]]:
    """Check samples and write the results; return a summary and the files."""
    device, samples, out = pick_device(options.device), options.samples, options.out
    kind, clock = kind_of(samples), Clock(device)
    if samples.resolve().is_relative_to(out.resolve()):
        raise OutputError(f"{shown(out)} is the folder of the samples and was not changed; choose another --out")
    made = Trajectory.load(samples).made if kind == "run" else {}
    name, domain, field = _open(options, made, device)
    classes = {} if domain is None else classes_of(domain, field)
    inputs = _read_fitting(samples, name, domain, field, classes)
    x, cond = tree_map(lambda c: c.to(device), inputs.x), {k: v.to(device) for k, v in inputs.cond.items()}
    try_once(field, x, cond)
    how: dict[str, Any] = {
        "evidence": options.evidence,
        "evaluations": options.evaluations or None,
        "rivals": _rivals(options, field, {n: v for n, v in classes.items() if n in cond and len(v) > 1}),
        "seed": options.seed,
        "space": getattr(field, "space", None),
        "batch": 256 if domain is None else domain.batch(device),
        "first": 0 if kind == "run" else None,  # a run is checked with the noise it was drawn with
        "repeats": REPEATS if kind == "cif" else 1,
    }
    total = how["repeats"] * len(inputs.names)
    with fresh(out, force=options.force) as folder, sampling_bar("checking samples", total) as bar:
        result = check(field, x, cond, progress=bar, **how)
        table = _table(inputs, result)
        written = [write_rows(folder / "checks.csv", _with_problems(table, inputs.problems))]
        source = "" if domain is None else confidence_source(field.reference)
        rows = _summary(inputs, result, source)
        origin = provenance(device, clock.seconds, seed=options.seed, samples=shown(samples), checkpoint=name)
        written += checks_page(folder, inputs.x, table, result, rows, {k: str(v) for k, v in origin.items()})
        content = {
            "samples": len(inputs.names),
            "not_checked": inputs.problems,
            "evidence": result.evidence,
            "evaluations": result.evaluations,
            "standard_error": None if result.error is None else float(result.error.mean()),
            "read_as_something_else": None if result.margin is None else int((result.margin < 0).sum()),
            "withheld": result.withheld,
            "checkpoint_confidence": source,
            "identity": identity(name) if domain is not None else "",
            "provenance": origin,
        }
        written.append(write_json(folder / "checks.json", content))
    return [*rows, *_least_confident(table)], moved(written, folder, out)


def _rivals(options: Check, field: Any, classes: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the conditions to compare with the requested one; empty if the check of the reference is used."""
    known = getattr(getattr(field, "reference", None), "checks", {})
    if not options.evaluations and (options.evidence in known if options.evidence else known):
        return {}
    return classes if len(classes) == 1 and options.evidence in ("", "contest") else {}


# ---- the checkpoint or network ---------------------------------------------------------------------------------------


class _Network(torch.nn.Module):
    """A user's network with its space."""

    def __init__(self, network: torch.nn.Module, space: Any) -> None:
        super().__init__()
        self.network, self.space = network, space

    def forward(self, x: Any, t: Tensor, **cond: Any) -> Any:
        return self.network(x, t, **cond)


def _open(options: Check, made: dict[str, Any], device: torch.device) -> tuple[str, Domain | None, Any]:
    """Load the checkpoint or network that checks; return its name, domain and field."""
    record, samples = RunRecord.read(made, options.checkpoint), shown(options.samples)
    if not record.checkpoint:
        if not options.network:
            raise UsageError(
                f"{samples} does not record which checkpoint drew its samples; add --checkpoint, or --network "
                "module:function"
            )
        network, space = build(options.network)
        if space is None:
            raise UsageError(f"the shape of a sample is not known; return (network, space) from {options.network}")
        return options.network, None, _Network(network.to(device).eval(), space)
    try:
        domain, field = open_checkpoint(record.checkpoint, device, network=options.network)
        content = identity(record.checkpoint)
    except CheckpointError as error:
        if options.checkpoint:
            raise
        raise CheckpointError(
            f"{error} ({samples} was drawn with this checkpoint; if it moved, add --checkpoint)"
        ) from error
    if not options.checkpoint and record.identity and content != record.identity:
        raise MismatchError(
            f"{samples} was not drawn with {record.checkpoint}, or the checkpoint was trained again since; to use it "
            "anyway, add --checkpoint"
        )
    return record.checkpoint, domain, field


# ---- samples ---------------------------------------------------------------------------------------------------------

KINDS = (
    "a folder that fmwc sample wrote or its samples.safetensors, an array file (.npz, .npy, .safetensors, .pt), a "
    "folder of images with one subfolder per class, or CIF files"
)
RUN = {"x0", "grid", "times"}  # tensors that only a samples file of fmwc has
OTHER_NAMES = {"images": "x", "labels": "y"}  # names used by image data sets


class Inputs(NamedTuple):
    """Samples to check.

    Attributes:
        x: The samples.
        cond: Their conditions.
        names: The name of each sample.
        problems: Why a sample cannot be checked, by name.
    """

    x: State
    cond: dict[str, Tensor]
    names: list[str]
    problems: dict[str, str]


def kind_of(path: Path) -> str:
    """Return the kind of samples at a path: `run`, `arrays`, `images` or `cif`."""
    if not path.exists():
        raise DataError(f"{shown(path)} does not exist; give {KINDS}")
    if path.is_dir():
        inside = [p for p in path.iterdir() if not p.name.startswith(".")]
        if (path / "samples.safetensors").is_file():
            return "run"
        if any(p.suffix.lower() == ".cif" for p in inside):
            return "cif"
        if any(p.is_dir() for p in inside):
            return "images"
        raise DataError(f"{shown(path)} holds no samples; give {KINDS}")
    if path.suffix.lower() == ".cif":
        return "cif"
    if path.suffix not in arrays.READERS:
        raise DataError(f"{shown(path)} is not a supported kind of file; give {KINDS}")
    return "run" if path.suffix == ".safetensors" and arrays.read(path).keys() >= RUN else "arrays"


def _read_fitting(samples: Path, name: str, domain: Domain | None, field: Any, classes: dict[str, Tensor]) -> Inputs:
    """Read the samples; raise unless the network supports them."""
    space = getattr(field, "space", None)
    shapes = {} if space is None else {n: c.shape for n, c in space.channels.items()}
    inputs = read_inputs(
        samples,
        classes=len(classes.get("y", ())) or 10,
        pixels=domain is not None and domain.name == "mnist",
        atoms=shapes["type"][0] if shapes.keys() == {"type", "coord", "lattice"} else 0,
    )
    _require_known(inputs, classes)
    for problem in list(inputs.problems.items())[:SHOWN]:
        say_on_stderr("not checked: " + ": ".join(problem))
    if space is not None:
        space.check(inputs.x, f"{shown(samples)} does not fit {name}: ")
        space.check_rows(inputs.cond, len(inputs.names))
    return inputs


def _require_known(inputs: Inputs, classes: dict[str, Tensor]) -> None:
    """Raise if samples lack a condition or have a class that the network does not know."""
    for name, known in classes.items():
        values = inputs.cond.get(name)
        if values is None:
            raise DataError(f"these samples have no '{name}', which the network needs; add one value per sample")
        if values.is_floating_point() or values.ndim != 1:
            raise DataError(f"'{name}' must be one whole number per sample; got {values.dtype} {tuple(values.shape)}")
        unknown = ~torch.isin(values.cpu(), known.cpu())
        if unknown.any():
            first = int(unknown.int().argmax())
            raise DataError(
                f"sample {inputs.names[first]} has {name} = {int(values[first])}, but the network has the {len(known)} "
                f"classes {int(known.min())} to {int(known.max())}"
            )


def read_inputs(path: Path, *, classes: int = 10, pixels: bool = False, atoms: int = 0) -> Inputs:
    """Read samples from a file or a folder.

    Arguments:
        path: A file or a folder.
        classes: The number of classes of images in folders named by class.
        pixels: Whether the network was trained on images with values from 0 to 1; whole numbers are then pixels from
            0 to 255.
        atoms: The largest number of atoms that the network supports; 0 if it was not trained on crystals.
    """
    kind = kind_of(path)
    if kind == "run":
        run = Trajectory.load(path)
        return Inputs(run.x, run.cond, run.names, {})
    if kind == "arrays":
        return _arrays(path, pixels)
    if kind == "images":
        if not pixels:
            raise UsageError(f"{shown(path)} holds image files, but the network was not trained on such images")
        images, names = mnist.pictures(path, classes)
        return Inputs(mnist.unit(images.x), {"y": images.y}, list(names), {})
    if not atoms:
        raise UsageError(f"{shown(path)} holds crystals, but the network was not trained on crystals")
    return _crystals(path, atoms)


def _arrays(path: Path, pixels: bool) -> Inputs:
    columns = arrays.read(path)
    if "x" not in columns:
        columns = {OTHER_NAMES.get(name, name): value for name, value in columns.items()}
    whole = "x" in columns and not columns["x"].is_floating_point()
    x, cond = arrays.samples_of(columns, path)
    if x is None:
        raise DataError(f"{shown(path)} holds {', '.join(columns)[:200]} but no samples; name them x, or x.channel")
    if pixels and isinstance(x, Tensor):
        x = x[:, None] if x.ndim == 3 else x
        x = x / 255 if whole else x
    return Inputs(x, cond, [f"{i:05d}" for i in range(batch_size(x))], {})


def _crystals(path: Path, atoms: int) -> Inputs:
    """Read CIF files as Niggli cells, like the training data, or as drawn; record why files cannot be used."""
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix.lower() == ".cif" and not p.name.startswith("."))
    texts: dict[str, str] = {}
    problems: dict[str, str] = {}
    for file in files:
        try:
            texts[shown(file.name)] = read_text_of(file, CIF_BYTES)
        except FmwcError as error:
            problems[shown(file.name)] = str(error)
    usable = {}
    for name, cell in zip(texts, cells([*texts.values()], keep=True), strict=True):
        if isinstance(cell, str):
            problems[name] = cell
        elif len(cell.numbers) > atoms:
            problems[name] = f"{len(cell.numbers)} atoms; the network supports at most {atoms}"
        else:
            usable[name] = cell
    if not usable:
        name, why = next(iter(problems.items()))
        raise DataError(f"none of {len(files)} structures in {shown(path)} can be checked; {name}: {why}")
    x, mask = encode(from_cells(usable, atoms))
    return Inputs(x, {"atoms": mask}, list(usable), problems)


# ---- tables ----------------------------------------------------------------------------------------------------------


def _table(inputs: Inputs, result: CheckResult) -> dict[str, list[Any]]:
    """Return one row per sample: its conditions and the results of the check."""
    score = result.score.cpu()
    table: dict[str, list[Any]] = {"name": inputs.names}
    table |= {name: value.tolist() for name, value in inputs.cond.items() if value.ndim == 1}
    table["score"] = score.tolist()
    with suppress(UsageError):  # equal scores have no ranks
        table["rank"] = ranked_among(score, require_varied(score.sort().values)).tolist()
    if result.error is not None:
        table["standard_error"] = result.error.tolist()
    if result.confidence is not None:
        table["confidence"] = result.confidence.tolist()
    if result.rival is not None and result.margin is not None:
        rival = result.rival if isinstance(result.rival, list) else result.rival.tolist()
        table |= {"rival": rival, "margin": result.margin.tolist()}
    return table


def _with_problems(table: dict[str, list[Any]], problems: dict[str, str]) -> dict[str, list[Any]]:
    """Add a row for each sample that could not be checked."""
    if not problems:
        return table
    count = len(table["name"])
    longer = {name: [*column, *[None] * len(problems)] for name, column in table.items()}
    return {**longer, "name": [*table["name"], *problems], "problem": [*[None] * count, *problems.values()]}


def _summary(inputs: Inputs, result: CheckResult, source: str) -> Rows:
    rows = {"samples": f"{len(inputs.names):,}"}
    if inputs.problems:
        rows["not checked"] = f"{len(inputs.problems):,}, see checks.csv"
    rows |= {"evidence": result.evidence, "evaluations per sample": str(result.evaluations)}
    if result.error is not None:
        spread = f"; the scores of these samples differ by {result.score.std():.2g}" if len(inputs.names) > 1 else ""
        rows["standard error of a score"] = f"{result.error.mean():.2g}{spread}"
    if result.margin is not None:
        other = int((result.margin < 0).sum())
        rows["better explained by another condition"] = f"{other:,} ({other / len(inputs.names):.1%})"
    if result.confidence is None:
        rows["confidence"] = f"withheld: {result.withheld}"
    if source:
        rows["checkpoint"] = source
    return [{"": name, "value": value} for name, value in rows.items()]


def _least_confident(table: dict[str, list[Any]]) -> Rows:
    """Return printed rows for the least confident samples."""
    order = sorted(range(len(table["name"])), key=lambda i: -table["score"][i])[:SHOWN]
    conditions = [
        n for n in table if n not in ("name", "score", "rank", "standard_error", "confidence", "rival", "margin")
    ]
    rows = []
    for place, i in enumerate(order, 1):
        words = [str(table["name"][i]), f"score {table['score'][i]:.4g}"]
        if "rival" in table and len(conditions) == 1:
            words.append(contest_text(table[conditions[0]][i], table["rival"][i], table["margin"][i]))
        rows.append({"": f"least confident, {place}", "value": ", ".join(words)})
    return rows
