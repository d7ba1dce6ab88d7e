"""`--set key=value`: invalid values raise one line before any work."""

import pytest

from fmwc.checkerboard.recipe import PRESETS as BOARD
from fmwc.crystals.recipe import PRESETS as CRYSTALS
from fmwc.errors import FmwcError
from fmwc.mnist.recipe import PRESETS as MNIST
from fmwc.recipes import override

RECIPES = [BOARD["quick"], MNIST["quick"], CRYSTALS["quick"]]


@pytest.mark.parametrize(
    "change",
    [
        "lr=nan", "lr=inf", "lr=1e400", "lr=-1e400", "lr=1e10", "lr=", "lr=one", "iterations=0", "iterations=-5",
        "iterations=1e3", "iterations=" + "9" * 30, "iterations=" + "9" * 5000, "batch=1.5", "batch=0",
        "seed=" + "9" * 20,
        "prior_rate=2", "prior_rate=nan", "width=1000000000", "beta=-inf", "warmup=-1", "cycles=0", "method=none",
        "decay=\0", "method=" + "a" * 5000, "decay=a\nb", "=1", "seed", "", "seed\0=1", "nothing=1", "noise_steps=-1",
    ],
)  # fmt: skip
def test_invalid_overrides_raise_one_line(change):
    for recipe in RECIPES:
        with pytest.raises(FmwcError) as raised:
            override(recipe, [change]).plan  # noqa: B018
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 1000


def test_valid_overrides_are_applied():
    for recipe in RECIPES:
        made = override(recipe, ["lr=1e-4", "iterations=1_000", "seed=-3", "warmup=0"])
        assert (made.lr, made.iterations, made.seed, made.warmup) == (1e-4, 1000, -3, 0.0)
