r"""The metric of the geometry: inputs in standardised coordinates, scaled by the sensitivity of the surrogate.

.. math:: z(x) = w \odot T(x), \qquad w_j = \max\bigl(\sqrt{g_j / \operatorname{rms}(g)}, \; w_{min}\bigr)

T standardises each input, after a logarithm for positive inputs that span several orders of magnitude. The sensitivity g_j is
measured once at the deployed surrogate, without any training: one input at a time is exchanged between rows of the data, so that
every input stays within its range.

.. math:: g_{jk}^2 = \tfrac12 \operatorname{mean}_i \bigl(\widehat F_k(x_i \text{ with } x_{ij} \text{ of another row}) - \widehat F_k(x_i)\bigr)^2

This is a departure from the paper, whose distances are Euclidean in phi(x) and nu(x). An input that hardly changes the prediction
then contributes hardly anything to the distance.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Float

from geoq.arrays import flat, restore
from geoq.checks import check_fraction, check_integer
from geoq.data.coordinates import Coordinates, Inputs, Kind, Rows, fit_columns
from geoq.data.table import Schema, Table

# The surrogate as a function of numbers.
Predict: TypeAlias = Callable[[np.ndarray], np.ndarray]


def identity(x: Any) -> Any:
    r"""The inputs in their own units, which is the representation of the paper.

    .. math:: \phi = \operatorname{Id}_{\mathcal X}
    """
    return x


@dataclass(frozen=True)
class FittedMetric:
    """Coordinates T, weights w, and the sensitivity of the surrogate.

    Attributes:
        coordinates: T.
        weight: w, one number per coordinate; None if all weights are 1.
        sensitivity: g, one row per coordinate and one column per output, in units of the outputs; None if it was not measured.
            The coordinates of one column of a table have the same sensitivity.
        importance: sensitivity per coordinate over all outputs, each output divided by its standard deviation.
        low: smallest T of each coordinate in the data.
        high: largest T of each coordinate in the data.
    """

    coordinates: Coordinates
    weight: Float[np.ndarray, " *coordinates"] | None
    sensitivity: Float[np.ndarray, " m n_outputs"] | None
    importance: Float[np.ndarray, " m"]
    low: Float[np.ndarray, " m"]
    high: Float[np.ndarray, " m"]

    def __call__(self, coordinates: Rows) -> Rows:
        """Z, from coordinates T."""
        return coordinates if self.weight is None else self.weight * coordinates

    def overhang(self, coordinates: Rows) -> Float[np.ndarray, " n n_outputs"]:
        r"""How much each output would change outside the ranges of the inputs, if it kept changing as inside.

        .. math:: O_k(x) = \sqrt{\textstyle\sum_j (g_{jk} o_j)^2}, \quad o_j \text{ the distance of } T_j \text{ to its range}
        """
        assert self.sensitivity is not None
        t = flat(coordinates)
        outside = np.maximum(t - self.high, self.low - t).clip(min=0)
        return np.sqrt(outside**2 @ self.sensitivity**2)

    def describe(self, names: Any = None) -> str:
        """Which inputs the prediction depends on, the most influential first."""
        if self.sensitivity is None:
            return "all inputs have the same weight"
        largest = float(self.importance.max()) or 1.0
        order = np.argsort(-self.importance, kind="stable").tolist()
        log, column = self.coordinates.log.reshape(-1), self.coordinates.input_of
        # One coordinate per column of a table.
        first = {int(column[j]): j for j in reversed(order)}
        parts = [
            f"{names[c] if names else f'input {c}'}{' (logarithm)' if log[j] else ''}: {float(self.importance[j]) / largest:.2g}"
            for c, j in reversed(first.items())
        ]
        return f"relative sensitivity of the prediction: {', '.join(parts[:5])}"


@runtime_checkable
class Metric(Protocol):
    """How distances between inputs are measured. ``fit`` is called after the deployed surrogate is trained."""

    def coordinates(self, points: np.ndarray, schema: Schema | None, /) -> Coordinates: ...

    def fit(
        self, coordinates: Coordinates, points: np.ndarray, outputs: np.ndarray, predict: Predict, /
    ) -> FittedMetric: ...


@dataclass(frozen=True)
class SensitivityMetric:
    """Standardised inputs, or their logarithms, scaled by the square root of the surrogate's sensitivity.

    Attributes:
        min_weight: smallest weight of an input.
        max_inputs: with more inputs than this, as for fields, all weights are 1 and no logarithms are taken.
        n_rows: number of rows at which the sensitivity is measured. This takes ``n_rows * (n_inputs + 1)`` predictions.
        random_state: seed of the exchange.

    Example:
        >>> SensitivityMetric(min_weight=0.1)
        SensitivityMetric(min_weight=0.1, max_inputs=64, n_rows=200, random_state=0)
    """

    min_weight: float = 0.3
    max_inputs: int = 64
    n_rows: int = 200
    random_state: int = 0

    def __post_init__(self) -> None:
        check_fraction(self.min_weight, "SensitivityMetric.min_weight")
        check_integer(self.n_rows, "n_rows", 1)

    def coordinates(self, points: Inputs, schema: Schema | None) -> Coordinates:
        """T of the points, with logarithms for tables."""
        if schema is not None:
            return fit_columns(points, {}, schema, logarithms=True)
        few = math.prod(points.shape[1:]) <= self.max_inputs
        return Coordinates.fit(points, logarithms=few)

    def fit(
        self, coordinates: Coordinates, points: Inputs, outputs: np.ndarray, predict: Predict
    ) -> FittedMetric:
        """Measure the sensitivity of the surrogate, and set the weights."""
        n_inputs = math.prod(coordinates.input_shape)
        if n_inputs > self.max_inputs or coordinates.constant.all():
            return _unweighted(coordinates, points)
        sensitivity = self._sensitivity(coordinates, points, predict)
        with warnings.catch_warnings(action="ignore"):  # of outputs without values
            deviation = np.nanstd(flat(outputs), axis=0)
        importance, varies = np.ones(n_inputs), deviation > 0
        if varies.any():
            scaled = sensitivity[:, varies] / deviation[varies]
            importance = np.sqrt((scaled**2).mean(axis=1))
        weight = input_weights(importance, coordinates.inputs_that_vary, self.min_weight)
        t, column = flat(coordinates(points)), coordinates.input_of
        # One row per input up to here; the coordinates of one column of a table have the same weight.
        return FittedMetric(
            coordinates,
            weight[column].reshape(coordinates.mean.shape),
            sensitivity[column],
            importance[column],
            t.min(axis=0),
            t.max(axis=0),
        )

    def _sensitivity(
        self, coordinates: Coordinates, points: np.ndarray, predict: Predict
    ) -> Float[np.ndarray, " n_inputs n_outputs"]:
        """How much each output changes if the values of one input are exchanged."""
        rng = np.random.default_rng(self.random_state)
        rows = points[rng.permutation(len(points))[: self.n_rows]]

        def answers(inputs: np.ndarray) -> np.ndarray:
            return flat(predict(inputs.reshape(rows.shape))).astype(float)

        inputs = flat(rows)
        unchanged = answers(inputs)
        sensitivity = np.zeros((inputs.shape[1], unchanged.shape[1]))
        for j in np.flatnonzero(coordinates.inputs_that_vary):
            exchanged = inputs.copy()
            exchanged[:, j] = inputs[rng.permutation(len(rows)), j]
            change = answers(exchanged) - unchanged
            sensitivity[j] = np.sqrt((change**2).mean(axis=0) / 2)
        return sensitivity


@dataclass(frozen=True)
class StandardizedMetric:
    """Standardised inputs with equal weights and without logarithms: the paper's nu for all distances."""

    def coordinates(self, points: Inputs, schema: Schema | None) -> Coordinates:
        """T of the points, without logarithms."""
        if schema is not None:
            return fit_columns(points, {}, schema, logarithms=False)
        return Coordinates.fit(points, logarithms=False)

    def fit(
        self, coordinates: Coordinates, points: Inputs, outputs: np.ndarray, predict: Predict
    ) -> FittedMetric:
        """Equal weights; the surrogate is not evaluated."""
        del outputs, predict
        return _unweighted(coordinates, points)


@dataclass(frozen=True)
class Columns:
    """The metric of a table whose columns are numbers, logarithms, periodic numbers or categories.

    It serves anchors, support distance, bound and safe region alike. Columns that are not described are found from the
    data: strings, categories and booleans are categories, and positive numbers that span three decades are logarithms.

    Attributes:
        kinds: what the columns are, by name, or by number for arrays: ``Number()``, ``Log()``, ``Periodic(24)``, ``Category()``
            or ``Ignored()``, all of ``geoq.parts``.
        weighting: the metric that weights the columns.

    Example:
        >>> from geoq.parts import Columns, Ignored, Periodic
        >>> columns = Columns({"hour": Periodic(24), "name": Ignored()})
    """

    kinds: Any = field(default_factory=dict)  # raises below unless it is a mapping
    weighting: "SensitivityMetric | StandardizedMetric" = field(default_factory=SensitivityMetric)

    def __post_init__(self) -> None:
        kinds = self.kinds.values() if isinstance(self.kinds, Mapping) else [None]
        if not all(isinstance(kind, Kind) for kind in kinds):
            raise TypeError(
                f"Columns({self.kinds!r}): a kind is an object of geoq.parts; pass Number(), Log(), Periodic(24), Category() or "
                "Ignored() for each column, as in Columns({'hour': Periodic(24)})."
            )

    def coordinates(self, points: Float[np.ndarray, " n c"], schema: Schema | None) -> Coordinates:
        """T of the columns of a table or an array."""
        logarithms = isinstance(self.weighting, SensitivityMetric)
        return fit_columns(points, self.kinds, schema, logarithms=logarithms)

    def fit(
        self, coordinates: Coordinates, points: Inputs, outputs: np.ndarray, predict: Predict
    ) -> FittedMetric:
        """The weights of the columns."""
        return self.weighting.fit(coordinates, points, outputs, predict)


def input_weights(
    importance: np.ndarray, varying: np.ndarray, min_weight: float
) -> Float[np.ndarray, " n_inputs"]:
    """Square roots of the sensitivities relative to their root mean square over the varying inputs, with a minimum."""
    typical = float(np.sqrt((importance[varying] ** 2).mean()))
    if not typical > 0:
        return np.ones_like(importance)
    return np.sqrt(importance / typical).clip(min=min_weight)


def _unweighted(coordinates: Coordinates, points: np.ndarray) -> FittedMetric:
    # The ranges of fields are not used.
    n = coordinates.mean.size
    t = flat(coordinates(points[:1] if points.ndim > 2 else points))
    return FittedMetric(coordinates, None, None, np.ones(n), t.min(axis=0), t.max(axis=0))


def rows_like(inputs: np.ndarray, like: Any) -> Any:
    """Numbers as rows of the kind and dtype that ``like`` has."""
    if isinstance(like, Table):
        return like.like(np.asarray(inputs, dtype=float))
    if hasattr(like, "new_tensor"):
        return like.new_tensor(inputs)
    return inputs.astype(like.dtype) if isinstance(like, np.ndarray) else restore(inputs, like)
