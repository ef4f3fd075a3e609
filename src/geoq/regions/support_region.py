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
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from geoq.columns import ColumnCoordinates
from geoq.crossfit import CalibrationPoints, CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.metric import AnyCoordinates, FittedMetric
from geoq.quantiles import check_fraction, check_quantile, rank
from geoq.regions.field_region import FieldRegion
from geoq.regions.field_scores import has_grid
from geoq.regions.safe_region import SAFE, DistanceRegion, FittedRegion
from geoq.regions.support_scores import N_NEAREST, SCORES, Cloud
from geoq.table import Names, Schema

# Thresholds are never smaller than these, so that many points do not turn the region into a bounding box.
MIN_THRESHOLD = (0.0, 0.05, 0.1, 0.1)


@dataclass(frozen=True)
class SupportRegion:
    """Queries that lie where the calibration has points, by four scores; see the module for their definitions.

    For inputs on a grid the region is a ``FieldRegion``. For other inputs with many coordinates, and for representations of the
    user, it is a ``DistanceRegion``.

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
        if has_grid(data.inputs.shape[1:]):
            return FieldRegion(self.quantile).fit(calibration)
        if metric is None:
            return DistanceRegion(self.quantile).fit(calibration)
        known = metric.coordinates
        if math.prod(known.input_shape) > self.max_inputs or known.constant.all():
            return DistanceRegion(self.quantile).fit(calibration)
        points = _varying(data.inputs, known)
        importance = _numpy(metric.importance)[_varies(known)]
        cloud = Cloud(points, importance, _columns(known), self.min_weight)
        scores = []
        for train, held_out in _splits(calibration, data):
            queries = _without_new_levels(known, points, train, held_out)
            scores.append(replace(cloud, points=points[train]).scores(queries))
        thresholds = _thresholds(np.concatenate(scores), self.quantile)
        return FittedSupportRegion(self, metric, cloud, thresholds)


def _varies(coordinates: AnyCoordinates) -> np.ndarray:
    return np.asarray((~coordinates.constant).reshape(-1).cpu().numpy())


def _columns(coordinates: AnyCoordinates) -> np.ndarray:
    """The input of each coordinate that varies."""
    return np.asarray(coordinates.column.cpu().numpy()[_varies(coordinates)])


def _without_new_levels(
    coordinates: AnyCoordinates,
    points: np.ndarray,
    train: np.ndarray,
    held_out: np.ndarray,
) -> np.ndarray:
    """The held-out points, without those whose category the fold has not seen: such queries are never safe."""
    held: np.ndarray = points[held_out]
    if isinstance(coordinates, ColumnCoordinates):
        levels = coordinates.is_level.cpu().numpy()[_varies(coordinates)]
        own = points[train][:, levels]
        new = held[:, levels] > own.max(axis=0, initial=-np.inf)
        held = held[~new.any(axis=1)]
    return held


def _numpy(tensor: Tensor) -> np.ndarray:
    return np.asarray(tensor.detach().double().cpu().numpy())


def _varying(inputs: Tensor, coordinates: AnyCoordinates) -> np.ndarray:
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
    return np.asarray(np.maximum(ordered, MIN_THRESHOLD).clip(min=1e-12))


@dataclass(frozen=True)
class FittedSupportRegion:
    """The fitted scores and their thresholds. The support score is the largest ratio of a score to its threshold."""

    rule: SupportRegion
    metric: FittedMetric
    cloud: Cloud
    thresholds: np.ndarray
    threshold: float = 1.0
    meaning: tuple[str, str] = (
        "within the region of the held-out points of the random folds",
        "outside the region of the held-out points of the random folds; the bound is a guess",
    )

    def ratios(self, inputs: Float[Tensor, " n *coordinates"]) -> np.ndarray:
        """Each score divided by its threshold, one column per score."""
        points = _varying(inputs, self.metric.coordinates)
        return np.asarray(self.cloud.scores(points) / self.thresholds)

    def support_score(self, features: GeometricFeatures) -> Float[Tensor, " n"]:
        """The largest ratio of a score to its threshold; infinite if a constant input has changed."""
        points = _varying(features.inputs, self.metric.coordinates)
        ratio = self.cloud.largest_ratio(points, self.thresholds)
        score = torch.from_numpy(ratio).to(features.support_distance)
        changed = self.metric.coordinates.changed_rows(features.inputs)
        return score if changed is None else score.masked_fill(changed, math.inf)

    def contains(self, support_score: Float[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Whether the score is at most 1."""
        return support_score <= SAFE

    def explain(
        self, inputs: Float[Tensor, " 1 *coordinates"], names: Names | None = None
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
        column = _columns(metric.coordinates)
        cloud = Cloud(points, importance, column, rule.min_weight)
        return FittedSupportRegion(rule, metric, cloud, _numpy(arrays["thresholds"]))


class _Explanation:
    """The text for one query."""

    def __init__(
        self, region: FittedSupportRegion, inputs: Tensor, names: Names | None
    ) -> None:
        self.region, self.cloud, self.names = region, region.cloud, names
        self.coordinates = region.metric.coordinates
        self.inputs = inputs.to(self.coordinates.mean)
        self.t = _varying(self.inputs, self.coordinates)
        self.number = np.flatnonzero(_varies(self.coordinates)).tolist()
        self.column = self.coordinates.column.tolist()
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
        texts = {"distance": self._distance, "pair": self._pair, "axis": self._axis}
        return texts[SCORES[int(ratio.argmax())]]()

    def _label(self, j: int) -> str:
        """The name of the input that coordinate j comes from."""
        column = self.column[j]
        return f"input {column if self.names is None else self.names[column]}"

    def _text(self, j: int, value: float) -> str:
        """A value of coordinate j, in the units of the user."""
        if isinstance(self.names, Schema):
            return str(self.names.columns[self.column[j]].text(value))
        return f"{value:.4g}"

    def _limit(self, name: str) -> float:
        return float(self.region.thresholds[SCORES.index(name)])

    def _inside(self) -> str:
        outside = np.maximum(self.t - self.cloud.high, self.cloud.low - self.t)[0]
        if outside.max() <= 0:
            return "all inputs are within the region of the held-out points"
        j = int(outside.argmax())
        return (
            f"{self._described(j)} is {outside[j]:.2g} standard deviations out of its range, which is less than its influence "
            "on the prediction allows"
        )

    def _input(self) -> str:
        score, limit = self.cloud.by_input(self.t)[0], self._limit("input")
        found = [int(j) for j in np.argsort(-score) if score[j] > limit]
        others = [self._described(j) for j in found[1:6]]
        more = f"; also unusual: {', '.join(others)}" if others else ""
        return self._one_input(found[0]) + more + (", ..." if len(found) > 6 else "")

    def _one_input(self, j: int) -> str:
        number, cloud = self.number[j], self.cloud
        value, here = self.value[number], self.t[0, j]
        if not self.coordinates.is_number(number):
            return f"{self._described(j)} lies in a gap of the data"
        if cloud.low[j] <= here <= cloud.high[j]:
            below, above = (
                self._text(number, self._units(j, at))
                for at in cloud.values.neighbours(j, here)
            )
            return f"{self._label(number)} is {self._text(number, value)}; its nearest values in the data are {below} and {above}"
        is_above = here > cloud.high[j]
        low, high = self._ends(j)
        end = high if is_above else low
        gap = float(cloud.values(self.t)[0, j])
        far = f"{gap:.2g} standard deviations"
        if bool(self.coordinates.log.reshape(-1)[number]):
            far = f"{abs(math.log10(max(value, 1e-300) / end)):.2g} decades"
        side = "above" if is_above else "below"
        text = (
            f"{self._label(number)} is {self._text(number, value)}, {far} {side} its range in the data, "
            f"{self._text(number, low)} to {self._text(number, high)}"
        )
        sensitivity = self.region.metric.sensitivity
        if sensitivity is None:
            return text
        change = gap * float(sensitivity[number].square().mean().sqrt())
        return f"{text} (the prediction would change by {change:.2g} if it kept changing as inside)"

    def _described(self, j: int) -> str:
        """Input j with its value and its range in the data."""
        number = self.number[j]
        if not self.coordinates.is_number(number):
            return self._label(number)
        value, low, high = (
            self._text(number, at) for at in (self.value[number], *self._ends(j))
        )
        return f"{self._label(number)} ({value}, range {low} to {high})"

    def _ends(self, j: int) -> tuple[float, float]:
        """The range of input j in the data, in the units of the user."""
        cloud = self.cloud
        return self._units(j, cloud.low[j]), self._units(j, cloud.high[j])

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
            f"{self._described(j)} and {self._described(k)} are each in range, but not together: the nearest point in "
            f"their plane is {score.max():.2g} standard deviations away (held-out points: at most {self._limit('pair'):.2g})"
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
        labels = [self._described(int(j)) for j in np.argsort(-abs(loading))]
        named = " and ".join([*dict.fromkeys(labels)][:2])
        return (
            f"the correlation of {named} differs from the data, by {score.max():.2g} deviations of a principal axis "
            f"(held-out points: at most {self._limit('axis'):.2g})"
        )

    def _distance(self) -> str:
        unusual = self._described(int(self.cloud.by_input(self.t)[0].argmax()))
        return (
            f"the {N_NEAREST} nearest points are {self.cloud.by_distance(self.t)[0]:.2g} standard deviations away on average "
            f"(held-out points: at most {self._limit('distance'):.2g}); the most unusual input is {unusual}"
        )
