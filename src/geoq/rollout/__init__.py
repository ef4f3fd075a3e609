"""Rollouts: error bounds along autoregressive forecasts, and the horizon up to which a forecast can be trusted.

This package contains only what a rollout needs and a single prediction does not: trajectories, rollouts of the deployed
surrogate and of the fold surrogates, features along a rollout, the schemes that bound the error of every step, the safe region
and the trusted horizon of rollouts, a training recipe, and the estimator with its checks and its files. Code that a single
prediction needs as well belongs to the other modules of geoq and is imported from there.
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
