"""Flow matching: spaces of named channels, geodesic paths, objectives."""

from fmwc.flow.manifolds import Euclidean, FlatTorus, Lattice, Manifold
from fmwc.flow.objective import PathSample, elbo, flow_matching, path_sample
from fmwc.flow.space import Channel, Path, Space, as_space, euclidean, path_of

__all__ = [
    "Channel",
    "Euclidean",
    "FlatTorus",
    "Lattice",
    "Manifold",
    "Path",
    "PathSample",
    "Space",
    "as_space",
    "elbo",
    "euclidean",
    "flow_matching",
    "path_of",
    "path_sample",
]
