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
        "lr=nan", "lr=one", "iterations=0", "iterations=" + "9" * 5000, "batch=1.5", "seed=" + "9" * 20, "prior_rate=2",
        "width=1000000000", "method=none", "decay=a\nb", "=1", "seed", "nothing=1",
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
