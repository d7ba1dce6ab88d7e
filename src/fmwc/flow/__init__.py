"""Flow matching: spaces of named channels, geodesic paths, objectives."""

from fmwc.flow.couplings import COUPLINGS, Pairs, couple, optimal_transport
from fmwc.flow.manifolds import Euclidean, FlatTorus, Lattice, Manifold
from fmwc.flow.objective import PathSample, elbo, flow_matching, path_sample
from fmwc.flow.space import Channel, Path, Space, as_space, euclidean, path_of

__all__ = [
    "COUPLINGS",
    "Channel",
    "Euclidean",
    "FlatTorus",
    "Lattice",
    "Manifold",
    "Pairs",
    "Path",
    "PathSample",
    "Space",
    "as_space",
    "couple",
    "elbo",
    "euclidean",
    "flow_matching",
    "optimal_transport",
    "path_of",
    "path_sample",
]
