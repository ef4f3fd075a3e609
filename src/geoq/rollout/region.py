"""The safe region of rollouts: how far from the data did held-out rollouts get?"""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.increment import inverse_cdf_quantile


@dataclass(frozen=True)
class RolloutRegion:
    r"""Steps that start no farther from the data than held-out rollouts got in all their steps.

    .. math:: \Omega_{safe} = \{u : \Delta d_k(u) \le \widehat Q_{\alpha_{safe}}(\max_n \Delta d_k(\widehat u_n))\}

    Whole rollouts are the units, unlike in ``DistanceRegion``: a threshold that one step in twenty exceeds would end the
    trust in nearly every rollout of a hundred.
    """

    threshold: float
    meaning = (
        "no farther from the data than held-out rollouts got",
        "farther from the data than held-out rollouts got, so take the bound as a guess",
    )

    @staticmethod
    def n_others(n_safe: int) -> int:
        """None: distances to the data are compared, not tuples with each other."""
        del n_safe
        return 0

    @classmethod
    def fit(
        cls, calibration: CalibrationSet, *, n_safe: int, safe_quantile: float
    ) -> "RolloutRegion":
        """Set the threshold by the farthest step of each held-out rollout."""
        del n_safe
        distance = calibration.features.support_distance
        rollout = calibration.unit.unique(return_inverse=True)[1]
        farthest = distance.new_zeros(int(rollout.max()) + 1)
        farthest.scatter_reduce_(0, rollout, distance, "amax")
        return cls(float(inverse_cdf_quantile(farthest, safe_quantile)))

    def support_score(self, features: GeometricFeatures) -> Float[Tensor, " n"]:
        """The support distance itself."""
        return features.support_distance

    def contains(self, support_score: Float[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Whether the score is within the threshold."""
        return support_score <= self.threshold
