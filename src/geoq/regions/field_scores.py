r"""What a field is compared by: its small windows, two moments of each channel, and its large patterns.

Distances between whole fields are nearly equal and hardly change when a field becomes rougher. Windows have few cells, so that
distances between them differ, and there are many of them, so that the data fill their space.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from geoq.coordinates import CHANGED
from geoq.neighbors import Neighbors

# Fields with their channels first.
Grids: TypeAlias = Float[Tensor, " n channels *grid"]
# Cells of a window along each axis: on a line, and on grids with more axes.
WINDOW_ON_LINE, WINDOW = 7, 3
N_POSITIONS = 64
# Windows of the data that are kept.
N_WINDOWS = 2048
# Principal axes of the windows with a smaller deviation, relative to the first one, are directions without variation.
MIN_DEVIATION = 0.01
# The fraction of the variance of a channel that counts as none, and the smallest deviation of a moment between fields.
VARIANCE_FLOOR, MIN_MOMENT_DEVIATION = 1e-4, 0.02
# Patterns are linear functions of at most this many blocks of cells; their axes come from at most this many fields.
N_BLOCKS, N_PATTERN_FIELDS = 2048, 512
# The largest number of channels of a row with two axes.
MAX_CHANNELS = 16
MIN_CELLS = 16
# Below this size a deviation is rounding.
TINY = 1e-12


def grid_axes(row_shape: Sequence[int]) -> int:
    """The number of axes of the grid of a row, from its shape: channels come first and the grid comes last.

    A row with one axis is a line. A row with two axes is a plane if the first axis has more than 16 entries or is at least half
    as long as the second one; otherwise it consists of channels on a line. With three and four axes, the first one counts
    the channels.
    """
    if len(row_shape) == 2:
        first, second = row_shape
        return 2 if first > MAX_CHANNELS or 2 * first >= second else 1
    return min(3, max(1, len(row_shape) - 1))


def has_grid(row_shape: Sequence[int]) -> bool:
    """Whether inputs of this shape are fields: they have two axes or more, and a grid of at least 16 cells."""
    grid = row_shape[len(row_shape) - grid_axes(row_shape) :]
    return len(row_shape) > 1 and math.prod(grid) >= MIN_CELLS


@dataclass(frozen=True)
class Fields:
    """Inputs on a grid, and the output or its change from the input; None if the output lives on another grid."""

    inputs: Grids
    answer: Float[Tensor, " n more *grid"] | None = None

    @property
    def joined(self) -> Float[Tensor, " n all *grid"]:
        """Input and answer as channels of one field."""
        assert self.answer is not None
        return torch.cat([self.inputs, self.answer], dim=1)

    @property
    def numbers(self) -> int:
        """About how many numbers the scores of one field need."""
        n_channels, *grid = self.inputs.shape[1:]
        n_more = 0 if self.answer is None else self.answer.shape[1]
        window = math.prod(window_sizes(grid))
        return 2 * (n_channels + n_more) * (math.prod(grid) + N_POSITIONS * window)


@dataclass(frozen=True)
class Layout:
    """How rows of inputs and outputs are fields.

    Attributes:
        n_spatial: the number of axes of the grid, which come last.
        answers: whether the outputs live on the grid of the inputs.
        changes: whether the answer is the change from the input to the output, as in a step in time.
        order: the nodes of a mesh along a curve through it; None for a grid.
    """

    n_spatial: int
    answers: bool
    changes: bool
    order: Sequence[int] | None = None

    @staticmethod
    def of(
        inputs: Float[Tensor, " n *input"],
        outputs: Float[Tensor, " n *output"],
        n_spatial: int,
        order: Sequence[int] | None = None,
    ) -> "Layout":
        """Use changes where the outputs are closer to the inputs than to their mean."""
        grid, own = inputs.shape[-n_spatial:], outputs.shape[-n_spatial:]
        on_grid = outputs.ndim > n_spatial and own == grid
        changes = on_grid and inputs.numel() == outputs.numel()
        if changes:
            step = (outputs - inputs.reshape(outputs.shape)).square().mean()
            changes = bool(step < (outputs - outputs.mean(dim=0)).square().mean())
        return Layout(n_spatial, on_grid, changes, order)

    def fields(self, inputs: Tensor, output: Tensor) -> Fields:
        """Arrange inputs and outputs with their channels first."""
        grid = inputs.shape[inputs.ndim - self.n_spatial :]
        fields = self._ordered(inputs.reshape(len(inputs), -1, *grid).double())
        if not self.answers:
            return Fields(fields)
        answer = self._ordered(output.reshape(len(output), -1, *grid).to(fields))
        return Fields(fields, answer - fields if self.changes else answer)

    def _ordered(self, fields: Tensor) -> Tensor:
        return fields if self.order is None else fields[..., list(self.order)]

    def cell(self, window: int, grid: Sequence[int]) -> int | tuple[int, ...]:
        """The cell or node of the user in the middle of the window with this number."""
        place = place_of(window, grid)
        if self.order is not None:
            return self.order[place[0]]
        return place[0] if len(place) == 1 else place


def window_sizes(grid: Sequence[int]) -> list[int]:
    """The number of cells of a window along each axis."""
    size = WINDOW_ON_LINE if len(grid) == 1 else WINDOW
    return [min(size, n) for n in grid]


def positions(grid: Sequence[int]) -> list[Int[np.ndarray, " n"]]:
    """The first cells of the windows along each axis, evenly spread."""
    per_axis = max(1, round(N_POSITIONS ** (1 / len(grid))))
    return [
        np.unique(np.linspace(0, n - size, per_axis).round().astype(int))
        for n, size in zip(grid, window_sizes(grid), strict=True)
    ]


def place_of(window: int, grid: Sequence[int]) -> tuple[int, ...]:
    """The cell in the middle of the window with this number."""
    at = positions(grid)
    index = np.unravel_index(window, [len(axis) for axis in at])
    return tuple(
        int(axis[i]) + size // 2
        for axis, i, size in zip(at, index, window_sizes(grid), strict=True)
    )


def windows_of(fields: Grids) -> Float[Tensor, " n n_positions entries"]:
    """The windows of each field at evenly spread positions, each with all channels."""
    grid, cut = fields.shape[2:], fields
    for axis, (size, at) in enumerate(
        zip(window_sizes(grid), positions(grid), strict=True), start=2
    ):
        rows = torch.as_tensor(at, device=fields.device)
        cut = cut.unfold(axis, size, 1).index_select(axis, rows)
    n_positions = math.prod(cut.shape[2 : 2 + len(grid)])
    return cut.movedim(1, 1 + len(grid)).reshape(len(fields), n_positions, -1)


@dataclass(frozen=True)
class Windows:
    r"""Windows of the data, and the distance from the windows of a field to the nearest of them.

    .. math:: z = (V^T w / \sigma, \; \|w - V V^T w\| / (0.01 \sigma_1))

    Distances are Euclidean in z: w is a standardised window, V are the principal axes with deviations of at least 1 % of the
    first one, and the last coordinate is the length off their span.
    """

    mean: Float[Tensor, " entries"]
    scale: Float[Tensor, " entries"]
    axes: Float[Tensor, " entries n_axes"]
    deviation: Float[Tensor, " n_axes"]
    cloud: Float[Tensor, " n_windows n_coordinates"]

    @staticmethod
    def fit(drawn: Float[Tensor, " n_windows entries"]) -> "Windows":
        """Find the principal axes of windows of the data, and keep the windows in these axes."""
        mean, scale = drawn.mean(dim=0), drawn.std(dim=0, correction=0)
        varies = scale > TINY * mean.abs().clamp(min=1)
        scale = torch.where(varies, scale, 1.0)
        standard = (drawn - mean) / scale
        _, size, directions = torch.linalg.svd(standard, full_matrices=False)
        size = (size / math.sqrt(len(drawn))).clamp(min=TINY)
        kept = size > MIN_DEVIATION * size[0]
        kept[0] = True
        axes, deviation = directions[kept].T.contiguous(), size[kept]
        bare = Windows(mean, scale, axes, deviation, drawn[:0, :1])
        return Windows(mean, scale, axes, deviation, bare._coordinates(drawn))

    @cached_property
    def _neighbors(self) -> Neighbors:
        return Neighbors(self.cloud)

    def _coordinates(self, windows: Tensor) -> Tensor:
        standard = (windows - self.mean) / self.scale
        along = standard @ self.axes
        off = torch.linalg.vector_norm(standard - along @ self.axes.T, dim=1)
        off = off / (MIN_DEVIATION * self.deviation[0])
        return torch.cat([along / self.deviation, off[:, None]], dim=1)

    def distances(self, fields: Grids) -> Float[Tensor, " n n_positions"]:
        """Distance from the window at each position to the nearest window of the data."""
        windows = windows_of(fields)
        flat = self._coordinates(windows.reshape(-1, windows.shape[2]))
        return self._neighbors.nearest(flat, 1)[0].reshape(windows.shape[:2])


@dataclass(frozen=True)
class Values:
    """The values that some numbers take in the data, and the distance to the nearest of them, in deviations."""

    deviation: Float[Tensor, " k"]
    taken: Float[Tensor, " k n_points"]

    @staticmethod
    def fit(values: Float[Tensor, " n k"], smallest: float) -> "Values":
        """Sort the values of each number; ``smallest`` is the smallest deviation."""
        deviation = values.std(dim=0, correction=0).clamp(min=smallest)
        return Values(deviation, values.T.contiguous().sort(dim=1).values)

    def gaps(self, values: Float[Tensor, " n k"]) -> Float[Tensor, " n k"]:
        """Distance of each number to the nearest value in the data, in deviations."""
        columns, last = values.T.contiguous(), self.taken.shape[1] - 1
        above = torch.searchsorted(self.taken, columns)
        upper = self.taken.gather(1, above.clamp(max=last)) - columns
        lower = columns - self.taken.gather(1, (above - 1).clamp(min=0))
        return torch.minimum(upper.abs(), lower.abs()).T / self.deviation

    def around(self, number: int, value: float) -> tuple[float, float]:
        """The neighbouring values of a number in the data; the ends of its range if it lies outside."""
        taken = self.taken[number].cpu().numpy()
        if not taken[0] < value < taken[-1]:
            return float(taken[0]), float(taken[-1])
        above = int(np.searchsorted(taken, value))
        return float(taken[above - 1]), float(taken[above])


@dataclass(frozen=True)
class Channels:
    """The typical size of each channel over all cells and fields, which is the measure of moments and patterns."""

    mean: Float[Tensor, " channels"]
    deviation: Float[Tensor, " channels"]

    @staticmethod
    def fit(mean: Float[Tensor, " n channels"], square: Tensor) -> "Channels":
        """Combine the means and the mean squares of the channels of all fields."""
        mean, square = mean.mean(dim=0), square.mean(dim=0)
        deviation = (square - mean.square()).clamp(min=0).sqrt()
        varies = deviation > CHANGED * square.sqrt()
        return Channels(mean, torch.where(varies, deviation, 0.0))

    @property
    def scale(self) -> Float[Tensor, " channels"]:
        """The deviation; 1 for a channel that is constant in the data."""
        return torch.where(self.deviation > 0, self.deviation, 1.0)

    def moments(self, fields: Grids) -> Float[Tensor, " n n_moments"]:
        r"""Mean and logarithm of the deviation of each channel.

        .. math:: m_c / \sigma_c, \qquad \tfrac12 \ln(v_c / \sigma_c^2 + 10^{-4})
        """
        flat = fields.flatten(start_dim=2) / self.scale[:, None]
        variance = flat.var(dim=2, correction=0)
        spread = 0.5 * (variance + VARIANCE_FLOOR).log()
        return torch.cat([flat.mean(dim=2), spread], dim=1)

    def moment(self, number: int, value: float) -> tuple[int, str, float]:
        """The channel, the name and the value in the units of the user of one of the moments."""
        channel = number % len(self.mean)
        scale = float(self.scale[channel])
        if number < len(self.mean):
            return channel, "mean", value * scale
        variance = max(0.0, math.exp(2 * value) - VARIANCE_FLOOR)
        return channel, "standard deviation", math.sqrt(variance) * scale

    def blocks(self, fields: Grids) -> Float[Tensor, " n n_blocks"]:
        """Means over blocks of cells in deviations of the channel; the cells themselves if there are few."""
        grid = fields.shape[2:]
        shape = (-1, *(1,) * len(grid))
        standard = (fields - self.mean.reshape(shape)) / self.scale.reshape(shape)
        coarser = (math.prod(fields.shape[1:]) / N_BLOCKS) ** (1 / len(grid))
        if coarser > 1:
            pool: Callable[..., Tensor] = getattr(
                functional, f"adaptive_avg_pool{len(grid)}d"
            )
            standard = pool(standard, [max(1, int(n / coarser)) for n in grid])
        return standard.flatten(start_dim=1)


@dataclass(frozen=True)
class Patterns:
    """The leading principal axes of the blocks of a field."""

    mean: Float[Tensor, " n_blocks"]
    axes: Float[Tensor, " n_blocks k"]

    @staticmethod
    def fit(blocks: Float[Tensor, " n n_blocks"], n_axes: int) -> "Patterns":
        """Find the leading axes from at most 512 fields, evenly spread over the rows."""
        few = blocks[:: max(1, math.ceil(len(blocks) / N_PATTERN_FIELDS))]
        mean = few.mean(dim=0)
        _, size, directions = torch.linalg.svd(few - mean, full_matrices=False)
        kept = size > 1e-3 * size[0].clamp(min=TINY)
        kept[0] = True
        kept[n_axes:] = False
        return Patterns(mean, directions[kept].T.contiguous())

    def __call__(self, blocks: Float[Tensor, " n n_blocks"]) -> Float[Tensor, " n k"]:
        """The coordinates of fields along the axes."""
        return (blocks - self.mean) @ self.axes
