"""Deep ensembles and MC dropout whose standard deviation is scaled by a conformal factor of held-out errors."""

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from geoq.baselines import Bound
from geoq.baselines.conformal import conformal_factor


@runtime_checkable
class Baseline(Protocol):
    """A dataclass such as ``geoq.baselines.DeepEnsemble`` or ``MCDropout``."""

    def fit(self, x, y): ...

    def predict(self, x) -> Bound: ...


@dataclass
class CalibratedSpread:
    r"""A conformal factor times the spread of an ensemble or of dropout passes.

    .. math:: \widehat E_j(x) = c_j (\sigma_j(x) + \beta \overline \sigma_j),
        \quad c_j = \widehat Q_\tau(e_{ij} / (\sigma_j^{(-i)}(x_i) + \beta \overline \sigma_j))

    Each fold trains the whole baseline, with all its members, on the rows that it leaves in. Errors :math:`e_{ij}` and
    deviations :math:`\sigma_j^{(-i)}` are those of the held-out rows. The deployed baseline is trained on all rows.

    Attributes:
        baseline: the ensemble or the dropout network.
        quantile: tau.
        folds: the folds, normally random folds.
        beta: fraction of the mean spread that is added, so that the scale is positive.
    """

    baseline: Baseline
    quantile: float
    folds: object
    beta: float = 0.01

    def fit(self, x, y):
        error, spread = [], []
        for train, held_out in self.folds.split(x):
            bound = replace(self.baseline).fit(x[train], y[train]).predict(x[held_out])
            error.append(abs(y[held_out] - bound.prediction))
            spread.append(bound.error_hat)
        scale = np.concatenate(spread)
        self.least_ = self.beta * scale.mean(axis=0)
        self.factor_ = conformal_factor(
            torch.as_tensor(np.concatenate(error)),
            torch.as_tensor(scale + self.least_),
            self.quantile,
        ).numpy()
        self.baseline_ = replace(self.baseline).fit(x, y)
        return self

    def predict(self, x):
        prediction, spread = self.baseline_.predict(x)
        return Bound(prediction, self.factor_ * (spread + self.least_))
