"""The safe region of rollouts: a threshold on the support distance, set by whole held-out rollouts."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from geoq.crossfit import CalibrationSet
from geoq.quantiles import check_quantile, inverse_cdf_quantile
from geoq.regions.safe_region import FittedDistanceRegion, FittedRegion
from geoq.rollout.features import RolloutFeatures

MEANING = (
    "at most as far from the data as held-out rollouts were",
    "farther from the data than held-out rollouts were; the bound is a guess",
)


@dataclass(frozen=True)
class RolloutRegion:
    r"""Steps that start at most as far from the data as held-out rollouts were at their farthest step.

    .. math:: \Omega_{safe} = \{u : \Delta d_k(u) \le \widehat Q_{\alpha_{safe}}(\max_n \Delta d_k(\widehat u_n))\}

    The quantile is taken over whole rollouts, unlike in ``DistanceRegion``. A threshold that one step in twenty exceeds would
    end the supported horizon of nearly every rollout of a hundred steps.

    Attributes:
        quantile: alpha_safe, the fraction of the held-out rollouts whose steps are all in the region.

    Example:
        >>> RolloutRegion(quantile=0.9)
        RolloutRegion(quantile=0.9)
    """

    quantile: float = 0.95

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "RolloutRegion.quantile")

    def fit(self, calibration: CalibrationSet) -> FittedDistanceRegion:
        """Set the threshold from the farthest step of each held-out rollout."""
        distance = calibration.features.support_distance
        rollout = calibration.group.unique(return_inverse=True)[1]
        farthest = distance.new_zeros(int(rollout.max()) + 1)
        farthest.scatter_reduce_(0, rollout, distance, "amax")
        threshold = float(inverse_cdf_quantile(farthest, self.quantile))
        return FittedDistanceRegion(threshold, MEANING, self)


def score_along(
    region: FittedRegion, features: RolloutFeatures
) -> Float[Tensor, " n n_steps"]:
    """The support score of each step; infinite from the step at which a rollout diverges."""
    alive = features.alive
    score = features.support_distance.new_full(alive.shape, torch.inf)
    if alive.any():
        score[alive] = region.support_score(features.along[alive.flatten()])
    return score
