r"""Errors that are 0 or 1: their quantile is a verdict, and a verdict is learned as a probability.

.. math:: \widehat E_{cj}(x) = \mathbb 1\{P_{cj}(x) > 1 - \tau\}

The upper quantile of a 0/1 error is 1 where it is 1 with more than the probability 1 - tau. The pinball loss of a smooth
bound finds that slowly, for nearly all cells are right; the cross-entropy of P does not.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from geoq.crossfit import CalibrationSet
from geoq.field_factor import MOST_ROWS, FieldNetwork, View
from geoq.geometry import GeometricFeatures
from geoq.increment import check_quantile
from geoq.scale import LowRankScale
from geoq.surrogate import chunks
from geoq.training import Training, train


@dataclass
class IndicatorIncrement:
    """An increment for fields of 0/1 errors, such as wrong cells of a thresholded prediction.

    The bound is 0 or 1 and does not rest on the anchors: where they were wrong and the verdict is 0, the increment is
    negative.

    Attributes:
        quantile: tau.
        n_spatial: 1 for fields on a line, 2 for fields in the plane.
        view: what the network sees.
        widths: channels per level of the U-Net.
        training: how it is trained.
    """

    quantile: float = 0.95
    n_spatial: int = 2
    view: View = field(
        default_factory=lambda: View(
            prediction=True, displacement=True, anchor_error=True
        )
    )
    widths: tuple[int, ...] = (32, 64, 128)
    training: Training = field(
        default_factory=lambda: Training(n_steps=2000, batch_size=8, check_every=100)
    )

    def __post_init__(self) -> None:
        check_quantile(self.quantile, "quantile")

    def check_shapes(
        self, z_shape: tuple[int, ...], field_shape: tuple[int, ...]
    ) -> None:
        """Refuse errors without a grid, and displacements on another one."""
        self.view.check_shapes(z_shape, field_shape, self.n_spatial)

    def fit(self, calibration: CalibrationSet) -> "IndicatorIncrement":
        error = calibration.error
        if not ((error == 0) | (error == 1)).all():
            raise ValueError(
                f"IndicatorIncrement bounds errors of 0 and 1, but errors reach from {float(error.min()):.3g} to "
                f"{float(error.max()):.3g}; threshold them in error_functional, or use PowerLawIncrement.for_fields()."
            )
        shape = tuple(error.shape[1:])
        some = calibration.some(MOST_ROWS).features
        channels = self.view(some, None, self._grid(shape))
        n_out = math.prod(shape[: len(shape) - self.n_spatial])
        self._build(channels.shape[1], n_out, error.device)
        self.network_.set_units(channels, some.support_distance.float())
        # A fresh network knows how often each cell is wrong, and nothing else.
        share = error.mean(dim=0).reshape(n_out, -1).float()
        maps = LowRankScale(self.n_spatial).maps(share).float()
        self.offset_ = maps.clamp(1e-6, 0.5).logit()
        weight = 1 / share.mean(dim=1, keepdim=True).clamp(min=1e-6)

        def loss(network: nn.Module, rows: Tensor) -> Tensor:
            del network
            logit = self._logit(calibration.features[rows])
            target = error[rows].reshape(logit.shape).float()
            return nn.functional.binary_cross_entropy_with_logits(logit, target, weight)

        train(self.network_, loss, self.training, units=calibration.unit)
        return self

    def _grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[len(shape) - self.n_spatial :]

    def _build(self, n_in: int, n_out: int, device: torch.device) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.training.random_state)
            network = FieldNetwork(
                n_in, n_out, n_spatial=self.n_spatial, widths=self.widths, dropout=0.0
            )
        self.network_ = network.to(device)

    def _logit(self, features: GeometricFeatures) -> Tensor:
        """Of P, one row of channels and cells per query."""
        shape = tuple(features.anchor_error.shape[1:])
        seen = self.view(features, None, self._grid(shape))
        answer: Tensor = self.network_((seen, features.support_distance))
        return answer.view(-1, *self.offset_.shape) + self.offset_

    @torch.no_grad()
    def __call__(self, features: GeometricFeatures) -> Tensor:
        anchor = features.anchor_error
        device = anchor.device
        self.network_.to(device)
        self.offset_ = self.offset_.to(device)
        verdicts = [
            self._logit(features[rows]).sigmoid() > 1 - self.quantile
            for rows in chunks(len(features), 8 * anchor[0].numel())
        ]
        return torch.cat(verdicts).reshape(anchor.shape).to(anchor) - anchor

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Settings and weights, for a file."""
        return asdict(self), {"offset": self.offset_, **self.network_.state_dict()}

    @staticmethod
    def from_state(
        settings: dict[str, Any], weights: dict[str, Tensor]
    ) -> "IndicatorIncrement":
        """The fitted model that ``state`` described."""
        model = IndicatorIncrement(
            settings["quantile"],
            settings["n_spatial"],
            View(**settings["view"]),
            tuple(settings["widths"]),
            Training(**settings["training"]),
        )
        offset = weights["offset"]
        model._build(len(weights["mean"]), len(offset), offset.device)
        model.network_.load_state_dict(
            {name: array for name, array in weights.items() if name != "offset"}
        )
        model.network_.eval()
        model.offset_ = offset
        return model
