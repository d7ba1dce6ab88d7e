"""Flow matching: spaces of named channels, geodesic paths, objectives."""

from fmwc.flow.losses import (
    COUPLINGS,
    Pairs,
    PathSample,
    couple,
    elbo_loss,
    flow_matching_loss,
    optimal_transport,
    path_sample,
)
from fmwc.flow.manifolds import Euclidean, FlatTorus, Lattice, Manifold
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
    "elbo_loss",
    "euclidean",
    "flow_matching_loss",
    "optimal_transport",
    "path_of",
    "path_sample",
]
