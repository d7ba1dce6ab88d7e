"""Checking finished samples with a checkpoint: what `fmwc check` does, and the check that `fmwc sample` ends with."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmwc.bars import sampling_bar
from fmwc.checkpoint import identity
from fmwc.checks import Check, check, suited
from fmwc.checks.residuals import discrete
from fmwc.errors import CheckpointError, DataError, MismatchError, OutputError, UsageError
from fmwc.files import claimed, write_text
from fmwc.readers import shown
from fmwc.recipes.named import build, try_once
from fmwc.recipes.recipe import Clock, provenance
from fmwc.report.checks import write_checks
from fmwc.report.run import made_from
from fmwc.sampling import Trajectory
from fmwc.settings import Setting, open_checkpoint
from fmwc.settings.given import Given, kind_of, read_given
from fmwc.settings.samples import Outcome, write_rows
from fmwc.settings.setting import Rows, say_on_stderr
from fmwc.settings.way import Way
from fmwc.state import each

__all__ = ["check_samples", "planned_check"]

MOST = 100_000
SHOWN = 5  # samples in the printed table, most doubtful first
ASKED = 1000  # samples whose conditions say which values there are


def classes_of(setting: Setting | None, field: Any) -> dict[str, Tensor]:
    """Return the discrete conditions of a checkpoint's network and the values that they can have."""
    if setting is None or getattr(field, "space", None) is None:
        return {}
    with suppress(UsageError):  # a network with conditions that only its user knows
        cond = setting.conditions(field, ASKED)
        return {name: cond[name].unique() for name in discrete(cond, field.space, ASKED)}
    return {}


def planned_check(setting: Setting, field: Any, evaluations: int) -> Any:
    """Return the check that samples of a checkpoint get for a number of evaluations."""
    classes = classes_of(setting, field)
    cond = {name: values for name, values in classes.items() if len(values) > 1}
    known = getattr(getattr(field, "reference", None), "checks", {})
    return suited(
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
    device: torch.device,
    checkpoint: str = "",
    network: str = "",
    evaluations: int = 0,
    evidence: str = "",
    seed: int = 0,
    force: bool = False,
) -> Outcome:
    """Ask a flow for its own opinion of finished samples and write what it says.

    Arguments:
        samples: A file or a folder, as :mod:`fmwc.settings.given` reads them.
        out: The folder to write to.
        checkpoint: A shipped name or a folder; the one that drew the samples, if they say so, where it is empty.
        network: `module:function` that builds the network, where that is the user's own; without a checkpoint, the
            network is checked with as it is.
        evaluations: Evaluations per sample, at most; 0 is as many as the checkpoint's reference has, else 20.
        evidence: `contest`, `echo` or `nearest`; the reference's own if empty, or else chosen by the conditions.
        seed: Seeds the noise that samples are mixed with.
        force: Write into a folder that is not empty.
    """
    if not 0 <= evaluations <= MOST:
        raise UsageError(f"--evaluations lies between 1 and {MOST:,} per sample, got {evaluations}")
    kind, clock = kind_of(samples), Clock(device)
    if out.resolve() == (samples if samples.is_dir() else samples.parent).resolve():
        raise OutputError(
            f"{shown(out)} holds the samples themselves, and nothing in it was touched; choose another --out"
        )
    made = Trajectory.load(samples).made if kind == "run" else {}
    name, setting, field = _opened(samples, made, checkpoint, network, device)
    space = getattr(field, "space", None)
    classes = classes_of(setting, field)
    shapes = {} if space is None else {n: c.shape for n, c in space.channels.items()}
    given = read_given(
        samples,
        classes=len(classes.get("y", ())) or 10,
        pixels=setting is not None and setting.name == "mnist",
        rows=shapes["type"][0] if shapes.keys() == {"type", "coord", "lattice"} else 0,
    )
    _require_known(given, classes)
    for problem in list(given.problems.items())[:SHOWN]:
        say_on_stderr("not checked: " + ": ".join(problem))
    x, cond = each(lambda c: c.to(device), given.x), {k: v.to(device) for k, v in given.cond.items()}
    if space is not None:
        space.check(x, f"{shown(samples)} is not of {name}: ")
        space.check_rows(cond, len(given.names))
    try_once(field, x, cond)
    known = getattr(getattr(field, "reference", None), "checks", {})
    own = not evaluations and (evidence in known if evidence else bool(known))  # the reference's check, as it is
    rivals = {} if own else {n: v for n, v in classes.items() if n in cond and len(v) > 1}
    rivals = rivals if len(rivals) == 1 and evidence in ("", "contest") else {}
    how: dict[str, Any] = {"evidence": evidence, "rivals": rivals, "seed": seed, "space": space}
    batch = setting.batch(device) if setting is not None else 256
    with claimed(out, "check", force=force) as folder, sampling_bar("checking samples", len(given.names)) as bar:
        del folder
        found = check(field, x, cond, evaluations=evaluations or None, batch=batch, progress=bar, **how)
        table = _table(given, found)
        written = [write_rows(out / "checks.csv", _with_problems(table, given.problems))]
        said_of = "" if setting is None else made_from(field.reference)
        rows = _summary(given, found, said_of)
        origin = provenance(device, clock.seconds, seed=seed, samples=shown(samples), checkpoint=name)
        written += write_checks(out, given.x, table, found, rows, {k: str(v) for k, v in origin.items()})
        said = {
            "samples": len(given.names),
            "not_checked": given.problems,
            "evidence": found.evidence,
            "evaluations": found.evaluations,
            "read_as_something_else": None if found.margin is None else int((found.margin < 0).sum()),
            "withheld": found.withheld,
            "checkpoint_confidence": said_of,
            "identity": identity(name) if setting is not None else "",
            "provenance": origin,
        }
        written.append(write_text(out / "checks.json", json.dumps(said, indent=1) + "\n"))
    return Outcome([*rows, *_doubtful(table)], written)


def _opened(
    samples: Path, made: dict[str, Any], checkpoint: str, network: str, device: torch.device
) -> tuple[str, Setting | None, Any]:
    """The name of what checks, its setting, and the field or network."""
    way = Way.read(made, checkpoint)
    if not way.checkpoint:
        if not network:
            raise UsageError(
                f"{shown(samples)} does not say which checkpoint drew its samples; give --checkpoint, or --network "
                "module:function"
            )
        net, space = build(network)
        if space is None:
            raise UsageError(f"the shape of a sample is not known: let {network} return (network, space)")
        return network, None, _Plain(net.to(device).eval(), space)
    try:
        setting, field = open_checkpoint(way.checkpoint, device, network=network)
        if not checkpoint and way.identity and identity(way.checkpoint) != way.identity:
            raise MismatchError(
                f"{way.checkpoint} is not what drew {shown(samples)}, or was trained again since; give --checkpoint to "
                "check with it all the same"
            )
    except CheckpointError as error:
        if checkpoint or isinstance(error, MismatchError):
            raise
        raise CheckpointError(f"{error} ({shown(samples)} was drawn by it; if it moved, give --checkpoint)") from error
    return way.checkpoint, setting, field


class _Plain(torch.nn.Module):
    """A network of the user's own with its space."""

    def __init__(self, network: torch.nn.Module, space: Any) -> None:
        super().__init__()
        self.network, self.space = network, space

    def forward(self, x: Any, t: Tensor, **cond: Any) -> Any:
        return self.network(x, t, **cond)


def _require_known(given: Given, classes: dict[str, Tensor]) -> None:
    """Raise where samples have a class that the network does not know."""
    for name, values in classes.items():
        own = given.cond.get(name)
        if own is None:
            raise DataError(f"these samples have no '{name}', which the network takes: add it, one per sample")
        if own.is_floating_point() or own.ndim != 1:
            raise DataError(f"'{name}' is one whole number per sample, got {own.dtype} {tuple(own.shape)}")
        strange = ~torch.isin(own.cpu(), values.cpu())
        if strange.any():
            at = int(strange.int().argmax())
            raise DataError(
                f"sample {given.names[at]} has {name} = {int(own[at])}, which is none of the {len(values)} classes of "
                f"the network, {int(values.min())} to {int(values.max())}"
            )


# ---- tables ------------------------------------------------------------------------------------------------------


def _table(given: Given, found: Check) -> dict[str, list[Any]]:
    """One row per sample: what was asked for, and what the flow says of it."""
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


def _summary(given: Given, found: Check, said_of: str) -> Rows:
    rows = [
        {"": "samples", "value": f"{len(given.names):,}"},
        {"": "evidence", "value": found.evidence},
        {"": "evaluations per sample", "value": str(found.evaluations)},
    ]
    if given.problems:
        rows.insert(1, {"": "not checked", "value": f"{len(given.problems):,}, as checks.csv says"})
    if found.margin is not None:
        other = int((found.margin < 0).sum())
        rows.append({"": "the flow reads as something else", "value": f"{other:,} ({other / len(given.names):.1%})"})
    if found.confidence is None:
        rows.append({"": "confidence", "value": f"withheld: {found.withheld}"})
    if said_of:
        rows.append({"": "in this checkpoint", "value": said_of})
    return rows


def _doubtful(table: dict[str, list[Any]]) -> Rows:
    """The most doubtful samples in words."""
    order = sorted(range(len(table["name"])), key=lambda i: -table["score"][i])[:SHOWN]
    rows = []
    for place, i in enumerate(order, 1):
        words = [str(table["name"][i]), f"score {table['score'][i]:.4g}"]
        asked = [name for name in table if name not in ("name", "score", "rank", "confidence", "rival", "margin")]
        if "rival" in table and len(asked) == 1:
            words.append(f"asked for {table[asked[0]][i]}")
            if table["margin"][i] < 0:
                words.append(f"the flow itself reads {table['rival'][i]}")
        rows.append({"": f"most doubtful, {place}", "value": ", ".join(words)})
    return rows
