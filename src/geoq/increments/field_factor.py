r"""A learned factor on the bound of a field: a small network on a grid or on a mesh that sees the query.

.. math:: \widehat E_{cj}(x) = b_{cj}(x) \, \exp\bigl(a_c \, h_{cj}(W u(x), \log \Delta d(x))\bigr)

The bound b depends on the cell. The error also depends on local structures in the fields u of the query, such as a front, a
vortex or an interface. A network h sees these fields after whitening by W. A new network is 0, and held-out tuples stop its
training. They also choose the exponent a_c of each channel. In a channel for which nothing can be learned, for example at a
long lead time, the exponent is 0 and the bound stays b.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from geoq.archive import load_weights, without_prefix
from geoq.arrays import chunks, permutation
from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.increments.climatology import PerCoordinate
from geoq.increments.domain import Domain, Grid, Layout, check_domain, layout_of
from geoq.increments.factor import BoundOf, Learned
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
from geoq.increments.shapes import Shapes
from geoq.quantiles import n_required, pinball_loss
from geoq.settings import check_object, check_widths, is_integer, is_number
from geoq.training.loop import RowLoss, Training, TrainingResult, seeded, train_on

# The exponent a_c of a channel is one of these.
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class FieldFactor:
    """How the factor on the bound of a field is learned.

    Attributes:
        sees: what the networks see, some of ``inputs``, ``prediction``, ``displacement``, ``anchor_error`` and ``log_bound``
            (from ``geoq.increments``). Arrays that do not lie on the cells of the error are seen as constant channels if they
            have at most 32 numbers. None means the inputs and the prediction, and the inputs
            alone for time series and groups.
        widths: channels at each resolution of a network; one resolution is two convolutions.
        dropout: fraction of the activations that are dropped in training.
        n_splits: number of parts of the tuples. For each part, one network is trained on the other parts; the part stops
            its training and validates it. The bound uses the mean of all networks.
        training: how a network is trained; its ``validation_fraction`` is not used.
        domain: where the errors lie. An increment model sets it; None means that it is found from the shapes.

    Example:
        >>> from geoq.increments import inputs, prediction
        >>> factor = FieldFactor(sees=(inputs, prediction), n_splits=3)
    """

    sees: tuple[Seen, ...] | None = None
    widths: tuple[int, ...] = (16,)
    dropout: float = 0.1
    n_splits: int = 5
    training: Training = Training(
        n_steps=400, batch_size=8, learning_rate=2e-3, check_every=25, patience=6
    )
    domain: Domain | None = None

    def __post_init__(self) -> None:
        check_domain(self.domain)
        if self.sees is not None:
            check_sees(self.sees)
        check_widths(self.widths, "widths")
        if not is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ValueError(
                f"FieldFactor(dropout={self.dropout!r}): dropout is a fraction; choose a number from 0 to 1, 1 excluded."
            )
        check_object(self.training, Training, "training", "Training(n_steps=400)")
        if not is_integer(self.n_splits) or self.n_splits < 2:
            raise ValueError(
                f"FieldFactor(n_splits={self.n_splits}): n_splits must be at least 2, because one part stops the training on "
                "the others."
            )

    def network(self, n_in: int, n_out: int, layout: Layout) -> FieldNetwork:
        """A new network."""
        return FieldNetwork(
            n_in, n_out, layout=layout, widths=self.widths, dropout=self.dropout
        )

    def check_shapes(self, shapes: Shapes) -> None:
        """Refuse errors without cells, and fields to be seen that lie on other cells."""
        View(self.sees or (), layout_of(self.domain, shapes)).check(shapes)

    def _sees(self, calibration: CalibrationSet, layout: Layout) -> tuple[Seen, ...]:
        """What the networks see, without fields on other cells.

        The surrogates of time series and groups are trained on other periods or groups than the deployed surrogate, so that
        their predictions differ systematically. There the networks see the inputs alone.
        """
        if self.sees is not None:
            return self.sees
        shapes = Shapes.of(calibration)
        rows = {inputs: shapes.inputs, prediction: shapes.outputs}
        visible = [seen for seen, row in rows.items() if layout.is_visible(row)]
        if calibration.position is not None and inputs in visible:
            return (inputs,)
        return tuple(visible) or (log_bound,)

    def fit(
        self, calibration: CalibrationSet, bound_of: BoundOf, quantile: float
    ) -> Learned:
        """Train one network for each part of the tuples, without that part, and validate it on that part."""
        splits = self._splits(calibration)
        if not splits:
            return Learned.nothing(calibration)
        layout = layout_of(self.domain, Shapes.of(calibration))
        view = View(self._sees(calibration, layout), layout)
        how, n_networks = replace(self, sees=tuple(view.sees)), len(splits)
        with seeded(self.training.random_state):
            fitted = FittedField.fresh(how, calibration, bound_of, view, n_networks)
            loss = self._loss(calibration, fitted, bound_of, quantile)
            fitted.trainings = tuple(
                train_on(network, loss, self.training, *rows)
                for network, rows in zip(fitted.networks, splits, strict=True)
            )
        held_out = [rows for _, rows in splits]
        validation = _Validation(calibration, held_out, bound_of)
        validation.choose_exponents(fitted, quantile)
        # With fewer validation tuples than the quantile level requires, the lift would be infinite.
        if not fitted.exponent.any() or len(validation.tuples) < n_required(quantile):
            return Learned.nothing(calibration)
        return Learned(fitted, validation.tuples, validation.factors(fitted))

    def _splits(self, calibration: CalibrationSet) -> list[tuple[Tensor, Tensor]]:
        """For each network: the rows to train on, and the rows that stop the training.

        For time series the parts are stretches of time, and tuples that depend on a part are left out of its training.
        """
        groups, group = calibration.group.unique(return_inverse=True)
        n_splits = min(self.n_splits, len(groups))
        order = torch.arange(len(groups))
        if calibration.position is None:
            order = permutation(len(groups))
        part = (order * n_splits // len(groups)).to(group.device)[group]
        splits = []
        for number in range(n_splits):
            held_out = part == number
            independent = calibration.independent_of(held_out)
            if independent.any():
                splits.append((independent.nonzero()[:, 0], held_out.nonzero()[:, 0]))
        return splits

    def _loss(
        self,
        calibration: CalibrationSet,
        fitted: "FittedField",
        bound_of: BoundOf,
        quantile: float,
    ) -> RowLoss:
        """The pinball loss; channels with errors of different sizes have equal weights, and so have families of folds."""
        size = _channel_size(calibration, fitted.view.layout.n_axes).float()
        size = torch.where(size > 0, size, 1.0)
        weight = (calibration.weight * len(calibration)).float()

        def loss(network: nn.Module, rows: Tensor) -> Tensor:
            features = calibration.features[rows]
            bound = bound_of(features)
            scaled = (network(fitted.view(features, bound)).exp() * bound).float()
            error = calibration[rows].error
            missed = pinball_loss(error.float(), scaled.view_as(error), quantile)
            by_row = (missed / size).reshape(len(missed), -1).mean(dim=1)
            return (weight[rows] * by_row).mean()

        return loss

    def settings(self) -> dict[str, Any]:
        """Plain settings, for a file; the increment model stores the domain."""
        plain = {k: v for k, v in vars(self).items() if k not in ("sees", "domain")}
        return plain | {
            "sees": None if self.sees is None else names_of(self.sees),
            "training": asdict(self.training),
        }

    @staticmethod
    def from_settings(settings: dict[str, Any]) -> "FieldFactor":
        """The factor that ``settings`` described."""
        sees = settings["sees"]
        return FieldFactor(
            **{
                **settings,
                "sees": None if sees is None else tuple(SEEN[name] for name in sees),
                "widths": tuple(settings["widths"]),
                "training": Training(**settings["training"]),
            }
        )


@dataclass
class FittedField:
    """A fitted factor: the networks, and for each channel the exponent and the limits of the logarithm of its factor.

    The limits are the smallest and the largest logarithm on held-out tuples. Far from the data the output of a network is
    arbitrary, and its exponential reached 1e11 without limits.

    Attributes:
        networks: the trained networks.
        settings: how they were trained.
        view: what they see.
        field_shape: the shape of a row of the error.
        exponent: a_c of each channel.
        lower: the lower limit of the logarithm in each channel.
        upper: the upper limit of the logarithm in each channel.
        trainings: the first, best and last held-out loss of each network; empty if the factor was read from a file.
    """

    networks: list[FieldNetwork]
    settings: FieldFactor
    view: View
    field_shape: tuple[int, ...]
    exponent: Float[Tensor, " n_channels"]
    lower: Float[Tensor, " n_channels"]
    upper: Float[Tensor, " n_channels"]
    trainings: tuple[TrainingResult, ...] = ()

    @staticmethod
    def fresh(
        settings: FieldFactor,
        calibration: CalibrationSet,
        bound_of: BoundOf,
        view: View,
        n_networks: int,
    ) -> "FittedField":
        """New networks, normalised with the calibration tuples."""
        shape, layout = calibration.field_shape, view.layout
        some = calibration.subsample(max_rows(shape))
        parts = [some.features[r] for r in chunks(len(some), 4 * math.prod(shape))]
        channels = torch.cat([view(part, bound_of(part))[0] for part in parts])
        n_out = layout.n_outputs(shape)
        networks = [
            settings.network(channels.shape[1], n_out, layout).to(some.point.device)
            for _ in range(n_networks)
        ]
        view.normalize(networks, channels, some.features)
        free = torch.full((n_out,), math.inf)
        return FittedField(
            networks, settings, view, shape, torch.ones(n_out), -free, free
        )

    @torch.no_grad()
    def log_factor(
        self, network: FieldNetwork, features: GeometricFeatures, bound: PerCoordinate
    ) -> Float[Tensor, " n n_channels n_cells"]:
        """The output of one network, with all exponents at 1."""
        answer: Tensor = network.to(bound.device)(self.view(features, bound))
        return answer.view(len(bound), len(self.exponent), -1)

    def factor(
        self, features: GeometricFeatures, bound: PerCoordinate
    ) -> PerCoordinate:
        """The factor on each value of the bound: the geometric mean over the networks."""
        answers = [self.log_factor(net, features, bound) for net in self.networks]
        mean = torch.stack(answers).mean(dim=0)
        power, lower, upper = (
            part.to(bound.device)[:, None]
            for part in (self.exponent, self.lower, self.upper)
        )
        limited = power * mean.clamp(lower, upper)
        return limited.exp().reshape(bound.shape).to(bound)

    def __str__(self) -> str:
        used = int((self.exponent > 0).sum())
        seen = " and ".join(words_of(self.view.sees))
        return (
            f"a factor learned from {seen} on {used} of {len(self.exponent)} channels"
        )

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Settings and weights, for a file."""
        settings = {
            "settings": self.settings.settings(),
            "field_shape": self.field_shape,
            "cells": self.view.layout.cells,
            "on_cells": self.view.layout.on_cells,
            "n_networks": len(self.networks),
        }
        weights = {
            f"{number}.{name}": array
            for number, network in enumerate(self.networks)
            for name, array in network.state_dict().items()
        }
        limits = {"exponent": self.exponent, "lower": self.lower, "upper": self.upper}
        return settings, {**limits, **weights}

    @staticmethod
    def from_state(
        settings: dict[str, Any], arrays: dict[str, Tensor], domain: Domain | None
    ) -> "FittedField":
        """The factor that ``state`` described, on the domain of the increment model."""
        how = FieldFactor.from_settings(settings["settings"])
        cells, exponent = tuple(settings["cells"]), arrays["exponent"]
        layout = Layout(domain or Grid(len(cells)), cells, settings["on_cells"])
        networks = []
        for number in range(settings["n_networks"]):
            weights = without_prefix(f"{number}.", arrays)
            with torch.device("meta"):
                network = how.network(len(weights["mean"]), len(exponent), layout)
            load_weights(network, weights)
            networks.append(network)
        shape, view = tuple(settings["field_shape"]), View(how.sees or (), layout)
        limits = arrays["lower"], arrays["upper"]
        return FittedField(networks, how, view, shape, exponent, *limits)


def _channel_size(calibration: CalibrationSet, n_axes: int) -> Tensor:
    """The mean error of each channel, with dimensions of size 1 for tuples and cells."""
    shape = calibration.field_shape
    grid = tuple(range(1 + len(shape) - n_axes, 1 + len(shape)))
    total: Tensor | float = 0.0
    for rows in chunks(len(calibration), math.prod(shape)):
        error = calibration[rows].error
        total = total + error.mean(dim=(0, *grid), keepdim=True) * len(error)
    return torch.as_tensor(total / len(calibration))


@dataclass(frozen=True)
class _Validation:
    """The held-out tuples of each part, which validate the network that was trained without that part."""

    calibration: CalibrationSet
    parts: list[Tensor]
    bound_of: BoundOf

    @cached_property
    def rows(self) -> list[Tensor]:
        """A limited number of rows, spread evenly over each part."""
        n_rows = max(1, max_rows(self.calibration.field_shape) // len(self.parts))
        return [rows[:: math.ceil(len(rows) / n_rows)] for rows in self.parts]

    @cached_property
    def tuples(self) -> CalibrationSet:
        """The tuples, part by part."""
        return self.calibration[torch.cat(self.rows)]

    def _answers(self, fitted: FittedField) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Rows, bounds and logarithms of factors, part by part and in chunks."""
        for network, rows in zip(fitted.networks, self.rows, strict=True):
            for part in chunks(len(rows), 8 * math.prod(fitted.field_shape)):
                features = self.calibration.features[rows[part]]
                bound = self.bound_of(features)
                yield rows[part], bound, fitted.log_factor(network, features, bound)

    def choose_exponents(self, fitted: FittedField, quantile: float) -> None:
        """Set the exponent of each channel to the one with the smallest loss, and the limits to the range found here."""
        losses = torch.zeros(len(EXPONENTS), len(fitted.exponent), dtype=torch.float64)
        ranges = []
        for rows, bound, log in self._answers(fitted):
            # The network is free where the bound is 0; there its output has no part in the limits.
            used = torch.where(bound.view_as(log) > 0, log, 0)
            ends = torch.stack([used.amin(dim=(0, 2)), used.amax(dim=(0, 2))])
            ranges.append(ends.cpu())
            own, error = (
                part.reshape(log.shape).float()
                for part in (bound, self.calibration[rows].error)
            )
            for place, power in enumerate(EXPONENTS):
                missed = pinball_loss(error, own * (power * log).exp(), quantile)
                losses[place] += missed.mean(dim=2).sum(dim=0).double().cpu()
        fitted.exponent = torch.tensor(EXPONENTS)[losses.argmin(dim=0)]
        lower, upper = torch.stack(ranges, dim=1)
        fitted.lower, fitted.upper = lower.amin(dim=0), upper.amax(dim=0)

    def factors(self, fitted: FittedField) -> PerCoordinate:
        """The factor of each tuple, from the network that was trained without it."""
        power = fitted.exponent[:, None]
        parts = [
            (power.to(log.device) * log).exp().flatten(1)
            for _, _, log in self._answers(fitted)
        ]
        return torch.cat(parts)
