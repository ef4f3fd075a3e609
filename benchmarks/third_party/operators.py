"""The Fourier neural operator of neuraloperator on Darcy flow and on Burgers' equation, with shifted inputs.

The package contains no data, so the solvers of ``benchmarks.fields.problems`` give the reference outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.fields.operator import BATCH, fitted, moments
from benchmarks.fields.problems import burgers, burgers_fields, darcy, darcy_fields, noisy


@dataclass(frozen=True)
class OperatorRecipe:
    """Train ``neuralop.models.FNO`` on standardised fields."""

    n_modes: int
    n_hidden: int
    n_steps: int
    seed: int = 0

    def __call__(self, x, y):
        from neuralop.models import FNO

        channels = {"in_channels": x.shape[1], "out_channels": y.shape[1]}
        n_modes = (self.n_modes,) * (x.ndim - 2)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            network = FNO(n_modes=n_modes, hidden_channels=self.n_hidden, **channels)
        rng, n = np.random.default_rng(self.seed), min(BATCH, len(x))
        batches = (rng.choice(len(x), n, replace=False) for _ in range(self.n_steps))
        optimizer = torch.optim.AdamW(network.parameters(), 5e-3)
        parts = moments(x), moments(y)
        return fitted(network, x, y, parts, optimizer, batches, self.n_steps)


@dataclass(frozen=True)
class FieldCase:
    """Inputs ``draw(rng, n)``, the reference solver, shifted inputs with their solvers, and the recipe of the operator."""

    name: str
    draw: Callable
    solve: Callable
    shifts: dict[str, tuple[Callable, Callable]]
    recipe: OperatorRecipe


coefficients, starts = partial(darcy_fields, size=32), burgers_fields
_DARCY = {
    "rougher": coefficients(2.5),
    "smoother": coefficients(5.0),
    "contrast x 1.5": coefficients(contrast=1.2),
    "contrast x 2": coefficients(contrast=1.6),
    "noisy": noisy(coefficients(), 0.2),
}
_BURGERS = {
    "rougher": starts(2.0),
    "smoother": starts(4.0),
    "amplitude x 1.5": starts(amplitude=1.5),
    "noisy": noisy(starts(), 0.2),
}
_DARCY = {name: (draw, darcy) for name, draw in _DARCY.items()}
_BURGERS = {name: (draw, burgers) for name, draw in _BURGERS.items()}
_BURGERS["viscosity x 0.6 (not in x)"] = starts(), partial(burgers, viscosity=0.012)
FIELD_CASES = (
    FieldCase("Darcy", coefficients(), darcy, _DARCY, OperatorRecipe(8, 16, 300)),
    FieldCase("Burgers", starts(), burgers, _BURGERS, OperatorRecipe(16, 24, 600)),
)
