r"""A learned factor on the bound of a field: a small convolutional network that sees the query.

.. math:: \widehat E_{cj}(x) = b_{cj}(x) \, \exp\bigl(a_c \, h_{cj}(W u(x), \log \Delta d(x))\bigr)

Which cell is hard is in the scale of the bound; which day is hard is in the fields of the query, and local: a front, a
vortex, an interface. h starts at 0 and stops by held-out tuples; they choose the exponent a_c of each channel too, so that
a channel (a lead time, say) where nothing can be known keeps its bound.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from geoq.coverage import n_needed
from geoq.crossfit import CalibrationSet
from geoq.factor import BoundOf, Learned
from geoq.geometry import GeometricFeatures
from geoq.increment import (
    Shapes,
    check_spatial,
    pinball_loss,
    warn_of_channels_last,
)
from geoq.nets.unet import UNet
from geoq.surrogate import chunks
from geoq.training import RowLoss, Training, seeded, train_on

EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Rows that units are found by, and that judge the factor: this many, or fewer of large fields.
MOST_ROWS = 256
MOST_VALUES = 2**27
# Directions in which the channels vary less than this share of the most are not blown up.
LEAST_VARIANCE = 1e-3


def most_rows(field_shape: tuple[int, ...]) -> int:
    """Rows that hold no more than ``MOST_VALUES`` values, but enough to judge a bound."""
    return min(MOST_ROWS, max(32, MOST_VALUES // math.prod(field_shape)))


@dataclass(frozen=True)
class View:
    """Which fields of a query the network sees; each must end in the error's grid, all dimensions before are channels.

    Attributes:
        inputs: nu(x).
        prediction: the surrogate's answer.
        displacement: from the anchors, in representation space.
        anchor_error: mean observed error of the anchors.
        bound: logarithm of the bound that the factor is on.
    """

    inputs: bool = True
    prediction: bool = False
    displacement: bool = False
    anchor_error: bool = False
    bound: bool = False

    def __post_init__(self) -> None:
        if not (self._seen_of_features or self.bound):
            raise ValueError(
                "the View shows nothing; switch on one of its fields, such as anchor_error=True."
            )

    def __call__(
        self, features: GeometricFeatures, bound: Tensor | None, grid: tuple[int, ...]
    ) -> Float[Tensor, " n n_channels *grid"]:
        parts = [getattr(features, name) for name in self._seen_of_features]
        if self.bound and bound is not None:
            parts.append(bound.clamp(min=torch.finfo(torch.float32).tiny).log())
        channels = [part.reshape(len(part), -1, *grid).float() for part in parts]
        return torch.cat(channels, dim=1)

    def n_inputs(self, features: GeometricFeatures, grid: tuple[int, ...]) -> int:
        """How many of the channels, the first ones, are nu(x)."""
        return features.inputs[0].numel() // math.prod(grid) if self.inputs else 0

    def check_shapes(self, shapes: Shapes, n_spatial: int) -> None:
        """Refuse errors without a grid, and anything to be seen that is on another one."""
        check_spatial(n_spatial)
        if len(shapes.error) < n_spatial:
            raise ValueError(
                f"n_spatial={n_spatial}, but an error has shape {shapes.error}; put the grid last, or use an increment "
                "model for tables."
            )
        warn_of_channels_last(shapes.error, n_spatial)
        for name, what, shape in (
            ("inputs", "inputs", shapes.inputs),
            ("prediction", "outputs", shapes.outputs),
            ("displacement", "representation", shapes.z),
        ):
            # Not only what cannot be reshaped: numbers of another grid may be as many.
            if getattr(self, name) and shape[-n_spatial:] != shapes.error[-n_spatial:]:
                raise ValueError(
                    f"View({name}=True), but a row of the {what} has shape {shape} and an error {shapes.error}, which do "
                    f"not end in one grid; put the grid last in both, or choose a view with {name}=False."
                )

    @property
    def _seen_of_features(self) -> list[str]:
        names = [item.name for item in fields(self) if getattr(self, item.name)]
        return [name for name in names if name != "bound"]


@dataclass(frozen=True)
class FieldFactor:
    """How the factor is learned.

    Attributes:
        n_spatial: 1 for fields on a line, 2 for fields in the plane.
        view: what the networks see. Not the prediction by default: a fold's surrogate knows less of the climate than the
            deployed one, and a factor learned from its answers is fooled by that.
        widths: channels per level of a network; one level is two convolutions.
        dropout: share of activations left out in training.
        n_groups: groups that the tuples are dealt to. A network is trained without each, stopped and judged by it, and
            the mean of all of them answers.
        n_networks: networks that are trained, if fewer than the groups; the others' tuples then judge nothing.
        training: how a network is trained; the groups take the place of its ``validation_fraction``.
    """

    n_spatial: int = 2
    view: View = field(default_factory=View)
    widths: tuple[int, ...] = (16,)
    dropout: float = 0.1
    n_groups: int = 5
    n_networks: int | None = None
    training: Training = field(
        default_factory=lambda: Training(
            n_steps=400, batch_size=8, learning_rate=2e-3, check_every=25, patience=6
        )
    )

    def __post_init__(self) -> None:
        if self.n_groups < 2:
            raise ValueError(
                f"n_groups={self.n_groups}, but one group must stop what the others train; choose 2 or more."
            )

    def network(self, n_in: int, n_out: int) -> "FieldNetwork":
        """A fresh network."""
        return FieldNetwork(
            n_in,
            n_out,
            n_spatial=self.n_spatial,
            widths=self.widths,
            dropout=self.dropout,
        )

    def check_shapes(self, shapes: Shapes) -> None:
        """Refuse errors without a grid, and anything to be seen that is on another one."""
        self.view.check_shapes(shapes, self.n_spatial)

    def fit(
        self, calibration: CalibrationSet, bound_of: BoundOf, quantile: float
    ) -> Learned:
        """Networks that are each judged by tuples that they were not trained on."""
        splits = self._splits(calibration)
        if not splits:
            return Learned.nothing(calibration)
        with seeded(self.training.random_state):
            fitted = FittedField.fresh(self, calibration, bound_of, len(splits))
            loss = self._loss(calibration, fitted, bound_of, quantile)
            for network, rows in zip(fitted.networks, splits, strict=True):
                train_on(network, loss, self.training, *rows)
        judged = _Judged(calibration, [held_out for _, held_out in splits], bound_of)
        judged.choose(fitted, quantile)
        # What too few tuples judge cannot be lifted to its level.
        if not fitted.exponent.any() or len(judged.tuples) < n_needed(quantile):
            return Learned.nothing(calibration)
        return Learned(fitted, judged.tuples, judged.factors(fitted))

    def _splits(self, calibration: CalibrationSet) -> list[tuple[Tensor, Tensor]]:
        """Rows to train each network on, and the rows of the group that stops it.

        Along time groups are stretches, and tuples that depend on those of the group are left out of its training.
        """
        units, unit = calibration.unit.unique(return_inverse=True)
        n_groups = min(self.n_groups, len(units))
        order = torch.arange(len(units))
        if calibration.position is None:
            order = torch.randperm(
                len(units), generator=torch.Generator().manual_seed(0)
            )
        group = (order * n_groups // len(units)).to(unit.device)[unit]
        splits = []
        for number in range(min(n_groups, self.n_networks or n_groups)):
            held_out = group == number
            apart = calibration.apart_from(held_out)
            if apart.any():
                splits.append((apart.nonzero()[:, 0], held_out.nonzero()[:, 0]))
        return splits

    def _loss(
        self,
        calibration: CalibrationSet,
        fitted: "FittedField",
        bound_of: BoundOf,
        quantile: float,
    ) -> RowLoss:
        error = calibration.error
        # Channels of other sizes weigh alike, and families of folds too.
        grid = tuple(range(error.ndim - self.n_spatial, error.ndim))
        size = error.mean(dim=(0, *grid), keepdim=True).float()
        size = torch.where(size > 0, size, 1.0)
        weight = (calibration.weight * len(calibration)).float()

        def loss(network: nn.Module, rows: Tensor) -> Tensor:
            features = calibration.features[rows]
            bound = bound_of(features)
            scaled = (network(fitted.seen(features, bound)).exp() * bound).float()
            missed = pinball_loss(
                error[rows].float(), scaled.view_as(error[rows]), quantile
            )
            by_row = (missed / size).flatten(1).mean(dim=1)
            return (weight[rows] * by_row).mean()

        return loss

    @staticmethod
    def from_settings(settings: dict[str, Any]) -> "FieldFactor":
        """The factor that ``asdict`` described."""
        return FieldFactor(
            **{
                **settings,
                "view": View(**settings["view"]),
                "widths": tuple(settings["widths"]),
                "training": Training(**settings["training"]),
            }
        )


class FieldNetwork(nn.Module):
    """W, the units of the distance and the U-Net in one state dict; one row of numbers per query, all 0 at first."""

    def __init__(
        self,
        n_in: int,
        n_out: int,
        *,
        n_spatial: int,
        widths: tuple[int, ...],
        dropout: float,
    ) -> None:
        super().__init__()
        self.unet = UNet(
            n_in, n_out, n_spatial=n_spatial, widths=widths, dropout=dropout
        )
        for parameter in self.unet.output.parameters():
            nn.init.zeros_(parameter)
        self.register_buffer("mean", torch.zeros(n_in))
        self.register_buffer("whitening", torch.eye(n_in))
        self.register_buffer("distances", torch.tensor([0.0, 1.0, 0.0, 0.0]))
        self.mean: Tensor
        self.whitening: Tensor
        self.distances: Tensor

    def set_units(
        self, channels: Tensor, n_inputs: int, distance: Float[Tensor, " n"]
    ) -> None:
        """Each channel in its own unit, and the inputs, which come first, uncorrelated.

        Of states at successive times the changes are then as loud as the states.
        """
        flat = channels.transpose(0, 1).reshape(channels.shape[1], -1).double()
        self.mean.copy_(flat.mean(dim=1))
        unit = flat.std(dim=1, correction=0)
        unit = torch.where(unit > 0, unit, 1.0)
        self.whitening.copy_(torch.diag(1 / unit))
        if n_inputs > 1:
            inputs = flat[:n_inputs] / unit[:n_inputs, None]
            variances, directions = torch.linalg.eigh(torch.cov(inputs))
            least = (LEAST_VARIANCE * variances.max()).clamp(min=1e-30)
            uncorrelated = directions / variances.clamp(min=least).sqrt()
            self.whitening[:n_inputs, :n_inputs] = uncorrelated / unit[:n_inputs, None]
        log = distance.clamp(min=1e-30).log()
        spread = log.std(correction=0)
        self.distances.copy_(
            torch.stack(
                [log.mean(), spread if spread > 0 else spread + 1, log.min(), log.max()]
            )
        )

    def take_units(self, network: "FieldNetwork") -> None:
        """The units of another network, which need not be found twice."""
        for own, other in zip(self.buffers(), network.buffers(), strict=True):
            own.copy_(other)

    def forward(self, seen: tuple[Tensor, Tensor]) -> Tensor:
        channels, distance = seen
        centred = channels - self.mean.view(-1, *(1,) * (channels.ndim - 2))
        white = torch.tensordot(self.whitening, centred, dims=([0], [1])).transpose(
            0, 1
        )
        centre, spread, low, high = self.distances
        # Beyond the distances it has seen the network is not asked; the law under it goes on.
        log = distance.float().clamp(min=1e-30).log().clamp(low, high)
        answer: Tensor = self.unet(white, (log - centre) / spread)
        return answer.flatten(1)


@dataclass
class FittedField:
    """Trained networks, what they see, how much of their answer each channel takes, and the range that it is believed in.

    The range is that of the held-out tuples: far from the data a network says anything, and exp makes it a bound of 1e11.
    """

    networks: list[FieldNetwork]
    settings: FieldFactor
    field_shape: tuple[int, ...]
    exponent: Float[Tensor, " n_channels"]
    least: Float[Tensor, " n_channels"]
    most: Float[Tensor, " n_channels"]

    @staticmethod
    def fresh(
        settings: FieldFactor,
        calibration: CalibrationSet,
        bound_of: BoundOf,
        n_networks: int,
    ) -> "FittedField":
        """Untrained networks in the units of the tuples."""
        shape = tuple(calibration.error.shape[1:])
        some = calibration.some(most_rows(shape))
        grid = shape[len(shape) - settings.n_spatial :]
        channels = torch.cat(
            [
                settings.view(some.features[rows], bound_of(some.features[rows]), grid)
                for rows in chunks(len(some), 4 * some.error[0].numel())
            ]
        )
        n_out = math.prod(shape) // math.prod(grid)
        networks = [
            settings.network(channels.shape[1], n_out).to(some.error.device)
            for _ in range(n_networks)
        ]
        networks[0].set_units(
            channels,
            settings.view.n_inputs(some.features, grid),
            some.features.support_distance.float(),
        )
        for network in networks[1:]:
            network.take_units(networks[0])
        free = torch.full((n_out,), math.inf)
        return FittedField(networks, settings, shape, torch.ones(n_out), -free, free)

    @property
    def grid(self) -> tuple[int, ...]:
        return self.field_shape[len(self.field_shape) - self.settings.n_spatial :]

    def seen(self, features: GeometricFeatures, bound: Tensor) -> tuple[Tensor, Tensor]:
        """What the networks are given."""
        return self.settings.view(features, bound, self.grid), features.support_distance

    @torch.no_grad()
    def log_factor(
        self,
        network: FieldNetwork,
        features: GeometricFeatures,
        bound: Float[Tensor, " n n_coordinates"],
    ) -> Float[Tensor, " n n_channels n_cells"]:
        """One network's answer, with all exponents at 1."""
        answer: Tensor = network.to(bound.device)(self.seen(features, bound))
        return answer.view(len(bound), len(self.exponent), -1)

    def factor(
        self, features: GeometricFeatures, bound: Float[Tensor, " n n_coordinates"]
    ) -> Float[Tensor, " n n_coordinates"]:
        """The factor of each value of the bound: the geometric mean of the networks'."""
        answers = [self.log_factor(net, features, bound) for net in self.networks]
        mean = torch.stack(answers).mean(dim=0)
        power, least, most = (
            part.to(bound.device)[:, None]
            for part in (self.exponent, self.least, self.most)
        )
        believed = power * mean.clamp(least, most)
        return believed.exp().reshape(bound.shape).to(bound)

    def __str__(self) -> str:
        used = int((self.exponent > 0).sum())
        return f"a convolutional factor on {used} of {len(self.exponent)} channels"

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """For a file."""
        settings = {
            "settings": asdict(self.settings),
            "field_shape": self.field_shape,
            "n_networks": len(self.networks),
        }
        weights = {
            f"{number}.{name}": array
            for number, network in enumerate(self.networks)
            for name, array in network.state_dict().items()
        }
        of_channels = {
            name: getattr(self, name) for name in ("exponent", "least", "most")
        }
        return settings, {**of_channels, **weights}

    @staticmethod
    def from_state(
        settings: dict[str, Any], arrays: dict[str, Tensor]
    ) -> "FittedField":
        """The factor that ``state`` described."""
        how = FieldFactor.from_settings(settings["settings"])
        exponent = arrays["exponent"]
        networks = []
        for number in range(settings["n_networks"]):
            prefix = f"{number}."
            weights = {
                name.removeprefix(prefix): array
                for name, array in arrays.items()
                if name.startswith(prefix)
            }
            with seeded(how.training.random_state):
                network = how.network(len(weights["mean"]), len(exponent))
            network.load_state_dict(weights)
            networks.append(network.eval())
        shape = tuple(settings["field_shape"])
        # Files from before the range was kept have none.
        free = torch.full_like(exponent, math.inf)
        least, most = arrays.get("least", -free), arrays.get("most", free)
        return FittedField(networks, how, shape, exponent, least, most)


@dataclass(frozen=True)
class _Judged:
    """Held-out tuples, some of each group, each of them for the network that did not see it."""

    calibration: CalibrationSet
    groups: list[Tensor]
    bound_of: BoundOf

    @cached_property
    def rows(self) -> list[Tensor]:
        """Some rows in all, evenly from each group."""
        most = max(1, most_rows(self.calibration.error.shape[1:]) // len(self.groups))
        return [rows[:: math.ceil(len(rows) / most)] for rows in self.groups]

    @cached_property
    def tuples(self) -> CalibrationSet:
        """The tuples, group by group."""
        return self.calibration[torch.cat(self.rows)]

    def _answers(self, fitted: FittedField) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Rows, bounds and log factors, group by group in chunks."""
        for network, rows in zip(fitted.networks, self.rows, strict=True):
            for part in chunks(len(rows), 8 * math.prod(fitted.field_shape)):
                features = self.calibration.features[rows[part]]
                bound = self.bound_of(features)
                yield rows[part], bound, fitted.log_factor(network, features, bound)

    def choose(self, fitted: FittedField, quantile: float) -> None:
        """Set each channel's exponent to the best one, and the range of its factors to what is seen here."""
        losses = torch.zeros(len(EXPONENTS), len(fitted.exponent), dtype=torch.float64)
        seen = []
        for rows, bound, log in self._answers(fitted):
            seen.append(torch.stack([log.amin(dim=(0, 2)), log.amax(dim=(0, 2))]).cpu())
            own, error = (
                part.reshape(log.shape).float()
                for part in (bound, self.calibration.error[rows])
            )
            for place, power in enumerate(EXPONENTS):
                missed = pinball_loss(error, own * (power * log).exp(), quantile)
                losses[place] += missed.mean(dim=2).sum(dim=0).double().cpu()
        fitted.exponent = torch.tensor(EXPONENTS)[losses.argmin(dim=0)]
        least, most = torch.stack(seen, dim=1)
        fitted.least, fitted.most = least.amin(dim=0), most.amax(dim=0)

    def factors(self, fitted: FittedField) -> Float[Tensor, " n n_coordinates"]:
        """The factor of each of the tuples."""
        power = fitted.exponent[:, None]
        parts = [
            (power.to(log.device) * log).exp().flatten(1)
            for _, _, log in self._answers(fitted)
        ]
        return torch.cat(parts)
