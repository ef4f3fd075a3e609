r"""Errors that take one of two known values: the upper quantile is a thresholded probability, so the probability is learned.

.. math:: \widehat E_{cj}(x) = \begin{cases} e^+_{cj} & P_{cj}(x) > 1 - \tau \\ e^-_{cj} & \text{otherwise} \end{cases}

The error of a thresholded field is 0 or 1 in each cell. If the surrogate predicts the probability p of an event, its error is
min(p, 1 - p) or max(p, 1 - p). The upper quantile of such an error is the larger value where this value has a probability above
1 - tau. Minimising the pinball loss of a smooth bound converges slowly, because nearly all cells are right. Minimising the
cross-entropy of P converges quickly.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from geoq.arrays import chunks, nonzero_counts
from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.increments.field_network import (
    SEEN,
    FieldNetwork,
    Seen,
    channels_of,
    check_grid,
    check_sees,
    inputs,
    log_bound,
    max_rows,
    n_input_channels,
    names_of,
    prediction,
)
from geoq.increments.prior import CellPrior, PredictionPrior
from geoq.increments.shapes import Shapes
from geoq.quantiles import check_quantile
from geoq.training.loop import Training, seeded, train

# From predictions to the two values that the error can take there, the smaller one first.
TwoValues = Callable[[Tensor], tuple[Tensor, Tensor]]
# An error counts as one of the two values if it differs by at most this fraction of the larger one (rounded predictions).
TOLERANCE = 1e-3


def misclassification_values(predicted: Tensor) -> tuple[Tensor, Tensor]:
    """The error is 0 where a class is right and 1 where it is wrong."""
    return torch.zeros_like(predicted), torch.ones_like(predicted)


def probability_error_values(predicted: Tensor) -> tuple[Tensor, Tensor]:
    """The two errors of a predicted probability if the truth is 0 or 1."""
    other = 1 - predicted
    return torch.minimum(predicted, other), torch.maximum(predicted, other)


def logit_error_values(predicted: Tensor) -> tuple[Tensor, Tensor]:
    """The two errors of a predicted logit, the logarithm of the odds, if the truth is 0 or 1."""
    greater = predicted.abs().sigmoid()
    return 1 - greater, greater


OWN_VALUES: dict[str, TwoValues] = {
    values.__name__: values
    for values in (
        misclassification_values,
        probability_error_values,
        logit_error_values,
    )
}


@dataclass
class IndicatorIncrement:
    """The increment model for fields of errors with two values, such as the wrong cells of a thresholded prediction.

    The bound does not depend on the anchor error. Where the anchors were wrong and the bound is the smaller value, the
    increment is negative.

    Attributes:
        quantile: tau, the level of the conditional quantile.
        values: the two values as a function of the predictions: ``misclassification_values``,
            ``probability_error_values``, ``logit_error_values`` (from ``geoq.increments``) or a function of yours.
        n_spatial: 1 for fields on a line, 2 for fields in the plane.
        sees: the fields that the networks see, besides the support distance.
        widths: channels at each resolution of the U-Net; each further resolution doubles the distance that it sees.
        n_networks: number of networks, each stopped by other held-out tuples; P is their mean.
        training: how a network is trained.

    Example:
        >>> from geoq.increments import probability_error_values
        >>> increment = IndicatorIncrement(0.9, values=probability_error_values)
    """

    quantile: float = 0.95
    values: TwoValues = misclassification_values
    n_spatial: int = 2
    sees: tuple[Seen, ...] = (inputs, prediction)
    widths: tuple[int, ...] = (16, 32, 64)
    n_networks: int = 3
    training: Training = field(
        default_factory=lambda: Training(
            n_steps=2000, batch_size=4, check_every=100, patience=3, n_decays=2
        )
    )
    may_be_negative: ClassVar[bool] = True
    why_not_conformalizable: ClassVar[str] = (
        "its bound is one of two values, and a factor on it does not raise its coverage; choose a higher quantile for it, "
        "or compare several levels with bounds(x, levels)"
    )

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "quantile")
        check_sees(self.sees)
        if log_bound in self.sees:
            raise ValueError(
                "sees contains log_bound, but IndicatorIncrement learns a probability and not a factor on a bound; remove it."
            )
        if self.n_networks < 1:
            raise ValueError(
                f"IndicatorIncrement(n_networks={self.n_networks}): n_networks must be an integer >= 1."
            )
        if not callable(self.values):
            raise TypeError(
                f"values={self.values!r}, but it is called as values(prediction); pass a function, such as "
                "values=probability_error_values (from geoq.increments import probability_error_values)."
            )

    def check_shapes(self, shapes: Shapes) -> None:
        """Refuse errors without a grid, and fields to be seen that lie on another grid."""
        check_grid(self.sees, shapes, self.n_spatial)

    def check_errors(
        self, predicted: Float[Tensor, " n *output"], error: Float[Tensor, " n *field"]
    ) -> None:
        """Refuse errors that take other values, and name the function that describes their values if there is one."""
        away, fits = _away(self.values, predicted, error)
        if fits:
            return
        fitting = [
            f"they fit values={name} (from geoq.increments import {name})"
            for name, values in OWN_VALUES.items()
            if predicted.shape == error.shape and _away(values, predicted, error)[1]
        ]
        otherwise = (
            "pass the two values as values=, threshold the errors in error_functional, or use "
            "FieldScaleIncrement()"
        )
        raise ValueError(
            f"IndicatorIncrement(values={_name(self.values)}) is for errors that take one of two values, but some errors "
            f"differ from both by up to {away:.3g}; {[*fitting, otherwise][0]}."
        )

    def fit(self, calibration: CalibrationSet) -> "IndicatorIncrement":
        error = self._is_greater(calibration)
        shape = tuple(error.shape[1:])
        some = calibration.subsample(max_rows(shape)).features
        channels = channels_of(self.sees, some, None, self._grid(shape))
        n_out = math.prod(shape[: len(shape) - self.n_spatial])
        first, *others = self._build(channels.shape[1], n_out, error.device)
        first.fit_normalization(
            channels,
            n_input_channels(self.sees, some, self._grid(shape)),
            some.support_distance.float(),
        )
        for other in others:
            other.copy_normalization(first)
        per_channel = error.reshape(len(error), n_out, -1)
        self.start_ = self._start(per_channel, calibration)
        count = nonzero_counts(per_channel).float()
        share = count.mean(dim=1, keepdim=True) / len(error)
        weight = 1 / share.clamp(min=1e-6)

        def loss(network: nn.Module, rows: Tensor) -> Tensor:
            features = calibration.features[rows]
            start = self.start_(features.prediction)
            logit = _logit(network, self._seen(features), start)
            target = per_channel[rows].float()
            return nn.functional.binary_cross_entropy_with_logits(logit, target, weight)

        for number, network in enumerate(self.networks_):
            training = self.training.with_seed_offset(number)
            train(network, loss, training, calibration.group, repeatable=True)
        return self

    def _start(
        self,
        greater: Bool[Tensor, " n n_channels n_cells"],
        calibration: CalibrationSet,
    ) -> CellPrior | PredictionPrior:
        """The logit that a new network starts from: the frequency of the larger value, by prediction and by cell."""
        predicted = calibration.features.prediction
        if prediction in self.sees and predicted[0].numel() == greater[0].numel():
            predicted = predicted.reshape(greater.shape)
            return PredictionPrior.fit(greater, predicted, calibration.group)
        return CellPrior.fit(greater)

    def _is_greater(self, calibration: CalibrationSet) -> Bool[Tensor, " n *field"]:
        """Which errors took the larger of their two values."""
        self.check_errors(calibration.features.prediction, calibration.error)
        result = torch.empty_like(calibration.error, dtype=torch.bool)
        for rows in chunks(len(result), 8 * result[0].numel()):
            less, greater = self._both(calibration.features[rows])
            result[rows] = calibration.error[rows] >= (less + greater) / 2
        return result

    def _both(self, features: GeometricFeatures) -> tuple[Tensor, Tensor]:
        return _two(self.values, features.prediction, features.anchor_error)

    def _grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[len(shape) - self.n_spatial :]

    def _build(self, n_in: int, n_out: int, device: torch.device) -> list[FieldNetwork]:
        networks = []
        for number in range(self.n_networks):
            with seeded(self.training.with_seed_offset(number).random_state):
                network = FieldNetwork(
                    n_in,
                    n_out,
                    n_spatial=self.n_spatial,
                    widths=self.widths,
                    dropout=0.0,
                )
            networks.append(network.to(device))
        self.networks_ = nn.ModuleList(networks)
        return networks

    def _seen(self, features: GeometricFeatures) -> tuple[Tensor, Tensor]:
        """The input of the networks."""
        grid = self._grid(tuple(features.anchor_error.shape[1:]))
        return channels_of(self.sees, features, None, grid), features.support_distance

    @torch.no_grad()
    def probability(self, features: GeometricFeatures) -> Tensor:
        """P: the probability that each error takes the larger of its two values."""
        device = features.anchor_error.device
        self.networks_.to(device)
        self.start_.to(device)
        parts = []
        for rows in chunks(len(features), 8 * features.anchor_error[0].numel()):
            some = features[rows]
            seen, start = self._seen(some), self.start_(some.prediction)
            answers = [_logit(net, seen, start).sigmoid() for net in self.networks_]
            parts.append(torch.stack(answers).mean(dim=0))
        return torch.cat(parts).reshape(features.anchor_error.shape)

    def expected_error(self, features: GeometricFeatures) -> Tensor:
        """The mean error: not a bound, but a sharper map of where errors are."""
        less, greater = self._both(features)
        return less + self.probability(features).to(less) * (greater - less)

    def __call__(self, features: GeometricFeatures) -> Tensor:
        less, greater = self._both(features)
        is_greater = self.probability(features) > 1 - self.quantile
        return torch.where(is_greater, greater, less) - features.anchor_error

    def describe(self) -> str:
        """The fitted bound in one sentence."""
        names = [
            getattr(seen, "__name__", "a function").replace("_", " ")
            for seen in self.sees
        ]
        return (
            f"the error takes one of two values ({_name(self.values)}), and the bound is the larger one where its "
            f"probability exceeds {1 - self.quantile:.3g}, estimated from {', '.join(names)} and the distance to the data"
        )

    def at_level(self, quantile: float) -> "IndicatorIncrement":
        """The same probabilities, thresholded at another level."""
        check_quantile(quantile, "levels")
        other = copy.copy(self)
        other.quantile = quantile
        return other

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Settings and weights, for a file."""
        name = _name(self.values)
        if OWN_VALUES.get(name) is not self.values:
            raise ValueError(
                f"values={self.values!r} is a function of the user, which a file cannot hold; use one of {', '.join(OWN_VALUES)}."
            )
        settings = {**asdict(self), "values": name, "sees": names_of(self.sees)}
        return settings, {**self.start_.state_dict(), **self.networks_.state_dict()}

    @staticmethod
    def from_state(
        settings: dict[str, Any], weights: dict[str, Tensor]
    ) -> "IndicatorIncrement":
        """The fitted model that ``state`` described."""
        model = IndicatorIncrement(
            settings["quantile"],
            OWN_VALUES[settings["values"]],
            settings["n_spatial"],
            tuple(SEEN[name] for name in settings["sees"]),
            tuple(settings["widths"]),
            settings["n_networks"],
            Training(**settings["training"]),
        )
        # The names of the networks' weights start with the number of the network.
        start = {name: weights[name] for name in weights if not name[0].isdigit()}
        model.start_ = (PredictionPrior if "value" in start else CellPrior)(**start)
        n_channels = len(next(iter(start.values())))
        mean = weights["0.mean"]
        model._build(len(mean), n_channels, mean.device)
        model.networks_.load_state_dict(
            {name: weights[name] for name in weights if name not in start}
        )
        model.networks_.eval()
        return model


def _logit(
    network: nn.Module,
    seen: tuple[Tensor, Tensor],
    start: Float[Tensor, " *n n_channels n_cells"],
) -> Float[Tensor, " n n_channels n_cells"]:
    """The logit of the probability P of one network."""
    answer: Tensor = network(seen)
    return answer.view(-1, *start.shape[-2:]) + start


def _name(values: TwoValues) -> str:
    return getattr(values, "__name__", repr(values))


def _two(values: TwoValues, predicted: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """The two values, with the shape and dtype of the errors."""
    less, greater = values(predicted)
    return less.reshape(like.shape).to(like), greater.reshape(like.shape).to(like)


def _away(values: TwoValues, predicted: Tensor, error: Tensor) -> tuple[float, bool]:
    """The largest distance of an error to the nearer of its two values, and whether all distances are small enough."""
    largest, near = 0.0, True
    for rows in chunks(len(error), 8 * error[0].numel()):
        less, greater = _two(values, predicted[rows], error[rows])
        away = torch.minimum((error[rows] - less).abs(), (error[rows] - greater).abs())
        largest = max(largest, float(away.max()))
        near = near and bool((away <= TOLERANCE * greater.abs()).all())
    return largest, near
