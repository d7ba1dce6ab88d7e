"""Settings: what each verb of the command does on the Checkerboard, on digits and on crystals."""

import torch

from fmwc.checkpoint import about, load
from fmwc.errors import UsageError, pick
from fmwc.field import Field
from fmwc.recipes.named import build
from fmwc.settings.checkerboard import CheckerboardSetting
from fmwc.settings.crystals import CrystalSetting
from fmwc.settings.mnist import MnistSetting
from fmwc.settings.own import OwnSetting
from fmwc.settings.setting import Setting

__all__ = ["SETTINGS", "Setting", "open_checkpoint", "setting_named", "setting_of"]

SETTINGS: dict[str, Setting] = {
    setting.name: setting for setting in (CheckerboardSetting(), MnistSetting(), CrystalSetting())
}


def setting_named(name: str, judge: str = "") -> Setting:
    """A setting, with a judge of the user's own if one is named."""
    chosen = pick(SETTINGS, name, "setting")
    return chosen.judged_by(judge) if judge else chosen


def setting_of(checkpoint: str, judge: str = "") -> Setting:
    """The setting a checkpoint was trained in; without its own judge where it was trained on a user's data."""
    recipe = about(checkpoint).get("recipe") or {}
    if recipe.get("name") not in SETTINGS:
        raise UsageError(
            f"{checkpoint} is of a network of your own, which this verb does not take; use it from Python "
            "(fmwc.sample, fmwc.confidence.editing, fmwc.confidence.rewinding)"
        )
    chosen = setting_named(recipe["name"], judge)
    return chosen.unjudged() if recipe.get("own") and not judge else chosen


def open_checkpoint(checkpoint: str, device: torch.device, judge: str = "", network: str = "") -> tuple[Setting, Field]:
    """A checkpoint's setting and its field.

    Arguments:
        checkpoint: A shipped name or a folder.
        judge: A judge of the user's own.
        network: `module:function` that builds the network, where that is the user's own.
    """
    record = about(checkpoint)
    recipe = record.get("recipe") or {}
    if recipe.get("name") in SETTINGS:
        if network:
            raise UsageError(f"{checkpoint} is of {recipe['name']}, whose network fmwc builds; leave out --network")
        return setting_of(checkpoint, judge), load(checkpoint, device=device)
    if judge:
        raise UsageError("fmwc judges no samples of a network of your own; leave out --judge")
    if not network and (record.get("network") or {}).get("config") is None:
        before = f" (it was {recipe['network']})" if recipe.get("network") else ""
        raise UsageError(f"{checkpoint} is of a network of your own: add --network module:function{before}")
    made, space = build(network) if network else (None, None)
    return OwnSetting(), load(checkpoint, made, space=space, device=device)
