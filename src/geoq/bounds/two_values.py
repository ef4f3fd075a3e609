r"""Errors that take one of two values, such as wrong labels, and their bound for the rows of a table.

.. math:: \widehat E_j(x) = \begin{cases} e^+_j & P_j(x) > 1 - \tau \\ e^-_j & \text{otherwise} \end{cases}

The upper quantile of such an error is the larger value where this value has a probability P above 1 - tau. For tables P is a logistic
regression on the features of the laws; ``IndicatorBound`` learns it for fields.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

from geoq.arrays import chunks, flat
from geoq.bounds.law import ADDED
from geoq.bounds.two_laws import Known
from geoq.core.geometry import Features
from geoq.core.tuples import Tuples

# A function from predictions to the two values that the error can take there, the smaller one first.
TwoValues = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
# Predictions can be rounded, so an error can differ from one of the two values by this fraction of the larger value.
TOLERANCE = 1e-3


def misclassification_values(predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two errors of a predicted class: 0 if it is right, 1 if it is wrong.

    Example:
        >>> misclassification_values(np.array([2.0, 0.0]))
        (array([0., 0.]), array([1., 1.]))
    """
    return np.zeros_like(predicted), np.ones_like(predicted)


def probability_error_values(predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two errors of a predicted probability if the truth is 0 or 1.

    Example:
        >>> probability_error_values(np.array([0.25, 0.5]))
        (array([0.25, 0.5 ]), array([0.75, 0.5 ]))
    """
    other = 1 - predicted
    return np.minimum(predicted, other), np.maximum(predicted, other)


def logit_error_values(predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two errors of the probability that belongs to a predicted logit if the truth is 0 or 1.

    Example:
        >>> logit_error_values(np.array([0.0]))
        (array([0.5]), array([0.5]))
    """
    larger = 1 / (1 + np.exp(-abs(predicted)))
    return 1 - larger, larger


# The functions that a file can name.
FUNCTIONS = (misclassification_values, probability_error_values, logit_error_values)


def two_values(values: TwoValues, predicted: np.ndarray, like: np.ndarray) -> list[np.ndarray]:
    """The two values, with the shape and dtype of the errors."""
    return [own.reshape(like.shape).astype(like.dtype) for own in values(predicted)]


def largest_difference(values: TwoValues, predicted: np.ndarray, error: np.ndarray) -> float:
    """The largest difference of an error to the nearer of its two values; 0 if all differences are tolerated."""
    largest, fits = 0.0, True
    for rows in chunks(len(error), 8 * error[:1].size):
        smaller, larger = two_values(values, predicted[rows], error[rows])
        gap = np.minimum(abs(error[rows] - smaller), abs(error[rows] - larger))
        gap = np.nan_to_num(gap)
        largest = max(largest, float(gap.max()))
        fits = fits and bool((gap <= TOLERANCE * abs(larger)).all())
    return 0.0 if fits else largest


def values_of(tuples: Tuples) -> TwoValues | None:
    """The two values of the errors if all outputs are 0 or 1 and are predicted as such or as probabilities; None otherwise."""
    outputs, predicted, error = tuples.points.outputs, tuples.predictions, tuples.errors
    known = outputs[~np.isnan(outputs)]
    both = 0 < known.mean() < 1 and np.isin(known, (0, 1)).all()
    if not both or predicted.shape != error.shape or predicted.min() < 0 or predicted.max() > 1:
        return None
    functions = misclassification_values, probability_error_values
    return next((own for own in functions if not largest_difference(own, predicted, error)), None)


@dataclass(frozen=True)
class LabelBound:
    """The bound for rows of a table whose errors take two values, such as predicted labels or probabilities of 0 and 1.

    Attributes:
        values: the two values as a function of the predictions: ``misclassification_values`` or ``probability_error_values``.

    Example:
        >>> from geoq.parts import LabelBound, probability_error_values
        >>> bound = LabelBound(values=probability_error_values)
    """

    values: TwoValues = misclassification_values
    uses_opinion: ClassVar[bool] = True

    def fit(self, tuples: Tuples, quantile: float) -> "FittedLabels":
        """A logistic regression for each output, in which every family of folds has the same weight."""
        from sklearn.linear_model import LogisticRegression  # here: a slow import

        known, features = Known.of(tuples), tuples.features
        columns = _columns(known, features, self.values)
        mean, deviation = columns.mean(axis=0), columns.std(axis=0) + 1e-9
        error, found = flat(tuples.error), []
        ends = two_values(self.values, features.prediction, tuples.error)
        larger = error >= flat(ends[0] + ends[1]) / 2
        for j in range(error.shape[1]):
            rows, weight = ~np.isnan(error[:, j]), tuples.weight * len(error)
            target, n = larger[rows, j], rows.sum()
            rare = np.log((target.sum() + 0.5) / (n - target.sum() + 0.5))
            slopes = np.append(np.zeros(columns.shape[2]), rare)
            if target.any() and not target.all():
                phi = ((columns - mean) / deviation)[rows, j]
                model = LogisticRegression().fit(phi, target, weight[rows])
                slopes = np.append(model.coef_[0], model.intercept_)
            found.append(slopes)
        return FittedLabels(quantile, self.values, known, mean, deviation, np.stack(found))


@dataclass(frozen=True)
class TwoValued:
    """A fitted bound that is one of two values, by the ``probability`` of the larger one; ``quantile`` is the level of a bound without a level."""

    quantile: float
    values: TwoValues
    has_levels: ClassVar[bool] = True
    scalable: ClassVar[bool] = False
    uses_anchor_error: ClassVar[bool] = False
    probability: ClassVar[Any]

    def expected_error(self, features: Features) -> np.ndarray:
        """The mean of the error: not a bound, but it distinguishes cells with the same bound. For labels, the probability of a wrong one."""
        smaller, larger = two_values(self.values, features.prediction, features.anchor_error)
        return np.asarray(smaller + self.probability(features) * (larger - smaller))

    def __call__(self, features: Features, quantile: float | None = None) -> np.ndarray:
        level = self.quantile if quantile is None else quantile
        smaller, larger = two_values(self.values, features.prediction, features.anchor_error)
        return np.where(self.probability(features) > 1 - level, larger, smaller)


@dataclass(frozen=True)
class FittedLabels(TwoValued):
    """The regressions on standardised features, one row of slopes and an intercept for each output."""

    known: Known
    mean: Float[np.ndarray, " n_outputs n_features"]
    deviation: Float[np.ndarray, " n_outputs n_features"]
    slopes: Float[np.ndarray, " n_outputs n_slopes"]

    def probability(self, features: Features) -> np.ndarray:
        """The probability that each error takes the larger of its two values."""
        phi = (_columns(self.known, features, self.values) - self.mean) / self.deviation
        logit = (phi * self.slopes[:, :-1]).sum(axis=2) + self.slopes[:, -1]
        return np.asarray(0.5 + 0.5 * np.tanh(logit / 2)).reshape(features.anchor_error.shape)

    def describe(self) -> str:
        """The fitted bound in one sentence."""
        return f"An error has one of two values, and the bound is the larger one if its probability exceeds {1 - self.quantile:.3g}"


def _columns(known: Known, features: Features, values: TwoValues) -> np.ndarray:
    """The features of the laws and the smaller error, as logarithms where they are sizes, for each output."""
    own = known.law_features(features, 1.0)
    smaller, _ = two_values(values, features.prediction, features.anchor_error)
    columns = [np.log(own[n] + ADDED[n]) if n in ADDED else own[n] for n in own]
    columns.append(np.log(flat(smaller) + ADDED["departure"]))
    shape = flat(features.anchor_error).shape
    return np.stack([np.broadcast_to(column, shape) for column in columns], axis=2)
