"""Rollouts: error bounds along autoregressive forecasts that grow, saturate, and say until when to trust them."""

from geoq.rollout.additive import AdditiveRecursion, signed_displacement
from geoq.rollout.assessment import RolloutAssessment
from geoq.rollout.estimator import RolloutGeoQ
from geoq.rollout.recipe import TrainRollout
from geoq.rollout.region import RolloutRegion
from geoq.rollout.saturating import SaturatingGrowth

__all__ = [
    "AdditiveRecursion",
    "RolloutAssessment",
    "RolloutGeoQ",
    "RolloutRegion",
    "SaturatingGrowth",
    "TrainRollout",
    "signed_displacement",
]
