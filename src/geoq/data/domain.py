"""Where the values of inputs and errors lie: in the columns of a table, on a regular grid or at the nodes of a mesh."""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float

from geoq.checks import check_integer, is_integer, warn

# An axis with at most this many entries can hold channels, and an axis with more entries than the second number is one of space.
FEW_CHANNELS, MANY_CHANNELS = 4, 16
# Fewer cells are numbers and not a field.
MIN_CELLS = 8
# A row of at most this many inputs, or of this many errors, is a row of a table.
MAX_COLUMNS = 64
# Arrays that do not lie on the cells are seen as constant channels if they have at most this many numbers.
MAX_CONSTANTS = 32
# A shape such as (64, 64, 3) probably has its channels last: at most this many channels after a grid of at least this size.
MAX_CHANNELS_LAST, MIN_GRID_SIZE = 4, 8

Shape: TypeAlias = tuple[int, ...]


class Shapes(NamedTuple):
    """The shapes of one row of each array, which are available before the fold surrogates are trained; z is the representation."""

    z: Shape
    error: Shape
    inputs: Shape
    outputs: Shape


@dataclass(frozen=True)
class Layout:
    """Where the values of an error and of its inputs lie; a table has no domain and no cells.

    Attributes:
        cells: the shape of the cells, the last axes of an array on the domain.
        on_cells: whether the errors lie on the cells. If not, they are a few numbers for each field of inputs.
    """

    domain: "Grid | Mesh | None" = None
    cells: Shape = ()
    on_cells: bool = False

    @property
    def is_table(self) -> bool:
        """Whether the rows are rows of a table."""
        return self.domain is None

    def described(self) -> str:
        """What the points are, in words."""
        if self.is_table:
            return "rows of a table"
        size, mesh = " x ".join(map(str, self.cells)), isinstance(self.domain, Mesh)
        where = f"a mesh of {size} nodes" if mesh else f"a grid of {size} cells"
        return f"fields on {where}" + ("" if self.on_cells else ", with a few errors each")

    @property
    def n_axes(self) -> int:
        """How many of the last axes of an error are cells."""
        return len(self.cells) if self.on_cells else 0

    def n_outputs(self, error: Shape) -> int:
        """The number of channels of an error of this shape."""
        return math.prod(error[: len(error) - self.n_axes])

    def holds(self, row: Shape) -> bool:
        """Whether a row of this shape lies on the cells."""
        return not self.is_table and row[len(row) - len(self.cells) :] == self.cells

    def is_visible(self, row: Shape) -> bool:
        """Whether a network can see rows of this shape: they lie on the cells, or they are a few numbers."""
        return self.holds(row) or math.prod(row) <= MAX_CONSTANTS

    def channels(self, rows: np.ndarray) -> Float[np.ndarray, " n n_channels *cells"]:
        """Rows as channels on the cells, in single precision; numbers become constant channels."""
        if self.holds(rows.shape[1:]):
            return rows.reshape(len(rows), -1, *self.cells).astype(np.float32)
        numbers = rows.reshape(len(rows), -1, *(1,) * len(self.cells))
        shape = (*numbers.shape[:2], *self.cells)
        return np.broadcast_to(numbers.astype(np.float32), shape)

    @property
    def order(self) -> np.ndarray | None:
        """The nodes of a mesh along a curve through it; None for a grid."""
        return None if self.domain is None else self.domain.order


@dataclass(frozen=True)
class Table:
    """Rows of a table: numbers and categories that have no places."""

    def layout(self, shapes: Shapes) -> Layout:
        """Each value of an error is an output of its own."""
        del shapes
        return Layout()


@dataclass(frozen=True)
class Grid:
    """A regular grid, the last axes of an array. All axes before it count channels.

    Attributes:
        n_axes: 1 for a line, 2 for a plane, 3 for a volume.
        periodic: whether each axis of the grid is periodic, such as longitudes; empty if none is.

    Example:
        Maps of latitude and longitude:

        >>> from geoq import GeoQ, Grid
        >>> estimator = GeoQ(lambda x: x, None, domain=Grid(2, periodic=(False, True)))
    """

    n_axes: int
    periodic: tuple[bool, ...] = ()
    order: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not is_integer(self.n_axes) or self.n_axes not in (1, 2, 3):
            raise ValueError(
                f"Grid(n_axes={self.n_axes!r}), but a grid is a line, a plane or a volume; choose 1, 2 or 3."
            )
        given = self.periodic if isinstance(self.periodic, tuple) else (None,)
        if not {*map(type, given)} <= {bool} or len(given) not in (0, self.n_axes):
            raise ValueError(
                f"Grid({self.n_axes}, periodic={self.periodic!r}): periodic has one entry, True or False, for each axis of the "
                f"grid; pass a tuple of length {self.n_axes}."
            )

    def layout(self, shapes: Shapes) -> Layout:
        """Where these arrays lie on the grid; raises if neither an error nor an input has the axes of the grid."""
        error, inputs = shapes.error[-self.n_axes :], shapes.inputs[-self.n_axes :]
        few = math.prod(error) < MIN_CELLS and error != inputs
        if len(error) == self.n_axes and not few:
            if _looks_channels_last(shape := shapes.error, self.n_axes):
                order = (0, len(shape), *range(1, len(shape)))
                warn(
                    f"an error has shape {shape}, and its last {self.n_axes} axes, {error}, are used as the grid; if the last "
                    "axis holds channels, put it first in x and y and let the surrogate work in that order: "
                    f"x.permute{order}, or numpy.moveaxis(x, -1, 1)."
                )
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
        >>> from geoq import GeoQ, Mesh
        >>> coordinates = np.random.default_rng(0).uniform(size=(500, 2))
        >>> GeoQ(lambda x: x, None, domain=Mesh(coordinates)).domain
        Mesh(500 nodes, 2 coordinates)
    """

    coordinates: Float[np.ndarray, " n_nodes n_dimensions"]
    n_neighbors: int | None = None
    n_axes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        given: Any = self.coordinates
        nodes = np.array(given.detach().cpu() if hasattr(given, "detach") else given)
        if nodes.ndim != 2 or len(nodes) < MIN_CELLS or not nodes.shape[1]:
            raise ValueError(
                f"Mesh(coordinates) has shape {nodes.shape}, but it needs one row of coordinates for each of at least "
                f"{MIN_CELLS} nodes; pass an array of shape (n_nodes, n_dimensions), such as mesh.points, or mesh.p.T of scikit-fem."
            )
        if not np.isfinite(nodes).all():
            raise ValueError(
                f"Mesh(coordinates) has {np.sum(~np.isfinite(nodes))} values that are not finite; give every node its place."
            )
        if self.n_neighbors is not None:
            check_integer(self.n_neighbors, "n_neighbors", 1)
        object.__setattr__(self, "coordinates", nodes.astype(float))

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

    @cached_property
    def order(self) -> np.ndarray:
        """The nodes along a curve: successive leaves of a k-d tree. A window of it is a group of neighbouring nodes."""
        from scipy.spatial import cKDTree

        return np.asarray(cKDTree(self.coordinates, leafsize=1).indices)

    def layout(self, shapes: Shapes) -> Layout:
        """Where these arrays lie on the nodes; raises if neither an error nor an input ends with the nodes."""
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


Domain: TypeAlias = Table | Grid | Mesh


def layout_of(domain: Domain | None, shapes: Shapes) -> Layout:
    """Where errors and inputs of these shapes lie. Without a domain, it is found from what the shapes have in common.

    Rows of up to 64 numbers are rows of a table. Anything else is on a grid, if the shapes contain one.

    Raises:
        ValueError: the shapes do not fit the domain, or have several possible grids.
    """
    if domain is not None:
        return domain.layout(shapes)
    error, inputs = shapes.error, shapes.inputs
    few_errors = len(error) < 2 and math.prod(error) <= MAX_COLUMNS
    if few_errors and (len(inputs) < 2 or math.prod(inputs[-2:]) < 2 * MIN_CELLS):
        return Layout()
    _check_channels_first(shapes)
    pairs = zip(error[::-1], inputs[::-1], strict=False)
    n_common = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
    common = error[len(error) - n_common :]
    before = inputs[: len(inputs) - len(common)]
    if common == error and before and before[-1] >= max(common, default=math.inf):
        # A plane of inputs with a line of errors, or channels on a line.
        raise _ambiguous((before[-1], *common), shapes)
    of_inputs = math.prod(error) < MIN_CELLS or (len(error) == 1 and len(inputs) > 1)
    end = common or (inputs if of_inputs else error)
    certain = 0 < len(common) < min(len(error), len(inputs))
    layout = Grid(_grid_axes(end, shapes, channels_before=certain)).layout(shapes)
    return layout if math.prod(layout.cells) >= MIN_CELLS else Layout()


def _grid_axes(end: Shape, shapes: Shapes, *, channels_before: bool) -> int:
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
    is_plane = is_short if len(end) == 3 else first > MANY_CHANNELS or not is_short
    if is_plane:
        return 2
    raise _ambiguous(end, shapes)


def _ambiguous(end: Shape, shapes: Shapes) -> ValueError:
    n = len(end)
    return ValueError(
        f"an error has shape {shapes.error} and a row of x has shape {shapes.inputs}, which can be {end[0]} channels on a grid "
        f"of shape {end[1:]}, or a grid of shape {end}; pass domain=Grid({n - 1}) or domain=Grid({n}) (from geoq import Grid)."
    )


def _looks_channels_last(shape: Shape, n_spatial: int) -> bool:
    """Whether the last axis of an error is short and the ``n_spatial`` axes before it are long."""
    if len(shape) <= n_spatial or shape[-1] > MAX_CHANNELS_LAST:
        return False
    return min(shape[-1 - n_spatial : -1]) >= MIN_GRID_SIZE


def _check_channels_first(shapes: Shapes) -> None:
    """Raise for shapes that agree in their first axes, which are long, and end with a short axis."""
    error, inputs = shapes.error, shapes.inputs
    before = [n for n in (1, 2, 3) if _looks_channels_last(error, n)]
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
