"""The safe region: queries whose geometry resembles the calibration (lines 15-16).

A safe region is an object with settings. Its ``fit`` returns the fitted region, which has a threshold and scores queries.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

from geoq.arrays import Rows
from geoq.checks import check_count
from geoq.columns import ColumnCoordinates
from geoq.coordinates import Coordinates
from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.neighbors import Neighbors
from geoq.probing import N_PROBES
from geoq.quantiles import check_quantile, inverse_cdf_quantile
from geoq.representation import Standardization
from geoq.table import Names, schema_of

# The paper's K_safe, used where the folds leave enough points.
USUAL_NEIGHBORS = 20
# The largest ratio of a score to its threshold in the safe region; it is larger than 1 because of rounding.
SAFE = 1 + 1e-9


@runtime_checkable
class FittedRegion(Protocol):
    """A score of the features of queries, and the largest score that counts as safe.

    ``meaning`` is a pair of phrases for the reason: why a query is safe, and why it is not.
    """

    @property
    def threshold(self) -> float: ...

    @property
    def meaning(self) -> tuple[str, str]: ...

    def support_score(self, features: GeometricFeatures, /) -> Tensor: ...

    def contains(self, support_score: Tensor, /) -> Tensor: ...


@runtime_checkable
class Region(Protocol):
    """How a safe region is found from the calibration; ``DistanceRegion`` and ``SafeRegion`` are two such rules."""

    def fit(self, calibration: CalibrationSet, /) -> FittedRegion: ...


@runtime_checkable
class ExplainsFlags(Protocol):
    """A fitted region that explains why a query is safe or not, given its coordinates T(x) and the names of the inputs."""

    def explain(self, inputs: Tensor, names: Names | None = None, /) -> str: ...


@runtime_checkable
class ExplainsFields(Protocol):
    """A fitted region that explains why a field is safe or not, given T(x), the prediction and the names of the channels."""

    def explain_field(
        self, inputs: Tensor, prediction: Tensor, names: Names | None = None, /
    ) -> str: ...


Explains: TypeAlias = ExplainsFlags | ExplainsFields


@dataclass(frozen=True)
class Explanations:
    """What explains the flags of queries: the fitted region, T, T of the queries, the queries and the predictions."""

    region: Explains | FittedRegion
    coordinates: Coordinates | ColumnCoordinates
    inputs: Float[Tensor, " n *coordinates"]
    queries: Rows
    prediction: Float[Tensor, " n *output"]

    def __call__(self, query: int, names: Names | None = None) -> str:
        """Why this query is safe or not; empty if the region does not explain it."""
        one = slice(query, query + 1)
        if isinstance(self.region, ExplainsFields):
            inputs, prediction = self.inputs[one], self.prediction[one]
            return self.region.explain_field(inputs, prediction, names)
        n_inputs = math.prod(self.coordinates.input_shape)
        if names is not None and len(names) != n_inputs:
            raise ValueError(
                f"names has {len(names)} entries, but there are {n_inputs} inputs; pass one name per input."
            )
        own = self.inputs[one]
        if isinstance(self.coordinates, ColumnCoordinates):
            names = schema_of(self.queries).named(names)
            new = self.coordinates.explain_new(own, self.queries, query, names)
            if new:
                return new
        if isinstance(self.region, ExplainsFlags):
            return self.region.explain(own, names)
        return ""


@runtime_checkable
class NeedsNeighbors(Protocol):
    """A rule that compares calibration tuples with each other, and can refuse folds that leave too few of them."""

    def check_neighbors(self, n_independent: int, /) -> None: ...


def fit_region(region: Region, calibration: CalibrationSet) -> FittedRegion:
    """Fit a safe region; refused unless it is usable and has usable scores at some calibration tuples."""
    name = type(region).__name__
    fitted: Any = region.fit(calibration)
    if isinstance(fitted, type) or not isinstance(fitted, FittedRegion):
        raise TypeError(
            f"{name}.fit returned {fitted!r}, but it must return the fitted region, an object with threshold, meaning, "
            "support_score and contains."
        )
    if not isinstance(fitted.threshold, Real) or math.isnan(fitted.threshold):
        raise ValueError(
            f"{name}.fit returned a region with threshold={fitted.threshold!r}; the threshold must be a number."
        )
    meaning: Any = fitted.meaning
    if len(meaning) != 2 or not all(isinstance(words, str) for words in meaning):
        raise ValueError(
            f"{name}.fit returned a region with meaning={meaning!r}; it must be two phrases, why a query is safe and why not."
        )
    flags_of(fitted, calibration.features[:N_PROBES])
    return fitted


def flags_of(
    region: FittedRegion, features: GeometricFeatures
) -> tuple[Float[Tensor, " n"], Bool[Tensor, " n"]]:
    """The support scores and the safe flags of queries; refused unless there is one number and one flag per query."""
    name, shape = type(region).__name__, (len(features),)
    score: Any = region.support_score(features)
    if not isinstance(score, Tensor) or tuple(score.shape) != shape:
        raise ValueError(
            f"{name}.support_score returned {_described(score)} for {shape[0]} queries; return a tensor with one score per query."
        )
    if score.isnan().any():
        raise ValueError(
            f"{name}.support_score returned nan; return a number for every query."
        )
    safe: Any = region.contains(score)
    is_flag = isinstance(safe, Tensor) and not safe.is_floating_point()
    if not is_flag or tuple(safe.shape) != shape:
        raise ValueError(
            f"{name}.contains returned {_described(safe)} for {shape[0]} queries; return a boolean tensor with one flag per query."
        )
    return score, safe.bool()


def _described(answer: object) -> str:
    if not isinstance(answer, Tensor):
        return f"a {type(answer).__name__}"
    return f"a tensor of shape {tuple(answer.shape)} and dtype {answer.dtype}"


@dataclass(frozen=True)
class DistanceRegion:
    r"""Queries that are at most as far from the data as held-out points were when they interpolated.

    .. math:: \Omega_{safe} = \{x : \Delta d_k(x) \le \widehat Q_{\alpha_{safe}}(\Delta d_k \text{ of the interpolating tuples})\}

    This is a departure from the paper. The paper's score in feature space accepts a far query as soon as some fold held out
    points as far away, although the error can grow differently in another direction.

    Attributes:
        quantile: alpha_safe, the fraction of the interpolating calibration tuples that the region contains.

    Example:
        >>> DistanceRegion(quantile=0.9)
        DistanceRegion(quantile=0.9)
    """

    quantile: float = 0.95

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "DistanceRegion.quantile")

    def fit(self, calibration: CalibrationSet) -> "FittedDistanceRegion":
        """Set the threshold from the family of folds whose held-out points are nearest to the other points."""
        distance = calibration.features.support_distance[calibration.interpolating]
        threshold = float(inverse_cdf_quantile(distance, self.quantile))
        return FittedDistanceRegion(threshold, rule=self)


@dataclass(frozen=True)
class FittedDistanceRegion:
    """A threshold on the support distance, and the rule that has set it."""

    threshold: float
    meaning: tuple[str, str] = (
        "at most as far from the data as held-out points were when they interpolated",
        "farther from the data than held-out points were when they interpolated; the bound is a guess",
    )
    rule: Region = DistanceRegion()

    def support_score(self, features: GeometricFeatures) -> Float[Tensor, " n"]:
        """The support distance itself."""
        return features.support_distance

    def contains(self, support_score: Float[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Whether the score is at most the threshold."""
        return support_score <= self.threshold


@dataclass(frozen=True)
class SafeRegion:
    r"""The paper's safe region: features whose mean distance to the nearest calibration features is not unusual.

    .. math:: \Omega_{safe} = \{\psi : S(\psi) \le \tau_{safe}\}

    Attributes:
        n_neighbors: K_safe, the number of calibration features that the support score averages over. None means the paper's
            20, or as many as there are independent calibration tuples.
        quantile: alpha_safe, the fraction of the calibration tuples that the region contains.
    """

    n_neighbors: int | None = None
    quantile: float = 0.95

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "SafeRegion.quantile")
        if self.n_neighbors is not None:
            check_count(self.n_neighbors, "n_neighbors")

    def check_neighbors(self, n_independent: int) -> None:
        """Refuse more neighbours than a calibration tuple has independent others."""
        needed = self.n_neighbors or 1
        if needed > n_independent:
            raise ValueError(
                f"SafeRegion(n_neighbors={needed}), but a calibration point has only {n_independent} others that are "
                "independent of it; lower n_neighbors or the gap, or give more data."
            )

    def fit(self, calibration: CalibrationSet) -> "FittedSafeRegion":
        r"""Set the threshold from the leave-one-out scores of the calibration features.

        .. math:: \tau_{safe} = \widehat Q_{\alpha_{safe}}(\{S_{cal}(\psi_i)\})  (eq:safe_threshold_loo)
        """
        scores = leave_one_out_scores(calibration, self.n_averaged(calibration))
        threshold = float(inverse_cdf_quantile(scores, self.quantile))
        return FittedSafeRegion.of(self, calibration, threshold)

    def n_averaged(self, calibration: CalibrationSet) -> int:
        """The number of calibration features that the support score averages over."""
        return self.n_neighbors or min(USUAL_NEIGHBORS, calibration.n_independent)


@dataclass(frozen=True)
class FittedSafeRegion:
    """The standardised calibration features T(psi) and a threshold on the mean distance to the nearest of them."""

    rule: SafeRegion
    standardization: Standardization
    cloud: Float[Tensor, " n n_features"]
    n_neighbors: int
    threshold: float
    meaning: tuple[str, str] = (
        "the calibration contains similar queries",
        "the calibration contains too few similar queries; the bound is a guess",
    )

    @staticmethod
    def of(
        rule: SafeRegion, calibration: CalibrationSet, threshold: float
    ) -> "FittedSafeRegion":
        """The region with a known threshold."""
        nu, n_neighbors = calibration.standardization, rule.n_averaged(calibration)
        cloud = nu(calibration.features.flat)
        return FittedSafeRegion(rule, nu, cloud, n_neighbors, threshold)

    @cached_property
    def _neighbors(self) -> Neighbors:
        return Neighbors(self.cloud)

    def support_score(self, features: GeometricFeatures) -> Float[Tensor, " n"]:
        r"""Mean standardised distance to the nearest calibration features.

        .. math:: S(\psi) = \frac{1}{K_{safe}} \sum_{\psi_j \in \mathcal N_{T, K_{safe}}(\psi)} d_T(\psi, \psi_j)
            (eq:safe_score_standardized)
        """
        psi = self.standardization(features.flat)
        return self._neighbors.nearest(psi, self.n_neighbors)[0].mean(dim=1)

    def contains(self, support_score: Float[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Whether the score is at most the threshold."""
        return support_score <= self.threshold


def leave_one_out_scores(
    calibration: CalibrationSet, n_neighbors: int
) -> Float[Tensor, " n"]:
    r"""Support score of each calibration feature among the others.

    .. math:: S_{cal}(\psi_i) = \frac{1}{K_{safe}}
        \sum_{\psi_j \in \mathcal N_{T, K_{safe}}^{\Psi_{cal} \setminus \{\psi_i\}}(\psi_i)} d_T(\psi_i, \psi_j)
        (eq:safe_score_calibration_loo)

    This is a departure from the paper for dependent data: all tuples within reach in time, or of the same group, are left
    out. Otherwise the nearest neighbours of a forecast window are the windows six hours before and after it, and no new
    window is safe.
    """
    neighbors = Neighbors(calibration.standardization(calibration.features.flat))
    distances, _ = neighbors.nearest_other(
        n_neighbors, position=calibration.position, reach=calibration.reach
    )
    return distances.mean(dim=1)
