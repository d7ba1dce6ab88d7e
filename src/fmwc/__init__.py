"""fmwc: flow matching with confidence.

Generative flows that say how far to trust each sample. Needs torch, numpy and safetensors only.
"""

from fmwc import adapters
from fmwc.checkpoint import load, save
from fmwc.errors import FmwcError
from fmwc.field import Field, attach
from fmwc.flow import elbo, flow_matching
from fmwc.sampling import Trajectory, Watched, sample
from fmwc.training import fit_noise

__version__ = "0.1.0"
__all__ = [
    "Field",
    "FmwcError",
    "Trajectory",
    "Watched",
    "adapters",
    "attach",
    "elbo",
    "fit_noise",
    "flow_matching",
    "load",
    "sample",
    "save",
]
