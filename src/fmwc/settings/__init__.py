"""Settings: what each verb of the command does on the Checkerboard, on digits and on crystals."""

from fmwc.checkpoint import about
from fmwc.errors import UsageError, pick
from fmwc.settings.checkerboard import CheckerboardSetting
from fmwc.settings.crystals import CrystalSetting
from fmwc.settings.mnist import MnistSetting
from fmwc.settings.setting import Setting

__all__ = ["SETTINGS", "Setting", "setting_named", "setting_of"]

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
        raise UsageError(f"{checkpoint} is not of a recipe of fmwc; use it from Python: fmwc.sample(field, n)")
    chosen = setting_named(recipe["name"], judge)
    return chosen.unjudged() if recipe.get("own") and not judge else chosen
