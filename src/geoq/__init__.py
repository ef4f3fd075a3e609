"""Error bounds for a surrogate that you have already trained, and a flag for queries that the data do not support.

``GeoQ(surrogate, train).fit(x, y).assess(queries)`` is the main use, and ``RolloutGeoQ`` serves forecasts. ``geoq.parts`` has everything
else that a setting accepts; ``sklearn``, ``xarray``, ``plots``, ``planning``, ``report``, ``monitor`` and ``serving`` are the other public
modules. ``TrainNetwork``, ``TrainRollout``, ``Training`` and ``MLP`` need PyTorch, which is imported when one is used.
"""

from typing import TYPE_CHECKING

from geoq.checks import names_with_torch
from geoq.core.assessment import Assessment
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
from geoq.data.metric import SensitivityMetric
from geoq.regions.region import Region
from geoq.rollout.estimator import RolloutGeoQ
from geoq.surrogate import absolute_error, log_error, norm_error, relative_norm_error
from geoq.training.sources import PredictedFolds, TrainedFolds

if TYPE_CHECKING:
    from geoq.nets.mlp import MLP as MLP
    from geoq.rollout.recipe import TrainRollout as TrainRollout
    from geoq.training.loop import Training as Training
    from geoq.training.recipe import TrainNetwork as TrainNetwork

__version__ = "0.1.0"
# Without the names that need PyTorch, so that a star import works without it.
__all__ = [
    "Assessment",
    "ClusterFolds",
    "CombinedFolds",
    "GeoQ",
    "Grid",
    "GroupFolds",
    "Mesh",
    "NestedFolds",
    "PredictedFolds",
    "RandomFolds",
    "Region",
    "RolloutGeoQ",
    "SensitivityMetric",
    "Table",
    "TemporalFolds",
    "TrainedFolds",
    "WholeField",
    "absolute_error",
    "default_folds",
    "log_error",
    "norm_error",
    "relative_norm_error",
]
_WITH_TORCH = {
    "MLP": "geoq.nets.mlp",
    "TrainNetwork": "geoq.training.recipe",
    "TrainRollout": "geoq.rollout.recipe",
    "Training": "geoq.training.loop",
}
__getattr__, __dir__ = names_with_torch("geoq", __all__, _WITH_TORCH)
