"""Where the values of a field lie: on a regular grid or at the nodes of a mesh, given or found from the shapes of the data."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from geoq.increments.shapes import Shapes, looks_channels_last, warn_of_channels_last
from geoq.nets.mesh import MeshNet, Stencils
from geoq.nets.unet import UNet
from geoq.settings import check_integer, is_integer

# An axis with at most this many entries can hold channels, and an axis with more entries than the second number is one of space.
FEW_CHANNELS, MANY_CHANNELS = 4, 16
# Fewer cells are numbers and not a field.
MIN_CELLS = 8
# Arrays that do not lie on the cells are seen as constant channels if they have at most this many numbers.
MAX_CONSTANTS = 32
# The number of neighbours of a node for each dimension of its coordinates.
NEIGHBORS_PER_DIMENSION = 4


@dataclass(frozen=True)
class Grid:
    """A regular grid, the last axes of an array. All axes before it count channels.

    Attributes:
        n_axes: 1 for a line, 2 for a plane, 3 for a volume.
        periodic: whether each axis of the grid is periodic, such as longitudes; empty if none is.

    Example:
        Maps of latitude and longitude:

        >>> from geoq import FieldScaleIncrement
        >>> increment = FieldScaleIncrement(domain=Grid(2, periodic=(False, True)))
    """

    n_axes: int
    periodic: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if not is_integer(self.n_axes) or self.n_axes not in (1, 2, 3):
            raise ValueError(
                f"Grid(n_axes={self.n_axes!r}), but a grid is a line, a plane or a volume; choose 1, 2 or 3."
            )
        usable = isinstance(self.periodic, tuple)
        usable = usable and all(isinstance(axis, bool) for axis in self.periodic)
        if not usable or len(self.periodic) not in (0, self.n_axes):
            raise ValueError(
                f"Grid({self.n_axes}, periodic={self.periodic!r}): periodic has one entry, True or False, for each axis of the "
                f"grid; pass a tuple of length {self.n_axes}."
            )

    def network(
        self, n_in: int, n_out: int, widths: tuple[int, ...], dropout: float
    ) -> UNet:
        """A new network on this grid."""
        return UNet(
            n_in,
            n_out,
            n_spatial=self.n_axes,
            periodic=self.periodic,
            widths=widths,
            dropout=dropout,
        )

    def layout(self, shapes: Shapes) -> "Layout":
        """Where these arrays lie on the grid; refused if neither an error nor an input has the axes of the grid."""
        error, inputs = shapes.error[-self.n_axes :], shapes.inputs[-self.n_axes :]
        few = math.prod(error) < MIN_CELLS and error != inputs
        if len(error) == self.n_axes and not few:
            warn_of_channels_last(shapes.error, self.n_axes)
            return Layout(self, error, on_cells=True)
        if len(inputs) < self.n_axes or len(shapes.error) > 1:
            raise ValueError(
                f"domain=Grid({self.n_axes}), but an error has shape {shapes.error} and a row of x has shape "
                f"{shapes.inputs}; put the grid last in y, or lower n_axes."
            )
        return Layout(self, inputs, on_cells=False)


@dataclass(frozen=True, eq=False)
class Mesh:
    """Fixed nodes, such as an irregular mesh, stations or a point cloud. The nodes are the last axis of an array.

    Attributes:
        coordinates: the coordinates of the nodes, one row per node, in the order of the last axis of ``y``. Use Cartesian
            coordinates for points on a sphere.
        n_neighbors: number of neighbours that a convolution combines at each node; None means 4 for each coordinate.

    Example:
        >>> from geoq import FieldScaleIncrement
        >>> coordinates = np.random.default_rng(0).uniform(size=(500, 2))
        >>> increment = FieldScaleIncrement(domain=Mesh(coordinates))
        >>> increment.domain
        Mesh(500 nodes, 2 coordinates)
    """

    coordinates: Float[np.ndarray, " n_nodes n_dimensions"]
    n_neighbors: int | None = None
    n_axes = 1

    def __post_init__(self) -> None:
        given: Any = self.coordinates
        given = given.detach().cpu() if isinstance(given, Tensor) else given
        nodes = np.array(given, dtype=float)
        if nodes.ndim != 2 or len(nodes) < MIN_CELLS or not nodes.shape[1]:
            raise ValueError(
                f"Mesh(coordinates) has shape {nodes.shape}, but it needs one row of coordinates for each of at least "
                f"{MIN_CELLS} nodes; pass an array of shape (n_nodes, n_dimensions)."
            )
        if not np.isfinite(nodes).all():
            raise ValueError(
                f"Mesh(coordinates) has {np.sum(~np.isfinite(nodes))} values that are not finite; give every node its place."
            )
        if self.n_neighbors is not None:
            check_integer(self.n_neighbors, "n_neighbors", 1)
        object.__setattr__(self, "coordinates", nodes)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Mesh)
            and self.n_neighbors == other.n_neighbors
            and np.array_equal(self.coordinates, other.coordinates)
        )

    def __hash__(self) -> int:
        return hash(self.coordinates.tobytes())

    def __repr__(self) -> str:
        n_nodes, n_dimensions = self.coordinates.shape
        return f"Mesh({n_nodes} nodes, {n_dimensions} coordinates)"

    def stencils(self, n_blocks: int) -> list[Stencils]:
        """The stencils of each block of a network; each block has twice as many neighbours as the block before it."""
        usual = NEIGHBORS_PER_DIMENSION * self.coordinates.shape[1]
        n_neighbors = self.n_neighbors or usual
        return [_stencils(self, n_neighbors * 2**block) for block in range(n_blocks)]

    def network(
        self, n_in: int, n_out: int, widths: tuple[int, ...], dropout: float
    ) -> MeshNet:
        """A new network on these nodes."""
        return MeshNet(
            n_in,
            n_out,
            stencils=self.stencils(len(widths)),
            widths=widths,
            dropout=dropout,
        )

    def layout(self, shapes: Shapes) -> "Layout":
        """Where these arrays lie on the nodes; refused if neither an error nor an input ends with the nodes."""
        cells = (len(self.coordinates),)
        if shapes.error[-1:] == cells:
            return Layout(self, cells, on_cells=True)
        if shapes.inputs[-1:] != cells or len(shapes.error) > 1:
            raise ValueError(
                f"domain=Mesh(coordinates) has {cells[0]} nodes, but an error has shape {shapes.error} and a row of x has shape "
                f"{shapes.inputs}; put the nodes last in y, in the order of the coordinates. Samples with different nodes "
                "must be interpolated to common nodes."
            )
        return Layout(self, cells, on_cells=False)


@lru_cache(maxsize=8)
def _stencils(mesh: Mesh, n_neighbors: int) -> Stencils:
    """The stencils of a mesh; kept, because several networks use them."""
    return Stencils.of(mesh.coordinates, n_neighbors)


Domain = Grid | Mesh


@dataclass(frozen=True)
class Layout:
    """Where the values of an error and of its inputs lie.

    Attributes:
        domain: the domain on which a network computes.
        cells: the shape of its cells, the last axes of an array on the domain.
        on_cells: whether the errors lie on the cells. If not, they are a few numbers for each field of inputs.
    """

    domain: Domain
    cells: tuple[int, ...]
    on_cells: bool

    @property
    def n_axes(self) -> int:
        """How many of the last axes of an error are cells."""
        return len(self.cells) if self.on_cells else 0

    def n_outputs(self, error: tuple[int, ...]) -> int:
        """The number of channels of an error of this shape."""
        return math.prod(error[: len(error) - self.n_axes])

    def is_visible(self, row: tuple[int, ...]) -> bool:
        """Whether a network can see rows of this shape: they lie on the cells, or they are a few numbers."""
        on_cells = row[len(row) - len(self.cells) :] == self.cells
        return on_cells or math.prod(row) <= MAX_CONSTANTS

    def channels(self, rows: Tensor) -> Float[Tensor, " n n_channels *cells"]:
        """Rows as channels on the cells; numbers become constant channels."""
        shape = tuple(rows.shape[1:])
        if shape[-len(self.cells) :] == self.cells or not self.is_visible(shape):
            return rows.reshape(len(rows), -1, *self.cells).float()
        flat = rows.reshape(len(rows), -1, *(1,) * len(self.cells)).float()
        return flat.expand(-1, -1, *self.cells)


def check_domain(domain: object) -> None:
    """Refuse anything that is not a domain."""
    if domain is not None and not isinstance(domain, Grid | Mesh):
        raise TypeError(
            f"domain={domain!r} is not a domain; pass Grid(n_axes) or Mesh(coordinates) (from geoq import Grid, Mesh)."
        )


def layout_of(domain: Domain | None, shapes: Shapes) -> Layout:
    """Where errors and inputs of these shapes lie. Without a domain, the grid is found from what the shapes have in common.

    Raises:
        ValueError: the shapes do not fit the domain, have no grid, or have several possible grids.
    """
    if domain is not None:
        return domain.layout(shapes)
    _refuse_channels_last(shapes)
    error, inputs = shapes.error, shapes.inputs
    common = _common_end(error, inputs)
    before = inputs[: len(inputs) - len(common)]
    if common == error and before and before[-1] >= max(common, default=math.inf):
        # A plane of inputs with a line of errors, or channels on a line.
        raise _ambiguous((before[-1], *common), shapes)
    of_inputs = math.prod(error) < MIN_CELLS or (len(error) == 1 and len(inputs) > 1)
    end = common or (inputs if of_inputs else error)
    if not end:
        raise _without_grid(shapes)
    certain = 0 < len(common) < min(len(error), len(inputs))
    layout = Grid(_grid_axes(end, shapes, channels_before=certain)).layout(shapes)
    if math.prod(layout.cells) < MIN_CELLS:
        raise _without_grid(shapes)
    return layout


def _common_end(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The last axes that two shapes have in common."""
    n_axes = 0
    while n_axes < min(len(a), len(b)) and a[-1 - n_axes] == b[-1 - n_axes]:
        n_axes += 1
    return a[len(a) - n_axes :]


def _grid_axes(end: tuple[int, ...], shapes: Shapes, *, channels_before: bool) -> int:
    """The number of axes of the grid at the end of a shape.

    Channels come first, so the question is whether the first axis of the end counts channels or is an axis of the grid. It
    counts channels if it is short, and belongs to the grid if it is about as long as the others. Between these cases, and
    for a short axis with other channels before it, both are possible.
    """
    if len(end) == 1:
        return 1
    first, others = end[0], end[1:]
    if len(end) > 3:
        return _grid_axes(others, shapes, channels_before=True)
    is_short = 2 * first < min(others)
    if channels_before:
        if first <= FEW_CHANNELS and is_short:
            raise _ambiguous(end, shapes)
        return len(end)
    if first == 1 or (first <= FEW_CHANNELS and (is_short or len(end) == 3)):
        return _grid_axes(others, shapes, channels_before=first > 1)
    if len(end) == 2 and (first > MANY_CHANNELS or not is_short):
        return 2
    if len(end) == 3 and is_short:
        return 2
    raise _ambiguous(end, shapes)


def _ambiguous(end: tuple[int, ...], shapes: Shapes) -> ValueError:
    n = len(end)
    return ValueError(
        f"an error has shape {shapes.error} and a row of x has shape {shapes.inputs}, which can be {end[0]} channels on a grid "
        f"of shape {end[1:]}, or a grid of shape {end}; pass domain=Grid({n - 1}) or domain=Grid({n}) (from geoq import Grid)."
    )


def _without_grid(shapes: Shapes) -> ValueError:
    return ValueError(
        f"an error has shape {shapes.error} and a row of x has shape {shapes.inputs}, in which there is no grid of at least "
        f"{MIN_CELLS} cells; put the grid last, or use an increment model for tables, such as TwoLawIncrement()."
    )


def _refuse_channels_last(shapes: Shapes) -> None:
    """Refuse shapes that agree in their first axes, which are long, and end with a short axis."""
    error, inputs = shapes.error, shapes.inputs
    before = [n for n in (1, 2, 3) if looks_channels_last(error, n)]
    if not before or error[:-1] != inputs[:-1]:
        return
    otherwise = (
        f", or pass domain=Grid({min(3, before[-1] + 1)}) if the last axis belongs to the grid (from geoq import Grid)"
        if error == inputs
        else ""
    )
    raise ValueError(
        f"an error has shape {error} and a row of x has shape {inputs}. Their last axis is short, so it probably counts channels, "
        "but channels come first; let the surrogate work with numpy.moveaxis(x, -1, 1) and numpy.moveaxis(y, -1, 1)"
        f"{otherwise}."
    )


def domain_state(domain: Domain | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and arrays of a domain, for a file."""
    if isinstance(domain, Mesh):
        nodes = torch.from_numpy(domain.coordinates)
        return {"n_neighbors": domain.n_neighbors}, {"domain.coordinates": nodes}
    if domain is None:
        return {}, {}
    return {"n_axes": domain.n_axes, "periodic": list(domain.periodic)}, {}


def domain_from_state(
    settings: dict[str, Any], arrays: dict[str, Tensor]
) -> Domain | None:
    """The domain that ``domain_state`` described."""
    if "domain.coordinates" in arrays:
        return Mesh(arrays["domain.coordinates"].numpy(), settings["n_neighbors"])
    if not settings:
        return None
    return Grid(settings["n_axes"], tuple(settings["periodic"]))
