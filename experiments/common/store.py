"""Files of a reproduction: trained networks, and one result file per task. They allow a stopped run to resume.

`pieces/SEED-TASK.json` holds the numbers of one task, and `cells/SEED.json` those of all tasks of a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from experiments.common.comparisons import HeteroscedasticHead
from experiments.common.fitting import fit_dropout, fit_heads, fit_variance
from fmwc import recipes
from fmwc.baselines import Dropout
from fmwc.checkpoint import about, load
from fmwc.errors import CheckpointError, FmwcError, MismatchError, UsageError, pick
from fmwc.files import read_tensors, write_json, write_tensors
from fmwc.identity import SEAL, difference, plain
from fmwc.provenance import Clock, provenance
from fmwc.readers import Check, anything, array, mapping, read_json, record, text, whole
from fmwc.recipes import data_of

MEMBERS = 5  # members of an ensemble
SHARED = (1001, 1002, 1003, 1004)  # seeds of the ensemble members shared by all reported seeds
# Recipe fields that do not affect a network without noise.
OF_NOISE = (
    "method", "beta", "prior_rate", "cycles", "warmup", "exclude", "width", "noise_steps", "noise_batch", "noise_lr",
)  # fmt: skip

Say = Callable[[str], None]
P = ParamSpec("P")
T = TypeVar("T")

# ---- trained networks ------------------------------------------------------------------------------------------------

_WEIGHTS = record({"recipe": mapping(anything, 1000), "steps": whole(), SEAL: text(64, "[0-9a-f]{64}")})
_WHAT = "a network of python -m experiments reproduce"


class Networks:
    """The networks of a comparison, each trained on first use or loaded from an earlier run.

    Arguments:
        recipe: The sizes and the schedule.
        folder: The folder of the trained networks.
        device: The device for training.
        say: Called with a message after each training.
    """

    def __init__(self, recipe: Any, folder: Path, device: torch.device, say: Say) -> None:
        self.recipe, self.folder, self.device, self.say = recipe, folder, device, say

    @cached_property
    def data(self) -> str:
        """The fingerprint of the training data."""
        return data_of(self.recipe)

    def at(self, seed: int, **changes: Any) -> Any:
        """Return the recipe with the given seed and changes."""
        return replace(self.recipe, seed=seed, **changes)

    def flow(self, seed: int) -> nn.Module:
        """Return the plain flow-matching network."""
        recipe = self.at(seed)
        network = recipe.network().to(self.device)
        return network if recipes.take_flow(recipe, network) else self._trained("flow", recipe, network)

    def retrofit(self, seed: int, **changes: Any) -> Any:
        """Return the plain flow with a fitted noise model."""
        recipe = self.at(seed, method="retrofit", **changes)
        if self._already_fitted(recipe):
            return load(recipe.flow, device=self.device)
        return self._trained("retrofit", recipe, recipe.attach(self.flow(seed)).to(self.device))

    def joint(self, seed: int, name: str = "joint", **changes: Any) -> Any:
        """Return a field whose network and noise model were trained jointly."""
        recipe = self.at(seed, method="joint", **changes)
        return self._trained(name, recipe, recipe.attach(recipe.network()).to(self.device))

    def dropout(self, seed: int) -> Dropout:
        """Return a network trained with dropout."""
        recipe = self.at(seed)
        return self._trained("dropout", recipe, Dropout(recipe.network().to(self.device)))

    def head(self, seed: int) -> HeteroscedasticHead:
        """Return the model of UA-Flow, trained from scratch by its likelihood."""
        recipe = self.at(seed)
        return self._trained("head", recipe, HeteroscedasticHead(recipe.network(heads=2).to(self.device)))

    def variance(self, seed: int) -> HeteroscedasticHead:
        """Return UA-Flow's variance head on the frozen plain flow."""
        recipe = self.at(seed)
        head = HeteroscedasticHead(recipe.network(heads=2).to(self.device))
        head.graft(self.flow(seed))
        return self._trained("variance", recipe, head)

    def save_field(self, kind: str, seed: int, folder: Path, clock: Clock | None = None) -> None:
        """Write a field and its reference as a checkpoint, unless the folder already holds one."""
        if not (folder / "recipe.json").exists():
            field = getattr(self, kind)(seed)
            recipes.finish(self.at(seed, method=kind), field, folder, clock or Clock(self.device))

    def steps(self, name: str, seed: int) -> dict[str, int]:
        """Return the number of training steps of a network, and the planned number; a time limit may end it early."""
        recipe = self.at(seed)
        if name == "flow" and (given := getattr(recipe, "flow", "")):
            steps = about(given)["recipe"]["iterations"]
            return {"steps": steps, "of": steps}
        _, known = read_tensors(self._file(name, recipe), _WEIGHTS, _WHAT)
        return {"steps": known["steps"], "of": recipe.iterations}

    def _file(self, name: str, recipe: Any) -> Path:
        return self.folder / f"{name}-{recipe.decay}-{recipe.seed}.safetensors"

    def _trained(self, name: str, recipe: Any, module: Any) -> Any:
        """Load the weights of an earlier run with the same recipe into `module`, or train it and save the weights."""
        path = self._file(name, recipe)
        ignored = (*recipes.LATER, *(OF_NOISE if name == "flow" else ()), *(("flow",) if name == "joint" else ()))
        # Plain values are comparable between machines.
        identity = plain(recipes.identity_of(recipe, self.data, ignored))
        resume = path.with_suffix(".resume")
        if path.exists():
            tensors, known = read_tensors(path, _WEIGHTS, _WHAT)
            if rows := difference(known["recipe"], identity):
                raise MismatchError(f"{path} was trained with another recipe ({rows}); delete it, or use another --out")
            try:
                module.load_state_dict(tensors)
            except RuntimeError as error:
                raise CheckpointError(f"{path} has another architecture; delete it, or use another --out") from error
        else:
            clock = Clock(self.device)
            steps = FITS[name](recipe, module, resume=resume)
            tensors = {k: v.detach().cpu().clone().contiguous() for k, v in module.state_dict().items()}
            write_tensors(path, tensors, {"recipe": identity, "steps": steps or recipe.iterations})
            self.say(f"trained {name}, {recipe.decay}, seed {recipe.seed}: {clock.seconds:.0f} s")
        for left in (resume, resume.with_suffix(recipes.ENDED)):
            left.unlink(missing_ok=True)
        return module

    def _already_fitted(self, recipe: Any) -> bool:
        """Return whether the checkpoint of the flow already holds the noise model of this recipe."""
        if not getattr(recipe, "flow", ""):
            return False
        known = about(recipe.flow)
        fitted = known.get("recipe") or {}
        same = all(fitted.get(n) == getattr(recipe, n) for n in ("seed", *OF_NOISE) if hasattr(recipe, n))
        return same and (known.get("data") or {}).get("fingerprint") == self.data


FITS: dict[str, Callable[..., int | None]] = {
    "flow": recipes.fit_network,
    "retrofit": recipes.fit_retrofit,
    "joint": recipes.fit_joint,
    "output": recipes.fit_joint,
    "dropout": fit_dropout,
    "head": fit_heads,
    "variance": fit_variance,
}

# ---- tasks and their result files ------------------------------------------------------------------------------------

_SEED = whole(-(1 << 63), 1 << 64)
_ABOUT = record({}, {"seeds": array(_SEED, most=10_000)}, more=True)
_RESULTS = record({}, {"provenance": _ABOUT, "setting": text(100), "seed": _SEED, "decay": text(100)}, more=True)
_RESULT = record({"provenance": _ABOUT}, more=True)
_NOUNS = {"draw": "drawing", "read": "reading"}


def parse_tasks(
    only: str, tasks: Mapping[str, Mapping[str, Any]], networks: Iterable[str] = ()
) -> list[tuple[str, str]]:
    """Split `flow:0,draw:joint,read:joint` into (verb, name), where a network's name is its seed.

    Arguments:
        tasks: The known names for each verb, `draw` and `read`.
        networks: The networks that can be trained as separate tasks.
    """
    parsed = []
    for task in (part.strip() for part in only.split(",")) if only else ():
        verb, _, name = task.partition(":")
        if verb in tasks:
            pick(tasks[verb], name, _NOUNS[verb])
        else:
            known = dict.fromkeys(networks)
            pick(known or tasks, verb, "network" if known else "task")
            if not name.isdigit():
                forms = ", ".join(["network:seed", *(f"{v}:name" for v in tasks)])
                raise UsageError(f"--only takes {' or '.join(forms.rsplit(', ', 1))}, got '{task}'")
        parsed.append((verb, name))
    return parsed


def read_result(path: Path, schema: Check = _RESULT) -> dict[str, Any]:
    """Read the result file of a task."""
    try:
        return read_json(path, schema, error=CheckpointError)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; delete it and reproduce again") from error


def check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Raise an error if a result file was computed with other settings."""
    about = read_result(path)["provenance"]
    if rows := difference({name: about.get(name) for name in settings}, settings):
        raise MismatchError(f"{path} was made with other settings ({rows}); delete it, or use another --out")


def result_file(out: Path, seed: int, task: str) -> Path:
    """Return the path of a task's result file."""
    return out / "pieces" / f"{seed}-{task}.json"


def run_task(
    path: Path,
    task: Callable[[], Any],
    seed: int,
    settings: dict[str, Any],
    device: torch.device,
    say: Say,
    labels: Mapping[str, Any] | None = None,
) -> None:
    """Run a task and write its numbers, unless a file with the same settings exists."""
    if path.exists():
        check_settings(path, settings)
        say(f"{path.name} already exists; skipped")
        return
    clock = Clock(device)
    numbers = task()
    about = provenance(device, clock.seconds, seeds=[seed], **settings)
    write_json(path, {**(labels or {}), "provenance": about, "numbers": numbers})
    say(f"wrote {path.name} after {clock.seconds:.0f} s")


def join_results(out: Path, setting: str, seed: int, readings: Iterable[str], drawings: Iterable[str] = ()) -> Path:
    """Join the existing result files of a seed into one file.

    Arguments:
        readings: The tasks whose numbers are joined.
        drawings: The tasks on which the readings depend; only their provenance is joined.
    """
    paths = {name: result_file(out, seed, name) for name in (*drawings, *readings)}
    results = {name: read_result(path) for name, path in paths.items() if path.exists()}
    pieces = {name: result["provenance"] for name, result in results.items()}
    seconds = round(sum(piece["seconds"] for piece in pieces.values()), 1)
    about = {**next(iter(pieces.values())), "seconds": seconds, "pieces": pieces}
    numbers = {name: results[name]["numbers"] for name in readings if name in results}
    joined = {"setting": setting, "seed": seed, "provenance": about, "numbers": numbers}
    return write_json(out / "cells" / f"{seed}.json", joined)


def read_results(out: Path) -> list[dict[str, Any]]:
    """Read the joined results of every seed in a results folder."""
    results = [read_result(path, _RESULTS) for path in sorted((out / "cells").glob("*.json"))]
    if not results:
        raise CheckpointError(f"{out} holds no results; run python -m experiments reproduce first")
    return results


def experiment_of_results(out: Path) -> str:
    """Return the name of a results folder's experiment. Results without a name are of the Checkerboard."""
    return read_results(out)[0].get("setting") or "checkerboard"


def from_results(function: Callable[Concatenate[Path, P], T]) -> Callable[Concatenate[Path, P], T]:
    """Wrap a function of a results folder, so that unexpected contents raise an error that names the folder."""

    @wraps(function)
    def run(out: Path, /, *args: P.args, **options: P.kwargs) -> T:
        try:
            return function(out, *args, **options)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            if isinstance(error, FmwcError):
                raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}".removesuffix(": ")
            raise CheckpointError(
                f"the results in {out} are incomplete or have an unexpected format ({reason}); run "
                "python -m experiments reproduce or python -m experiments study to the end"
            ) from error

    return run
