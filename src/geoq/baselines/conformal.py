"""Split conformal prediction: residuals of data that were kept from the surrogate."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from geoq.arrays import Array, restore, take
from geoq.baselines.bound import Bound
from geoq.checks import check_fitted, check_pairs, clear_fitted
from geoq.quantiles import check_quantile, n_required
from geoq.surrogate import Surrogate, TrainSurrogate, absolute_error, evaluate, observe


def conformal_quantile(
    scores: Float[Tensor, " n *field"], quantile: float
) -> Float[Tensor, " *field"]:
    r"""Score that a fresh one does not exceed with at least the probability ``quantile``, per coordinate.

    .. math:: \text{the } \lceil (n + 1) \tau \rceil \text{-th smallest of } n \text{ scores}

    Raises:
        ValueError: so few scores that no finite one will do.
    """
    n_scores = len(scores)
    if n_scores < n_required(quantile):
        raise ValueError(
            f"quantile={quantile}, but {n_scores} calibration scores promise no finite bound at that level; "
            f"calibrate on at least {n_required(quantile)} or lower the quantile."
        )
    # The slack keeps products such as 0.95 * 20 = 19.000000000000004 at their exact value.
    return scores.kthvalue(math.ceil((n_scores + 1) * quantile - 1e-9), dim=0).values


def conformal_factor(
    error: Float[Tensor, " n *field"], scale: Float[Tensor, " n *rest"], quantile: float
) -> Float[Tensor, " *field"]:
    r"""Factor c by which a scale must be multiplied to bound the error, per coordinate.

    .. math:: c = \widehat Q_\tau(e_i / s_i), \quad \widehat E(x) = c \, s(x)

    ``scale`` has the shape of the error, or one number per row.
    """
    # Where nothing is wrong any factor will do, also where the scale is zero.
    per_value = scale.reshape(*scale.shape, *(1,) * (error.ndim - scale.ndim))
    ratio = torch.where(error == 0, 0, error / per_value)
    factor = conformal_quantile(ratio, quantile)
    if not factor.isfinite().all():
        raise ValueError(
            f"in {int((~factor.isfinite()).sum())} of {factor.numel()} output coordinates more than the share "
            f"{1 - quantile:g} of the calibration errors is positive where their scale is zero, so no factor bounds "
            "them; remove repeated inputs."
        )
    return factor


@dataclass
class SplitConformal:
    r"""The paper's conformal prediction: one number, or one field, that bounds the error of every query.

    .. math:: \widehat E_j = \widehat Q_\tau(|y_{ij} - \widehat F_j(x_i)|), \quad i \text{ held out of training}

    Attributes:
        train_surrogate: trains the surrogate, on the rows that do not calibrate it.
        quantile: tau, the coverage that a fresh query is promised.
        calibration_fraction: share of the rows kept from training.
        random_state: seed of the split.
    """

    train_surrogate: TrainSurrogate
    quantile: float = 0.95
    calibration_fraction: float = 0.2
    random_state: int = 0

    def fit(self, x: Array, y: Array) -> "SplitConformal":
        check_quantile(self.quantile, "quantile")
        if not 0 < self.calibration_fraction < 1:
            raise ValueError(
                f"calibration_fraction={self.calibration_fraction}, but some rows must train and some must calibrate; "
                "choose between 0 and 1."
            )
        clear_fitted(self)
        check_pairs(x, y)
        order = torch.randperm(
            len(x), generator=torch.Generator().manual_seed(self.random_state)
        )
        n_calibration = round(self.calibration_fraction * len(x))
        if not n_required(self.quantile) <= n_calibration < len(x):
            raise ValueError(
                f"calibration_fraction={self.calibration_fraction} keeps {n_calibration} of {len(x)} rows, but "
                f"quantile={self.quantile} needs at least {n_required(self.quantile)} of them, and training at least 1; "
                "change the fraction, lower the quantile or give more data."
            )
        calibration, training = order[:n_calibration], order[n_calibration:]
        self.surrogate_: Surrogate = self.train_surrogate(
            take(x, training), take(y, training)
        )
        _, residual = observe(
            self.surrogate_, absolute_error, take(x, calibration), take(y, calibration)
        )
        self.bound_ = conformal_quantile(residual, self.quantile)
        return self

    def predict(self, x: Array) -> Bound:
        check_fitted(self, "bound_")
        prediction = evaluate(self.surrogate_, x, "surrogate")
        error_hat = self.bound_.to(prediction).expand_as(prediction).clone()
        return Bound(restore(prediction, x), restore(error_hat, x))
