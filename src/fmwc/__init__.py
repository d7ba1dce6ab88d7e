"""fmwc: flow matching with confidence.

Generative flows that estimate how far to trust each sample. Requires only torch, numpy and safetensors. Public names
and submodules are imported on first use, so that `import fmwc` does not import torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fmwc import adapters as adapters
    from fmwc import checkpoint as checkpoint
    from fmwc import estimators as estimators
    from fmwc import flow as flow
    from fmwc import moments as moments
    from fmwc import noise as noise
    from fmwc import sampling as sampling
    from fmwc.calibration import fit_confidence as fit_confidence
    from fmwc.checkpoint import load as load
    from fmwc.checkpoint import save as save
    from fmwc.checks import check as check
    from fmwc.errors import FmwcError as FmwcError
    from fmwc.field import Field as Field
    from fmwc.field import attach as attach
    from fmwc.flow import elbo_loss as elbo_loss
    from fmwc.flow import flow_matching_loss as flow_matching_loss
    from fmwc.integrations.hub import from_pretrained as from_pretrained
    from fmwc.integrations.hub import push_to_hub as push_to_hub
    from fmwc.integrations.hub import save_pretrained as save_pretrained
    from fmwc.sampling import SamplingConfig as SamplingConfig
    from fmwc.sampling import Schedule as Schedule
    from fmwc.sampling import Trajectory as Trajectory
    from fmwc.sampling import VarianceRecorder as VarianceRecorder
    from fmwc.sampling import sample as sample
    from fmwc.screening import screen as screen
    from fmwc.training import fit_noise as fit_noise

__version__ = "0.1.0"
__all__ = [
    "Field",
    "FmwcError",
    "SamplingConfig",
    "Schedule",
    "Trajectory",
    "VarianceRecorder",
    "adapters",
    "attach",
    "check",
    "elbo_loss",
    "fit_confidence",
    "fit_noise",
    "flow_matching_loss",
    "from_pretrained",
    "load",
    "push_to_hub",
    "sample",
    "save",
    "save_pretrained",
    "screen",
]

_HOME = {
    "Field": "field",
    "FmwcError": "errors",
    "SamplingConfig": "sampling",
    "Schedule": "sampling",
    "Trajectory": "sampling",
    "VarianceRecorder": "sampling",
    "attach": "field",
    "check": "checks",
    "elbo_loss": "flow",
    "fit_confidence": "calibration",
    "fit_noise": "training",
    "flow_matching_loss": "flow",
    "from_pretrained": "integrations.hub",
    "load": "checkpoint",
    "push_to_hub": "integrations.hub",
    "sample": "sampling",
    "save": "checkpoint",
    "save_pretrained": "integrations.hub",
    "screen": "screening",
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
