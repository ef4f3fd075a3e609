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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from geoq.arrays import Rows, in_chunks
from geoq.checks import check_count
from geoq.columns import ColumnCoordinates, Kind, fit_columns
from geoq.coordinates import Coordinates
from geoq.quantiles import check_fraction
from geoq.surrogate import Surrogate, evaluate
from geoq.table import Schema, Table

AnyCoordinates: TypeAlias = Coordinates | ColumnCoordinates


def coordinates_from(arrays: Mapping[str, Tensor]) -> AnyCoordinates:
    """The coordinates that ``state`` described, from arrays that may hold more."""
    kind = ColumnCoordinates if "part" in arrays else Coordinates
    return kind(**{name: arrays[name] for name in kind.__dataclass_fields__})


def all_coordinates(
    coordinates: AnyCoordinates, points: Float[Tensor, " n *inputs"]
) -> Float[Tensor, " n *coordinates"]:
    """T of all points of the data."""
    like = coordinates(points[:1])
    return in_chunks(lambda part: coordinates(points[part]), len(points), like)


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

    coordinates: AnyCoordinates
    weight: Float[Tensor, " *coordinates"] | None
    sensitivity: Float[Tensor, " n_inputs n_outputs"] | None
    importance: Float[Tensor, " n_inputs"]
    low: Float[Tensor, " n_inputs"]
    high: Float[Tensor, " n_inputs"]

    def __call__(
        self, coordinates: Float[Tensor, " n *coordinates"]
    ) -> Float[Tensor, " n *coordinates"]:
        """Z, from coordinates T."""
        if self.weight is None:
            return coordinates
        return self.weight.to(coordinates.device) * coordinates

    def outside(
        self, coordinates: Float[Tensor, " n *coordinates"]
    ) -> Float[Tensor, " n n_inputs"]:
        """The distance of each coordinate to its range in the data."""
        t = coordinates.reshape(len(coordinates), -1)
        return torch.maximum(t - self.high, self.low - t).clamp_(min=0)

    def overhang(
        self, coordinates: Float[Tensor, " n *coordinates"]
    ) -> Float[Tensor, " n n_outputs"]:
        r"""How much each output would change outside the ranges of the inputs, if it kept changing as inside.

        .. math:: O_k(x) = \sqrt{\textstyle\sum_j (g_{jk} o_j)^2}, \quad o_j \text{ the distance of } T_j \text{ to its range}
        """
        assert self.sensitivity is not None
        return (self.outside(coordinates) ** 2 @ self.sensitivity**2).sqrt()

    def describe(self, names: list[str] | None = None) -> str:
        """Which inputs the prediction depends on, the most influential first."""
        if self.sensitivity is None:
            return "all inputs have the same weight"
        largest = float(self.importance.max()) or 1.0
        order = self.importance.argsort(descending=True, stable=True).tolist()
        log, column = self.coordinates.log.reshape(-1), self.coordinates.column.tolist()
        # One coordinate per column of a table.
        first = {column[j]: j for j in reversed(order)}
        parts = [
            f"{names[c] if names else f'input {c}'}{' (logarithm)' if log[j] else ''} {float(self.importance[j]) / largest:.2g}"
            for c, j in reversed(first.items())
        ]
        return f"relative sensitivity of the prediction: {', '.join(parts[:5])}"

    def to(self, like: Tensor) -> "FittedMetric":
        """The same metric on the device of a tensor."""
        on_device = {k: v.to(like.device) for k, v in self.state().items()}
        return FittedMetric.from_state(on_device)

    def state(self) -> dict[str, Tensor]:
        """The arrays, for a file."""
        arrays = {
            **self.coordinates.state(),
            "importance": self.importance,
            "low": self.low,
            "high": self.high,
        }
        optional = {"weight": self.weight, "sensitivity": self.sensitivity}
        return arrays | {k: v for k, v in optional.items() if v is not None}

    @staticmethod
    def from_state(arrays: dict[str, Tensor]) -> "FittedMetric":
        """The metric that ``state`` described."""
        return FittedMetric(
            coordinates_from(arrays),
            arrays.get("weight"),
            arrays.get("sensitivity"),
            arrays["importance"],
            arrays["low"],
            arrays["high"],
        )


@runtime_checkable
class Metric(Protocol):
    """How distances between inputs are measured. ``fit`` is called after the deployed surrogate is trained."""

    def coordinates(self, points: Tensor, /) -> AnyCoordinates: ...

    def fit(
        self,
        coordinates: AnyCoordinates,
        points: Tensor,
        outputs: Tensor,
        predict: Callable[[Tensor], Tensor],
        /,
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
        check_count(self.n_rows, "n_rows")

    def coordinates(self, points: Float[Tensor, " n *coordinates"]) -> Coordinates:
        """T of the points, with logarithms for tables."""
        few = math.prod(points.shape[1:]) <= self.max_inputs
        return Coordinates.fit(points, logarithms=few)

    def fit(
        self,
        coordinates: AnyCoordinates,
        points: Float[Tensor, " n *coordinates"],
        outputs: Float[Tensor, " n *output"],
        predict: Callable[[Tensor], Tensor],
    ) -> FittedMetric:
        """Measure the sensitivity of the surrogate, and set the weights."""
        t = all_coordinates(coordinates, points).reshape(len(points), -1)
        n_inputs = math.prod(coordinates.input_shape)
        if n_inputs > self.max_inputs or bool(coordinates.constant.all()):
            return _unweighted(coordinates, t)
        sensitivity = self._sensitivity(coordinates, points, predict)
        deviation = outputs.reshape(len(outputs), -1).to(t).std(dim=0, correction=0)
        importance = _over_outputs(sensitivity, deviation)
        weight = input_weights(importance, _varying(coordinates), self.min_weight)
        # Of inputs so far; the coordinates of one column of a table have the same weight.
        column = coordinates.column
        return FittedMetric(
            coordinates,
            weight[column].reshape(coordinates.mean.shape),
            sensitivity[column],
            importance[column],
            t.amin(dim=0),
            t.amax(dim=0),
        )

    def _sensitivity(
        self,
        coordinates: AnyCoordinates,
        points: Tensor,
        predict: Callable[[Tensor], Tensor],
    ) -> Float[Tensor, " n_inputs n_outputs"]:
        rng = np.random.default_rng(self.random_state)
        rows = points[torch.from_numpy(rng.permutation(len(points))[: self.n_rows])]
        flat = rows.reshape(len(rows), -1)

        def answers(inputs: Tensor) -> Tensor:
            predicted = predict(inputs.reshape(rows.shape))
            return predicted.reshape(len(rows), -1).to(points)

        unchanged = answers(flat)
        sensitivity = unchanged.new_zeros(flat.shape[1], unchanged.shape[1])
        for j in _varying(coordinates).nonzero()[:, 0].tolist():
            exchanged = flat.clone()
            order = torch.from_numpy(rng.permutation(len(rows))).to(flat.device)
            exchanged[:, j] = flat[order, j]
            change = answers(exchanged) - unchanged
            sensitivity[j] = (change.square().mean(dim=0) / 2).sqrt()
        return sensitivity


@dataclass(frozen=True)
class StandardizedMetric:
    """Standardised inputs with equal weights and without logarithms: the paper's nu for all distances."""

    def coordinates(self, points: Float[Tensor, " n *coordinates"]) -> Coordinates:
        """T of the points, without logarithms."""
        return Coordinates.fit(points, logarithms=False)

    def fit(
        self,
        coordinates: AnyCoordinates,
        points: Float[Tensor, " n *coordinates"],
        outputs: Float[Tensor, " n *output"],
        predict: Callable[[Tensor], Tensor],
    ) -> FittedMetric:
        """Equal weights; the surrogate is not evaluated."""
        del outputs, predict
        t = all_coordinates(coordinates, points).reshape(len(points), -1)
        return _unweighted(coordinates, t)


@dataclass(frozen=True)
class Columns:
    """The metric of a table whose columns are numbers, logarithms, periodic numbers or categories.

    It serves anchors, support distance, increment model and safe region alike. Columns that are not described are found from the
    data: strings, categories and booleans are categories, and positive numbers that span three decades are logarithms.

    Attributes:
        kinds: what the columns are, by name, or by number for arrays: ``Number()``, ``Log()``, ``Periodic(24)``, ``Category()``
            or ``Ignored()``, all of ``geoq.columns``.
        weighting: the metric that weights the columns.

    Example:
        >>> from geoq.columns import Ignored, Periodic
        >>> from geoq.metric import Columns
        >>> columns = Columns({"hour": Periodic(24), "name": Ignored()})
    """

    kinds: Any = field(default_factory=dict)  # refused below if it is not a mapping
    weighting: "SensitivityMetric | StandardizedMetric" = field(
        default_factory=SensitivityMetric
    )

    def __post_init__(self) -> None:
        if not isinstance(self.kinds, Mapping):
            raise TypeError(
                f"Columns({self.kinds!r}): kinds must map columns to kinds; pass for example Columns({{'hour': Periodic(24)}})."
            )
        for name, kind in self.kinds.items():
            if isinstance(kind, type) or not isinstance(kind, Kind):
                raise TypeError(
                    f"Columns({{{name!r}: {kind!r}}}): a kind is an object of geoq.columns; pass Number(), Log(), Periodic(24), "
                    "Category() or Ignored()."
                )

    def coordinates(self, points: Float[Tensor, " n c"]) -> ColumnCoordinates:
        """T of the columns of an array."""
        return self.of_table(points, None)

    def of_table(
        self, points: Float[Tensor, " n c"], schema: Schema | None
    ) -> ColumnCoordinates:
        """T of the columns of a table."""
        logarithms = isinstance(self.weighting, SensitivityMetric)
        return fit_columns(points, self.kinds, schema, logarithms=logarithms)

    def fit(
        self,
        coordinates: AnyCoordinates,
        points: Float[Tensor, " n *coordinates"],
        outputs: Float[Tensor, " n *output"],
        predict: Callable[[Tensor], Tensor],
    ) -> FittedMetric:
        """The weights of the columns."""
        return self.weighting.fit(coordinates, points, outputs, predict)


def input_weights(
    importance: Float[Tensor, " n_inputs"],
    varying: Bool[Tensor, " n_inputs"],
    min_weight: float,
) -> Float[Tensor, " n_inputs"]:
    """Square roots of the sensitivities relative to their root mean square over the varying inputs, with a minimum."""
    typical = importance[varying].square().mean().sqrt()
    if not typical > 0:
        return torch.ones_like(importance)
    return (importance / typical).sqrt().clamp(min=min_weight)


def _varying(coordinates: AnyCoordinates) -> Bool[Tensor, " n_inputs"]:
    """Which inputs vary: those with a coordinate that is not constant."""
    constant = coordinates.constant.reshape(-1)
    varying = constant.new_zeros(math.prod(coordinates.input_shape))
    varying[coordinates.column[~constant]] = True
    return varying


def _unweighted(coordinates: AnyCoordinates, t: Tensor) -> FittedMetric:
    ones = t.new_ones(t.shape[1])
    return FittedMetric(coordinates, None, None, ones, t.amin(dim=0), t.amax(dim=0))


def _over_outputs(
    sensitivity: Float[Tensor, " n_inputs n_outputs"],
    deviation: Float[Tensor, " n_outputs"],
) -> Float[Tensor, " n_inputs"]:
    """One sensitivity per input: each output divided by its deviation, root mean square over the outputs that vary."""
    varies = deviation > 0
    if not varies.any():
        return sensitivity.new_ones(len(sensitivity))
    return (sensitivity[:, varies] / deviation[varies]).square().mean(dim=1).sqrt()


def coordinates_of(
    representation: object, points: Float[Tensor, " n *coordinates"], x: Rows
) -> AnyCoordinates:
    """T of the inputs: by the metric, or without logarithms for a representation of the user."""
    if isinstance(x, Table):
        if not isinstance(representation, Columns):
            logarithms = isinstance(representation, SensitivityMetric)
            return fit_columns(points, {}, x.schema, logarithms=logarithms)
        return representation.of_table(points, x.schema)
    if not isinstance(representation, Metric):
        return Coordinates.fit(points, logarithms=False)
    coordinates: object = representation.coordinates(points)
    if not isinstance(coordinates, Coordinates | ColumnCoordinates):
        raise TypeError(
            f"{type(representation).__name__}.coordinates returned {type(coordinates).__name__}; return the Coordinates of the "
            "points, for example Coordinates.fit(points, logarithms=False)."
        )
    return coordinates


def predictor(surrogate: Surrogate, like: Rows) -> Callable[[Tensor], Tensor]:
    """The surrogate as a function of tensors, called with the kind and dtype of array that ``like`` has."""

    def predict(inputs: Tensor) -> Tensor:
        same: Any
        if isinstance(like, Table):
            array = inputs.double().cpu().numpy()
            same = Table(like.like(array), array)
        elif isinstance(like, np.ndarray):
            same = inputs.cpu().numpy().astype(like.dtype)
        else:
            same = inputs.to(like)
        return evaluate(surrogate, same, "surrogate")

    return predict
