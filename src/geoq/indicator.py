r"""Errors that take one of two known values: their quantile is a verdict, and a verdict is learned as a probability.

.. math:: \widehat E_{cj}(x) = \begin{cases} e^+_{cj} & P_{cj}(x) > 1 - \tau \\ e^-_{cj} & \text{otherwise} \end{cases}

A thresholded field is right or wrong, 0 or 1. The probability p of something that is or is not has the error min(p, 1 - p)
or max(p, 1 - p). The upper quantile of such an error is the greater value where that has more than the probability
1 - tau. The pinball loss of a smooth bound finds this slowly, for nearly all cells are right; the cross-entropy of P does
not.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from geoq.crossfit import CalibrationSet
from geoq.field_factor import FieldNetwork, View, most_rows
from geoq.geometry import GeometricFeatures
from geoq.increment import Shapes, check_quantile
from geoq.shares import CellShares, PredictedShares
from geoq.surrogate import chunks, nonzero_counts
from geoq.training import Training, seeded, train

# From predictions to the two values that the error there can take, the lesser first.
TwoValues = Callable[[Tensor], tuple[Tensor, Tensor]]
# Errors this near to one of their values, in units of the greater one, are taken for it: predictions may be rounded.
TOLERANCE = 1e-3


def zero_or_one(prediction: Tensor) -> tuple[Tensor, Tensor]:
    """Right or wrong."""
    return torch.zeros_like(prediction), torch.ones_like(prediction)


def of_probability(prediction: Tensor) -> tuple[Tensor, Tensor]:
    """The error of a probability, where the truth is 0 or 1."""
    return torch.minimum(prediction, 1 - prediction), torch.maximum(
        prediction, 1 - prediction
    )


def of_logit(prediction: Tensor) -> tuple[Tensor, Tensor]:
    """The same for a surrogate that answers the logarithm of the odds."""
    greater = prediction.abs().sigmoid()
    return 1 - greater, greater


OWN_VALUES: dict[str, TwoValues] = {
    values.__name__: values for values in (zero_or_one, of_probability, of_logit)
}


@dataclass
class IndicatorIncrement:
    """An increment for fields of errors with two values, such as wrong cells of a thresholded prediction.

    The bound does not rest on the anchors: where they were wrong and the verdict is not, the increment is negative.

    Attributes:
        quantile: tau.
        values: the two values, from the predictions; ``zero_or_one``, ``of_probability``, ``of_logit`` or yours.
        n_spatial: 1 for fields on a line, 2 for fields in the plane.
        view: what the network sees, beside the support distance.
        widths: channels per level of a U-Net; each further level sees twice as far.
        n_networks: networks that are trained, each stopped by other held-out tuples; P is the mean of theirs.
        training: how a network is trained.
    """

    quantile: float = 0.95
    values: TwoValues = zero_or_one
    n_spatial: int = 2
    view: View = field(default_factory=lambda: View(prediction=True))
    widths: tuple[int, ...] = (16, 32, 64)
    n_networks: int = 3
    training: Training = field(
        default_factory=lambda: Training(
            n_steps=2000, batch_size=4, check_every=100, patience=3, n_decays=2
        )
    )
    rests_on_anchors: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "quantile")
        if self.view.bound:
            raise ValueError(
                "View(bound=True), but IndicatorIncrement has no bound under its verdict; choose another view."
            )
        if self.n_networks < 1:
            raise ValueError(
                f"n_networks={self.n_networks}, but something must learn; choose 1 or more."
            )
        if not callable(self.values):
            raise TypeError(
                f"values={self.values!r}, but it is called as values(prediction); pass a function, such as "
                "values=of_probability (from geoq import of_probability)."
            )

    def check_shapes(self, shapes: Shapes) -> None:
        """Refuse errors without a grid, and anything to be seen that is on another one."""
        self.view.check_shapes(shapes, self.n_spatial)

    def check_errors(
        self, prediction: Float[Tensor, " n *output"], error: Float[Tensor, " n *field"]
    ) -> None:
        """Refuse errors that take other values than those expected, and name the ones they take, if we know them."""
        away, fits = _away(self.values, prediction, error)
        if fits:
            return
        fitting = [
            f"they are those of values={name}: from geoq import {name}"
            for name, values in OWN_VALUES.items()
            if prediction.shape == error.shape and _away(values, prediction, error)[1]
        ]
        otherwise = (
            "give the values that they take, threshold them in error_functional, or use "
            "PowerLawIncrement.for_fields()"
        )
        raise ValueError(
            f"IndicatorIncrement(values={_name(self.values)}) bounds errors that take one of two values, but errors are up "
            f"to {away:.3g} away from both; {[*fitting, otherwise][0]}."
        )

    def fit(self, calibration: CalibrationSet) -> "IndicatorIncrement":
        error = self._is_greater(calibration)
        shape = tuple(error.shape[1:])
        some = calibration.some(most_rows(shape)).features
        channels = self.view(some, None, self._grid(shape))
        n_out = math.prod(shape[: len(shape) - self.n_spatial])
        first, *others = self._build(channels.shape[1], n_out, error.device)
        first.set_units(
            channels,
            self.view.n_inputs(some, self._grid(shape)),
            some.support_distance.float(),
        )
        for other in others:
            other.take_units(first)
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
            training = self.training.numbered(number)
            train(network, loss, training, calibration.unit, repeatable=True)
        return self

    def _start(
        self,
        greater: Bool[Tensor, " n n_channels n_cells"],
        calibration: CalibrationSet,
    ) -> CellShares | PredictedShares:
        """All that a fresh network knows: how often errors are the greater, where that is predicted or in that cell."""
        prediction = calibration.features.prediction
        if self.view.prediction and prediction[0].numel() == greater[0].numel():
            predicted = prediction.reshape(greater.shape)
            return PredictedShares.fit(greater, predicted, calibration.unit)
        return CellShares.fit(greater)

    def _is_greater(self, calibration: CalibrationSet) -> Bool[Tensor, " n *field"]:
        """Which errors took the greater of their values."""
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
            with seeded(self.training.numbered(number).random_state):
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
        """What the networks are given."""
        grid = self._grid(tuple(features.anchor_error.shape[1:]))
        return self.view(features, None, grid), features.support_distance

    @torch.no_grad()
    def probability(self, features: GeometricFeatures) -> Tensor:
        """P: how likely each error takes the greater of its values."""
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

    def expected(self, features: GeometricFeatures) -> Tensor:
        """The expected error: no bound, but the sharper map of where errors are."""
        less, greater = self._both(features)
        return less + self.probability(features).to(less) * (greater - less)

    def __call__(self, features: GeometricFeatures) -> Tensor:
        less, greater = self._both(features)
        verdict = self.probability(features) > 1 - self.quantile
        return torch.where(verdict, greater, less) - features.anchor_error

    def describe(self) -> str:
        """The verdict in a sentence."""
        shown = [
            name.replace("_", " ") for name, seen in asdict(self.view).items() if seen
        ]
        return (
            f"the error takes one of two values ({_name(self.values)}), and the bound is the greater one where that has more "
            f"than the probability {1 - self.quantile:.3g}, judged from {', '.join(shown)} and the distance to the data"
        )

    def at_level(self, quantile: float) -> "IndicatorIncrement":
        """The same probabilities, judged at another level."""
        check_quantile(quantile, "levels")
        other = copy.copy(self)
        other.quantile = quantile
        return other

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Settings and weights, for a file."""
        name = _name(self.values)
        if OWN_VALUES.get(name) is not self.values:
            raise ValueError(
                f"values of the user's own ({self.values!r}) cannot be saved; use one of {', '.join(OWN_VALUES)}."
            )
        settings = {**asdict(self), "values": name}
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
            View(**settings["view"]),
            tuple(settings["widths"]),
            settings["n_networks"],
            Training(**settings["training"]),
        )
        # Names of the networks' weights start with the number of the network.
        start = {name: weights[name] for name in weights if not name[0].isdigit()}
        model.start_ = (PredictedShares if "value" in start else CellShares)(**start)
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
    """Of a network's P."""
    answer: Tensor = network(seen)
    return answer.view(-1, *start.shape[-2:]) + start


def _name(values: TwoValues) -> str:
    return getattr(values, "__name__", repr(values))


def _two(values: TwoValues, prediction: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """The two values, of the shape and kind of the errors."""
    less, greater = values(prediction)
    return less.reshape(like.shape).to(like), greater.reshape(like.shape).to(like)


def _away(values: TwoValues, prediction: Tensor, error: Tensor) -> tuple[float, bool]:
    """How far errors are at most from the nearer of their values, and whether all are near enough."""
    largest, near = 0.0, True
    for rows in chunks(len(error), 8 * error[0].numel()):
        less, greater = _two(values, prediction[rows], error[rows])
        away = torch.minimum((error[rows] - less).abs(), (error[rows] - greater).abs())
        largest = max(largest, float(away.max()))
        near = near and bool((away <= TOLERANCE * greater.abs()).all())
    return largest, near
