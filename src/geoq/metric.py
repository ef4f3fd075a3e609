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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from geoq.arrays import Array, restore
from geoq.checks import check_count
from geoq.quantiles import check_fraction, rank
from geoq.representation import Standardization
from geoq.surrogate import Surrogate, evaluate

# An input is used as a logarithm if it is positive, has at least this many distinct values, spans this factor, and its middle
# nine tenths span the second factor. A uniform input from 0 on spans 19 there, whatever its smallest value is.
MIN_DISTINCT, MIN_SPAN, MIN_MIDDLE_SPAN = 10, 1e3, 1e2
# A constant input has changed if it differs by more than this fraction of its value; a constant 0 has no such fraction.
CHANGED = 1e-6


@dataclass(frozen=True)
class Coordinates:
    r"""T: each input standardised by its mean and standard deviation, after a logarithm where ``log`` is true.

    .. math:: T_j(x) = (x_j - \mu_j) / \sigma_j \quad \text{or} \quad (\ln x_j - \mu_j) / \sigma_j

    The scale of a constant input is its absolute value, or 1 if it is 0. Without logarithms this is the paper's nu.

    Attributes:
        mean: mean of each input, after the logarithm.
        scale: standard deviation of each input, after the logarithm.
        log: which inputs are used as logarithms.
        constant: which inputs have a single value in the data.
    """

    mean: Float[Tensor, " *coordinates"]
    scale: Float[Tensor, " *coordinates"]
    log: Bool[Tensor, " *coordinates"]
    constant: Bool[Tensor, " *coordinates"]

    @classmethod
    def fit(
        cls, points: Float[Tensor, " n *coordinates"], *, logarithms: bool
    ) -> "Coordinates":
        """Mean and scale of each input over the points."""
        low, high = points.amin(dim=0), points.amax(dim=0)
        constant = low == high
        log = torch.zeros_like(constant)
        if logarithms:
            log = (low > 0) & (high >= MIN_SPAN * low) & ~constant
            for place in log.nonzero():
                column = points[(slice(None), *place)].sort().values
                low_end, high_end = (
                    column[rank(len(column), level) - 1] for level in (0.05, 0.95)
                )
                log[tuple(place)] = bool(
                    len(column.unique()) >= MIN_DISTINCT
                    and high_end >= MIN_MIDDLE_SPAN * low_end
                )
        standard = Standardization.fit(_logarithms(points, log))
        return cls(standard.mean, standard.scale, log, constant)

    def __call__(
        self, points: Float[Tensor, " n *coordinates"]
    ) -> Float[Tensor, " n *coordinates"]:
        standardise = Standardization(self.mean, self.scale)
        return standardise(_logarithms(points, self.log))

    def inverse(
        self, coordinates: Float[Tensor, " n *coordinates"]
    ) -> Float[Tensor, " n *coordinates"]:
        """The inputs that have these coordinates."""
        values = self.mean + self.scale * coordinates
        return torch.where(self.log, values.exp(), values)

    def changed(
        self, coordinates: Float[Tensor, " n *coordinates"]
    ) -> Bool[Tensor, " n *coordinates"]:
        """Which constant inputs differ from their value in the data."""
        allowed = torch.where(self.mean == 0, 0.0, CHANGED)
        return self.constant & (coordinates.abs() > allowed)

    def changed_rows(
        self, coordinates: Float[Tensor, " n *coordinates"]
    ) -> Bool[Tensor, " n"] | None:
        """Which queries change a constant input; None if no input is constant."""
        if not self.constant.any():
            return None
        return self.changed(coordinates).reshape(len(coordinates), -1).any(dim=1)

    def explain(
        self,
        coordinates: Float[Tensor, " 1 *coordinates"],
        names: Sequence[str] | None = None,
    ) -> str:
        """Which constant input a query changes; an empty text if it changes none."""
        changed = self.changed(coordinates).reshape(-1).nonzero()
        if not len(changed):
            return ""
        j = int(changed[0, 0])
        value, constant = (
            float(part.reshape(-1)[j])
            for part in (self.inverse(coordinates), self.mean)
        )
        label = f"input {j if names is None else names[j]}"
        return f"{label} is {value:.4g}, but it is {constant:.4g} in all the data, so its effect is unknown"


def _logarithms(points: Tensor, log: Tensor) -> Tensor:
    if not log.any():
        return points
    tiny = torch.finfo(points.dtype).tiny
    return torch.where(log, points.clamp(min=tiny).log(), points)


@dataclass(frozen=True)
class FittedMetric:
    """Coordinates T, weights w, and the sensitivity of the surrogate.

    Attributes:
        coordinates: T.
        weight: w, one number per input; None if all weights are 1.
        sensitivity: g, one row per input and one column per output, in units of the outputs; None if it was not measured.
        importance: sensitivity per input over all outputs, each output divided by its standard deviation.
        low: smallest T of each input in the data.
        high: largest T of each input in the data.
    """

    coordinates: Coordinates
    weight: Float[Tensor, " *coordinates"] | None
    sensitivity: Float[Tensor, " n_inputs n_outputs"] | None
    importance: Float[Tensor, " n_inputs"]
    low: Float[Tensor, " n_inputs"]
    high: Float[Tensor, " n_inputs"]

    def __call__(
        self, coordinates: Float[Tensor, " n *coordinates"]
    ) -> Float[Tensor, " n *coordinates"]:
        """Z, from coordinates T."""
        return coordinates if self.weight is None else self.weight * coordinates

    def overhang(
        self, coordinates: Float[Tensor, " n *coordinates"]
    ) -> Float[Tensor, " n n_outputs"]:
        r"""How much each output would change outside the ranges of the inputs, if it kept changing as inside.

        .. math:: O_k(x) = \sqrt{\textstyle\sum_j (g_{jk} o_j)^2}, \quad o_j \text{ the distance of } T_j \text{ to its range}
        """
        assert self.sensitivity is not None
        t = coordinates.reshape(len(coordinates), -1)
        outside = torch.maximum(t - self.high, self.low - t).clamp(min=0)
        return (outside**2 @ self.sensitivity**2).sqrt()

    def describe(self, names: list[str] | None = None) -> str:
        """Which inputs the prediction depends on, the most influential first."""
        if self.sensitivity is None:
            return "all inputs have the same weight"
        largest = float(self.importance.max()) or 1.0
        order = self.importance.argsort(descending=True, stable=True)[:5].tolist()
        log = self.coordinates.log.reshape(-1)
        parts = [
            f"{names[j] if names else f'input {j}'}{' (logarithm)' if log[j] else ''} {float(self.importance[j]) / largest:.2g}"
            for j in order
        ]
        return f"relative sensitivity of the prediction: {', '.join(parts)}"

    def to(self, like: Tensor) -> "FittedMetric":
        """The same metric on the device of a tensor."""
        on_device = {k: v.to(like.device) for k, v in self.state().items()}
        return FittedMetric.from_state(on_device)

    def state(self) -> dict[str, Tensor]:
        """The arrays, for a file."""
        arrays = {
            "mean": self.coordinates.mean,
            "scale": self.coordinates.scale,
            "log": self.coordinates.log,
            "constant": self.coordinates.constant,
            "importance": self.importance,
            "low": self.low,
            "high": self.high,
        }
        optional = {"weight": self.weight, "sensitivity": self.sensitivity}
        return arrays | {k: v for k, v in optional.items() if v is not None}

    @staticmethod
    def from_state(arrays: dict[str, Tensor]) -> "FittedMetric":
        """The metric that ``state`` described."""
        names = ("mean", "scale", "log", "constant")
        return FittedMetric(
            Coordinates(*(arrays[name] for name in names)),
            arrays.get("weight"),
            arrays.get("sensitivity"),
            arrays["importance"],
            arrays["low"],
            arrays["high"],
        )


@runtime_checkable
class Metric(Protocol):
    """How distances between inputs are measured. ``fit`` is called after the deployed surrogate is trained."""

    def coordinates(self, points: Tensor, /) -> Coordinates: ...

    def fit(
        self,
        coordinates: Coordinates,
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
        coordinates: Coordinates,
        points: Float[Tensor, " n *coordinates"],
        outputs: Float[Tensor, " n *output"],
        predict: Callable[[Tensor], Tensor],
    ) -> FittedMetric:
        """Measure the sensitivity of the surrogate, and set the weights."""
        t = coordinates(points).reshape(len(points), -1)
        if t.shape[1] > self.max_inputs or bool(coordinates.constant.all()):
            return _unweighted(coordinates, t)
        sensitivity = self._sensitivity(coordinates, points, predict)
        deviation = outputs.reshape(len(outputs), -1).to(t).std(dim=0, correction=0)
        importance = _over_outputs(sensitivity, deviation)
        varying = ~coordinates.constant.reshape(-1)
        weight = input_weights(importance, varying, self.min_weight)
        return FittedMetric(
            coordinates,
            weight.reshape(coordinates.mean.shape),
            sensitivity,
            importance,
            t.amin(dim=0),
            t.amax(dim=0),
        )

    def _sensitivity(
        self,
        coordinates: Coordinates,
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
        for j in (~coordinates.constant.reshape(-1)).nonzero()[:, 0].tolist():
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
        coordinates: Coordinates,
        points: Float[Tensor, " n *coordinates"],
        outputs: Float[Tensor, " n *output"],
        predict: Callable[[Tensor], Tensor],
    ) -> FittedMetric:
        """Equal weights; the surrogate is not evaluated."""
        del outputs, predict
        return _unweighted(coordinates, coordinates(points).reshape(len(points), -1))


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


def _unweighted(coordinates: Coordinates, t: Tensor) -> FittedMetric:
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


def predictor(surrogate: Surrogate, like: Array) -> Callable[[Tensor], Tensor]:
    """The surrogate as a function of tensors, called with the kind and dtype of array that ``like`` has."""

    def predict(inputs: Tensor) -> Tensor:
        kind: Any = restore(inputs, like)
        same = (
            kind.astype(like.dtype) if isinstance(like, np.ndarray) else kind.to(like)
        )
        return evaluate(surrogate, same, "surrogate")

    return predict
