"""A calibrated estimator: answers to queries (lines 13 to 17)."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import ndtri

from geoq.arrays import chunks, flat, in_dtype, native, restore, take, to_numbers
from geoq.bounds.protocol import bounds_of
from geoq.core.assessment import Assessment
from geoq.core.conformal import ConformalFactors, level_factors, levels_of
from geoq.core.folds import distinct_rows
from geoq.core.geometry import Features, Geometry, Relation, Space, anchor_error, displacement
from geoq.core.opinion import SecondOpinion
from geoq.core.tuples import Tuples, Typical
from geoq.data.coordinates import Coordinates, Part
from geoq.data.domain import Layout
from geoq.data.masks import Mask
from geoq.data.metric import FittedMetric, Metric, predictor
from geoq.data.process import Opinion, Process
from geoq.data.table import Names, Schema, Table, input_rows, is_frame
from geoq.quantiles import error_ratios
from geoq.regions.region import SAFE
from geoq.surrogate import answers_of, check_callable, errors_of

# A model is periodic if its answers one period later differ by less than this fraction.
PERIODIC = 1e-5


@dataclass(frozen=True)
class Repeats:
    """How often the inputs of each row occur in the data, and how much the outputs of equal inputs differ.

    The bound is for the next measurement at a query, not for the mean of many measurements, so it contains this spread.

    Attributes:
        count: the number of rows with the inputs of each row, itself included.
        spread: the standard deviation of the outputs of these rows.
    """

    count: Int[np.ndarray, " n"]
    spread: Float[np.ndarray, " n *output"]

    @staticmethod
    def of(points: np.ndarray, outputs: np.ndarray) -> "Repeats | None":
        """The repeats of the data; None if all inputs differ."""
        place = distinct_rows(flat(points))
        n_distinct = int(place.max()) + 1
        if n_distinct == len(place):
            return None
        count, values = np.bincount(place), np.nan_to_num(flat(outputs).astype(float))

        def mean(values: np.ndarray) -> np.ndarray:
            total = np.zeros((n_distinct, values.shape[1]))
            np.add.at(total, place, values)
            return total / count[:, None]

        squares = mean((values - mean(values)[place]) ** 2)
        # Unbiased: divide by n - 1.
        scaled = squares * (count / np.maximum(count - 1, 1))[:, None]
        return Repeats(count[place], np.sqrt(scaled)[place].reshape(outputs.shape))


def predict(surrogate: Any, mask: Mask | None, x: Any) -> np.ndarray:
    """The predictions of a surrogate, with the mask of y; they can be nan or infinite."""
    answers = answers_of(surrogate, x, "surrogate")
    return answers if mask is None else mask.filled(answers)


class View(NamedTuple):
    """Queries with an answer, related to the data.

    Attributes:
        rows: their rows among all queries.
        relation: their anchors.
        features: their features.
        gaps: which cells the surrogate has masked; None if there are none.
    """

    rows: Int[np.ndarray, " m"]
    relation: Relation
    features: Features
    gaps: Bool[np.ndarray, " m *output"] | None = None


@dataclass(frozen=True)
class Fitted:
    """Everything that the calibration has found. ``state.save`` stores it, except for the callables.

    Attributes:
        quantile: the level of the bound.
        coordinates: T.
        metric: the metric; None for a representation of the user.
        geometry: all points, which queries are related to.
        error: the observed errors of the deployed surrogate; an absent cell has the mean error of the cell.
        error_size: the observed error of each point, averaged over its field.
        process: the Gaussian process through the data; None if the bound does not use it.
        bound: the fitted bound.
        region: the fitted safe region.
        typical: medians over the calibration, for explanations.
        layout: whether the rows are rows of a table, or where their cells are.
        output_shape: the shape of a prediction.
        mask: the masked cells of y.
        exact: the cells in which all errors are zero.
        repeats: repeated measurements in the data; None if all inputs differ.
        schema: the columns of the table of ``fit``; None for arrays.
        output_names: the names of the outputs.
        families: the names of the fold schemes.
        conformal: the factors of ``conformalize``.
        tuples: the calibration tuples; None in a file that was saved without them.
        probes: a few inputs, at which a file has the answers of the callables.
        surrogate: the deployed surrogate.
        representation: the metric or the function phi.
        error_functional: rho.
    """

    quantile: float
    coordinates: Coordinates
    metric: FittedMetric | None
    geometry: Geometry
    error: Float[np.ndarray, " n *field"]
    error_size: Float[np.ndarray, " n"]
    process: Process | None
    bound: Any
    region: Any
    typical: Typical
    layout: Layout
    output_shape: tuple[int, ...]
    mask: Mask | None
    exact: Bool[np.ndarray, " *field"] | None
    repeats: Repeats | None
    schema: Schema | None
    output_names: tuple[str, ...] | None
    families: tuple[str, ...]
    conformal: ConformalFactors
    tuples: Tuples | None
    probes: Any
    surrogate: Any = field(repr=False)
    representation: Any = field(repr=False)
    error_functional: Any = field(repr=False)

    @property
    def uses_anchor_error(self) -> bool:
        """Whether the bound depends on the anchor error, so that their difference explains it."""
        return bool(getattr(self.bound, "uses_anchor_error", True))

    def rows_of(self, x: Any) -> Any:
        """Queries as rows; raises unless they have the columns or the shape of ``fit``."""
        if self.schema is None and is_frame(x):
            raise TypeError(
                "x is a data frame, but GeoQ was fitted on an array; pass x.to_numpy() with the columns in the order of fit."
            )
        rows = input_rows(x) if self.schema is None else self.schema.table(x)
        shape, own = to_numbers(rows, "x").shape, self.coordinates.input_shape
        if not shape or shape[1:] != own or not shape[0]:
            single = "; a single query needs a first dimension of 1" * (shape == own)
            raise ValueError(
                f"x has shape {shape}, but GeoQ was fitted on rows of shape {own}; pass at least one query of that shape{single}."
            )
        return rows if self.schema is not None else in_dtype(rows, native(self.probes))

    def views(self, x: Any) -> Iterator[tuple[slice, View]]:
        """Chunks of queries: those with an answer, with their anchors and features (line 14)."""
        check_callable(self.surrogate, "surrogate")
        if not isinstance(self.representation, Metric):
            check_callable(self.representation, "representation")
        shape = self.coordinates.input_shape
        numbers = max(math.prod(shape), self.error[:1].size)
        for part in chunks(len(x), numbers):
            yield part, self._view(x[part])

    def _view(self, x: Any) -> View:
        inputs = to_numbers(x, "x")
        rows = np.flatnonzero(~self.coordinates.unusable(inputs).any(axis=1))
        if len(rows) < len(x):
            x, inputs = take(x, rows), inputs[rows]
        if not len(rows):
            return View(rows, *self._nothing())
        prediction = answers_of(self.surrogate, x, "surrogate")
        gaps = None
        if self.mask is not None:
            if self.mask.fill is not None and prediction.shape[1:] == self.output_shape:
                gaps = np.isnan(prediction) & ~self.mask.cells
            prediction = self.mask.filled(prediction)
        space = self._space(x, self._coordinates(x, inputs, prediction))
        finite = np.isfinite(flat(prediction)).all(axis=1)
        finite &= np.isfinite(flat(space.z)).all(axis=1)
        if not finite.all():
            kept = np.flatnonzero(finite)
            rows, prediction, space = rows[kept], prediction[kept], space[kept]
            gaps = None if gaps is None else gaps[kept]
            if not len(rows):
                return View(rows, *self._nothing())
        relation = self.geometry.relate(space)
        features = Features(
            displacement(space.z, relation.anchors, self.geometry.points.z),
            relation.support_distance,
            anchor_error(relation.anchors, self.error),
            prediction,
            space.inputs,
            relation,
            self._opinion(space.normalized),
        )
        return View(rows, relation, features, gaps)

    def _coordinates(self, x: Any, inputs: np.ndarray, prediction: np.ndarray) -> np.ndarray:
        """T of queries. Beyond the range of a periodic input they are those inside it if the model answers the same there."""
        found = self.coordinates(inputs)
        limits = self.coordinates.is_part(Part.BELOW, Part.ABOVE)
        rows = np.flatnonzero((flat(found)[:, limits] != 0).any(axis=1))
        if not len(rows):
            return found
        moved = self.coordinates.within_periods(inputs[rows])
        there = predictor(lambda q: predict(self.surrogate, self.mask, q), take(x, rows))(moved)
        near = np.isclose(there, prediction[rows], PERIODIC, PERIODIC * self.typical.error.max())
        same = rows[flat(near).all(axis=1)]
        found[np.ix_(same, np.flatnonzero(limits))] = 0
        return found

    def _opinion(self, z: np.ndarray) -> Opinion | None:
        """What the process predicts at points in the coordinates of the metric."""
        return None if self.process is None else self.process(flat(z).astype(float))

    def second_opinion(self, x: Any) -> SecondOpinion:
        """The predictions of the process at queries, and their deviations."""
        if self.process is None:
            raise TypeError(
                f"{type(self.bound).__name__} has no Gaussian process through the data; the default bound of a table has one."
            )
        queries = self.rows_of(x)
        found = np.full((2, len(queries), *self.output_shape), np.nan)
        for part, view in self.views(queries):
            opinion = view.features.opinion
            if opinion is not None and len(view.rows):
                shape = (len(view.rows), *self.output_shape)
                found[0][view.rows + part.start] = opinion.mean.reshape(shape)
                found[1][view.rows + part.start] = opinion.deviation.reshape(shape)
        return SecondOpinion(*(self._restored(values, queries) for values in found))

    def _nothing(self) -> tuple[Relation, Features]:
        """The relation and the features of no queries."""
        none = np.zeros(0, dtype=int)
        points, k = self.geometry.points, self.geometry.n_anchors
        anchors = np.zeros((0, k), dtype=int)
        empty = np.zeros(0)
        near = np.zeros((0, self.geometry.n_support), dtype=int)
        relation = Relation(anchors, np.zeros((0, k)), empty, near, empty, empty)
        prediction = np.zeros((0, *self.output_shape))
        return relation, Features(
            points.z[none], empty, self.error[none], prediction, points.inputs[none], relation
        )

    def _space(self, x: Any, coordinates: np.ndarray) -> Space:
        """Phi and nu of the queries (lines 3 and 4)."""
        if self.metric is not None:
            z = self.metric(coordinates)
            return Space(z, z, coordinates)
        z = answers_of(self.representation, x, "representation")
        return Space(z, coordinates, coordinates)

    def _flags(self, view: View) -> tuple[np.ndarray, np.ndarray]:
        """The support scores (line 15) and the safe flags (line 16)."""
        if not len(view.rows):
            return np.zeros(0), np.zeros(0, dtype=bool)
        score = np.asarray(self.region.support_score(view.features), dtype=float)
        if score.shape != view.rows.shape:
            raise ValueError(
                f"{type(self.region).__name__}.support_score returned shape {score.shape} for {len(view.rows)} queries; return one "
                "number per query."
            )
        # A constant input that changes has an unknown effect, whatever the region measures.
        changed = self.coordinates.changed(view.features.inputs).any(axis=1)
        score = np.where(changed, np.inf, score)
        return score, score <= SAFE

    def _bound(self, view: View, safe: np.ndarray, level: float | None = None) -> np.ndarray:
        """The bounds with the conformal factors; 0 in exact cells and nan in cells that the surrogate has masked."""
        if not len(view.rows):
            return view.features.anchor_error
        bound = self.conformal(bounds_of(self.bound, view.features, level), safe)
        bound = self._between_levels(
            view.features, bound, self.quantile if level is None else level
        )
        if self.exact is not None:
            bound = np.where(self.exact, bound.dtype.type(0), bound)
        return _with_gaps(bound, view.gaps)

    def _between_levels(self, features: Features, bound: np.ndarray, level: float) -> np.ndarray:
        """Between the levels of a lattice, where no point was held out, the bound contains what the process expects."""
        opinion, inputs = features.opinion, flat(features.inputs)
        between = (self.coordinates.at_levels(inputs) != inputs).any(axis=1)
        if opinion is None or not between.any():
            return bound
        expected = abs(flat(features.prediction) - opinion.mean)
        expected = expected + ndtri((1 + level) / 2) * opinion.deviation
        floor = np.where(between[:, None], expected, 0).reshape(bound.shape)
        return np.maximum(bound, floor).astype(bound.dtype)

    def assess(self, x: Any) -> Assessment:
        """Error bound, safe flag and their parts at each query (lines 13 to 17)."""
        queries = self.rows_of(x)
        arrays, lost = self.parts_of(queries)
        kind = native(queries) if self.schema is None else None
        answer = {name: restore(part, kind) for name, part in arrays.items()}
        if self.mask is not None:
            for name in ("prediction", "error_hat", "anchor_error", "increment"):
                answer[name] = self.mask.hidden(answer[name])
        return Assessment(**answer, lost=lost, asked=queries, fitted=self)

    def parts_of(self, queries: Any) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The parts of the answers as numbers, and which queries have no answer."""
        n, arrays = len(queries), {}
        lost = np.ones(n, dtype=bool)
        for part, view in self.views(queries):
            score, safe = self._flags(view)
            bound, features = self._bound(view, safe), view.features
            anchor = _with_gaps(features.anchor_error, view.gaps)
            parts = {
                "prediction": _with_gaps(features.prediction, view.gaps),
                "error_hat": bound,
                "safe": safe,
                "support_score": score,
                "anchor_error": anchor,
                "increment": bound - anchor,
                "anchors": view.relation.anchors,
                "anchor_distance": view.relation.anchor_distance,
                "displacement": features.displacement,
                "support_distance": features.support_distance,
            }
            rows = view.rows + part.start
            lost[rows] = False
            for name, values in parts.items():
                if len(rows) == n:
                    arrays[name] = values  # no copy
                    continue
                if name not in arrays:
                    arrays[name] = _blank((n, *values.shape[1:]), values.dtype)
                arrays[name][rows] = values
        return arrays, lost

    def bound_of(self, x: Any) -> Any:
        """The error bounds, without the other parts in memory."""
        return self._of_each(x, lambda view: self._bound(view, self._flags(view)[1]))

    def _of_each(self, x: Any, of: Callable[[View], np.ndarray]) -> Any:
        """Fields of all queries, given a function of a chunk of them."""
        queries = self.rows_of(x)
        found = _blank((len(queries), *self.error.shape[1:]), self.error.dtype)
        for part, view in self.views(queries):
            if len(view.rows):
                found[view.rows + part.start] = of(view)
        return self._restored(found, queries)

    def bounds(self, x: Any, levels: Any) -> dict[float, Any]:
        """Error bounds by quantile level; bounds of different levels do not cross."""
        queries, levels = self.rows_of(x), levels_of(levels)
        has_levels = getattr(self.bound, "has_levels", False)
        factors = [] if has_levels else self._level_factors(levels)
        shape = (len(queries), *self.error.shape[1:])
        found = {level: _blank(shape, self.error.dtype) for level in levels}
        for part, view in self.views(queries):
            _, safe = self._flags(view)
            own = None if has_levels else self._bound(view, safe)
            for place, level in enumerate(levels):
                bound = self._bound(view, safe, level) if own is None else factors[place](own, safe)
                found[level][view.rows + part.start] = bound
        return {level: self._restored(values, queries) for level, values in found.items()}

    def _level_factors(self, levels: list[float]) -> list[ConformalFactors]:
        """Factors on the bound for other levels, from the calibration tuples."""
        if self.tuples is None:
            raise ValueError(
                "bounds needs the calibration tuples for this bound, but the file was saved with calibration=False; save it with "
                "them."
            )
        features = self.tuples.features
        safe = np.asarray(self.region.support_score(features)) <= SAFE
        ratio = error_ratios(self.tuples.error, bounds_of(self.bound, features))
        return level_factors(ratio, safe, levels, self.quantile)

    def expected_error(self, x: Any) -> Any:
        """The expected error at each query: not a bound, but a sharper map of where a field is wrong."""
        if not hasattr(self.bound, "expected_error"):
            raise TypeError(
                f"{type(self.bound).__name__} estimates an upper quantile of the error and not its mean; look at bounds(x, (0.5,))."
            )
        return self._of_each(x, lambda view: self.bound.expected_error(view.features))

    def _restored(self, values: np.ndarray, queries: Any) -> Any:
        """Fields as an array of the user's kind, with the mask of y."""
        kind = native(queries) if self.schema is None else None
        restored = restore(values, kind)
        return restored if self.mask is None else self.mask.hidden(restored)

    # Files

    def without_tuples(self) -> "Fitted":
        """The same calibration without its tuples, which take most of the space of a file."""
        return replace(self, tuples=None)

    def answers(self) -> dict[str, np.ndarray]:
        """The answers of the user's callables at the stored inputs."""
        found = {"surrogate": predict(self.surrogate, self.mask, self.probes)}
        if self.metric is None:
            phi = answers_of(self.representation, self.probes, "representation")
            found["representation"] = phi
        return {name: np.nan_to_num(answer) for name, answer in found.items()}

    def relative_difference(self, answer: np.ndarray, expected: np.ndarray) -> float:
        """The largest error between two answers of surrogates, relative to the typical error of the output or channel."""
        like = native(self.probes)
        error = errors_of(answer, self.error_functional, expected, like)
        by_channel = error.reshape(*error.shape[:2], -1) if error.ndim > 2 else error
        if error.ndim > 2:
            by_channel = by_channel.mean(axis=2)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = by_channel.reshape(len(error), -1) / self.typical.error
        return float(np.nan_to_num(ratio, posinf=np.inf).max())

    # Explanations

    def why_lost(self, asked: Any, query: int, names: Names | None) -> str:
        """Why a query has no answer, and what to do."""
        names = self.schema if names is None else names
        point = to_numbers(asked[query : query + 1], "x")[0]
        why = self.coordinates.why_unusable(point, names, "input")
        return why or (
            "the surrogate or the representation did not return finite numbers here; check their output"
        )

    def explain(
        self, asked: Any, prediction: Any, support_distance: Any, names: Names | None
    ) -> str:
        """Why one query is safe or not."""
        filled = (
            np.ma.filled(prediction, 0) if isinstance(prediction, np.ma.MaskedArray) else prediction
        )
        prediction = to_numbers(filled, "prediction")
        inputs = self._coordinates(asked, to_numbers(asked, "x"), prediction)
        known: Any = names
        if isinstance(asked, Table) and asked.schema is not None:
            known = asked.schema.named(names)
        changed = self.coordinates.why_changed(inputs, asked, known)
        if changed:
            return changed
        features = Features(
            np.zeros((1, 0)),
            to_numbers(support_distance, "support_distance"),
            np.zeros((1, 0)),
            prediction,
            inputs,
            opinion=self._opinion(inputs if self.metric is None else self.metric(inputs)),
        )
        return str(self.region.explain(features, known))


def _blank(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    """Rows without an answer."""
    if dtype.kind == "b":
        return np.zeros(shape, dtype)
    return np.full(shape, np.nan if dtype.kind == "f" else -1, dtype)


def _with_gaps(values: np.ndarray, gaps: np.ndarray | None) -> np.ndarray:
    """Fields with nan in the cells that the surrogate has masked."""
    if gaps is None or values.shape != gaps.shape or not gaps.any():
        return values
    return np.where(gaps, np.nan, values)
