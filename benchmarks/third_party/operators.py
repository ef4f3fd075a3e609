"""The Fourier neural operator of neuraloperator on Darcy flow and on Burgers' equation, with shifted inputs.

The package contains no data, so the solvers of ``benchmarks.fields.problems`` give the reference outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.fields.operator import Surrogate, standardised
from benchmarks.fields.problems import darcy, noisy, random_fields
from benchmarks.solvers import etdrk4

BATCH = 20


@dataclass(frozen=True)
class OperatorRecipe:
    """Train ``neuralop.models.FNO`` on standardised fields.

    Attributes:
        n_modes: Fourier modes along each axis.
        n_hidden: channels of the hidden layers.
        n_steps: training steps, each on a batch of 20 fields.
        seed: seed of the initial weights and of the batches.
    """

    n_modes: int
    n_hidden: int
    n_steps: int
    seed: int = 0

    def __call__(self, x, y):
        from neuralop.models import FNO

        of_x, of_y = moments(x), moments(y)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            network = FNO(
                n_modes=(self.n_modes,) * (x.ndim - 2),
                in_channels=x.shape[1],
                out_channels=y.shape[1],
                hidden_channels=self.n_hidden,
            )
        inputs, outputs = standardised(x, of_x), standardised(y, of_y)
        optimizer = torch.optim.AdamW(network.parameters(), 5e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, self.n_steps)
        rng = np.random.default_rng(self.seed)
        for _ in range(self.n_steps):
            rows = rng.choice(len(x), min(BATCH, len(x)), replace=False)
            optimizer.zero_grad()
            (network(inputs[rows]) - outputs[rows]).square().mean().backward()
            optimizer.step()
            schedule.step()
        return Surrogate(network.eval(), of_x, of_y)


def moments(fields):
    axes = (0, *range(2, fields.ndim))
    return fields.mean(axes, keepdims=True), fields.std(axes, keepdims=True)


@dataclass(frozen=True)
class FieldCase:
    """Inputs, reference solver, shifted inputs and the recipe of the operator.

    Attributes:
        name: the name in tables.
        draw: inputs from a random generator and their number.
        solve: the reference outputs of inputs.
        shifts: by name, a function that draws shifted inputs and the solver of these inputs.
        recipe: the training.
    """

    name: str
    draw: Callable
    solve: Callable
    shifts: dict[str, tuple[Callable, Callable]]
    recipe: OperatorRecipe


SQUARE, LINE = 32, 64


def coefficients(smoothness=3.5, contrast=0.8):
    """Windows of larger periodic fields, which are not periodic themselves."""

    def draw(rng, n):
        wide = random_fields(rng, n, (2 * SQUARE, 2 * SQUARE), smoothness)
        return contrast * wide[:, None, :SQUARE, :SQUARE]

    return draw


def starts(smoothness=3.0, amplitude=1.0):
    return lambda rng, n: amplitude * random_fields(rng, n, (LINE,), smoothness)[:, None]


def burgers(viscosity=0.02):
    """Solve u_t = viscosity u_xx - u u_x until t = 0.6 on a periodic interval."""

    def solve(x):
        return etdrk4(
            x, length=2 * np.pi, linear=lambda k: -viscosity * k**2, dt=0.005, n_steps=120
        )

    return solve


FIELD_CASES = (
    FieldCase(
        "Darcy",
        coefficients(),
        darcy,
        {
            "rougher": (coefficients(2.5), darcy),
            "smoother": (coefficients(5.0), darcy),
            "contrast x 1.5": (coefficients(contrast=1.2), darcy),
            "contrast x 2": (coefficients(contrast=1.6), darcy),
            "noisy": (noisy(coefficients(), 0.2), darcy),
        },
        OperatorRecipe(n_modes=8, n_hidden=16, n_steps=300),
    ),
    FieldCase(
        "Burgers",
        starts(),
        burgers(),
        {
            "rougher": (starts(2.0), burgers()),
            "smoother": (starts(4.0), burgers()),
            "amplitude x 1.5": (starts(amplitude=1.5), burgers()),
            "noisy": (noisy(starts(), 0.2), burgers()),
            "viscosity x 0.6 (not in x)": (starts(), burgers(0.012)),
        },
        OperatorRecipe(n_modes=16, n_hidden=24, n_steps=600),
    ),
)
