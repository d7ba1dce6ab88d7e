"""Checks of finished samples: what `fmwc check` does, and the check at the end of `fmwc sample`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmwc.checkpoint import identity
from fmwc.checks import CheckResult, check, choose_check
from fmwc.checks.residuals import discrete_conditions
from fmwc.commands.config import RunRecord
from fmwc.commands.inputs import Inputs, Outcome, kind_of, read_inputs, require_between, write_rows
from fmwc.domains import open_checkpoint
from fmwc.domains.domain import Domain, Rows
from fmwc.entry import build, try_once
from fmwc.errors import CheckpointError, DataError, MismatchError, OutputError, UsageError
from fmwc.files import claimed, write_json
from fmwc.progress import sampling_bar, say_on_stderr
from fmwc.provenance import Clock, pick_device, provenance
from fmwc.readers import shown
from fmwc.report.images import contest_text
from fmwc.report.reports import checks_page
from fmwc.report.run import confidence_source
from fmwc.sampling import Trajectory
from fmwc.state import tree_map

__all__ = ["check_samples", "planned_check"]

MOST = 100_000
SHOWN = 5  # samples in the printed table, least confident first
ASKED = 1000  # samples whose conditions show which values there are


def classes_of(domain: Domain | None, field: Any) -> dict[str, Tensor]:
    """Return the discrete conditions of a network with their possible values."""
    if domain is None or getattr(field, "space", None) is None:
        return {}
    with suppress(UsageError):  # a network whose conditions are not known
        cond = domain.conditions(field, ASKED)
        return {name: cond[name].unique() for name in discrete_conditions(cond, field.space, ASKED)}
    return {}


def planned_check(domain: Domain, field: Any, evaluations: int) -> Any:
    """Return the check of a checkpoint's samples with a given number of evaluations."""
    classes = classes_of(domain, field)
    cond = {name: values for name, values in classes.items() if len(values) > 1}
    known = getattr(getattr(field, "reference", None), "checks", {})
    return choose_check(
        field.space,
        cond,
        evaluations,
        known,
        rivals=cond if len(cond) == 1 and len(next(iter(cond.values()))) > 1 else {},
    )


def check_samples(
    samples: Path,
    out: Path,
    *,
    device: str | torch.device = "auto",
    checkpoint: str = "",
    network: str = "",
    evaluations: int = 0,
    evidence: str = "",
    seed: int = 0,
    force: bool = False,
) -> Outcome:
    """Check finished samples with a flow model and write the results.

    Arguments:
        samples: A file or a folder, as described in :mod:`fmwc.commands.inputs`.
        out: The folder to write to.
        device: Where to compute.
        checkpoint: A shipped name or a folder; by default, the one recorded with the samples.
        network: `module:function` that builds the network, for a network of your own; without a checkpoint, that
            network itself checks the samples.
        evaluations: The maximum number of evaluations per sample; 0: that of the checkpoint's reference, or 20.
        evidence: `contest`, `echo` or `nearest`; by default that of the reference, or chosen by the conditions.
        seed: Seeds the noise that samples are mixed with.
        force: Write into a folder that is not empty.
    """
    require_between("--evaluations", evaluations, 0, MOST)
    device = pick_device(device)
    kind, clock = kind_of(samples), Clock(device)
    if out.resolve() == (samples if samples.is_dir() else samples.parent).resolve():
        raise OutputError(f"{shown(out)} holds the samples; nothing in it was touched; choose another --out")
    made = Trajectory.load(samples).made if kind == "run" else {}
    name, domain, field = _opened(samples, made, checkpoint, network, device)
    classes = classes_of(domain, field)
    given = _read(samples, name, domain, field, classes)
    x, cond = tree_map(lambda c: c.to(device), given.x), {k: v.to(device) for k, v in given.cond.items()}
    try_once(field, x, cond)
    known = getattr(getattr(field, "reference", None), "checks", {})
    own = not evaluations and (evidence in known if evidence else bool(known))  # the reference's check, unchanged
    rivals = {} if own else {n: v for n, v in classes.items() if n in cond and len(v) > 1}
    rivals = rivals if len(rivals) == 1 and evidence in ("", "contest") else {}
    how: dict[str, Any] = {"evidence": evidence, "rivals": rivals, "seed": seed, "space": getattr(field, "space", None)}
    how["batch"] = domain.batch(device) if domain is not None else 256
    with claimed(out, "check", force=force), sampling_bar("checking samples", len(given.names)) as bar:
        found = check(field, x, cond, evaluations=evaluations or None, progress=bar, **how)
        table = _table(given, found)
        written = [write_rows(out / "checks.csv", _with_problems(table, given.problems))]
        source = "" if domain is None else confidence_source(field.reference)
        rows = _summary(given, found, source)
        origin = provenance(device, clock.seconds, seed=seed, samples=shown(samples), checkpoint=name)
        written += checks_page(out, given.x, table, found, rows, {k: str(v) for k, v in origin.items()})
        content = {
            "samples": len(given.names),
            "not_checked": given.problems,
            "evidence": found.evidence,
            "evaluations": found.evaluations,
            "read_as_something_else": None if found.margin is None else int((found.margin < 0).sum()),
            "withheld": found.withheld,
            "checkpoint_confidence": source,
            "identity": identity(name) if domain is not None else "",
            "provenance": origin,
        }
        written.append(write_json(out / "checks.json", content))
    return Outcome([*rows, *_doubtful(table)], written)


def _read(samples: Path, name: str, domain: Domain | None, field: Any, classes: dict[str, Tensor]) -> Inputs:
    """Read the samples; raise unless the network supports them."""
    space = getattr(field, "space", None)
    shapes = {} if space is None else {n: c.shape for n, c in space.channels.items()}
    given = read_inputs(
        samples,
        classes=len(classes.get("y", ())) or 10,
        pixels=domain is not None and domain.name == "mnist",
        rows=shapes["type"][0] if shapes.keys() == {"type", "coord", "lattice"} else 0,
    )
    _require_known(given, classes)
    for problem in list(given.problems.items())[:SHOWN]:
        say_on_stderr("not checked: " + ": ".join(problem))
    if space is not None:
        space.check(given.x, f"{shown(samples)} does not fit {name}: ")
        space.check_rows(given.cond, len(given.names))
    return given


def _opened(
    samples: Path, made: dict[str, Any], checkpoint: str, network: str, device: torch.device
) -> tuple[str, Domain | None, Any]:
    """Return the name of what checks, its domain, and its field or network."""
    record = RunRecord.read(made, checkpoint)
    if not record.checkpoint:
        if not network:
            raise UsageError(
                f"{shown(samples)} does not record which checkpoint drew its samples; add --checkpoint, or --network "
                "module:function"
            )
        net, space = build(network)
        if space is None:
            raise UsageError(f"the shape of a sample is not known: let {network} return (network, space)")
        return network, None, _Plain(net.to(device).eval(), space)
    try:
        domain, field = open_checkpoint(record.checkpoint, device, network=network)
        if not checkpoint and record.identity and identity(record.checkpoint) != record.identity:
            raise MismatchError(
                f"{record.checkpoint} did not draw {shown(samples)}, or was trained again since; to check with it "
                "anyway, add --checkpoint"
            )
    except CheckpointError as error:
        if checkpoint or isinstance(error, MismatchError):
            raise
        raise CheckpointError(f"{error} ({shown(samples)} was drawn by it; if it moved, add --checkpoint)") from error
    return record.checkpoint, domain, field


class _Plain(torch.nn.Module):
    """A network of your own with its space."""

    def __init__(self, network: torch.nn.Module, space: Any) -> None:
        super().__init__()
        self.network, self.space = network, space

    def forward(self, x: Any, t: Tensor, **cond: Any) -> Any:
        return self.network(x, t, **cond)


def _require_known(given: Inputs, classes: dict[str, Tensor]) -> None:
    """Raise if samples lack a condition or have a class that the network does not know."""
    for name, values in classes.items():
        own = given.cond.get(name)
        if own is None:
            raise DataError(f"these samples have no '{name}', which the network needs; add one value per sample")
        if own.is_floating_point() or own.ndim != 1:
            raise DataError(f"'{name}' must be one whole number per sample; got {own.dtype} {tuple(own.shape)}")
        strange = ~torch.isin(own.cpu(), values.cpu())
        if strange.any():
            at = int(strange.int().argmax())
            raise DataError(
                f"sample {given.names[at]} has {name} = {int(own[at])}, but the network has the {len(values)} classes "
                f"{int(values.min())} to {int(values.max())}"
            )


# ---- tables ------------------------------------------------------------------------------------------------------


def _table(given: Inputs, found: CheckResult) -> dict[str, list[Any]]:
    """Return one row per sample: its conditions and the results of the check."""
    score = found.score.cpu()
    higher = torch.searchsorted(score.sort().values, score, right=True)
    table: dict[str, list[Any]] = {"name": given.names}
    table |= {name: value.tolist() for name, value in given.cond.items() if value.ndim == 1}
    table |= {"score": score.tolist(), "rank": (1 - higher / len(score)).tolist()}
    if found.confidence is not None:
        table["confidence"] = found.confidence.tolist()
    if found.rival is not None and found.margin is not None:
        rival = found.rival if isinstance(found.rival, list) else found.rival.tolist()
        table |= {"rival": rival, "margin": found.margin.tolist()}
    return table


def _with_problems(table: dict[str, list[Any]], problems: dict[str, str]) -> dict[str, list[Any]]:
    if not problems:
        return table
    count = len(table["name"])
    longer = {name: [*column, *[None] * len(problems)] for name, column in table.items()}
    return {**longer, "name": [*table["name"], *problems], "problem": [*[None] * count, *problems.values()]}


def _summary(given: Inputs, found: CheckResult, said_of: str) -> Rows:
    rows = [
        {"": "samples", "value": f"{len(given.names):,}"},
        {"": "evidence", "value": found.evidence},
        {"": "evaluations per sample", "value": str(found.evaluations)},
    ]
    if given.problems:
        rows.insert(1, {"": "not checked", "value": f"{len(given.problems):,}, see checks.csv"})
    if found.margin is not None:
        other = int((found.margin < 0).sum())
        share = f"{other:,} ({other / len(given.names):.1%})"
        rows.append({"": "better explained by another condition", "value": share})
    if found.confidence is None:
        rows.append({"": "confidence", "value": f"withheld: {found.withheld}"})
    if said_of:
        rows.append({"": "in this checkpoint", "value": said_of})
    return rows


def _doubtful(table: dict[str, list[Any]]) -> Rows:
    """Describe the least confident samples."""
    order = sorted(range(len(table["name"])), key=lambda i: -table["score"][i])[:SHOWN]
    rows = []
    for place, i in enumerate(order, 1):
        words = [str(table["name"][i]), f"score {table['score'][i]:.4g}"]
        asked = [name for name in table if name not in ("name", "score", "rank", "confidence", "rival", "margin")]
        if "rival" in table and len(asked) == 1:
            words.append(contest_text(table[asked[0]][i], table["rival"][i], table["margin"][i]))
        rows.append({"": f"least confident, {place}", "value": ", ".join(words)})
    return rows
