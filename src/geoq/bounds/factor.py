r"""A learned factor on the bound of a field: a small network on a grid or on a mesh that sees the query (with torch).

.. math:: \widehat E_{cj}(x) = b_{cj}(x) \, \exp\bigl(a_c \, h_{cj}(W u(x), \log \Delta d(x))\bigr)

The bound b depends on the cell. The error also depends on local structures in the fields u of the query, such as a front, a
vortex or an interface. A network h sees these fields after whitening by W. A new network is 0, and held-out tuples stop its
training. They also choose the exponent a_c of each channel. In a channel for which nothing can be learned, for example at a long
lead time, the exponent is 0 and the bound stays b.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from geoq.arrays import chunks, joined, permutation
from geoq.bounds.fields import Values
from geoq.bounds.network import (
    FieldNetwork,
    Seen,
    Sight,
    check_sees,
    expected_error,
    inputs,
    log_bound,
    max_rows,
    pinball,
    prediction,
)
from geoq.checks import check_integer, check_object, check_widths, is_number
from geoq.core.geometry import Features
from geoq.core.tuples import Tuples
from geoq.data.domain import Layout, Shapes
from geoq.quantiles import n_required, pinball_loss
from geoq.training.loop import RowLoss, Training, TrainingResult, seeded, train

# The exponent a_c of a channel is one of these.
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)

BoundOf = Callable[[Features], Values]


@dataclass(frozen=True)
class FieldFactor:
    """How the factor on the bound of a field is learned.

    Attributes:
        sees: what the networks see, some of ``inputs``, ``prediction``, ``displacement``, ``anchor_error`` and ``log_bound``
            (from ``geoq.parts``). Arrays that do not lie on the cells of the error are seen as constant channels if they have at
            most 32 numbers. None means the inputs, the prediction and the error that the companion expects, and the inputs alone for time
            series and groups.
        widths: channels at each resolution of a network; one resolution is two convolutions.
        dropout: fraction of the activations that are dropped in training.
        n_splits: number of parts of the tuples. For each part, one network is trained on the other parts; the part stops its
            training and validates it. The bound uses the mean of all networks.
        training: how a network is trained; its ``validation_fraction`` is not used.

    Example:
        >>> from geoq.parts import FieldBound, FieldFactor, inputs, prediction
        >>> bound = FieldBound(factor=FieldFactor(sees=(inputs, prediction), n_splits=3))
    """

    sees: tuple[Seen, ...] | None = None
    widths: tuple[int, ...] = (16,)
    dropout: float = 0.1
    n_splits: int = 5
    training: Training = Training(
        n_steps=400, batch_size=8, learning_rate=2e-3, check_every=25, patience=6
    )

    def __post_init__(self) -> None:
        if self.sees is not None:
            check_sees(self.sees)
        check_widths(self.widths, "widths")
        if not is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ValueError(
                f"FieldFactor(dropout={self.dropout!r}): dropout is a fraction; choose a number from 0 to 1, 1 excluded."
            )
        check_object(self.training, Training, "training", "Training(n_steps=400)")
        # One part stops the training on the others.
        check_integer(self.n_splits, "n_splits", 2)

    def check_shapes(self, shapes: Shapes, layout: Layout) -> None:
        """Raise for fields to be seen that lie on other cells."""
        Sight(self.sees or (), layout).check(shapes)

    def _sight(self, tuples: Tuples) -> Sight:
        """What the networks see, without fields on other cells.

        The surrogates of time series and groups are trained on other periods or groups than the deployed surrogate, so that their
        predictions differ systematically. There the networks see the inputs alone.
        """
        points, layout = tuples.points, tuples.points.layout
        rows = {inputs: points.inputs, prediction: points.outputs}
        visible = [seen for seen, row in rows.items() if layout.is_visible(row.shape[1:])]
        if tuples.position is not None and inputs in visible:
            visible = [inputs]
        if tuples.opinion is not None:
            visible.append(expected_error)
        return Sight(self.sees or tuple(visible) or (log_bound,), layout)

    def fit(
        self, tuples: Tuples, bound_of: BoundOf, quantile: float
    ) -> "tuple[FittedFactor, Tuples, Values] | None":
        """Train one network for each part of the tuples, without that part, and validate it on that part.

        Returns the factor, the tuples on which it was validated, and their factors, each learned without the group of its tuple;
        None if no factor lowers the held-out loss of ``bound_of(features)``.
        """
        splits = self.splits(tuples)
        if not splits:
            return None
        sight, shape = self._sight(tuples), tuples.field_shape
        make = sight.maker(tuples, self.widths, self.dropout, bound_of)
        loss = _loss(tuples, sight, bound_of, quantile)
        with seeded(self.training.random_state):
            networks = tuple(make() for _ in splits)
            trainings = tuple(
                train(network, loss, self.training, *map(torch.from_numpy, rows))
                for network, rows in zip(networks, splits, strict=True)
            )
        # A limited number of held-out rows, spread evenly over each part.
        n_rows = max(1, max_rows(shape) // len(splits))
        held_out = [rows[:: math.ceil(len(rows) / n_rows)] for _, rows in splits]
        one = np.ones(sight.layout.n_outputs(shape), np.float32)
        bare = FittedFactor(networks, sight, one, -one, one, trainings)
        fitted, factors = _validated(bare, tuples, held_out, bound_of, quantile)
        # With fewer validation tuples than the quantile level requires, the lift would be infinite.
        if not fitted.exponent.any() or len(factors) < n_required(quantile):
            return None
        return fitted, tuples[np.concatenate(held_out)], factors

    def splits(self, tuples: Tuples) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each network: the rows to train on, and the rows that stop the training.

        For time series the parts are stretches of time, and tuples that depend on a part are left out of its training.
        """
        groups, group = np.unique(tuples.group, return_inverse=True)
        n_splits, n_groups = min(self.n_splits, len(groups)), len(groups)
        order = permutation(n_groups) if tuples.position is None else np.arange(n_groups)
        part = (order * n_splits // n_groups)[group]
        splits = []
        for number in range(n_splits):
            held_out = part == number
            independent = tuples.independent_of(held_out)
            if independent.any():
                splits.append((np.flatnonzero(independent), np.flatnonzero(held_out)))
        return splits


def _loss(tuples: Tuples, sight: Sight, bound_of: BoundOf, quantile: float) -> RowLoss:
    """The pinball loss; channels with errors of different sizes have equal weights, and so have families of folds."""
    n_channels = sight.layout.n_outputs(tuples.field_shape)
    total, count = np.zeros(n_channels), np.zeros(n_channels)
    for rows in chunks(len(tuples), math.prod(tuples.field_shape)):
        error = tuples[rows].error
        error = error.reshape(len(error), n_channels, -1)
        total += np.nansum(error, axis=(0, 2))
        count += (~np.isnan(error)).sum(axis=(0, 2))
    mean = total / np.maximum(count, 1)
    size = torch.from_numpy(np.where(mean > 0, mean, 1.0)[:, None]).float()
    weight = torch.from_numpy(tuples.weight * len(tuples)).float()

    def loss(network: nn.Module, rows: Tensor) -> Tensor:
        part = tuples[rows.numpy()]
        features = part.features
        bound = bound_of(features)
        log = network(sight(features, bound))
        error, own = (
            torch.from_numpy(np.array(values)).to(log.device) for values in (part.error, bound)
        )
        scaled = (log.exp() * own).float()
        missed = pinball(error.float().reshape(scaled.shape), scaled, quantile)
        by_row = (missed.view(len(rows), n_channels, -1) / size.to(log.device)).flatten(1).mean(1)
        return (weight[rows].to(log.device) * by_row).mean()

    return loss


@dataclass(frozen=True)
class FittedFactor:
    """A fitted factor: the networks, and for each channel the exponent and the limits of the logarithm of its factor.

    The limits are the smallest and the largest logarithm on held-out tuples. Far from the data the output of a network is
    arbitrary, and its exponential reached 1e11 without limits.
    """

    networks: tuple[FieldNetwork, ...]
    sight: Sight
    exponent: Float[np.ndarray, " n_channels"]
    lower: Float[np.ndarray, " n_channels"]
    upper: Float[np.ndarray, " n_channels"]
    trainings: tuple[TrainingResult, ...] = ()

    @torch.no_grad()
    def log_factor(self, network: nn.Module, features: Features, bound: Values) -> np.ndarray:
        """The output of one network at each query, channel and cell, with all exponents at 1."""
        answer: np.ndarray = network(self.sight(features, bound)).cpu().numpy()
        return answer.reshape(len(bound), len(self.exponent), -1)

    def __call__(self, features: Features, bound: Values) -> Values:
        """The factor on each value of the bound: the geometric mean over the networks."""
        mean = np.mean([self.log_factor(n, features, bound) for n in self.networks], axis=0)
        limited = mean.clip(self.lower[:, None], self.upper[:, None])
        factor: np.ndarray = np.exp(self.exponent[:, None] * limited)
        return factor.reshape(bound.shape)

    def describe(self) -> str:
        """What the factor is learned from, and on how many channels."""
        used, seen = int((self.exponent > 0).sum()), " and ".join(self.sight.words)
        return f"a factor learned from {seen} on {used} of {len(self.exponent)} channels"


def _validated(
    bare: FittedFactor, tuples: Tuples, held_out: list[Any], bound_of: BoundOf, quantile: float
) -> tuple[FittedFactor, Values]:
    """The factor with the exponents of the smallest loss on the rows that each network was trained without, and its values there.

    The range of the logarithms on these rows limits the factor.
    """
    losses, logs = np.zeros((len(EXPONENTS), len(bare.exponent))), []
    upper = np.full(len(bare.exponent), -np.inf, np.float32)
    lower = -upper
    for network, rows in zip(bare.networks, held_out, strict=True):
        for chunk in chunks(len(rows), 8 * math.prod(tuples.field_shape)):
            part = tuples[rows[chunk]]
            features = part.features
            bound = bound_of(features)
            log = bare.log_factor(network, features, bound)
            error, own = (v.reshape(log.shape).astype(np.float32) for v in (part.error, bound))
            # The network is free where the bound is 0; there its output has no part in the limits.
            used = np.where(own > 0, log, 0)
            lower = np.minimum(lower, used.min(axis=(0, 2)))
            upper = np.maximum(upper, used.max(axis=(0, 2)))
            for place, power in enumerate(EXPONENTS):
                missed = pinball_loss(error, own * np.exp(np.float32(power) * log), quantile)
                losses[place] += np.nan_to_num(missed).mean(axis=2).sum(axis=0)
            logs.append(log)
    exponent = np.array(EXPONENTS, np.float32)[losses.argmin(axis=0)]
    factors = [np.exp(exponent[:, None] * log).reshape(len(log), -1) for log in logs]
    return replace(bare, exponent=exponent, lower=lower, upper=upper), joined(factors)
