"""The safe region of rollouts: how far from the data did held-out rollouts get?"""

from dataclasses import dataclass

from geoq.crossfit import CalibrationSet
from geoq.increment import inverse_cdf_quantile
from geoq.safe_region import DistanceRegion


@dataclass(frozen=True)
class RolloutRegion(DistanceRegion):
    r"""Steps that start no farther from the data than held-out rollouts got in all their steps.

    .. math:: \Omega_{safe} = \{u : \Delta d_k(u) \le \widehat Q_{\alpha_{safe}}(\max_n \Delta d_k(\widehat u_n))\}

    Whole rollouts are the units, unlike in ``DistanceRegion``: a threshold that one step in twenty exceeds would end the
    trust in nearly every rollout of a hundred.
    """

    meaning = (
        "no farther from the data than held-out rollouts got",
        "farther from the data than held-out rollouts got, so take the bound as a guess",
    )

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
