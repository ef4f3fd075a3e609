r"""The bound for errors that take one of two values: it learns the probability of the larger value (with torch).

.. math:: \widehat E_{cj}(x) = \begin{cases} e^+_{cj} & P_{cj}(x) > 1 - \tau \\ e^-_{cj} & \text{otherwise} \end{cases}

The error of a thresholded field is 0 or 1 in each cell. If the surrogate predicts the probability p of an event, its error is
min(p, 1 - p) or max(p, 1 - p). The upper quantile of such an error is the larger value where this value has a probability P above
1 - tau. A smooth bound that is trained with the pinball loss converges slowly, because nearly all cells have the smaller error.
Training P with the cross-entropy converges quickly.

.. math:: \operatorname{logit} P_{cj}(x) = a_c \, s_c(\widehat F_{cj}(x)) + b_c \, m_{cj} + d_c + h_{cj}(x)

The network h corrects the prior, the other terms: s_c is the logit of the frequency of the larger value among held-out points with
the same prediction, and m in each cell. With few fields, networks that start from both end with a lower loss than those that start
from m.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy.special import logit
from torch import Tensor, nn

from geoq.arrays import chunks, joined, permutation
from geoq.bounds.fields import Bounds, Maps, check_cells, low_rank_maps
from geoq.bounds.network import FieldNetwork, Seen, Sight, check_sees, inputs, log_bound, prediction
from geoq.bounds.two_values import (
    FUNCTIONS,
    TwoValued,
    TwoValues,
    largest_difference,
    misclassification_values,
    two_values,
)
from geoq.checks import check_function, check_integer, check_object, check_widths
from geoq.core.geometry import Features
from geoq.core.tuples import Tuples
from geoq.data.domain import Layout, Shapes
from geoq.training.loop import Training, TrainingResult, seeded, train

Flags: TypeAlias = Bool[np.ndarray, " n n_channels n_cells"]
# Frequencies are at least this and at most 1 minus this. The weight of a channel in the loss is the inverse of the frequency of
# the larger value.
MIN_FREQUENCY = 1e-6
# Of a channel the prior uses at most this many values.
MAX_CHANNEL_VALUES = 2**19
# Bins of predictions, and the fewest errors of the rarer value in each, so that few errors make no peaks.
N_BINS, MIN_PER_BIN = 64, 8


@dataclass(frozen=True)
class IndicatorBound:
    """The bound for fields whose errors take two values, such as the wrong cells of a thresholded prediction.

    The bound is one of the two values and does not depend on the anchor error, so increments can be negative.

    Attributes:
        values: the two values as a function of the predictions: ``misclassification_values``, ``probability_error_values``,
            ``logit_error_values`` (from ``geoq.parts``) or a function of the user.
        sees: the fields that the networks see, in addition to the support distance.
        widths: channels at each resolution of the U-Net; each further resolution doubles the size of its receptive field.
        n_networks: number of networks. Different held-out tuples stop the training of each network; P is their mean.
        training: how a network is trained.

    Example:
        >>> from geoq.parts import IndicatorBound, probability_error_values
        >>> bound = IndicatorBound(values=probability_error_values)
    """

    values: TwoValues = misclassification_values
    sees: tuple[Seen, ...] = (inputs, prediction)
    widths: tuple[int, ...] = (16, 32, 64)
    n_networks: int = 3
    training: Training = Training(
        n_steps=2000, batch_size=4, check_every=100, patience=3, n_decays=2
    )
    uses_neighborhood: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_function(self.values, "values", "values(prediction)")
        check_sees(self.sees)
        if log_bound in self.sees:
            raise ValueError(
                "sees contains log_bound, but IndicatorBound learns a probability and not a factor on a bound; remove it."
            )
        check_widths(self.widths, "widths")
        check_integer(self.n_networks, "n_networks", 1)
        check_object(self.training, Training, "training", "Training(n_steps=1000)")

    def check_shapes(self, shapes: Shapes, layout: Layout) -> None:
        """Raise for errors without cells, and for fields to be seen that lie on other cells."""
        check_cells(self, shapes, layout)
        Sight(self.sees, layout).check(shapes)

    def check_errors(self, predicted: np.ndarray, error: np.ndarray) -> None:
        """Raise for errors that take other values; the message names the function that fits the errors if there is one."""
        difference = largest_difference(self.values, predicted, error)
        if not difference:
            return
        way_out = "pass the two values as values=, threshold the errors in error_functional, or use FieldBound()"
        for own in FUNCTIONS:
            if predicted.shape == error.shape and not largest_difference(own, predicted, error):
                way_out = f"they fit values={own.__name__} (from geoq.parts import {own.__name__})"
                break
        name = getattr(self.values, "__name__", self.values)
        raise ValueError(
            f"IndicatorBound(values={name}) is for errors that take one of two values, but some errors differ "
            f"from both by up to {difference:.3g}; {way_out}."
        )

    def fit(self, tuples: Tuples, quantile: float) -> "FittedIndicator":
        """Estimate the prior, and train the networks on the calibration tuples."""
        larger, present = self._flags(tuples)
        sight = Sight(self.sees, tuples.points.layout)
        make = sight.maker(tuples, self.widths)
        elementwise = prediction in self.sees and tuples.predictions.size == tuples.errors.size
        predicted = tuples.predictions[tuples.row] if elementwise else None
        prior = Prior.fit(larger, present, predicted, tuples.group)
        frequency = larger.sum(axis=(0, 2)) / np.maximum(present.sum(axis=(0, 2)), 1)
        weight = (1 / frequency.clip(min=MIN_FREQUENCY))[:, None]

        def loss(network: nn.Module, rows: Tensor) -> Tensor:
            own = rows.numpy()
            answer = _logit(network, sight, prior, tuples[own].features)
            counted = torch.from_numpy(weight * present[own]).to(answer)
            target = torch.from_numpy(larger[own]).to(answer)
            return nn.functional.binary_cross_entropy_with_logits(answer, target, counted)

        networks, trainings = [], []
        for number in range(self.n_networks):
            training = replace(self.training, random_state=self.training.random_state + number)
            with seeded(training.random_state):
                networks.append(make())
            trainings.append(
                train(
                    networks[-1], loss, training, *training.hold_out(torch.from_numpy(tuples.group))
                )
            )
        trained = tuple(networks), tuple(trainings)
        return FittedIndicator(quantile, self.values, sight, prior, *trained)

    def _flags(self, tuples: Tuples) -> tuple[Flags, Flags]:
        """Which errors took the larger of their two values, and which errors count; the error 0 of an exact cell counts."""
        exact = False if tuples.points.exact is None else tuples.points.exact
        n_channels = tuples.points.layout.n_outputs(tuples.field_shape)
        larger, present = np.empty((2, len(tuples), *tuples.field_shape), dtype=bool)
        for rows in chunks(len(tuples), 8 * tuples.errors[:1].size):
            stored = tuples.row[rows]
            error = np.where(exact, 0, tuples.errors[stored])
            self.check_errors(tuples.predictions[stored], tuples.errors[stored])
            values = two_values(self.values, tuples.predictions[stored], error)
            larger[rows], present[rows] = error >= (values[0] + values[1]) / 2, ~np.isnan(error)
        shape = (len(tuples), n_channels, -1)
        return larger.reshape(shape), present.reshape(shape)


@dataclass(frozen=True)
class FittedIndicator(TwoValued):
    """The fitted bound: the prior, and the networks that correct it."""

    sight: Sight
    prior: "Prior"
    networks: tuple[FieldNetwork, ...]
    trainings: tuple[TrainingResult, ...]

    @torch.no_grad()
    def probability(self, features: Features) -> Bounds:
        """P: the probability that each error takes the larger of its two values."""
        shape, parts = features.anchor_error.shape, []
        for rows in chunks(len(features), 8 * features.anchor_error[:1].size):
            some = features[rows]
            logits = [_logit(net, self.sight, self.prior, some) for net in self.networks]
            parts.append(torch.stack([own.sigmoid() for own in logits]).mean(0).cpu().numpy())
        return joined(parts).reshape(shape)

    def describe(self) -> str:
        """The fitted bound in one sentence."""
        name = getattr(self.values, "__name__", self.values)
        return (
            f"The error takes one of two values ({name}), and the bound is the larger one where its probability "
            f"exceeds {1 - self.quantile:.3g}, estimated from {', '.join(self.sight.words)} and the distance to the data"
        )


def _logit(network: nn.Module, sight: Sight, prior: "Prior", features: Features) -> Tensor:
    """The logit of the probability P of one network at each query, channel and cell."""
    correction: Tensor = network(sight(features))
    offset = torch.from_numpy(prior(features.prediction)).to(correction)
    return correction.view(-1, *offset.shape[-2:]) + offset


@dataclass(frozen=True)
class Prior:
    """The logits b m + d of each cell, and the logits a s of each channel at the mean predictions of its bins, if any."""

    offset: Maps
    tables: tuple[tuple[np.ndarray, np.ndarray], ...] = ()

    def __call__(self, predicted: Float[np.ndarray, " n *output"]) -> np.ndarray:
        at = predicted.reshape(len(predicted), len(self.offset), -1)
        each = [np.interp(at[:, c], *table) for c, table in enumerate(self.tables)]
        return self.offset + (np.stack(each, axis=1) if each else 0)

    @staticmethod
    def fit(larger: Flags, present: Flags, predicted: Any, group: np.ndarray) -> "Prior":
        """Estimate s, m and their coefficients from held-out errors that count; the prior is m if ``predicted`` is None.

        A coefficient is fitted on groups of rows that m was not computed from: on the same rows m would seem too informative.
        """
        from sklearn.linear_model import LogisticRegression  # here: a slow import

        cells = _cell_logits(larger, present)
        if predicted is None:
            return Prior(cells)
        distinct, number = np.unique(group, return_inverse=True)
        half = (permutation(len(distinct)) < len(distinct) / 2)[number]
        other = half if half.all() else ~half
        of_others = [_cell_logits(larger[rows], present[rows]) for rows in (half, other)]
        offsets, tables = [], []
        for c, own in enumerate(cells):
            places = np.flatnonzero(present[:, c])
            if len(places) > MAX_CHANNEL_VALUES:
                places = np.random.default_rng(0).choice(places, MAX_CHANNEL_VALUES)
            row, cell = np.divmod(places, len(own))
            target, at = larger[row, c, cell], predicted.reshape(larger.shape)[row, c, cell]
            value, table = _frequency_table(target, at)
            held_out = np.stack(of_others)[half[row].astype(int), c, cell]
            a, b, d = np.eye(3)[0]
            if target.any() and not target.all():
                columns = np.stack([np.interp(at, value, table), held_out], axis=1)
                model = LogisticRegression(solver="newton-cholesky").fit(columns, target)
                a, b, d = np.append(model.coef_[0], model.intercept_)
            offsets.append(b * own + d)
            tables.append((value, a * table))
        return Prior(np.stack(offsets), tuple(tables))


def _cell_logits(larger: Flags, present: Flags) -> Maps:
    """The map m: logits of the frequencies, approximated with few maps and at most 0."""
    frequency = larger.sum(axis=0) / np.maximum(present.sum(axis=0), 1)
    return np.asarray(logit(low_rank_maps(frequency).clip(MIN_FREQUENCY, 0.5)))


def _frequency_table(larger: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean predictions and the logits of bins with equally many errors of the rarer value; a repeated edge is a bin."""
    rarer = np.sort(at[larger == (larger.mean() < 0.5)])
    n_bins = max(1, min(N_BINS, len(rarer) // MIN_PER_BIN))
    edges = rarer[np.arange(1, n_bins) * len(rarer) // n_bins]
    ends, count = np.unique(edges, return_counts=True)
    ends = np.unique(np.concatenate([ends, np.nextafter(ends[count > 1], -np.inf)]))
    bins = np.searchsorted(ends, at)
    n, n_larger, total = (np.bincount(bins, w, len(ends) + 1) for w in (None, larger, at))
    used = n > 0
    return total[used] / n[used], logit((n_larger[used] + 0.5) / (n[used] + 1))
