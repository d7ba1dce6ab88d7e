"""The domains by name, and the domain of a checkpoint."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fmwc.errors import UsageError, pick

if TYPE_CHECKING:
    import torch

    from fmwc.domains import Domain, ShippedDomain
    from fmwc.field import Field

__all__ = ["DOMAINS", "domain_named", "domain_of", "open_checkpoint"]

CLASSES = {"checkerboard": "CheckerboardDomain", "mnist": "MnistDomain", "crystals": "CrystalDomain"}
DOMAINS = tuple(CLASSES)
OWN = "a network of your own"


@lru_cache
def _shipped(name: str) -> Any:
    """Import a domain on first use, because some need optional packages."""
    return getattr(import_module(f"fmwc.{name}.domain"), CLASSES[name])()


def domain_named(name: str, judge: str = "") -> ShippedDomain:
    """Return a shipped domain, with your own judge if one is given."""
    pick(CLASSES, name, "domain")
    domain: ShippedDomain = _shipped(name)
    return domain.with_judge(judge) if judge else domain


def domain_of(checkpoint: str, judge: str = "") -> ShippedDomain:
    """Return the domain of a checkpoint, without the shipped judge if it was trained on your own data."""
    from fmwc.checkpoint import about

    recipe = about(checkpoint).get("recipe") or {}
    if recipe.get("name") not in DOMAINS:
        raise UsageError(
            f"{checkpoint} holds {OWN}, which this command does not support; use Python instead (fmwc.sample, "
            "fmwc.uses.edit)"
        )
    chosen = domain_named(recipe["name"], judge)
    return chosen.with_judge("") if recipe.get("own") and not judge else chosen


def open_checkpoint(checkpoint: str, device: torch.device, judge: str = "", network: str = "") -> tuple[Domain, Field]:
    """Load a checkpoint; return its domain and its field.

    Arguments:
        checkpoint: A shipped name or a folder.
        device: The device of the field.
        judge: Your own judge.
        network: `module:function` that builds the network, if it is your own.
    """
    from fmwc.checkpoint import about, load
    from fmwc.domains import OwnDomain
    from fmwc.entry import build

    record = about(checkpoint)
    recipe = record.get("recipe") or {}
    if recipe.get("name") in DOMAINS:
        if network:
            raise UsageError(f"fmwc builds the network of {checkpoint} ({recipe['name']}) itself; leave out --network")
        return domain_of(checkpoint, judge), load(checkpoint, device=device)
    if judge:
        raise UsageError(f"there is no judge for samples of {OWN}; leave out --judge")
    if not network and (record.get("network") or {}).get("config") is None:
        before = f" (it was trained with {recipe['network']})" if recipe.get("network") else ""
        raise UsageError(f"{checkpoint} holds {OWN}: add --network module:function{before}")
    built, space = build(network) if network else (None, None)
    return OwnDomain(), load(checkpoint, built, space=space, device=device)
