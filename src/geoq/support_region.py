r"""The default safe region for tables: several scores of a query, each with its own threshold.

.. math:: S(x) = \max_k s_k(x) / t_k, \qquad \Omega_{safe} = \{x : S(x) \le 1\}

A mean distance hardly changes when one influential input leaves its range and all others stay inside. So the region combines
scores that look at the query from different sides, all in the coordinates T of the metric:

==========  ==============================================================================  ====================================
score       definition                                                                      what it detects
==========  ==============================================================================  ====================================
distance    mean distance to the 3 nearest distinct points                                  far queries, holes in all inputs
input       max over inputs of w_j times the distance of T_j to the nearest value of input j  one input out of range, gaps
pair        max over pairs of inputs of the distance to the nearest point in their plane    holes, ridges, new combinations
axis        max over principal axes of the distance to the nearest value, in deviations     broken correlations, new modes
==========  ==============================================================================  ====================================

A threshold is the 1 - (1 - alpha_safe) / K quantile of its score over the held-out points of the interpolating folds, each scored
against the points that its fold left in; K is the number of scores. A constant input that changes is never safe.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy.spatial import cKDTree
from torch import Tensor

from geoq.crossfit import CalibrationPoints, CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.metric import Coordinates, FittedMetric, input_weights
from geoq.neighbors import Neighbors
from geoq.neighbors.engines import MAX_TREE_DIMS
from geoq.neighbors.planes import Planes
from geoq.quantiles import check_fraction, check_quantile, rank
from geoq.safe_region import DistanceRegion, FittedRegion

SCORES = ("distance", "input", "pair", "axis")
# Thresholds are never smaller than these, so that many points do not turn the region into a bounding box.
MIN_THRESHOLD = (0.0, 0.05, 0.1, 0.1)
N_NEAREST = 3
# Pairs are formed from this many inputs, the most influential ones.
N_PAIRED = 10
# Principal axes with a smaller deviation are directions in which the data do not vary.
MIN_DEVIATION = 1e-3
# Distances off the span of the axes below this many ``MIN_DEVIATION`` are rounding.
ROUNDING = 0.01
CHUNK_ROWS = 20_000
# Up to this many differences, the nearest values are found without sorted columns.
MAX_DIFFERENCES = 2**16
SAFE = 1 + 1e-9


class _SortedColumns:
    """Distances to the nearest value of each column."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.columns = [np.unique(column) for column in values.T]

    def __call__(self, queries: np.ndarray) -> np.ndarray:
        if len(queries) * self.values.size <= MAX_DIFFERENCES:
            nearest: np.ndarray = abs(queries[:, None] - self.values).min(axis=1)
            return nearest
        gap = np.empty_like(queries)
        for j, (taken, query) in enumerate(zip(self.columns, queries.T, strict=True)):
            above = np.searchsorted(taken, query)
            upper = abs(taken[np.minimum(above, len(taken) - 1)] - query)
            lower = abs(query - taken[np.maximum(above - 1, 0)])
            gap[:, j] = np.minimum(upper, lower)
        return gap

    def neighbours(self, j: int, value: float) -> tuple[float, float]:
        """The values of column j on either side of a value; infinite if there is none."""
        taken = self.columns[j]
        above = int(np.searchsorted(taken, value))
        return (
            float(taken[above - 1]) if above > 0 else -math.inf,
            float(taken[above]) if above < len(taken) else math.inf,
        )


@dataclass(frozen=True)
class _Cloud:
    """The points that queries are scored against, in the coordinates of the inputs that vary."""

    points: np.ndarray
    importance: np.ndarray
    min_weight: float

    @cached_property
    def weight(self) -> np.ndarray:
        importance = torch.from_numpy(self.importance)
        varying = torch.ones_like(importance, dtype=torch.bool)
        return _numpy(input_weights(importance, varying, self.min_weight))

    @cached_property
    def low(self) -> np.ndarray:
        low: np.ndarray = self.points.min(axis=0)
        return low

    @cached_property
    def high(self) -> np.ndarray:
        high: np.ndarray = self.points.max(axis=0)
        return high

    @cached_property
    def tree(self) -> cKDTree:
        return cKDTree(np.unique(self.points, axis=0))

    @cached_property
    def neighbors(self) -> Neighbors:
        return Neighbors(torch.from_numpy(self.tree.data))

    @cached_property
    def values(self) -> _SortedColumns:
        return _SortedColumns(self.points)

    @cached_property
    def planes(self) -> Planes:
        """The planes of pairs of inputs. ``by_input`` covers queries outside the ranges."""
        top = np.argsort(-self.importance, kind="stable")[:N_PAIRED]
        return Planes(self.points, list(combinations(sorted(top.tolist()), 2)))

    @cached_property
    def mean(self) -> np.ndarray:
        mean: np.ndarray = self.points.mean(axis=0)
        return mean

    @cached_property
    def axes(self) -> tuple[np.ndarray, np.ndarray]:
        """Directions of the principal axes as columns, and their deviations."""
        _, size, directions = np.linalg.svd(
            self.points - self.mean, full_matrices=False
        )
        size = size / math.sqrt(len(self.points))
        return directions[size > MIN_DEVIATION].T, size[size > MIN_DEVIATION]

    @cached_property
    def along(self) -> _SortedColumns:
        return _SortedColumns((self.points - self.mean) @ self.axes[0])

    def by_distance(self, t: np.ndarray) -> np.ndarray:
        k = min(N_NEAREST, self.tree.n)
        if t.shape[1] <= MAX_TREE_DIMS:
            distances: np.ndarray = self.tree.query(t, k)[0].reshape(len(t), k)
        else:
            distances = self.neighbors.nearest(torch.from_numpy(t), k)[0].numpy()
        mean: np.ndarray = distances.mean(axis=1)
        return mean

    def by_input(self, t: np.ndarray) -> np.ndarray:
        """One column per input."""
        weighted: np.ndarray = self.weight * self.values(t)
        return weighted

    def by_axis(self, t: np.ndarray) -> np.ndarray:
        """One column per principal axis, and one for the distance off their span."""
        directions, deviation = self.axes
        centred = t - self.mean
        p = centred @ directions
        off = np.linalg.norm(centred - p @ directions.T, axis=1) / MIN_DEVIATION
        return np.column_stack(
            [self.along(p) / deviation, np.where(off > ROUNDING, off, 0.0)]
        )

    def scores(self, t: np.ndarray) -> np.ndarray:
        """The four scores, one column each."""
        parts = [
            np.column_stack(
                [
                    self.by_distance(part),
                    self.by_input(part).max(axis=1),
                    self.planes.largest(part),
                    self.by_axis(part).max(axis=1),
                ]
            )
            for part in np.array_split(t, max(1, math.ceil(len(t) / CHUNK_ROWS)))
        ]
        return np.concatenate(parts)


@dataclass(frozen=True)
class SupportRegion:
    """Queries that lie where the calibration has points, by four scores; see the module for their definitions.

    For inputs with many coordinates, such as fields, and for representations of the user, the region is a ``DistanceRegion``.

    Attributes:
        quantile: alpha_safe, the fraction of the held-out points of the interpolating folds that the region contains, nearly.
        min_weight: smallest weight of an input in the score "input", w_j = max(sqrt(g_j / rms(g)), min_weight). A smaller value
            accepts more queries in which only an input without much influence is out of range. Most of them are harmless, but
            some are not: a surrogate can underestimate the influence of an input.
        max_inputs: with more inputs than this the region is a ``DistanceRegion``.

    Example:
        >>> SupportRegion(quantile=0.9)
        SupportRegion(quantile=0.9, min_weight=1.0, max_inputs=64)
    """

    quantile: float = 0.95
    min_weight: float = 1.0
    max_inputs: int = 64

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "SupportRegion.quantile")
        check_fraction(self.min_weight, "SupportRegion.min_weight")

    def fit(self, calibration: CalibrationSet) -> FittedRegion:
        """Set the thresholds from the held-out points of the interpolating folds."""
        data = calibration.data
        assert data is not None
        metric = data.metric
        n_inputs = math.prod(data.inputs.shape[1:])
        if (
            metric is None
            or n_inputs > self.max_inputs
            or metric.coordinates.constant.all()
        ):
            return DistanceRegion(self.quantile).fit(calibration)
        points = _varying(data.inputs, metric.coordinates)
        importance = _numpy(metric.importance)[_varies(metric.coordinates)]
        cloud = _Cloud(points, importance, self.min_weight)
        scores = [
            _Cloud(points[train], importance, self.min_weight).scores(points[held_out])
            for train, held_out in _splits(calibration, data)
        ]
        thresholds = _thresholds(np.concatenate(scores), self.quantile)
        return FittedSupportRegion(self, metric, cloud, thresholds)


def _varies(coordinates: Coordinates) -> np.ndarray:
    varies: np.ndarray = (~coordinates.constant).reshape(-1).cpu().numpy()
    return varies


def _numpy(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().double().cpu().numpy()
    return array


def _varying(inputs: Tensor, coordinates: Coordinates) -> np.ndarray:
    """The coordinates of the inputs that vary, one row per point."""
    return _numpy(inputs.reshape(len(inputs), -1))[:, _varies(coordinates)]


def _splits(
    calibration: CalibrationSet, data: CalibrationPoints
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The splits of the interpolating folds, in the order of their tuples."""
    folds = calibration.fold[calibration.interpolating].unique_consecutive().tolist()
    return [data.splits[fold] for fold in folds]


def _thresholds(held_out: np.ndarray, quantile: float) -> np.ndarray:
    level = 1 - (1 - quantile) / len(SCORES)
    place = min(rank(len(held_out), level), len(held_out)) - 1
    ordered = np.sort(held_out, axis=0)[place]
    thresholds: np.ndarray = np.maximum(ordered, MIN_THRESHOLD).clip(min=1e-12)
    return thresholds


@dataclass(frozen=True)
class FittedSupportRegion:
    """The fitted scores and their thresholds. The support score is the largest ratio of a score to its threshold."""

    rule: SupportRegion
    metric: FittedMetric
    cloud: _Cloud
    thresholds: np.ndarray
    threshold: float = 1.0
    meaning: tuple[str, str] = (
        "within the region of the held-out points of the random folds",
        "outside the region of the held-out points of the random folds; the bound is a guess",
    )

    def ratios(self, inputs: Float[Tensor, " n *coordinates"]) -> np.ndarray:
        """Each score divided by its threshold, one column per score."""
        points = _varying(inputs, self.metric.coordinates)
        ratios: np.ndarray = self.cloud.scores(points) / self.thresholds
        return ratios

    def support_score(self, features: GeometricFeatures) -> Float[Tensor, " n"]:
        """The largest ratio of a score to its threshold; infinite if a constant input has changed."""
        score = torch.from_numpy(self.ratios(features.inputs).max(axis=1))
        score = score.to(features.support_distance)
        changed = self.metric.coordinates.changed_rows(features.inputs)
        return score if changed is None else score.masked_fill(changed, math.inf)

    def contains(self, support_score: Float[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Whether the score is at most 1."""
        return support_score <= SAFE

    def explain(
        self,
        inputs: Float[Tensor, " 1 *coordinates"],
        names: Sequence[str] | None = None,
    ) -> str:
        """Why one query is safe or not: the score with the largest ratio, and the inputs behind it."""
        return _Explanation(self, inputs, names).text()

    def state(self) -> dict[str, Tensor]:
        """The arrays, for a file."""
        return {
            "points": torch.from_numpy(self.cloud.points),
            "thresholds": torch.from_numpy(self.thresholds),
            "importance": torch.from_numpy(self.cloud.importance),
        }

    @staticmethod
    def from_state(
        rule: SupportRegion, arrays: dict[str, Tensor], metric: FittedMetric
    ) -> "FittedSupportRegion":
        """The region that ``state`` described."""
        points, importance = (_numpy(arrays[k]) for k in ("points", "importance"))
        cloud = _Cloud(points, importance, rule.min_weight)
        return FittedSupportRegion(rule, metric, cloud, _numpy(arrays["thresholds"]))


class _Explanation:
    """The text for one query."""

    def __init__(
        self,
        region: FittedSupportRegion,
        inputs: Tensor,
        names: Sequence[str] | None,
    ) -> None:
        self.region, self.cloud, self.names = region, region.cloud, names
        self.coordinates = region.metric.coordinates
        self.inputs = inputs.to(self.coordinates.mean)
        self.t = _varying(self.inputs, self.coordinates)
        self.number = np.flatnonzero(_varies(self.coordinates)).tolist()
        self.value = _numpy(self.coordinates.inverse(self.inputs).reshape(-1))

    def text(self) -> str:
        if changed := self.coordinates.explain(self.inputs, self.names):
            return changed
        ratio = self.region.ratios(self.inputs)[0]
        if ratio.max() <= SAFE:
            return self._inside()
        if ratio[SCORES.index("input")] > SAFE:
            # The most specific reason, even if another score exceeds its threshold by more.
            return self._input()
        texts: dict[str, Callable[[], str]] = {
            "distance": self._distance,
            "pair": self._pair,
            "axis": self._axis,
        }
        return texts[SCORES[int(ratio.argmax())]]()

    def _label(self, j: int) -> str:
        return f"input {j}" if self.names is None else f"input {self.names[j]}"

    def _limit(self, name: str) -> float:
        return float(self.region.thresholds[SCORES.index(name)])

    def _inside(self) -> str:
        outside = np.maximum(self.t - self.cloud.high, self.cloud.low - self.t)[0]
        if outside.max() <= 0:
            return "all inputs are within the region of the held-out points"
        j = int(outside.argmax())
        return (
            f"{self._label(self.number[j])} is {outside[j]:.2g} standard deviations out of its range, which is less than its "
            "influence on the prediction allows"
        )

    def _input(self) -> str:
        score, limit = self.cloud.by_input(self.t)[0], self._limit("input")
        found = [int(j) for j in np.argsort(-score) if score[j] > limit]
        others = [self._label(self.number[j]) for j in found[1:6]]
        more = f"; also out of range: {', '.join(others)}" if others else ""
        return self._one_input(found[0]) + more + (", ..." if len(found) > 6 else "")

    def _one_input(self, j: int) -> str:
        number, cloud = self.number[j], self.cloud
        value, here = self.value[number], self.t[0, j]
        if cloud.low[j] <= here <= cloud.high[j]:
            below, above = (
                self._units(j, at) for at in cloud.values.neighbours(j, here)
            )
            return f"{self._label(number)} is {value:.4g}; its nearest values in the data are {below:.4g} and {above:.4g}"
        is_above = here > cloud.high[j]
        end = self._units(j, cloud.high[j] if is_above else cloud.low[j])
        gap = float(cloud.values(self.t)[0, j])
        far = f"{gap:.2g} standard deviations"
        if bool(self.coordinates.log.reshape(-1)[number]):
            far = f"{abs(math.log10(max(value, 1e-300) / end)):.2g} decades"
        side = "above its largest" if is_above else "below its smallest"
        text = f"{self._label(number)} is {value:.4g}, {far} {side} value in the data, {end:.4g}"
        sensitivity = self.region.metric.sensitivity
        if sensitivity is None:
            return text
        change = gap * float(sensitivity[number].square().mean().sqrt())
        return f"{text} (the prediction would change by {change:.2g} if it kept changing as inside)"

    def _units(self, j: int, at: float) -> float:
        """A coordinate of input j in the units of the user."""
        filled = torch.zeros_like(self.coordinates.mean).reshape(-1)
        filled[self.number[j]] = at
        raw = self.coordinates.inverse(filled.reshape(1, *self.coordinates.mean.shape))
        return float(raw.reshape(-1)[self.number[j]])

    def _pair(self) -> str:
        score = self.cloud.planes.distances(self.t)[0]
        j, k = self.cloud.planes.pairs[int(score.argmax())]
        return (
            f"{self._label(self.number[j])} and {self._label(self.number[k])} are each in range, but not together: the nearest "
            f"point in their plane is {score.max():.2g} standard deviations away (held-out points: at most "
            f"{self._limit('pair'):.2g})"
        )

    def _axis(self) -> str:
        score = self.cloud.by_axis(self.t)[0]
        directions, deviation = self.cloud.axes
        place = int(score.argmax())
        centred = (self.t - self.cloud.mean)[0]
        loading = (
            centred - directions @ (centred @ directions)
            if place == len(deviation)
            else directions[:, place]
        )
        top = np.argsort(-abs(loading))[:2]
        named = " and ".join(self._label(self.number[j]) for j in top)
        return (
            f"the correlation of {named} differs from the data, by {score.max():.2g} deviations of a principal axis "
            f"(held-out points: at most {self._limit('axis'):.2g})"
        )

    def _distance(self) -> str:
        return (
            f"the {N_NEAREST} nearest points are {self.cloud.by_distance(self.t)[0]:.2g} standard deviations away on average "
            f"(held-out points: at most {self._limit('distance'):.2g})"
        )
