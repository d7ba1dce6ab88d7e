"""The checkpoints that the studio draws with, and the controls of its forms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fmwc.checkpoint import RECORD, about
from fmwc.cli.sample import classes_of
from fmwc.domains import Domain, EditDefault, ShippedDomain
from fmwc.errors import FmwcError, UsageError
from fmwc.field import Field
from fmwc.registry import open_checkpoint
from fmwc.state import SINGLE
from fmwc.studio.samples import CHANNELS, kind_of_space

__all__ = ["AT", "Model", "Refused", "Words", "checked"]

SAMPLES = 100_000  # largest run
STEPS = 1_000
SEEDS = (1 << 53) - 1  # largest whole number that JavaScript represents exactly


class Words(NamedTuple):
    """What the page says of a kind of sample: names, and what a user should know before drawing."""

    title: str
    noun: str
    kind: str
    number: int
    sentence: str
    judge: str


WORDS = {
    "checkerboard": Words(
        "Checkerboard", "points", "points", 2_000,
        "Points in the plane, from a flow that learned a checkerboard.",
        "A point fails if it lies on an empty square.",
    ),
    "mnist": Words(
        "Digits", "digits", "images", 40,
        "Handwritten digits, each of a class that you choose.",
        "A classifier that was trained on real digits reads each one. A digit fails if it reads another class.",
    ),
    "crystals": Words(
        "Crystals", "crystals", "crystals", 8,
        "Crystal structures, with the elements, composition or size that you choose.",
        "An energy model computes the energy above the hull of known crystals. More than 0.1 eV/atom fails.",
    ),
}  # fmt: skip


class Refused(UsageError):
    """Invalid value of a control.

    Arguments:
        control: The name of the control.
    """

    def __init__(self, message: str, control: str = "") -> None:
        super().__init__(message)
        self.control = control


@dataclass
class Model:
    """A checkpoint that is open in the studio.

    Arguments:
        name: A short name, unique in the studio.
        checkpoint: A shipped name or a folder.
        device: The device of the field.
        network: `module:function` that builds the network, if it is the user's own.
        judge: The user's own judge.
    """

    name: str
    checkpoint: str
    device: torch.device
    network: str = ""
    judge: str = ""
    ready: bool = False
    problem: str = ""

    def load(self) -> None:
        """Load the weights and find the classes. Called once, in the worker's thread."""
        try:
            self.opened  # noqa: B018
            self.classes  # noqa: B018
        except (FmwcError, ImportError, OSError) as error:
            self.problem = str(error)
        self.ready = True

    @cached_property
    def opened(self) -> tuple[Domain, Field]:
        """The domain and the field."""
        return open_checkpoint(self.checkpoint, self.device, self.judge, self.network)

    @property
    def domain(self) -> Domain:
        return self.opened[0]

    @property
    def field(self) -> Field:
        return self.opened[1]

    @cached_property
    def classes(self) -> list[int]:
        """The classes that can be asked for; empty if there are none."""
        found = classes_of(self.domain, self.field) if self.domain.name != "crystals" else {}
        return next((values.tolist() for values in found.values()), [])

    @cached_property
    def words(self) -> Words:
        recipe = about(self.checkpoint).get("recipe") or {}
        known = WORDS.get(recipe.get("name", ""))
        own = (Path(self.checkpoint) / RECORD).is_file()
        if known and not own:
            return known._replace(title=known.title + ", joint training" * self.name.endswith("-joint"))
        kind = kind_of_space(self.field.space)
        sentence = f"Samples of {self.checkpoint}."
        return Words(self.name, "samples", kind, 200, sentence, known.judge if known else "")

    @property
    def bad(self) -> str:
        """The word for failed samples."""
        words = {"crystals": "not metastable"}
        domain = self.domain
        return words.get(domain.name, domain.bad) if isinstance(domain, ShippedDomain) else "failed"

    @property
    def usable(self) -> bool:
        """Whether the weights are loaded."""
        return self.ready and not self.problem

    def as_dict(self) -> dict[str, Any]:
        """Return what the page shows of the model."""
        words = self.words if self.usable else WORDS.get(self.name, Words(self.name, "samples", "vectors", 1, "", ""))
        judged = self.usable and isinstance(self.domain, ShippedDomain) and self.domain.has_judge
        return {
            **{name: getattr(self, name) for name in ("name", "ready", "problem")},
            **{name: getattr(words, name) for name in ("title", "sentence", "kind")},
            "controls": self.controls() if self.usable else [],
            "judge": {"sentence": words.judge, "bad": self.bad} if judged else None,
        }

    # ---- controls ----------------------------------------------------------------------------------------------------

    def controls(self) -> list[dict[str, Any]]:
        """Return the controls of the form that draws samples. Their names are options of `fmwc sample`."""
        crystals = self.domain.name == "crystals"
        return [
            whole("count", "How many", self.words.number, 1, SAMPLES, f"The number of {self.words.noun}."),
            whole("seed", "Seed", 0, 0, SEEDS, "The same seed draws the same samples."),
            *([_choice_of_class("label", "all classes in turn", self.classes)] if self.classes else []),
            *(CHEMISTRY if crystals else []),
            whole(
                "steps", "Steps", 50, 1, STEPS, "Integration steps. Confidence needs the number of its reference, 50."
            ),
            {**choice("propagation", "Uncertainty", PROPAGATION), "advanced": True},
            {**choice("check", "Check", CHECKS), "advanced": True},
            {**choice("stepper", "Integration method", STEPPERS), "advanced": True},
        ]

    def edits(self) -> list[dict[str, Any]]:
        """Return the controls of the form that edits a sample."""
        space = self.field.space
        names = [] if space is None else [name for name in space.channels if name != SINGLE]
        known = self.domain.edits if isinstance(self.domain, ShippedDomain) else {}
        several = [*((name, CHANNELS.get(name, name), "") for name in names), ("", "everything", "")]
        several = several if known else several[-1:] + several[:-1]  # with measured defaults, one channel is better
        sentence = "Standard deviation of the noise that is added. 0 only integrates again."
        channel = choice("channel", "Change", several)
        for one in channel["choices"]:
            default = known.get(one["value"] or None, EditDefault())
            one |= {"at": None if default.at == "critical" else default.at, "scale": default.scale}
        scale = channel["choices"][0]["scale"]
        return [
            *([channel] if len(names) > 1 else []),
            *([_choice_of_class("label", "same class", self.classes)] if len(self.classes) > 1 else []),
            {**number("scale", "Strength", scale, 0, 10), "step": 0.05, "sentence": sentence},
            {**whole("seed", "Seed", 0, 0, SEEDS, "Another seed adds other noise."), "advanced": True},
        ]


def whole(name: str, title: str, default: int, low: int, high: int, sentence: str) -> dict[str, Any]:
    return {**number(name, title, default, low, high), "kind": "whole", "sentence": sentence}


def number(name: str, title: str, default: float, low: float, high: float) -> dict[str, Any]:
    return {"name": name, "title": title, "kind": "number", "default": default, "min": low, "max": high}


def text(name: str, title: str, sentence: str) -> dict[str, Any]:
    return {"name": name, "title": title, "kind": "text", "default": "", "max": 200, "sentence": sentence}


def choice(name: str, title: str, choices: Iterable[tuple[str, str, str]]) -> dict[str, Any]:
    """Return a control with several values; the first is the default."""
    values = [{"value": value, "title": words, "sentence": sentence} for value, words, sentence in choices]
    sentence = next((one["sentence"] for one in values if one["sentence"]), "")
    return {
        "name": name,
        "title": title,
        "kind": "choice",
        "default": values[0]["value"],
        "choices": values,
        "sentence": sentence,
    }


def _choice_of_class(name: str, first: str, classes: Iterable[int]) -> dict[str, Any]:
    return choice(name, "Class", [("", first, ""), *((str(value), str(value), "") for value in classes)])


CHEMISTRY = [
    text("formula", "Composition", "Such as LiFePO4. Predicts structures of this composition."),
    text("system", "Chemical system", "Such as Li-Fe-P-O: all of these elements and no others."),
    text("elements", "Allowed elements", "Such as Li,Fe,P,O: no others occur."),
    text("atoms", "Atoms", "In the cell: a number or a range, such as 12 or 8-16."),
]
PROPAGATION = [
    ("", "as the confidence needs", "How the variance of the velocity is computed while samples are drawn."),
    ("linearised", "linearised", "First order, in reverse mode; the usual choice."),
    ("tangent", "tangent", "First order, in forward mode: one value for every coordinate."),
    ("diagonal", "diagonal", "The paper's rules; ignores correlations between layers."),
    ("monte_carlo", "Monte Carlo", "Averages draws of the weights; slow."),
    ("none", "none", "Only samples, without their variance."),
]
CHECKS = [
    ("", "as the confidence needs", "Asks the flow itself how well it explains each finished sample."),
    ("20", "20 evaluations", "At most 20 evaluations of the network per sample."),
    ("60", "60 evaluations", "At most 60 evaluations of the network per sample."),
    ("none", "none", "Skip the check; the confidence may be withheld."),
]
STEPPERS = [
    ("euler", "Euler", "One evaluation of the network per step, as for the reference of the confidence."),
    ("midpoint", "midpoint", "Two evaluations per step."),
    ("heun", "Heun", "Two evaluations per step."),
]
AT = number("at", "Time", 0.5, 0, 0.9999)  # of an edit; the page shows it as a cursor


# ---- values of controls ----------------------------------------------------------------------------------------------


def checked(controls: Iterable[Mapping[str, Any]], values: Any) -> dict[str, Any]:
    """Return the values of a form, with defaults for those that are missing; raise :class:`Refused` if one is wrong."""
    if not isinstance(values, dict):
        raise Refused("the options must be an object with one value per control")
    known = {control["name"]: control for control in controls}
    if unknown := values.keys() - known.keys():
        raise Refused(f"there is no control '{sorted(unknown)[0][:40]}'; the controls are {', '.join(known)}")
    found = {name: values.get(name, control["default"]) for name, control in known.items()}
    for name, value in found.items():
        if expected := _problem(known[name], value):
            raise Refused(f"{known[name]['title']} must be {expected}; got {str(value)[:60]}", name)
    return found


def _problem(control: Mapping[str, Any], value: Any) -> str:
    """Return what was expected of a value; empty if it fits."""
    kind = control["kind"]
    if kind == "choice":
        values = [one["value"] for one in control["choices"]]
        return "" if value in values else f"one of {', '.join(one['title'] for one in control['choices'])}"
    if kind == "text":
        fits = isinstance(value, str) and len(value) <= control["max"]
        return "" if fits else f"text of at most {control['max']} characters"
    low, high = control["min"], control["max"]
    fits = isinstance(value, int if kind == "whole" else (int, float)) and not isinstance(value, bool)
    if fits and low <= value <= high:
        return ""
    return f"a {'whole ' * (kind == 'whole')}number from {low:,} to {high:,}"
