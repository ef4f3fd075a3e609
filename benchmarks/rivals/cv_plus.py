"""CV+ of Barber et al. (2021), the method "plus" of MAPIE's CrossConformalRegressor."""

from dataclasses import dataclass

import numpy as np

from benchmarks.rivals.remembered import RememberedTraining
from geoq.baselines import Bound
from geoq.quantiles import check_quantile, n_required
from geoq.surrogate import Surrogate


@dataclass
class CVPlus:
    r"""The largest error of the deployed surrogate that is possible in the CV+ interval of each output coordinate.

    .. math:: [\ell_j, u_j] = \bigl[\widehat Q^-_{1 - \tau}(\widehat F_j^{(-i)}(x) - e_{ij}),
        \widehat Q^+_\tau(\widehat F_j^{(-i)}(x) + e_{ij})\bigr], \quad
        \widehat E_j(x) = \max(u_j - \widehat F_j(x), \widehat F_j(x) - \ell_j)

    Lower and upper quantiles are the :math:`\lfloor (n + 1)(1 - \tau) \rfloor`-th and the
    :math:`\lceil (n + 1) \tau \rceil`-th smallest of the n values. The formula is written out here because MAPIE accepts
    one output coordinate only and trains its own surrogates; ``tests/test_rivals.py`` compares both.

    Attributes:
        surrogate: the deployed surrogate.
        train_surrogate: the recipe of the fold surrogates.
        quantile: tau.
        folds: the folds, normally random folds.
    """

    surrogate: Surrogate
    train_surrogate: RememberedTraining
    quantile: float
    folds: object

    def fit(self, x, y):
        check_quantile(self.quantile, "quantile")
        if len(x) < n_required(self.quantile):
            raise ValueError(
                f"quantile={self.quantile}, but x has {len(x)} rows, and CV+ needs at least {n_required(self.quantile)}."
            )
        splits = list(self.folds.split(x))
        self.members_ = self.train_surrogate.train_many(
            x, y, [train for train, _ in splits]
        )
        self.errors_ = [
            abs(y[held_out] - member(x[held_out]))
            for member, (_, held_out) in zip(self.members_, splits, strict=True)
        ]
        return self

    def predict(self, x):
        prediction = self.surrogate(x)
        answers = [member(x) for member in self.members_]
        alpha = 1 - self.quantile
        n_errors = sum(map(len, self.errors_))
        below = int(np.floor((n_errors + 1) * alpha + 1e-9)) - 1
        bound = np.empty_like(prediction)
        # A block of queries has one value per error, query and coordinate.
        for rows in np.array_split(np.arange(len(x)), 1 + prediction.size // 2000):
            low, high = (
                np.concatenate(
                    [
                        answer[rows] + sign * error[:, None]
                        for answer, error in zip(answers, self.errors_, strict=True)
                    ]
                )
                for sign in (-1, 1)
            )
            lower = np.partition(low, below, axis=0)[below]
            upper = np.partition(high, -1 - below, axis=0)[-1 - below]
            own = prediction[rows]
            bound[rows] = np.maximum(upper - own, own - lower)
        return Bound(prediction, bound)
