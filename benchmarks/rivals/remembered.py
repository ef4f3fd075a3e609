"""A recipe that trains once on the same data."""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks import record
from geoq.arrays import take, to_numbers
from geoq.training.sources import train_each


@dataclass
class RememberedTraining:
    """A ``train_surrogate`` that trains once on the same data, so that several methods use the same fold surrogates.

    Attributes:
        train_surrogate: the recipe, which is called for new data.
        seconds_saved: seconds of the trainings that were not repeated, so that each method can be charged its own.
    """

    train_surrogate: Any
    seconds_saved: float = field(default=0.0, init=False)
    _known: dict[str, tuple[Any, float]] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, x, y):
        return self.train_many(x, y, [np.arange(len(x))])[0]

    def n_together(self, x, y):
        """The number of surrogates that the recipe trains together."""
        recipe = self.train_surrogate
        return recipe.n_together(x, y) if hasattr(recipe, "train_many") else 1

    def train_many(self, x, y, subsets):
        """A surrogate per subset of the rows; new ones are trained together if the recipe can."""
        keys = [fingerprint(take(x, rows), take(y, rows)) for rows in subsets]
        new = {k: r for k, r in zip(keys, subsets, strict=True) if k not in self._known}
        self.seconds_saved += sum(self._known[k][1] for k in keys if k not in new)
        started = time.perf_counter()
        trained = train_each(self.train_surrogate, x, y, [*new.values()])
        seconds = (time.perf_counter() - started) / max(1, len(new))
        for key, surrogate in zip(new, trained, strict=True):
            self._known[key] = surrogate, seconds
        return [self._known[key][0] for key in keys]


def fingerprint(*arrays):
    """A hash of arrays. Arrays and tensors differ: a surrogate may return only the kind that it was trained with."""
    kinds = " ".join(type(array).__name__ for array in arrays)
    return f"{kinds} {record.fingerprint(*(to_numbers(array, 'data') for array in arrays))}"
