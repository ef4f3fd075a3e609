"""Weights of the calibration tuples, and conformal factors with weights."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from geoq.crossfit import CalibrationSet
from geoq.quantiles import n_required, rank, weighted_quantile

# weights(calibration): one number per tuple; their mean is 1.
TupleWeights = Callable[[CalibrationSet], Tensor]


def equal_tuples(calibration: CalibrationSet) -> Float[Tensor, " n"]:
    """The same weight for all tuples. The nested folds then have more than half of the weight."""
    return torch.ones_like(calibration.weight)


def equal_families(calibration: CalibrationSet) -> Float[Tensor, " n"]:
    """The same total weight for each family of folds, as GeoQ has it."""
    return len(calibration) * calibration.weight


def weighted_conformal_factor(
    error: Float[Tensor, " n *field"],
    scale: Float[Tensor, " n *rest"],
    weight: Float[Tensor, " n"],
    quantile: float,
) -> Float[Tensor, " *field"]:
    r"""Factor c, per coordinate, with which a scale becomes a bound of the error.

    .. math:: c = \widehat Q_{\tau'}(e_i / s_i; w_i), \quad \tau' = \lceil (n + 1) \tau \rceil / n

    With equal weights it is ``geoq.baselines.conformal.conformal_factor``.

    Raises:
        ValueError: There are too few rows, or too many errors are positive where their scale is zero.
    """
    n_tuples = len(error)
    if n_tuples < n_required(quantile):
        raise ValueError(
            f"quantile={quantile}, but {n_tuples} tuples give no finite factor; use at least {n_required(quantile)}."
        )
    per_value = scale.reshape(*scale.shape, *(1,) * (error.ndim - scale.ndim))
    ratio = torch.where(error == 0, 0, error / per_value)
    weights = weight.reshape(-1, *(1,) * (error.ndim - 1)).expand_as(ratio)
    level = rank(n_tuples + 1, quantile) / n_tuples
    factor = weighted_quantile(ratio.double(), weights.double(), level).to(error)
    if not factor.isfinite().all():
        raise ValueError(
            f"quantile={quantile}, but in {int((~factor.isfinite()).sum())} of {factor.numel()} output coordinates more "
            f"than the fraction {1 - quantile:g} of the errors is positive where the scale is zero, so no factor bounds them; "
            "remove repeated inputs."
        )
    return factor
