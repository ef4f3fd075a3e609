"""A calibrated estimator: answers to queries (lines 13 to 17)."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool, Float

from geoq.arrays import (
    chunks,
    flat,
    in_kind,
    is_lazy,
    native,
    own_copy,
    per_row,
    restore,
    take,
    to_numbers,
)
from geoq.bounds.protocol import bounds_of
from geoq.core.assessment import Assessment, SecondOpinion, numbers_of
from geoq.core.beyond import change_beyond, with_margins
from geoq.core.conformal import ConformalFactors, level_factors, levels_of
from geoq.core.geometry import Features, Geometry, Space, anchor_mean, displacement
from geoq.core.intervals import Tails, interval, within_limits
from geoq.core.tuples import Repeats, Tuples, Typical
from geoq.data.companion import Companion
from geoq.data.coordinates import Coordinates, Part
from geoq.data.domain import Layout
from geoq.data.masks import Mask, predict, with_gaps
from geoq.data.metric import FittedMetric, Metric, rows_like
from geoq.data.process import Opinion, Process
from geoq.data.table import Names, Schema, input_rows, is_frame
from geoq.quantiles import error_ratios
from geoq.regions.region import SAFE
from geoq.surrogate import answers_of, check_callable, errors_of, log_error, on_scale

# A function of the features of a chunk of queries, and of the cells that the surrogate has masked there.
Parts: TypeAlias = Callable[[Features, Any], dict[Any, np.ndarray]]
# A model is periodic if its answers one period later differ by less than this fraction.
PERIODIC = 1e-5


def embed(
    representation: Any, metric: FittedMetric | None, x: Any, coordinates: np.ndarray
) -> Space:
    """Phi and nu of the inputs, or their coordinates in the metric (lines 3 and 4)."""
    if metric is not None:
        z = metric(coordinates)
        return Space(z, z, coordinates)
    z = answers_of(representation, x, "representation")
    return Space(z, coordinates, coordinates)


@dataclass(frozen=True)
class Fitted:
    """Everything that the calibration has found. ``state.save`` stores it, except for the callables.

    Attributes:
        coordinates: T.
        metric: the metric; None for a representation of the user.
        geometry: all points, which queries are related to.
        error: the observed errors of the deployed surrogate; an absent cell has the mean error of the cell.
        error_size: the observed error of each point, averaged over its field.
        process: a second model of the data, a Gaussian process or a companion; None if the bound does not use one.
        between: the errors of the process at levels of a lattice that it has not seen; None without a lattice.
        typical: medians over the calibration, for explanations.
        exact: the cells in which all errors are zero.
        repeats: repeated measurements in the data; None if all inputs differ.
        schema: the columns of the table of ``fit``; None for arrays.
        families: the names of the fold schemes.
        beyond: the fraction of the planned queries that are beyond all held-out points; None without planned queries.
        tuples: the calibration tuples; None in a file that was saved without them.
        probes: a few inputs, at which a file has the answers of the callables.
        verified: the predictions at the last points, which ``update`` has added; None without them.
        limits: the known limits of the outputs, or None.
        tails: the factors of the two sides of an interval where errors are lopsided, or None.
        features: the function of the user; ``user`` are the coordinates of its numbers, None if the bound does not use them, and
            ``verified_user`` the numbers in these coordinates at the last points.
    """

    quantile: float
    coordinates: Coordinates
    metric: FittedMetric | None
    geometry: Geometry
    error: Float[np.ndarray, " n *field"]
    error_size: Float[np.ndarray, " n"]
    process: Process | Companion | None
    between: Float[np.ndarray, " m p"] | None
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
    beyond: float | None
    conformal: ConformalFactors
    tuples: Tuples | None
    probes: Any
    surrogate: Any = field(repr=False)
    representation: Any = field(repr=False)
    error_functional: Any = field(repr=False)
    verified: Float[np.ndarray, " n_verified *output"] | None = None
    limits: tuple[np.ndarray, np.ndarray] | None = None
    tails: Tails | None = None
    features: Any = field(default=None, repr=False)
    user: Coordinates | None = None
    verified_user: Float[np.ndarray, " n_verified k"] | None = None

    @property
    def n_verified(self) -> int:
        """How many of the points ``update`` has added."""
        return 0 if self.verified is None else len(self.verified)

    def _scaled(self, values: np.ndarray) -> np.ndarray:
        """Outputs on the scale of their error, on which all features are."""
        return on_scale(values, self.error_functional)

    def _outputs(self, values: np.ndarray) -> np.ndarray:
        """Values on the scale of the error in the unit of the outputs."""
        return np.exp(values) if self.error_functional is log_error else values

    def rows_of(self, x: Any) -> Any:
        """Queries as rows; raises unless they have the columns or the shape of ``fit``."""
        if self.schema is None and is_frame(x):
            raise TypeError(
                "x is a data frame, but GeoQ was fitted on an array; pass x.to_numpy() with the columns in the order of fit."
            )
        rows = input_rows(x) if self.schema is None else self.schema.table(x)
        shape, own = to_numbers(rows, "x").shape, self.coordinates.input_shape
        if not shape or shape[1:] != own or not shape[0]:
            single = "; a single query needs a first dimension of 1, x[None]" * (shape == own)
            raise ValueError(
                f"x has shape {shape}, but GeoQ was fitted on rows of shape {own}; pass at least one query of that shape{single}."
            )
        return rows if self.schema is not None else in_kind(rows, native(self.probes))

    def views(
        self, x: Any
    ) -> Iterator[tuple[slice, Features, Bool[np.ndarray, " m"], np.ndarray | None]]:
        """Chunks of queries with their features (line 14), which of them have no answer, and which cells the surrogate masks.

        A query without an answer has the features of another row, so that its numbers are finite.
        """
        check_callable(self.surrogate, "surrogate")
        if not isinstance(self.representation, Metric):
            check_callable(self.representation, "representation")
        numbers = max(math.prod(self.coordinates.input_shape), self.error[:1].size)
        for part in chunks(len(x), numbers):
            yield part, *self._view(x[part])

    def _view(self, x: Any) -> tuple[Features, np.ndarray, np.ndarray | None]:
        inputs = to_numbers(x, "x")
        absent, gaps = self.coordinates.unusable(inputs).any(axis=1), None
        if absent.any():
            known = self.probes if absent.all() else take(x, np.flatnonzero(~absent))
            x = take(known, np.where(absent, 0, np.cumsum(~absent) - 1))
            inputs = to_numbers(x, "x")
        given, user = answers_of(self.surrogate, x, "surrogate"), None
        prediction = self._scaled(given)
        if self.mask is not None:
            if self.mask.fill is not None and prediction.shape[1:] == self.output_shape:
                gaps = np.isnan(prediction) & ~self.mask.cells
            prediction = self.mask.filled(prediction)
        space = embed(self.representation, self.metric, x, self._coordinates(x, inputs, prediction))
        finite = np.isfinite(flat(prediction)).all(axis=1)
        finite &= np.isfinite(flat(space.z)).all(axis=1)
        if self.user is not None:
            user = self.user(flat(answers_of(self.features, x, "features", given)).astype(float))
            finite &= np.isfinite(user).all(axis=1)
            user = np.nan_to_num(user)
        if not finite.all():
            prediction = np.where(per_row(finite, prediction), prediction, 0)
            z = np.where(per_row(finite, space.z), space.z, self.geometry.points.z[0])
            space = replace(space, z=z)
        return self.features_of(space, prediction, user), absent | ~finite, gaps

    def features_of(self, space: Space, prediction: np.ndarray, user: Any) -> Features:
        """The features of queries in the coordinates of the geometry."""
        relation = self.geometry.relate(space)
        features = Features(
            displacement(space.z, relation.anchors, self.geometry.points.z),
            relation.support_distance,
            anchor_mean(relation.anchors, self.error),
            prediction,
            space.inputs,
            relation,
            self._opinion(space.normalized),
            user=user,
        )
        return self._beyond(features)

    def _beyond(self, features: Features) -> Features:
        """The features with the changes beyond the ranges."""
        return replace(features, change=change_beyond(features, self.metric, self.process))

    def _coordinates(self, x: Any, inputs: np.ndarray, prediction: np.ndarray) -> np.ndarray:
        """T of queries. Beyond the range of a periodic input they are those inside it if the model answers the same there."""
        found = self.coordinates(inputs)
        limits = self.coordinates.is_part(Part.BELOW, Part.ABOVE)
        rows = np.flatnonzero((flat(found)[:, limits] != 0).any(axis=1))
        if not len(rows):
            return found
        moved = self.coordinates.within_periods(inputs[rows])
        again = rows_like(moved, take(x, rows))
        there = predict(self.surrogate, self.mask, again, self.error_functional)
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
                "this calibration has no second opinion: the bound uses none, or a regression on the same fields is more than twice as "
                "wrong as the surrogate."
            )

        def parts(features: Features, gaps: Any) -> dict[Any, np.ndarray]:
            del gaps
            opinion: Any = features.opinion
            values = {"prediction": self._outputs(opinion.mean), "deviation": opinion.deviation}
            shape = (len(features), *self.output_shape)
            return {name: value.reshape(shape) for name, value in values.items()}

        return SecondOpinion(**self._fields(x, parts))

    def flags(self, features: Features) -> tuple[np.ndarray, np.ndarray]:
        """The support scores (line 15) and the safe flags (line 16)."""
        score = np.asarray(self.region.support_score(features), dtype=float)
        if score.shape != (len(features),):
            raise ValueError(
                f"{type(self.region).__name__}.support_score returned shape {score.shape} for {len(features)} queries; return one "
                "number per query."
            )
        # A constant input that changes has an unknown effect, whatever the region measures.
        changed = self.coordinates.changed(features.inputs).any(axis=1)
        score = np.where(changed, np.inf, score)
        return score, score <= SAFE

    def scaled_bound(
        self, features: Features, gaps: Any, safe: np.ndarray, level: float | None = None
    ) -> np.ndarray:
        """The bounds with the conformal factors; 0 in exact cells and nan in cells that the surrogate has masked."""
        bound, own = bounds_of(self.bound, features, level), self.quantile
        if getattr(self.bound, "scalable", True):
            bound = with_margins(bound, features, safe, self, own if level is None else level)
        bound = self.conformal(bound, safe)
        bound = within_limits(self, features.prediction, bound)
        if self.exact is not None:
            bound = np.where(self.exact, bound.dtype.type(0), bound)
        return with_gaps(bound, gaps)

    def assess(self, x: Any) -> Assessment:
        """Error bound, safe flag and their parts at each query (lines 13 to 17)."""
        queries = self.rows_of(x)
        arrays, lost = self.parts_of(queries)
        kind = native(queries) if self.schema is None else None
        fields: Any = dict.fromkeys(
            ("prediction", "error_hat", "anchor_error", "increment"), self._restored
        )
        answer = {name: fields.get(name, restore)(part, kind) for name, part in arrays.items()}
        asked = queries if is_lazy(queries) else own_copy(queries)
        return Assessment(**answer, lost=lost, asked=asked, fitted=self)

    def parts_of(self, queries: Any) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The parts of the answers as numbers, and which queries have no answer."""

        def parts(features: Features, gaps: Any) -> dict[Any, np.ndarray]:
            score, safe = self.flags(features)
            bound = self.scaled_bound(features, gaps, safe)
            anchor, relation = with_gaps(features.anchor_error, gaps), features.relation
            assert relation is not None
            return {
                "prediction": with_gaps(self._outputs(features.prediction), gaps),
                "error_hat": bound,
                "safe": safe,
                "support_score": score,
                "anchor_error": anchor,
                "increment": bound - anchor,
                "anchors": relation.anchors,
                "anchor_distance": relation.anchor_distance,
                "displacement": features.displacement,
                "support_distance": features.support_distance,
            }

        return self.of_all(queries, parts)

    def of_all(self, queries: Any, of: Parts) -> tuple[dict[Any, np.ndarray], np.ndarray]:
        """Arrays of all queries, given a function of the features and gaps of a chunk; and which queries have no answer."""
        n, arrays = len(queries), {}
        lost = np.zeros(n, dtype=bool)
        for part, features, absent, gaps in self.views(queries):
            lost[part] = absent
            for name, found in of(features, gaps).items():
                values = found
                if absent.any():
                    blank = {"b": False, "f": np.nan}.get(values.dtype.kind, -1)
                    values = np.where(per_row(absent, values), blank, values)
                if len(values) == n:
                    arrays[name] = values  # no copy
                    continue
                if name not in arrays:
                    arrays[name] = np.empty((n, *values.shape[1:]), values.dtype)
                arrays[name][part] = values
        return arrays, lost

    def _fields(self, x: Any, of: Parts) -> dict[Any, Any]:
        """Fields of all queries as arrays of the user's kind, with the mask of y."""
        queries = self.rows_of(x)
        kind = native(queries) if self.schema is None else None
        found, _ = self.of_all(queries, of)
        return {name: self._restored(values, kind) for name, values in found.items()}

    def _restored(self, values: Any, kind: Any) -> Any:
        """Values in the user's kind of array, with the mask of y."""
        found = restore(values, kind)
        return found if self.mask is None else self.mask.hidden(found)

    def bound_of(self, x: Any) -> Any:
        """The error bounds, without the other parts in memory."""
        return self._fields(
            x,
            lambda features, gaps: {0: self.scaled_bound(features, gaps, self.flags(features)[1])},
        )[0]

    def bounds(self, x: Any, levels: Any) -> dict[float, Any]:
        """Error bounds by quantile level; bounds of different levels do not cross."""
        wanted = levels_of(levels)
        has_levels = getattr(self.bound, "has_levels", False)
        factors = [] if has_levels else self._level_factors(wanted)

        def parts(features: Features, gaps: Any) -> dict[Any, np.ndarray]:
            safe = self.flags(features)[1]
            if has_levels:
                return {level: self.scaled_bound(features, gaps, safe, level) for level in wanted}
            own = self.scaled_bound(features, gaps, safe)
            return {
                level: within_limits(self, features.prediction, f(own, safe))
                for level, f in zip(wanted, factors, strict=True)
            }

        return self._fields(x, parts)

    def interval(self, prediction: Any, bound: Any, safe: Any, level: float) -> tuple[Any, Any]:
        """The ends of the intervals around predictions with bounds at this level, in the user's kind of array."""
        one, size, flag = map(numbers_of, (prediction, bound, safe))
        lower, upper = interval(self, one, size, flag, level)
        return self._restored(lower, prediction), self._restored(upper, prediction)

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
        dtype = self.error.dtype
        return self._fields(
            x, lambda features, _: {0: self.bound.expected_error(features).astype(dtype)}
        )[0]

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
        if self.user is not None:
            given = answers_of(self.surrogate, self.probes, "surrogate")
            found["features"] = answers_of(self.features, self.probes, "features", given)
        return {name: np.nan_to_num(answer) for name, answer in found.items()}

    def relative_difference(self, answer: np.ndarray, expected: np.ndarray) -> float:
        """The largest error between two answers of surrogates, relative to the typical error of the output or channel."""
        error = errors_of(answer, self.error_functional, expected, native(self.probes))
        if error.ndim > 2:
            error = error.reshape(*error.shape[:2], -1).mean(axis=2)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = flat(error) / self.typical.error
        return float(np.nan_to_num(ratio, posinf=np.inf).max())

    # Explanations

    def why_lost(self, asked: Any, query: int, names: Names | None) -> str:
        """Why a query has no answer, and what to do."""
        names = self.schema if names is None else names
        point = to_numbers(asked[query : query + 1], "x")[0]
        why = self.coordinates.why_unusable(point, names, "input")
        return why or (
            "the surrogate, the representation or features did not return finite numbers here; check their output"
        )

    def explain(self, answer: Assessment, query: int, names: Names | None) -> str:
        """Why one query is safe or not."""
        features, asked = self.seen_again(answer, query), answer.asked[query : query + 1]
        known: Any = names if self.schema is None else self.schema.named(names)
        changed = self.coordinates.why_changed(features.inputs, asked, known)
        return changed or str(self.region.explain(features, known))

    def seen_again(self, answer: Assessment, query: int) -> Features:
        """What the region sees of a query that has an answer; the surrogate is not asked for its prediction again."""
        parts = answer.asked, answer.prediction, answer.support_distance
        asked, prediction, distance = (part[query : query + 1] for part in parts)
        prediction = self._scaled(np.nan_to_num(numbers_of(prediction)))
        inputs = self._coordinates(asked, to_numbers(asked, "x"), prediction)
        opinion = self._opinion(inputs if self.metric is None else self.metric(inputs))
        none, distance = np.zeros((1, 0)), to_numbers(distance, "support_distance")
        return self._beyond(Features(none, distance, none, prediction, inputs, opinion=opinion))
