"""Rollouts: error bounds along autoregressive forecasts, and the horizon up to which a forecast can be trusted.

This package contains only what a rollout needs and a single prediction does not; the rest is imported from the other modules.
"""

from geoq.rollout.additive import AdditiveRecursion, signed_displacement
from geoq.rollout.assessment import RolloutAssessment
from geoq.rollout.estimator import RolloutGeoQ
from geoq.rollout.memory import WithMemory
from geoq.rollout.recipe import TrainRollout
from geoq.rollout.region import RolloutRegion
from geoq.rollout.saturating import SaturatingGrowth
from geoq.rollout.tolerance import Relative

__all__ = [
    "AdditiveRecursion",
    "Relative",
    "RolloutAssessment",
    "RolloutGeoQ",
    "RolloutRegion",
    "SaturatingGrowth",
    "TrainRollout",
    "WithMemory",
    "signed_displacement",
]
