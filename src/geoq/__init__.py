"""GeoQ: how wrong is this prediction, here, and may I trust that answer?"""

from geoq.core.conformal import WholeField
from geoq.core.estimator import GeoQ
from geoq.core.folds import (
    ClusterFolds,
    CombinedFolds,
    GroupFolds,
    NestedFolds,
    RandomFolds,
    TemporalFolds,
    default_folds,
)
from geoq.data.domain import Grid, Mesh, Table
from geoq.regions.region import PaperRegion, Region
from geoq.surrogate import absolute_error, norm_error, relative_norm_error
