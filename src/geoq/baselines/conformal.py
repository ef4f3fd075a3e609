"""Split conformal prediction: the bound is a quantile of errors on data that the surrogate was not trained on."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from geoq.arrays import Array, restore, take
from geoq.baselines.bound import Bound
from geoq.checks import check_fitted, check_pairs, clear_fitted
from geoq.quantiles import check_quantile, n_required, rank
from geoq.surrogate import Surrogate, TrainSurrogate, absolute_error, evaluate, observe


def conformal_quantile(
    scores: Float[Tensor, " n *field"], quantile: float
) -> Float[Tensor, " *field"]:
    r"""Conformal quantile of the scores of each coordinate.

    .. math:: \text{the } \lceil (n + 1) \tau \rceil \text{-th smallest of } n \text{ scores}

    The score of a new exchangeable row does not exceed it with a probability of at least :math:`\tau`. Too few scores for a finite
    result are refused.

    Example:
        >>> float(conformal_quantile(torch.arange(1.0, 20.0), 0.95))
        19.0
    """
    n_scores = len(scores)
    if n_scores < n_required(quantile):
        raise ValueError(
            f"quantile={quantile}, but {n_scores} calibration scores give no finite bound at this quantile level; "
            f"use at least {n_required(quantile)} scores or lower quantile."
        )
    return scores.kthvalue(rank(n_scores + 1, quantile), dim=0).values


def conformal_factor(
    error: Float[Tensor, " n *field"], scale: Float[Tensor, " n *rest"], quantile: float
) -> Float[Tensor, " *field"]:
    r"""Factor c, per coordinate, with which a scale becomes a bound of the error.

    .. math:: c = \widehat Q_\tau(e_i / s_i), \quad \widehat E(x) = c \, s(x)

    Scales have the shape of the errors, or are one number per row. Too few rows, and too many positive errors where the scale is
    zero, are refused.
    """
    # Every factor bounds an error of zero, also where the scale is zero.
    per_value = scale.reshape(*scale.shape, *(1,) * (error.ndim - scale.ndim))
    ratio = torch.where(error == 0, 0, error / per_value)
    factor = conformal_quantile(ratio, quantile)
    if not factor.isfinite().all():
        raise ValueError(
            f"quantile={quantile}, but in {int((~factor.isfinite()).sum())} of {factor.numel()} output coordinates more "
            f"than the fraction {1 - quantile:g} of the calibration errors is positive where the scale is zero, so no "
            "factor bounds them; remove repeated inputs."
        )
    return factor


@dataclass
class SplitConformal:
    r"""The paper's split conformal prediction: the same bound for all queries, one number per output coordinate.

    .. math:: \widehat E_j = \widehat Q_\tau(|y_{ij} - \widehat F_j(x_i)|), \quad i \text{ held out of training}

    Attributes:
        train_surrogate: Function that trains a surrogate; it receives the rows that are not held out.
        quantile: Quantile level :math:`\tau`, the guaranteed coverage of a new exchangeable query.
        calibration_fraction: Fraction of the rows that are held out of training.
        random_state: Seed of the split.

    Example:
        >>> import numpy as np
        >>> def train_line(x, y):
        ...     weights = np.linalg.lstsq(x, y, rcond=None)[0]
        ...     return lambda x: x @ weights
        >>> x = np.linspace(0, 1, 100)[:, None]
        >>> baseline = SplitConformal(train_line, quantile=0.9).fit(x, x + 0.1 * np.sin(99 * x))
        >>> prediction, error_hat = baseline.predict(np.array([[0.5], [9.0]]))
        >>> error_hat.round(2).tolist()
        [[0.1], [0.1]]
    """

    train_surrogate: TrainSurrogate
    quantile: float = 0.95
    calibration_fraction: float = 0.2
    random_state: int = 0

    def fit(self, x: Array, y: Array) -> "SplitConformal":
        """Train the surrogate on a part of the rows and compute the bound from the others."""
        check_quantile(self.quantile, "quantile")
        if not 0 < self.calibration_fraction < 1:
            raise ValueError(
                f"calibration_fraction={self.calibration_fraction}, but a fraction lies strictly between 0 and 1; "
                "0.2 is usual."
            )
        clear_fitted(self)
        check_pairs(x, y)
        order = torch.randperm(
            len(x), generator=torch.Generator().manual_seed(self.random_state)
        )
        n_calibration = round(self.calibration_fraction * len(x))
        if not n_required(self.quantile) <= n_calibration < len(x):
            raise ValueError(
                f"calibration_fraction={self.calibration_fraction} holds out {n_calibration} of {len(x)} rows, but "
                f"quantile={self.quantile} needs at least {n_required(self.quantile)} of them, and training at least 1; "
                "change calibration_fraction, lower quantile or pass more rows."
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
        """Predictions of the surrogate and the bound, which is the same for all rows of ``x``."""
        check_fitted(self, "bound_")
        prediction = evaluate(self.surrogate_, x, "surrogate")
        error_hat = self.bound_.to(prediction).expand_as(prediction).clone()
        return Bound(restore(prediction, x), restore(error_hat, x))
