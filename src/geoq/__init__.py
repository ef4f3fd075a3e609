"""GeoQ: how wrong is this prediction, here, and may I trust that answer?"""

from geoq.assessment import Assessment
from geoq.conformal import WholeField
from geoq.estimator import GeoQ
from geoq.folds import (
    ClusterFolds,
    CombinedFolds,
    GroupFolds,
    NestedFolds,
    RandomFolds,
    TemporalFolds,
    default_folds,
)
from geoq.increments import (
    FieldIncrement,
    FieldScaleIncrement,
    Grid,
    IndicatorIncrement,
    Mesh,
    NormScaledIncrement,
    TwoLawIncrement,
)
from geoq.metric import SensitivityMetric, StandardizedMetric
from geoq.nets.mlp import MLP
from geoq.regions.field_region import FieldRegion
from geoq.regions.safe_region import DistanceRegion, SafeRegion
from geoq.regions.support_region import SupportRegion
from geoq.representation import identity
from geoq.rollout import RolloutGeoQ
from geoq.surrogate import absolute_error, norm_error, relative_norm_error
from geoq.training import PredictedFolds, TrainedFolds, Training, TrainNetwork

__all__ = [
    "MLP",
    "Assessment",
    "ClusterFolds",
    "CombinedFolds",
    "DistanceRegion",
    "FieldIncrement",
    "FieldRegion",
    "FieldScaleIncrement",
    "GeoQ",
    "Grid",
    "GroupFolds",
    "IndicatorIncrement",
    "Mesh",
    "NestedFolds",
    "NormScaledIncrement",
    "PredictedFolds",
    "RandomFolds",
    "RolloutGeoQ",
    "SafeRegion",
    "SensitivityMetric",
    "StandardizedMetric",
    "SupportRegion",
    "TemporalFolds",
    "TrainNetwork",
    "TrainedFolds",
    "Training",
    "TwoLawIncrement",
    "WholeField",
    "absolute_error",
    "default_folds",
    "identity",
    "norm_error",
    "relative_norm_error",
]
