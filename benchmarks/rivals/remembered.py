"""A recipe that trains once on the same data."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Int

from geoq.arrays import Array, take
from geoq.surrogate import Surrogate, TrainSurrogate, TrainTogether
from geoq.training.fold_surrogates import train_each


@dataclass
class RememberedTraining:
    """A ``train_surrogate`` that trains once on the same data, so that several methods use the same fold surrogates.

    Attributes:
        train_surrogate: the recipe, which is called for new data.
        seconds_saved: seconds of the trainings that were not repeated, so that each method can be charged its own.
    """

    train_surrogate: TrainSurrogate
    seconds_saved: float = field(default=0.0, init=False)
    _known: dict[str, tuple[Surrogate, float]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __call__(self, x: Array, y: Array) -> Surrogate:
        return self.train_many(x, y, [torch.arange(len(x))])[0]

    def n_together(self, x: Array, y: Array) -> int:
        """The number of surrogates that the recipe trains together."""
        recipe = self.train_surrogate
        return recipe.n_together(x, y) if isinstance(recipe, TrainTogether) else 1

    def train_many(
        self,
        x: Array,
        y: Array,
        subsets: Sequence[Int[Array, " _"]],
        seeds: Sequence[int] | None = None,
    ) -> list[Surrogate]:
        """A surrogate per subset of the rows; new ones are trained together if the recipe can."""
        if seeds is not None:
            raise ValueError(
                f"seeds={seeds}, but RememberedTraining identifies trainings by their data; use one recipe per seed."
            )
        rows = [torch.as_tensor(subset) for subset in subsets]
        keys = [
            "-".join(_fingerprint(take(part, some)) for part in (x, y)) for some in rows
        ]
        new = {k: r for k, r in zip(keys, rows, strict=True) if k not in self._known}
        self.seconds_saved += sum(self._known[k][1] for k in keys if k not in new)
        started = time.perf_counter()
        trained = train_each(self.train_surrogate, x, y, [*new.values()])
        seconds = (time.perf_counter() - started) / max(1, len(new))
        for key, surrogate in zip(new, trained, strict=True):
            self._known[key] = surrogate, seconds
        return [self._known[key][0] for key in keys]


def _fingerprint(array: Array) -> str:
    # Arrays and tensors differ: a surrogate may return only the kind that it was trained with.
    place = "numpy" if isinstance(array, np.ndarray) else str(array.device)
    values = array if isinstance(array, np.ndarray) else array.detach().cpu().numpy()
    label = f"{place} {values.dtype.str} {values.shape} ".encode()
    return hashlib.sha256(label + np.ascontiguousarray(values).tobytes()).hexdigest()
