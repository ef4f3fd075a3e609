"""Deep ensemble: the same recipe trained from several seeds."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from geoq.arrays import Array, restore
from geoq.baselines.bound import GAUSSIAN_95, Bound, spread
from geoq.checks import check_fitted, check_pairs, clear_fitted
from geoq.surrogate import Surrogate, TrainSurrogate, TrainTogether, evaluate


@runtime_checkable
class SeededRecipe(Protocol):
    """A recipe for a surrogate that can be started from another seed; ``geoq.TrainNetwork`` is one."""

    def with_seed(self, random_state: int, /) -> TrainSurrogate: ...


@dataclass
class DeepEnsemble:
    r"""The paper's deep ensemble: mean of the members, and their standard deviation as a bound.

    .. math:: \widehat E(x) = 1.96 \sigma(x)

    Attributes:
        train_surrogate: the recipe of one member, a ``geoq.TrainNetwork`` or your own ``SeededRecipe``.
        n_members: the paper takes as many as GeoQ has folds, for equal cost.
        random_state: seed that the members' own seeds are drawn from.
    """

    train_surrogate: TrainSurrogate
    n_members: int = 5
    random_state: int = 0

    def fit(self, x: Array, y: Array) -> "DeepEnsemble":
        if self.n_members < 2:
            raise ValueError(
                f"n_members={self.n_members}, but a spread needs at least 2; 5 to 10 are usual."
            )
        if not isinstance(self.train_surrogate, SeededRecipe):
            raise TypeError(
                f"train_surrogate is a {type(self.train_surrogate).__name__} without with_seed(random_state), so its "
                "members could not differ; pass a geoq.TrainNetwork."
            )
        clear_fitted(self)
        check_pairs(x, y)
        # 31 bits, which every library takes as a seed.
        seeds = (
            np.random.SeedSequence(self.random_state).generate_state(self.n_members)
            >> 1
        )
        self.members_: list[Surrogate] = []
        if isinstance(self.train_surrogate, TrainTogether):
            n_together, rows = self.train_surrogate.n_together(x, y), np.arange(len(x))
            for some in np.split(seeds, range(n_together, len(seeds), n_together)):
                self.members_ += self.train_surrogate.train_many(
                    x, y, [rows] * len(some), some.tolist()
                )
        else:
            for seed in seeds.tolist():
                self.members_.append(self.train_surrogate.with_seed(seed)(x, y))
        return self

    def predict(self, x: Array) -> Bound:
        check_fitted(self, "members_")
        mean, deviation = spread(
            evaluate(member, x, "the ensemble member") for member in self.members_
        )
        return Bound(restore(mean, x), restore(GAUSSIAN_95 * deviation, x))
