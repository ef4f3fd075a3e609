r"""A companion of a field surrogate: a second opinion about each cell, from the same pairs.

Two regressions are candidates, and the one with the smaller error at some held-out pairs is used. ``BetweenComponents`` is a Gaussian
process from the leading principal components of the inputs to the components of the outputs. ``AroundCells`` is one regression for all
cells. It sees the inputs u in a window around a cell, through random features:

.. math:: m_c(x) = u_c + W \, [\tanh(A u + b), \; u, \; 1]

Here u_c is added if inputs and outputs have the same shape, so that the regression learns the change of a state. The window can also
contain the prediction of ``BetweenComponents``.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int
from scipy.spatial import cKDTree

from geoq.arrays import chunks, flat, permutation
from geoq.data.domain import Layout, Mesh
from geoq.data.process import Opinion, Process, Smoothness, of_folds, smoothness_of

# The fraction of the variance that components explain and their largest number, for inputs and for outputs.
OF_INPUTS, OF_OUTPUTS = (0.99, 40), (0.999, 60)
# The number of random features, of cells that they are fitted to, and of parts of the pairs for held-out predictions.
N_FEATURES, N_CELLS, N_PARTS = 300, 20_000, 5
# Penalties relative to the mean of the diagonal, and scales of the random weights.
PENALTIES, SPREADS = 10.0 ** np.arange(-11, 0, 2), (0.3, 0.7, 1.5)
# Radii of the windows on lines, planes and volumes, and the numbers of nearest nodes on a mesh.
RADII, NODES = {1: (2, 4, 10), 2: (1, 2), 3: (1,)}, (7, 13)

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Components:
    """Leading principal components of rows, in units of their deviation."""

    mean: Float[np.ndarray, " p"]
    axes: Float[np.ndarray, " k p"]
    unit: float
    left: Float[np.ndarray, " p"]  # the mean square that the components leave in each column

    @staticmethod
    def fit(rows: Float[np.ndarray, " n p"], share: float, most: int) -> "Components":
        """Fit the components that explain this fraction of the variance, at most ``most``."""
        centred = rows - rows.mean(axis=0)
        _, size, axes = np.linalg.svd(centred, full_matrices=False)
        explained = np.cumsum(size**2) / max((size**2).sum(), 1e-300)
        axes = axes[: min(int((explained < share).sum()) + 1, most)]
        scores = centred @ axes.T
        left = ((centred - scores @ axes) ** 2).mean(axis=0)
        return Components(rows.mean(axis=0), axes, float(scores.std()) or 1.0, left)

    def __call__(self, rows: Float[np.ndarray, " n p"]) -> Float[np.ndarray, " n k"]:
        return np.asarray((rows - self.mean) @ self.axes.T / self.unit)


@dataclass(frozen=True)
class BetweenComponents:
    """A Gaussian process from the components of the inputs to the components of the outputs."""

    inputs: Components
    outputs: Components
    process: Process

    @staticmethod
    def fit(pairs: Pair, smoothness: Smoothness | None = None) -> "BetweenComponents":
        """Fit to pairs of flattened fields; all folds share the smoothness, and with it the number of inputs."""
        x, y = (flat(part) for part in pairs)
        most = OF_INPUTS[1] if smoothness is None else len(smoothness[1])
        inputs = Components.fit(x, 1.0 if smoothness else OF_INPUTS[0], most)
        outputs = Components.fit(y, *OF_OUTPUTS)
        z, scores = inputs(x), outputs(y)
        kernel, scales, noise = smoothness or smoothness_of(z, scores)
        # A fold of few pairs has fewer components than all pairs.
        smoothness = kernel, scales[: z.shape[1]], noise
        return BetweenComponents(inputs, outputs, Process.fit(z, scores, smoothness))

    def __call__(self, x: Float[np.ndarray, " n *inputs"]) -> Pair:
        """The prediction and its deviation, one row per query."""
        found, of = self.process(self.inputs(flat(x))), self.outputs
        mean = of.mean + of.unit * found.mean @ of.axes
        return mean, np.sqrt((of.unit * found.deviation) ** 2 @ of.axes**2 + of.left)


def cells_around(layout: Layout, radius: int) -> Int[np.ndarray, " n_cells n_near"]:
    """For each cell the cells in a window around it, which wraps around at the edges, or the nearest nodes of a mesh."""
    if isinstance(layout.domain, Mesh):
        nodes = layout.domain.coordinates
        distance, near = cKDTree(nodes).query(nodes, min(2 * radius, len(nodes)))
        # Of nodes at the same distance those with the smaller coordinates come first, however the nodes are numbered.
        keys = [*np.moveaxis(nodes[near], 2, 0)[::-1], (distance / distance.max()).round(9)]
        return np.take_along_axis(near, np.lexsort(keys, axis=1), axis=1)[:, :radius]
    place, n_axes = np.arange(math.prod(layout.cells)).reshape(layout.cells), len(layout.cells)
    shifts = product(range(-radius, radius + 1), repeat=n_axes)
    around = [np.roll(place, shift, axis=tuple(range(n_axes))).ravel() for shift in shifts]
    return np.stack(around, axis=1)


@dataclass(frozen=True)
class Window:
    """What a regression sees: the inputs within a radius and, where ``stacked``, what components predict within one cell."""

    layout: Layout
    radius: int
    stacked: bool

    @cached_property
    def near(self) -> tuple[np.ndarray, np.ndarray]:
        """The cells within the radius, and within one cell."""
        one = NODES[0] if isinstance(self.layout.domain, Mesh) else 1
        return cells_around(self.layout, self.radius), cells_around(self.layout, one)

    def by_cell(self, fields: np.ndarray) -> Float[np.ndarray, " n n_cells n_channels"]:
        """Fields with their channels last."""
        n_cells = math.prod(self.layout.cells)
        return fields.reshape(len(fields), -1, n_cells).transpose(0, 2, 1)

    def values(
        self, x: np.ndarray, first: np.ndarray | None, rows: np.ndarray, cells: np.ndarray
    ) -> Float[np.ndarray, " m n_seen"]:
        """The values around some cells of some rows of x, and of what the components predict first."""
        fields = [self.by_cell(part) for part in (x, first) if part is not None]
        found = [
            field[rows[:, None], near[cells]].reshape(len(rows), -1)
            for field, near in zip(fields, self.near, strict=False)
        ]
        return np.concatenate(found, axis=1)


def with_combinations(z: Float[np.ndarray, " m n_seen"]) -> Float[np.ndarray, " m n_all"]:
    """Tanh of random combinations, which are the same in every fit, the standardised values around a cell themselves, and 1."""
    rng, n = np.random.default_rng(0), z.shape[1]
    mixing = rng.normal(size=(n, N_FEATURES)) * rng.choice(SPREADS, N_FEATURES) / np.sqrt(n)
    combined = np.tanh(z @ mixing + rng.normal(size=N_FEATURES))
    return np.concatenate([combined, z, np.ones((len(z), 1))], axis=1)


@dataclass(frozen=True)
class AroundCells:
    """One regression for all cells, on random features of what lies around a cell; see the formula of the module."""

    window: Window
    whole: BetweenComponents | None
    is_change: bool
    mean: Float[np.ndarray, " n_seen"]
    scale: Float[np.ndarray, " n_seen"]
    weights: Float[np.ndarray, " n_all n_channels"]
    deviation: Float[np.ndarray, " n_channels"]

    @staticmethod
    def fit(pairs: Pair, smoothness: Smoothness, window: Window) -> "AroundCells":
        """Fit to pairs; the penalty is the one with the smallest error at the cells of a fifth of them."""
        x, y = pairs
        whole, first, is_change = None, None, x.shape == y.shape
        if window.stacked:
            whole = BetweenComponents.fit(pairs, smoothness)
            first = _held_out_predictions(pairs, smoothness) - (flat(x) if is_change else 0)
        target = window.by_cell(y - x if is_change else y)
        rows, cells = np.divmod(permutation(target[..., 0].size)[:N_CELLS], target.shape[1])
        values, target = window.values(x, first, rows, cells), target[rows, cells]
        mean, scale = values.mean(axis=0), values.std(axis=0) + 1e-12
        known, held_out = with_combinations((values - mean) / scale), rows % N_PARTS == 0

        def weights_of(own: np.ndarray, penalty: float) -> np.ndarray:
            matrix = known[own].T @ known[own]
            ridge = penalty * np.trace(matrix) / len(matrix) * np.eye(len(matrix))
            return np.linalg.solve(matrix + ridge, known[own].T @ target[own])

        gaps = [known[held_out] @ weights_of(~held_out, p) - target[held_out] for p in PENALTIES]
        losses = [(gap**2).mean(axis=0) for gap in gaps]
        best = int(np.argmin([loss.sum() for loss in losses]))
        weights = weights_of(rows >= 0, PENALTIES[best])
        fitted = window, whole, is_change, mean, scale, weights
        return AroundCells(*fitted, np.sqrt(losses[best]))

    def __call__(self, x: Float[np.ndarray, " n *inputs"]) -> Pair:
        """The prediction and its deviation, one row per query; one deviation per channel."""
        n_cells = math.prod(self.window.layout.cells)
        own = flat(x) if self.is_change else 0
        first = None if self.whole is None else self.whole(x)[0] - own
        parts = []
        for part in chunks(len(x), n_cells * len(self.weights)):
            places = np.divmod(np.arange(len(x[part]) * n_cells), n_cells)
            seen = self.window.values(x[part], None if first is None else first[part], *places)
            found = with_combinations((seen - self.mean) / self.scale) @ self.weights
            parts.append(flat(found.reshape(len(x[part]), n_cells, -1).transpose(0, 2, 1)))
        mean = np.concatenate(parts) + own
        return mean, np.broadcast_to(np.repeat(self.deviation, n_cells), mean.shape)


def _held_out_predictions(pairs: Pair, smoothness: Smoothness) -> np.ndarray:
    """What components predict at pairs that they have not seen: errors there are as large as at queries."""
    (x, y), part = pairs, np.arange(len(pairs[0])) % N_PARTS
    found = np.empty_like(flat(y))
    for number in range(N_PARTS):
        own = part == number
        found[own] = BetweenComponents.fit((x[~own], y[~own]), smoothness)(x[own])[0]
    return found


@dataclass(frozen=True)
class Companion:
    """A fitted companion, called like a ``Process`` with the coordinates of queries."""

    mean: Float[np.ndarray, " *inputs"]
    unit: Float[np.ndarray, " *inputs"]
    model: BetweenComponents | AroundCells
    words: ClassVar[str] = "A regression on the same fields"

    def __call__(self, z: Float[np.ndarray, " n n_inputs"]) -> Opinion:
        mean, deviation = self.model(self.mean + self.unit * z.reshape(-1, *self.mean.shape))
        return Opinion(mean, np.array(deviation), np.ones(len(mean)))


def field_opinion(
    z: Float[np.ndarray, " n n_inputs"],
    units: tuple[np.ndarray, np.ndarray],
    outputs: Float[np.ndarray, " n *output"],
    layout: Layout,
    splits: Iterable[tuple[np.ndarray, np.ndarray]],
) -> tuple[Companion, Opinion]:
    """The companion of all pairs, and what the companions of the folds predict at the points held out."""
    x = units[0] + units[1] * z.reshape(len(z), *units[0].shape)
    y = outputs.astype(float)
    make = _chosen(x, y, layout)
    return of_folds(lambda rows: Companion(*units, make((x[rows], y[rows]))), z, splits)


def _chosen(x: np.ndarray, y: np.ndarray, layout: Layout) -> Any:
    """How a companion is fitted: the candidate with the smallest error on a fifth of the pairs."""
    smoothness = BetweenComponents.fit((x, y)).process.smoothness
    radii = NODES if isinstance(layout.domain, Mesh) else RADII[len(layout.cells)]
    visible = layout.holds(x.shape[1:]) and layout.holds(y.shape[1:])
    windows = [Window(layout, *kind) for kind in product(radii, (False, True)) if visible]

    def make(window: Window | None) -> Any:
        if window is None:
            return lambda pairs: BetweenComponents.fit(pairs, smoothness)
        return lambda pairs: AroundCells.fit(pairs, smoothness, window)

    own = np.arange(len(x)) % N_PARTS == 0

    def error(window: Window | None) -> float:
        mean, _ = make(window)((x[~own], y[~own]))(x[own])
        return float(((mean - flat(y[own])) ** 2).mean())

    return make(min([None, *windows], key=error))
