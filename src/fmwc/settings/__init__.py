"""Settings: what each verb of the command does on the Checkerboard, on digits and on crystals."""

from fmwc.settings.checkerboard import CheckerboardSetting
from fmwc.settings.crystals import CrystalSetting
from fmwc.settings.mnist import MnistSetting
from fmwc.settings.setting import Setting

__all__ = ["SETTINGS", "Setting"]

SETTINGS: dict[str, Setting] = {
    setting.name: setting for setting in (CheckerboardSetting(), MnistSetting(), CrystalSetting())
}
