"""Deep ensemble: several surrogates that differ only in the seed of their training."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from geoq.arrays import Array, restore
from geoq.baselines.bound import GAUSSIAN_95, Bound, spread
from geoq.checks import check_fitted, check_pairs, clear_fitted
from geoq.surrogate import Surrogate, TrainSurrogate, TrainTogether, evaluate


@runtime_checkable
class SeededRecipe(Protocol):
    """A function that trains a surrogate and whose seed can be set, such as ``geoq.TrainNetwork``."""

    def with_seed(self, random_state: int, /) -> TrainSurrogate:
        """Return the same function with another seed."""


@dataclass
class DeepEnsemble:
    r"""The paper's deep ensemble: the bound is a multiple of the standard deviation of the members.

    .. math:: \widehat E(x) = 1.96 \sigma(x)

    The prediction is the mean of the members.

    Attributes:
        train_surrogate: Function that trains one member: a ``geoq.TrainNetwork``, or an object with ``with_seed``.
        n_members: Number of members; the paper uses the number of folds of GeoQ, for equal cost.
        random_state: Seed from which the seeds of the members are derived.

    Example:
        >>> from functools import partial
        >>> from geoq import Training, TrainNetwork
        >>> from geoq.nets.mlp import MLP
        >>> x = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
        >>> recipe = TrainNetwork(partial(MLP, 1, 1, hidden=(8,)), training=Training(n_steps=20))
        >>> bound = DeepEnsemble(recipe, n_members=3).fit(x, x**2).predict(x)
        >>> bound.prediction.shape, bool((bound.error_hat > 0).all())
        ((40, 1), True)
    """

    train_surrogate: TrainSurrogate
    n_members: int = 5
    random_state: int = 0

    def fit(self, x: Array, y: Array) -> "DeepEnsemble":
        """Train all members on all rows."""
        if self.n_members < 2:
            raise ValueError(
                f"n_members={self.n_members}, but a standard deviation needs at least 2 members; 5 to 10 are usual."
            )
        if not isinstance(self.train_surrogate, SeededRecipe):
            raise TypeError(
                f"train_surrogate is a {type(self.train_surrogate).__name__} without with_seed(random_state), so all "
                "members would be equal; pass a geoq.TrainNetwork."
            )
        clear_fitted(self)
        check_pairs(x, y)
        # Seeds of 31 bits, which every library accepts.
        sequence = np.random.SeedSequence(self.random_state)
        seeds = sequence.generate_state(self.n_members) >> 1
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
        """Mean of the members, and 1.96 times their standard deviation as the bound."""
        check_fitted(self, "members_")
        mean, deviation = spread(
            evaluate(member, x, "the ensemble member") for member in self.members_
        )
        return Bound(restore(mean, x), restore(GAUSSIAN_95 * deviation, x))
