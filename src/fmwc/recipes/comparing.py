"""The bench: every method of a comparison at one seed, trained or loaded from an earlier run; and the files of cells.

A cell is what was read at one seed. Networks and cells that exist are not made again, so a run that was stopped goes on
where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from fmwc.baselines import Dropout, HeteroscedasticHead
from fmwc.checkpoint import about, load
from fmwc.errors import CheckpointError, FmwcError, MismatchError
from fmwc.files import read_tensors, write_json, write_tensors
from fmwc.identity import SEAL, difference, plain
from fmwc.readers import (
    Check,
    anything,
    array,
    mapping,
    read_json,
    record,
    text,
    whole,
)
from fmwc.recipes.fitting import (
    ENDED,
    LATER,
    fit_dropout,
    fit_head,
    fit_joint,
    fit_network,
    fit_retrofit,
    fit_variance,
    identity_of,
    take_flow,
)
from fmwc.recipes.recipe import Clock, data_of, provenance

__all__ = [
    "MEMBERS",
    "SHARED",
    "Bench",
    "Say",
    "cells",
    "check_cell",
    "from_results",
    "join",
    "once",
    "piece",
    "read_piece",
    "setting_of_results",
]

MEMBERS = 5  # of an ensemble
SHARED = (1001, 1002, 1003, 1004)  # seeds of the members that the ensembles of all reported seeds have in common
# What a network without noise does not depend on.
OF_NOISE = (
    "method",
    "beta",
    "prior_rate",
    "cycles",
    "warmup",
    "exclude",
    "width",
    "noise_steps",
    "noise_batch",
    "noise_lr",
)

_WEIGHTS = record({"recipe": mapping(anything, 1000), "steps": whole(), SEAL: text(64, "[0-9a-f]{64}")})

Say = Callable[[str], None]
P = ParamSpec("P")
T = TypeVar("T")


class Bench:
    """Creates the bench: trains what is asked for, or loads it from an earlier run.

    Arguments:
        recipe: The sizes and the schedule.
        models: A folder for the trained networks.
    """

    def __init__(self, recipe: Any, models: Path, device: torch.device, say: Say) -> None:
        self.recipe, self.models, self.device, self.say = recipe, models, device, say

    def made(self, name: str, recipe: Any, module: nn.Module, fit: Callable[..., int | None]) -> None:
        """Fills `module` with the weights of an earlier run of the same recipe, or fits and keeps them."""
        path = self.models / f"{name}-{recipe.decay}-{recipe.seed}.safetensors"
        aside = (*LATER, *(OF_NOISE if name == "flow" else ()), *(("flow",) if name == "joint" else ()))
        identity = plain(identity_of(recipe, self.data, aside))  # trained on one machine, it is read on others
        point = path.with_suffix(".resume")
        if path.exists():
            tensors, about = read_tensors(path, _WEIGHTS, "a network of fmwc reproduce")
            if rows := difference(about["recipe"], identity):
                raise MismatchError(f"{path} was trained by another recipe ({rows}); delete it, or use another --out")
            try:
                module.load_state_dict(tensors)
            except RuntimeError as error:
                raise CheckpointError(f"{path} is of another architecture; delete it, or use another --out") from error
            for left in (point, point.with_suffix(ENDED)):
                left.unlink(missing_ok=True)
            return
        clock = Clock(self.device)
        steps = fit(recipe, module, resume=point)
        tensors = {k: v.detach().cpu().clone().contiguous() for k, v in module.state_dict().items()}
        about = {"recipe": identity, "steps": steps or recipe.iterations}
        write_tensors(path, tensors, about)
        for left in (point, point.with_suffix(ENDED)):
            left.unlink(missing_ok=True)
        self.say(f"trained {name}, {recipe.decay}, seed {recipe.seed}: {clock.seconds:.0f} s")

    def trained(self, name: str, seed: int) -> dict[str, int]:
        """How many steps a network was trained for, and of how many: a clock may have stopped it."""
        recipe = self.at(seed)
        given: str = getattr(recipe, "flow", "") if name == "flow" else ""
        if given:
            steps = about(given)["recipe"]["iterations"]
            return {"steps": steps, "of": steps}
        path = self.models / f"{name}-{recipe.decay}-{seed}.safetensors"
        _, known = read_tensors(path, _WEIGHTS, "a network of fmwc reproduce")
        return {"steps": known["steps"], "of": recipe.iterations}

    @cached_property
    def data(self) -> str:
        """The fingerprint of what is trained on."""
        return data_of(self.recipe)

    def at(self, seed: int, **changes: Any) -> Any:
        return replace(self.recipe, seed=seed, **changes)

    def flow(self, seed: int) -> nn.Module:
        recipe = self.at(seed)
        network = recipe.network().to(self.device)
        if not take_flow(recipe, network):
            self.made("flow", recipe, network, fit_network)
        return network

    def retrofit(self, seed: int, name: str = "retrofit", **changes: Any) -> Any:
        recipe = self.at(seed, method="retrofit", **changes)
        if self._fits(recipe):
            return load(recipe.flow, device=self.device)
        field = recipe.attach(self.flow(seed)).to(self.device)
        self.made(name, recipe, field, fit_retrofit)
        return field

    def _fits(self, recipe: Any) -> bool:
        """Whether the checkpoint that the flow is taken from has the noise, too, that would be fitted to it here."""
        if not getattr(recipe, "flow", ""):
            return False
        record = about(recipe.flow)
        wanted = {name: getattr(recipe, name) for name in ("seed", *OF_NOISE) if hasattr(recipe, name)}
        same = all((record.get("recipe") or {}).get(name) == value for name, value in wanted.items())
        return same and (record.get("data") or {}).get("fingerprint") == self.data

    def joint(self, seed: int, name: str = "joint", **changes: Any) -> Any:
        recipe = self.at(seed, method="joint", **changes)
        field = recipe.attach(recipe.network()).to(self.device)
        self.made(name, recipe, field, fit_joint)
        return field

    def dropout(self, seed: int) -> Dropout:
        recipe = self.at(seed)
        dropout = Dropout(recipe.network().to(self.device))
        self.made("dropout", recipe, dropout, fit_dropout)
        return dropout

    def head(self, seed: int) -> HeteroscedasticHead:
        recipe = self.at(seed)
        head = HeteroscedasticHead(recipe.network(heads=2).to(self.device))
        self.made("head", recipe, head, fit_head)
        return head

    def variance(self, seed: int) -> HeteroscedasticHead:
        """UA-Flow's head of the variance on the plain flow, which stays as it is."""
        recipe = self.at(seed)
        head = HeteroscedasticHead(recipe.network(heads=2).to(self.device))
        head.graft(self.flow(seed))
        self.made("variance", recipe, head, fit_variance)
        return head


_SEED = whole(-(1 << 63), 1 << 64)
_ABOUT = record({}, {"seeds": array(_SEED, most=10_000)}, more=True)
_CELL = record({}, {"provenance": _ABOUT, "setting": text(100), "seed": _SEED, "decay": text(100)}, more=True)
_PIECE = record({"provenance": _ABOUT}, more=True)


def read_piece(path: Path, schema: Check = _PIECE) -> dict[str, Any]:
    """Read the numbers of a task, and where they come from."""
    try:
        return read_json(path, schema, error=CheckpointError)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; delete it and reproduce again") from error


def from_results(function: Callable[Concatenate[Path, P], T]) -> Callable[Concatenate[Path, P], T]:
    """Decorate a function of a results folder: numbers that it cannot use are an error about that folder."""

    @wraps(function)
    def run(out: Path, /, *args: P.args, **options: P.kwargs) -> T:
        try:
            return function(out, *args, **options)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            if isinstance(error, FmwcError):
                raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}".removesuffix(": ")
            raise CheckpointError(
                f"{out} holds numbers of another kind than its tables are made of ({reason}); run fmwc reproduce or "
                "fmwc study to the end"
            ) from error

    return run


def check_cell(path: Path, made_with: dict[str, Any]) -> None:
    """Raises where a cell that is there was made with other settings."""
    about = read_piece(path)["provenance"]
    if rows := difference({name: about.get(name) for name in made_with}, made_with):
        raise MismatchError(f"{path} was made with other settings ({rows}); delete it, or use another --out")


def piece(out: Path, seed: int, name: str) -> Path:
    """The file that a task at one seed is kept in."""
    return out / "pieces" / f"{seed}-{name}.json"


def once(
    path: Path, task: Callable[[], Any], seed: int, made_with: dict[str, Any], device: torch.device, say: Say
) -> None:
    """Does a task and keeps its numbers, unless they are there already, made with the same settings."""
    if path.exists():
        check_cell(path, made_with)
        say(f"{path.name} is there already")
        return
    clock = Clock(device)
    numbers = task()
    about = provenance(device, clock.seconds, seeds=[seed], **made_with)
    write_json(path, {"provenance": about, "numbers": numbers})
    say(f"wrote {path.name} after {clock.seconds:.0f} s")


def join(out: Path, setting: str, seed: int, readings: Iterable[str], drawn: Iterable[str] = ()) -> Path:
    """One cell from the pieces of a seed that there are; tables print a dash for what is missing.

    Arguments:
        readings: The pieces whose numbers it holds.
        drawn: Pieces that those were read from, which it names too.
    """
    paths = {name: piece(out, seed, name) for name in (*drawn, *readings)}
    there = {name: read_piece(path) for name, path in paths.items() if path.exists()}
    about = {**next(iter(there.values()))["provenance"]}
    about["seconds"] = round(sum(p["provenance"]["seconds"] for p in there.values()), 1)
    about["pieces"] = {name: p["provenance"] for name, p in there.items()}
    numbers = {name: there[name]["numbers"] for name in readings if name in there}
    cell = {"setting": setting, "seed": seed, "provenance": about, "numbers": numbers}
    return write_json(out / "cells" / f"{seed}.json", cell)


def cells(out: Path) -> list[dict[str, Any]]:
    """The cells of a results folder."""
    found = [read_piece(p, _CELL) for p in sorted((out / "cells").glob("*.json"))]
    if not found:
        raise CheckpointError(f"{out} holds no results; run fmwc reproduce first")
    return found


def setting_of_results(out: Path) -> str:
    """Which setting a results folder is of; the Checkerboard's cells, which came first, do not say."""
    return cells(out)[0].get("setting") or "checkerboard"
