"""The safe region: is this query's geometry one that the calibration has seen? (lines 15-16)."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.increment import inverse_cdf_quantile
from geoq.neighbors import Neighbors
from geoq.representation import Standardization


@runtime_checkable
class FittedRegion(Protocol):
    """A score of the queries' features, and the largest one that counts as safe."""

    @property
    def threshold(self) -> float: ...

    @property
    def meaning(self) -> tuple[str, str]: ...

    def support_score(self, features: GeometricFeatures, /) -> Tensor: ...

    def contains(self, support_score: Tensor, /) -> Tensor: ...


@runtime_checkable
class SafeRule(Protocol):
    """How a safe region is found from the calibration; ``SafeRegion`` and ``DistanceRegion`` are two.

    ``n_others`` says how many tuples independent of it each calibration tuple must have.
    """

    def n_others(self, n_safe: int, /) -> int: ...

    def fit(
        self, calibration: CalibrationSet, /, *, n_safe: int, safe_quantile: float
    ) -> FittedRegion: ...


def _wanted_as_class() -> Any:
    raise TypeError(
        "a safe region was made without its threshold, which fit finds; the argument safe_region wants the class: pass "
        "safe_region=SafeRegion or safe_region=DistanceRegion, without parentheses."
    )


@dataclass(frozen=True)
class DistanceRegion:
    r"""Queries no farther from the data than held-out points were when they interpolated.

    .. math:: \Omega_{safe} = \{x : \Delta d_k(x) \le \widehat Q_{\alpha_{safe}}(\Delta d_k \text{ of the interpolating tuples})\}

    A departure from the paper: its score in feature space calls a far query safe as soon as some fold held out points as
    far away, though nothing tells that the error there grows alike in another direction.
    """

    threshold: float = field(default_factory=_wanted_as_class)
    meaning = (
        "no farther from the data than held-out points were when they interpolated",
        "farther from the data than held-out points were when they interpolated, so take the bound as a guess",
    )

    @staticmethod
    def n_others(n_safe: int) -> int:
        """None: distances to the data are compared, not tuples with each other."""
        del n_safe
        return 0

    @classmethod
    def fit(
        cls, calibration: CalibrationSet, *, n_safe: int, safe_quantile: float
    ) -> "DistanceRegion":
        """Set the threshold by the family of folds whose held-out points stay nearest to the others."""
        distance = calibration.features.support_distance[calibration.interpolating]
        return cls.at(
            calibration,
            n_safe=n_safe,
            threshold=float(inverse_cdf_quantile(distance, safe_quantile)),
        )

    @classmethod
    def at(
        cls, calibration: CalibrationSet, *, n_safe: int, threshold: float
    ) -> "DistanceRegion":
        """The region for a threshold that is known already."""
        del calibration, n_safe
        return cls(threshold)

    def support_score(self, features: GeometricFeatures) -> Float[Tensor, " n"]:
        """The support distance itself."""
        return features.support_distance

    def contains(self, support_score: Float[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Whether the score is within the threshold."""
        return support_score <= self.threshold


@dataclass(frozen=True)
class SafeRegion:
    r"""Features whose mean distance to the nearest calibration features is not unusual.

    .. math:: \Omega_{safe} = \{\psi : S(\psi) \le \tau_{safe}\}

    ``cloud`` holds the standardised calibration features T(psi).
    """

    standardization: Standardization = field(default_factory=_wanted_as_class)
    cloud: Float[Tensor, " n n_features"] = field(default_factory=_wanted_as_class)
    n_safe: int = field(default_factory=_wanted_as_class)
    threshold: float = field(default_factory=_wanted_as_class)
    meaning = (
        "the calibration holds queries like this one",
        "the calibration holds too few queries like this one, so take the bound as a guess",
    )

    @staticmethod
    def n_others(n_safe: int) -> int:
        """As many as the leave-one-out score averages over."""
        return n_safe

    @classmethod
    def fit(
        cls, calibration: CalibrationSet, *, n_safe: int, safe_quantile: float
    ) -> "SafeRegion":
        r"""Set the threshold by the leave-one-out scores of the calibration features.

        .. math:: \tau_{safe} = \widehat Q_{\alpha_{safe}}(\{S_{cal}(\psi_i)\})  (eq:safe_threshold_loo)
        """
        scores = leave_one_out_scores(calibration, n_safe)
        return cls.at(
            calibration,
            n_safe=n_safe,
            threshold=float(inverse_cdf_quantile(scores, safe_quantile)),
        )

    @classmethod
    def at(
        cls, calibration: CalibrationSet, *, n_safe: int, threshold: float
    ) -> "SafeRegion":
        """The region for a threshold that is known already."""
        cloud = calibration.standardization(calibration.features.flat)
        return cls(calibration.standardization, cloud, n_safe, threshold)

    @cached_property
    def _neighbors(self) -> Neighbors:
        return Neighbors(self.cloud)

    def support_score(self, features: GeometricFeatures) -> Float[Tensor, " n"]:
        r"""Mean standardised distance to the nearest calibration features; small is good.

        .. math:: S(\psi) = \frac{1}{K_{safe}} \sum_{\psi_j \in \mathcal N_{T, K_{safe}}(\psi)} d_T(\psi, \psi_j)
            (eq:safe_score_standardized)
        """
        distances, _ = self._neighbors.nearest(
            self.standardization(features.flat), self.n_safe
        )
        return distances.mean(dim=1)

    def contains(self, support_score: Float[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Whether the score is within the threshold."""
        return support_score <= self.threshold


def leave_one_out_scores(
    calibration: CalibrationSet, n_safe: int
) -> Float[Tensor, " n"]:
    r"""Support score of each calibration feature among the others.

    .. math:: S_{cal}(\psi_i) = \frac{1}{K_{safe}}
        \sum_{\psi_j \in \mathcal N_{T, K_{safe}}^{\Psi_{cal} \setminus \{\psi_i\}}(\psi_i)} d_T(\psi_i, \psi_j)
        (eq:safe_score_calibration_loo)

    A departure for dependent data: tuples within reach in time, or of the same group, are left out together.
    Otherwise a forecast window's nearest neighbours are the windows six hours away, and nothing new is ever safe.
    """
    neighbors = Neighbors(calibration.standardization(calibration.features.flat))
    distances, _ = neighbors.nearest_other(
        n_safe, position=calibration.position, reach=calibration.reach
    )
    return distances.mean(dim=1)
