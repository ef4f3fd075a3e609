"""GeoQ: how wrong is this prediction, here, and may I trust that answer?"""

from geoq.assessment import Assessment
from geoq.climatology import Climatology
from geoq.coverage import ExpectedShare, WholeField
from geoq.estimator import GeoQ
from geoq.field_factor import FieldFactor, View
from geoq.fold_surrogates import PredictedFolds, TrainedFolds
from geoq.folds import (
    ClusterFolds,
    CombinedFolds,
    GroupFolds,
    NestedFolds,
    RandomFolds,
    TemporalFolds,
    default_folds,
)
from geoq.increment import FieldIncrement, NormScaledIncrement
from geoq.indicator import IndicatorIncrement, of_logit, of_probability, zero_or_one
from geoq.levels import PredictionLevels
from geoq.power_law import PowerLawIncrement
from geoq.representation import identity
from geoq.rollout import (
    AdditiveRecursion,
    RolloutAssessment,
    RolloutGeoQ,
    RolloutRegion,
    SaturatingGrowth,
    TrainRollout,
)
from geoq.safe_region import DistanceRegion, SafeRegion
from geoq.scale import LowRankScale
from geoq.surrogate import absolute_error, norm_error, relative_norm_error
from geoq.training import Training, TrainNetwork

__all__ = [
    "AdditiveRecursion",
    "Assessment",
    "Climatology",
    "ClusterFolds",
    "CombinedFolds",
    "DistanceRegion",
    "ExpectedShare",
    "FieldFactor",
    "FieldIncrement",
    "GeoQ",
    "GroupFolds",
    "IndicatorIncrement",
    "LowRankScale",
    "NestedFolds",
    "NormScaledIncrement",
    "PowerLawIncrement",
    "PredictedFolds",
    "PredictionLevels",
    "RandomFolds",
    "RolloutAssessment",
    "RolloutGeoQ",
    "RolloutRegion",
    "SafeRegion",
    "SaturatingGrowth",
    "TemporalFolds",
    "TrainNetwork",
    "TrainRollout",
    "TrainedFolds",
    "Training",
    "View",
    "WholeField",
    "absolute_error",
    "default_folds",
    "identity",
    "norm_error",
    "of_logit",
    "of_probability",
    "relative_norm_error",
    "zero_or_one",
]
