r"""The increment model for errors that take one of two values: it learns the probability of the larger value.

.. math:: \widehat E_{cj}(x) = \begin{cases} e^+_{cj} & P_{cj}(x) > 1 - \tau \\ e^-_{cj} & \text{otherwise} \end{cases}

The error of a thresholded field is 0 or 1 in each cell. If the surrogate predicts the probability p of an event, its error is
min(p, 1 - p) or max(p, 1 - p). The upper quantile of such an error is the larger value where this value has a probability P
above 1 - tau. A smooth bound that is trained with the pinball loss converges slowly, because nearly all cells have the smaller
error. Training P with the cross-entropy converges quickly.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from geoq.archive import load_weights
from geoq.arrays import chunks, nonzero_counts
from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.increments.domain import (
    Domain,
    Grid,
    Layout,
    check_domain,
    domain_from_state,
    domain_state,
    layout_of,
)
from geoq.increments.field_network import (
    SEEN,
    FieldNetwork,
    Seen,
    View,
    check_sees,
    inputs,
    log_bound,
    max_rows,
    names_of,
    prediction,
    words_of,
)
from geoq.increments.prior import (
    CellPrior,
    FittedCellPrior,
    FittedPredictionPrior,
    PredictionPrior,
    Prior,
)
from geoq.increments.shapes import Shapes
from geoq.quantiles import check_quantile
from geoq.settings import check_integer, check_object, check_widths
from geoq.training.loop import Training, seeded, train

# A function from predictions to the two values that the error can take there, the smaller one first.
TwoValues = Callable[[Tensor], tuple[Tensor, Tensor]]
# Predictions can be rounded, so an error can differ from one of the two values by this fraction of the larger value.
TOLERANCE = 1e-3
# The weight of a channel in the loss is the inverse of the frequency of the larger value, which is at least this.
MIN_FREQUENCY = 1e-6


def misclassification_values(predicted: Tensor) -> tuple[Tensor, Tensor]:
    """The two errors of a predicted class: 0 if it is right, 1 if it is wrong.

    Example:
        >>> misclassification_values(torch.tensor([2.0, 0.0]))
        (tensor([0., 0.]), tensor([1., 1.]))
    """
    return torch.zeros_like(predicted), torch.ones_like(predicted)


def probability_error_values(predicted: Tensor) -> tuple[Tensor, Tensor]:
    """The two errors of a predicted probability if the truth is 0 or 1.

    Example:
        >>> probability_error_values(torch.tensor([0.25, 0.5]))
        (tensor([0.2500, 0.5000]), tensor([0.7500, 0.5000]))
    """
    other = 1 - predicted
    return torch.minimum(predicted, other), torch.maximum(predicted, other)


def logit_error_values(predicted: Tensor) -> tuple[Tensor, Tensor]:
    """The two errors of the probability that belongs to a predicted logit if the truth is 0 or 1.

    Example:
        >>> logit_error_values(torch.tensor([0.0]))
        (tensor([0.5000]), tensor([0.5000]))
    """
    larger = predicted.abs().sigmoid()
    return 1 - larger, larger


# The functions that a file can name.
TWO_VALUES: dict[str, TwoValues] = {
    values.__name__: values
    for values in (
        misclassification_values,
        probability_error_values,
        logit_error_values,
    )
}
PRIORS: dict[str, Prior] = {
    type(prior).__name__: prior for prior in (CellPrior(), PredictionPrior())
}


@dataclass
class IndicatorIncrement:
    """The increment model for fields whose errors take two values, such as the wrong cells of a thresholded prediction.

    The bound is one of the two values and does not depend on the anchor error. The increment is negative where the bound is
    smaller than the anchor error.

    Attributes:
        quantile: tau, the quantile level of the bound.
        values: the two values as a function of the predictions: ``misclassification_values``,
            ``probability_error_values``, ``logit_error_values`` (from ``geoq.increments``) or a function of the user.
        domain: where the errors lie, ``Mesh(coordinates)`` or ``Grid(n_axes)``; None means that the shapes determine the grid.
        sees: the fields that the networks see, in addition to the support distance.
        widths: channels at each resolution of the U-Net; each further resolution doubles the size of its receptive field.
        n_networks: number of networks. Different held-out tuples stop the training of each network; P is their mean.
        training: how a network is trained.
        prior: how the logits that the networks correct are found, ``PredictionPrior()`` or ``CellPrior()`` (from
            ``geoq.increments.prior``). None means a ``PredictionPrior`` if the networks see the prediction and there is one
            prediction for each error, and a ``CellPrior`` otherwise.
        trainings_: after ``fit``, the first, best and last held-out loss of each network. The first is the loss of the prior;
            a network with the best step 0 leaves the prior as it is.

    Example:
        >>> from geoq.increments import probability_error_values
        >>> increment = IndicatorIncrement(0.9, values=probability_error_values)
    """

    quantile: float = 0.95
    values: TwoValues = misclassification_values
    domain: Domain | None = None
    sees: tuple[Seen, ...] = (inputs, prediction)
    widths: tuple[int, ...] = (16, 32, 64)
    n_networks: int = 3
    training: Training = Training(
        n_steps=2000, batch_size=4, check_every=100, patience=3, n_decays=2
    )
    prior: Prior | None = None
    may_be_negative: ClassVar[bool] = True
    why_not_conformalizable: ClassVar[str] = (
        "its bound is one of two values, and a factor on it does not raise its coverage; choose a higher quantile for it, "
        "or compare several quantile levels with bounds(x, levels)"
    )

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "quantile")
        check_sees(self.sees)
        if log_bound in self.sees:
            raise ValueError(
                "sees contains log_bound, but IndicatorIncrement learns a probability and not a factor on a bound; remove it."
            )
        check_domain(self.domain)
        check_widths(self.widths, "widths")
        check_integer(self.n_networks, "n_networks", 1)
        check_object(self.training, Training, "training", "Training(n_steps=1000)")
        if self.prior is not None:
            check_object(self.prior, Prior, "prior", "CellPrior()")
        if not callable(self.values):
            raise TypeError(
                f"values={self.values!r}, but it is called as values(prediction); pass a function, such as "
                "values=probability_error_values (from geoq.increments import probability_error_values)."
            )

    def check_shapes(self, shapes: Shapes) -> None:
        """Refuse errors without a grid, and fields to be seen that lie on another grid."""
        View(self.sees, layout_of(self.domain, shapes)).check(shapes)

    def check_errors(
        self, predicted: Float[Tensor, " n *output"], error: Float[Tensor, " n *field"]
    ) -> None:
        """Refuse errors that take other values; the message names the function that fits the errors if there is one."""
        difference, fits = _largest_difference(self.values, predicted, error)
        if fits:
            return
        fitting = [
            f"they fit values={name} (from geoq.increments import {name})"
            for name, values in TWO_VALUES.items()
            if predicted.shape == error.shape
            and _largest_difference(values, predicted, error)[1]
        ]
        otherwise = "pass the two values as values=, threshold the errors in error_functional, or use FieldScaleIncrement()"
        raise ValueError(
            f"IndicatorIncrement(values={_name(self.values)}) is for errors that take one of two values, but some errors "
            f"differ from both by up to {difference:.3g}; {[*fitting, otherwise][0]}."
        )

    def fit(self, calibration: CalibrationSet) -> "IndicatorIncrement":
        """Estimate the prior, and train the networks on the calibration tuples."""
        is_larger = self._is_larger(calibration)
        shape = tuple(is_larger.shape[1:])
        layout = layout_of(self.domain, Shapes.of(calibration))
        self.view_ = View(self.sees, layout)
        some = calibration.subsample(max_rows(shape)).features
        channels, n_out = self.view_(some)[0], layout.n_outputs(shape)
        networks = self._build(channels.shape[1], n_out, is_larger.device)
        self.view_.normalize(networks, channels, some)
        target = is_larger.reshape(len(is_larger), n_out, -1)
        self.prior_ = self._prior(target, calibration).fit(
            target, calibration.features.prediction, calibration.group
        )
        count = nonzero_counts(target).float()
        frequency = count.mean(dim=1, keepdim=True) / len(target)
        weight = 1 / frequency.clamp(min=MIN_FREQUENCY)

        def loss(network: nn.Module, rows: Tensor) -> Tensor:
            features = calibration.features[rows]
            prior = self.prior_(features.prediction)
            logit = _logit(network, self.view_(features), prior)
            return nn.functional.binary_cross_entropy_with_logits(
                logit, target[rows].float(), weight
            )

        trainings = map(self.training.with_seed_offset, range(self.n_networks))
        self.trainings_ = tuple(
            train(network, loss, training, calibration.group, repeatable=True)
            for network, training in zip(self.networks_, trainings, strict=True)
        )
        return self

    def _prior(self, target: Tensor, calibration: CalibrationSet) -> Prior:
        if self.prior is not None:
            return self.prior
        is_elementwise = calibration.features.prediction.numel() == target.numel()
        use_prediction = prediction in self.sees and is_elementwise
        return PredictionPrior() if use_prediction else CellPrior()

    def _is_larger(self, calibration: CalibrationSet) -> Bool[Tensor, " n *field"]:
        """Which errors took the larger of their two values."""
        self.check_errors(calibration.features.prediction, calibration.error)
        result = torch.empty_like(calibration.error, dtype=torch.bool)
        for rows in chunks(len(result), 8 * result[0].numel()):
            smaller, larger = self._two_values(calibration.features[rows])
            result[rows] = calibration.error[rows] >= (smaller + larger) / 2
        return result

    def _two_values(self, features: GeometricFeatures) -> tuple[Tensor, Tensor]:
        return _two_values(self.values, features.prediction, features.anchor_error)

    def _build(self, n_in: int, n_out: int, device: torch.device) -> list[FieldNetwork]:
        networks, layout = [], self.view_.layout
        for number in range(self.n_networks):
            with seeded(self.training.with_seed_offset(number).random_state):
                network = FieldNetwork(
                    n_in, n_out, layout=layout, widths=self.widths, dropout=0.0
                )
            networks.append(network.to(device))
        self.networks_ = nn.ModuleList(networks)
        return networks

    @torch.no_grad()
    def probability(self, features: GeometricFeatures) -> Tensor:
        """P: the probability that each error takes the larger of its two values."""
        device = features.anchor_error.device
        self.networks_.to(device)
        self.prior_.to(device)
        parts = []
        for rows in chunks(len(features), 8 * features.anchor_error[0].numel()):
            some = features[rows]
            seen, prior = self.view_(some), self.prior_(some.prediction)
            answers = [_logit(net, seen, prior).sigmoid() for net in self.networks_]
            parts.append(torch.stack(answers).mean(dim=0))
        return torch.cat(parts).reshape(features.anchor_error.shape)

    def expected_error(self, features: GeometricFeatures) -> Tensor:
        """The mean of the error; it is not a bound, but it distinguishes cells that have the same bound."""
        smaller, larger = self._two_values(features)
        return smaller + self.probability(features).to(smaller) * (larger - smaller)

    def __call__(self, features: GeometricFeatures) -> Tensor:
        smaller, larger = self._two_values(features)
        is_larger = self.probability(features) > 1 - self.quantile
        return torch.where(is_larger, larger, smaller) - features.anchor_error

    def describe(self) -> str:
        """The fitted bound in one sentence."""
        return (
            f"the error takes one of two values ({_name(self.values)}), and the bound is the larger one where its probability "
            f"exceeds {1 - self.quantile:.3g}, estimated from {', '.join(words_of(self.sees))} and the distance to the data"
        )

    def at_level(self, quantile: float) -> "IndicatorIncrement":
        """The model with the same probabilities and another quantile level, which is another threshold."""
        check_quantile(quantile, "levels")
        other = copy.copy(self)
        other.quantile = quantile
        return other

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Settings and weights, for a file."""
        values = _name(self.values)
        if values not in TWO_VALUES:
            raise ValueError(
                f"values={self.values!r} is a function of the user, which a file cannot hold; use one of {', '.join(TWO_VALUES)}."
            )
        prior = None if self.prior is None else type(self.prior).__name__
        if prior is not None and self.prior != PRIORS.get(prior):
            raise ValueError(
                f"prior={self.prior!r} is an object of the user, which a file cannot hold; use one of {', '.join(PRIORS)}."
            )
        domain, nodes = domain_state(self.domain)
        settings = {
            "quantile": self.quantile,
            "values": values,
            "domain": domain,
            "cells": self.view_.layout.cells,
            "on_cells": self.view_.layout.on_cells,
            "sees": names_of(self.sees),
            "widths": self.widths,
            "n_networks": self.n_networks,
            "training": asdict(self.training),
            "prior": prior,
        }
        networks = self.networks_.state_dict()
        return settings, {**nodes, **self.prior_.state_dict(), **networks}

    @staticmethod
    def from_state(
        settings: dict[str, Any], weights: dict[str, Tensor]
    ) -> "IndicatorIncrement":
        """The fitted model that ``state`` described."""
        domain = domain_from_state(settings["domain"], weights)
        weights = {k: v for k, v in weights.items() if not k.startswith("domain.")}
        model = IndicatorIncrement(
            settings["quantile"],
            TWO_VALUES[settings["values"]],
            domain,
            tuple(SEEN[name] for name in settings["sees"]),
            tuple(settings["widths"]),
            settings["n_networks"],
            Training(**settings["training"]),
            None if settings["prior"] is None else PRIORS[settings["prior"]],
        )
        cells = tuple(settings["cells"])
        layout = Layout(domain or Grid(len(cells)), cells, settings["on_cells"])
        model.view_ = View(model.sees, layout)
        # The names of a network's weights start with its number; the other arrays belong to the prior.
        prior = {name: weights[name] for name in weights if not name[0].isdigit()}
        kind = FittedPredictionPrior if "value" in prior else FittedCellPrior
        model.prior_ = kind(**prior)
        # Refused here if the file does not contain all networks.
        mean = weights[f"{model.n_networks - 1}.mean"]
        with torch.device("meta") as meta:
            model._build(len(mean), len(prior["offset"]), meta)
        own = {name: weights[name] for name in weights if name not in prior}
        load_weights(model.networks_, own)
        return model


def _logit(
    network: nn.Module,
    seen: tuple[Tensor, Tensor],
    prior: Float[Tensor, " *n n_channels n_cells"],
) -> Float[Tensor, " n n_channels n_cells"]:
    """The logit of the probability P of one network."""
    correction: Tensor = network(seen)
    return correction.view(-1, *prior.shape[-2:]) + prior


def _name(values: TwoValues) -> str:
    names = [name for name, own in TWO_VALUES.items() if own is values]
    return names[0] if names else repr(values)


def _two_values(
    values: TwoValues, predicted: Tensor, like: Tensor
) -> tuple[Tensor, Tensor]:
    """The two values, with the shape and dtype of the errors."""
    smaller, larger = values(predicted)
    return smaller.reshape(like.shape).to(like), larger.reshape(like.shape).to(like)


def _largest_difference(
    values: TwoValues, predicted: Tensor, error: Tensor
) -> tuple[float, bool]:
    """The largest difference of an error to the nearer of its two values, and whether all differences are tolerated."""
    largest, fits = 0.0, True
    for rows in chunks(len(error), 8 * error[0].numel()):
        both = _two_values(values, predicted[rows], error[rows])
        to_smaller, to_larger = ((error[rows] - value).abs() for value in both)
        difference = torch.minimum(to_smaller, to_larger)
        largest = max(largest, float(difference.max()))
        fits = fits and bool((difference <= TOLERANCE * both[1].abs()).all())
    return largest, fits
