"""fmwc: flow matching with confidence.

Generative flows that say how far to trust each sample. Needs torch, numpy and safetensors only. Public names and
submodules are imported when they are first used, so that `import fmwc` does not wait for torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fmwc import adapters as adapters
    from fmwc import checkpoint as checkpoint
    from fmwc import flow as flow
    from fmwc import moments as moments
    from fmwc import propagate as propagate
    from fmwc import sampling as sampling
    from fmwc import vad as vad
    from fmwc.checkpoint import load as load
    from fmwc.checkpoint import save as save
    from fmwc.checks import check as check
    from fmwc.choosing import fit_confidence as fit_confidence
    from fmwc.errors import FmwcError as FmwcError
    from fmwc.field import Field as Field
    from fmwc.field import attach as attach
    from fmwc.flow import elbo as elbo
    from fmwc.flow import flow_matching as flow_matching
    from fmwc.sampling import Trajectory as Trajectory
    from fmwc.sampling import Watched as Watched
    from fmwc.sampling import sample as sample
    from fmwc.training import fit_noise as fit_noise

__version__ = "0.1.0"
__all__ = [
    "Field",
    "FmwcError",
    "Trajectory",
    "Watched",
    "adapters",
    "attach",
    "check",
    "elbo",
    "fit_confidence",
    "fit_noise",
    "flow_matching",
    "load",
    "sample",
    "save",
]

_HOME = {
    "Field": "field",
    "FmwcError": "errors",
    "Trajectory": "sampling",
    "Watched": "sampling",
    "attach": "field",
    "check": "checks",
    "elbo": "flow",
    "fit_confidence": "choosing",
    "fit_noise": "training",
    "flow_matching": "flow",
    "load": "checkpoint",
    "sample": "sampling",
    "save": "checkpoint",
}


def __getattr__(name: str) -> Any:
    """Import a public name, or a submodule, on first use."""
    if name in _HOME:
        value = getattr(import_module(f"fmwc.{_HOME[name]}"), name)
    elif not name.startswith("_") and find_spec(f"fmwc.{name}") is not None:
        value = import_module(f"fmwc.{name}")
    else:
        raise AttributeError(f"module 'fmwc' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
