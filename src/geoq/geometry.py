"""The geometry of a query relative to a set of points: its anchors, its displacement and its support distance."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from geoq.arrays import chunks, gathered, own_arrays, permutation, rows_of
from geoq.neighbors import Neighbors

# NumPy takes less time than torch for arrays of at most this many numbers.
SMALL_NUMBERS = 2**15
# A cell that is absent from a sample has the error of one of this many similar samples.
N_SIMILAR = 20
# Up to this many rows are taken at once.
FEW_ROWS = 2**10

T = TypeVar("T")


def anchor_mean(
    anchors: Int[Tensor, " n_queries n_anchors"],
    values: Float[Tensor, " n_points *shape"],
) -> Float[Tensor, " n_queries *shape"]:
    """Mean of the values of the anchors. It is summed one anchor at a time to avoid an array (queries, anchors, field)."""
    rows, columns = values, anchors.T
    if len(anchors) * values[:1].numel() <= SMALL_NUMBERS:
        rows, columns = own_arrays(values, anchors.T)
    if isinstance(rows, np.ndarray) and anchors.numel() <= FEW_ROWS:
        # One call, with the same sums as the loop.
        total = np.add.accumulate(rows.take(columns, axis=0))[-1]
        return torch.from_numpy(total / len(columns))
    total = rows_of(rows, columns[0])
    for column in columns[1:]:
        total += rows_of(rows, column)
    return torch.as_tensor(total / len(columns))


def anchor_error(
    anchors: Int[Tensor, " n_queries n_anchors"],
    error: Float[Tensor, " n_points *field"],
) -> Float[Tensor, " n_queries *field"]:
    r"""Mean observed error of each query's anchors.

    .. math:: \overline E_{k_a}(x) = \frac{1}{k_a} \sum_{x_j \in \mathcal N_{\phi, k_a}(x)} E(x_j)  (eq:anchor_average)
    """
    return anchor_mean(anchors, error)


def mean_over_field(error: Float[Tensor, " n *field"]) -> Float[Tensor, " n"]:
    """The error of each point, averaged over its field."""
    return error.reshape(len(error), -1).mean(dim=1)


def mean_over_channels(
    error: Float[Tensor, " n *field"],
) -> Float[Tensor, " n n_channels"]:
    """The error of each point, averaged over each channel of a field; the errors of a vector are not averaged."""
    channels = error.flatten(2).mean(dim=2) if error.ndim > 2 else error
    return channels.reshape(len(error), -1)


def displacement(
    z: Float[Tensor, " n_queries *z"],
    anchors: Int[Tensor, " n_queries n_anchors"],
    z_points: Float[Tensor, " n_points *z"],
) -> Float[Tensor, " n_queries *z"]:
    r"""Mean displacement from the anchors to the query.

    .. math:: \Delta z_{k_a}(x) = \frac{1}{k_a} \sum_{x_j \in \mathcal N_{\phi, k_a}(x)} (\phi(x) - \phi(x_j))  (eq:dz)
    """
    return z - anchor_mean(anchors, z_points)


def support_distance(
    distances: Float[Tensor, " n_queries n_support"],
) -> Float[Tensor, " n_queries"]:
    r"""Mean distance to the nearest points in the space of standardised inputs.

    .. math:: \Delta d_k(x) = \frac{1}{k} \sum_{x_j \in \mathcal N_{\nu, k}(x)} \|\nu(x) - \nu(x_j)\|  (eq:dd)
    """
    return distances.mean(dim=1)


@dataclass(frozen=True)
class Gathered:
    r"""Rows of a stored array, gathered when they are read, so that tuples of one point share its fields.

    A row is :math:`v_p`, the mean of :math:`v_a` over the anchors a, or the difference :math:`v_p - \operatorname{mean}_a v_a`.

    Attributes:
        values: the stored array v.
        dtype: the dtype of the gathered rows.
        point: p, a row of the stored array for each gathered row; None leaves this term out.
        anchors: rows of the stored array; None leaves the mean out.
    """

    values: Shaped[Tensor, " n_points *shape"]
    dtype: torch.dtype
    point: Int[Tensor, " n"] | None = None
    anchors: Int[Tensor, " n n_anchors"] | None = None

    def __len__(self) -> int:
        rows = self.anchors if self.point is None else self.point
        assert rows is not None
        return len(rows)

    def __getitem__(self, rows: slice | Tensor) -> "Gathered":
        point = None if self.point is None else self.point[rows]
        anchors = None if self.anchors is None else self.anchors[rows]
        return Gathered(self.values, self.dtype, point, anchors)

    def read(self) -> Shaped[Tensor, " n *shape"]:
        """The rows as one array."""
        if self.anchors is None:
            assert self.point is not None
            return self.values[self.point].to(self.dtype)
        mean = anchor_mean(self.anchors, self.values).to(self.dtype)
        return mean if self.point is None else self.values[self.point] - mean


class _Column:
    """An attribute that is set to a tensor or to gathered rows, and is read as a tensor."""

    def __init__(self, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, instance: Any, owner: type) -> Tensor:
        stored: Tensor | Gathered = vars(instance)[self.name]
        return stored.read() if isinstance(stored, Gathered) else stored

    def __set__(self, instance: Any, stored: Tensor | Gathered) -> None:
        vars(instance)[self.name] = stored


def gathers(*names: str) -> Callable[[type[T]], type[T]]:
    """Decorate a dataclass: the named attributes may be set to ``Gathered`` rows, and are read as tensors."""

    def decorate(cls: type[T]) -> type[T]:
        for name in names:
            setattr(cls, name, _Column(name))
        return cls

    return decorate


def assembled(cls: type[T], **attributes: Any) -> T:
    """An object of a decorated dataclass, from tensors and gathered rows, which the annotations of ``__init__`` do not contain."""
    made = cls.__new__(cls)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made


@runtime_checkable
class UsesNeighborhood(Protocol):
    """An increment model that uses the nearest points of a query if ``uses_neighborhood`` is true."""

    @property
    def uses_neighborhood(self) -> bool: ...


def uses_neighborhood(part: object) -> bool:
    """Whether an increment model uses the nearest points of a query."""
    return isinstance(part, UsesNeighborhood) and part.uses_neighborhood


@dataclass(frozen=True)
class Neighborhood:
    """The nearest points of each query, for increment models that use their outputs and errors.

    Attributes:
        rows: rows of the data that the support distance averages over, the nearest first.
        nearest: distance to the nearest point.
        side: length of the mean displacement to these points, divided by the support distance. It is about 0 amid the data
            and about 1 outside.
    """

    rows: Int[Tensor, " n k"]
    nearest: Float[Tensor, " n"]
    side: Float[Tensor, " n"]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The attributes in their order."""
        return self.rows, self.nearest, self.side


@gathers("displacement", "anchor_error", "prediction", "inputs")
@dataclass(frozen=True)
class GeometricFeatures:
    r"""The features of queries, which are available before the reference output is.

    .. math:: \psi_{k_a, k}(x) = (\Delta z_{k_a}(x), \Delta d_k(x))  (eq:psi)

    The paper's increment models use only ``displacement`` and ``support_distance``. Other models can also use the anchor
    error, the prediction of the surrogate and the standardised inputs nu(x), which psi does not contain.

    Attributes:
        displacement: mean displacement from the anchors, in representation space.
        support_distance: mean distance to the nearest points, in standardised inputs.
        anchor_error: mean observed error of the anchors.
        prediction: prediction of the surrogate.
        inputs: standardised inputs nu(x), or the coordinates T(x) of a metric.
        neighborhood: the nearest points; None unless the increment model uses them.
    """

    displacement: Float[Tensor, " n *z"]
    support_distance: Float[Tensor, " n"]
    anchor_error: Float[Tensor, " n *field"]
    prediction: Float[Tensor, " n *output"]
    inputs: Float[Tensor, " n *coordinates"]
    neighborhood: Neighborhood | None = None

    def __len__(self) -> int:
        return len(self.support_distance)

    def __getitem__(self, rows: slice | Tensor) -> "GeometricFeatures":
        return GeometricFeatures.of([part[rows] for part in self.stored])

    @property
    def stored(self) -> tuple[Tensor | Gathered, ...]:
        """All arrays in a fixed order, for ``of``; gathered rows are not read."""
        names = ("_displacement", "support_distance", "_anchor_error", "_prediction")
        own = tuple(vars(self)[name] for name in (*names, "_inputs"))
        return own if self.neighborhood is None else own + self.neighborhood.parts

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All arrays in a fixed order, as tensors."""
        return tuple(p.read() if isinstance(p, Gathered) else p for p in self.stored)

    @staticmethod
    def of(parts: Sequence[Tensor | Gathered]) -> "GeometricFeatures":
        """The features that have these parts."""
        names = ("displacement", "support_distance", "anchor_error", "prediction")
        own = dict(zip((*names, "inputs"), parts, strict=False))
        rest: Any = parts[5:]
        neighborhood = Neighborhood(*rest) if rest else None
        return assembled(GeometricFeatures, **own, neighborhood=neighborhood)

    @staticmethod
    def cat(parts: "list[GeometricFeatures]") -> "GeometricFeatures":
        """The rows of all parts, in order."""
        columns = zip(*(p.parts for p in parts), strict=True)
        return GeometricFeatures.of([torch.cat(column) for column in columns])

    @property
    def flat(self) -> Float[Tensor, " n n_features"]:
        """Psi as one vector per query."""
        return torch.cat(
            [self.displacement.reshape(len(self), -1), self.support_distance[:, None]],
            dim=1,
        )

    @property
    def norm(self) -> Float[Tensor, " n"]:
        r"""Length of psi, :math:`\|\psi\|_{\mathscr P}`."""
        return torch.hypot(self.distance, self.support_distance)

    @property
    def distance(self) -> Float[Tensor, " n"]:
        """Length of the displacement, computed in chunks."""
        length = torch.empty_like(self.support_distance)
        shape = self[:1].displacement.shape[1:]
        for rows in chunks(len(self), math.prod(shape)):
            part = self[rows].displacement
            length[rows] = torch.linalg.vector_norm(part.reshape(len(part), -1), dim=1)
        return length


@dataclass(frozen=True)
class Embedding:
    """Inputs in the coordinates of the geometry.

    Attributes:
        z: the representation phi(x).
        normalized: the standardised inputs nu(x), in which support distances are measured; the same tensor as ``z`` if one
            metric serves both.
        inputs: the coordinates that models and safe regions see; ``normalized`` if None.
    """

    z: Float[Tensor, " n *z"]
    normalized: Float[Tensor, " n *coordinates"]
    inputs: Float[Tensor, " n *coordinates"] | None = None

    def __len__(self) -> int:
        return len(self.z)

    def __getitem__(self, rows: slice | Tensor) -> "Embedding":
        def chosen(values: Tensor) -> Tensor:
            return values[rows] if isinstance(rows, slice) else gathered(values, rows)

        z = chosen(self.z)
        return Embedding(
            z=z,
            normalized=z if self.shared else chosen(self.normalized),
            inputs=None if self.inputs is None else chosen(self.inputs),
        )

    @property
    def coordinates(self) -> Float[Tensor, " n *coordinates"]:
        """The coordinates that models and safe regions see."""
        return self.normalized if self.inputs is None else self.inputs

    @property
    def shared(self) -> bool:
        """Whether phi is nu, so that one neighbour search gives both anchors and support distance."""
        return self.z is self.normalized


@dataclass(frozen=True)
class Relation:
    """Queries related to a set of points.

    Attributes:
        anchors: rows of the nearest points in representation space, the nearest first.
        anchor_distance: distances to the anchors.
        support_distance: the second part of psi.
        queries: phi of the queries.
        points: phi of the points.
        neighborhood: the nearest points, if the geometry collects them.
    """

    anchors: Int[Tensor, " n n_anchors"]
    anchor_distance: Float[Tensor, " n n_anchors"]
    support_distance: Float[Tensor, " n"]
    queries: Float[Tensor, " n *z"]
    points: Float[Tensor, " n_points *z"]
    neighborhood: Neighborhood | None = None

    @cached_property
    def displacement(self) -> Float[Tensor, " n *z"]:
        """The first part of psi."""
        return displacement(self.queries, self.anchors, self.points)


@dataclass(frozen=True)
class Geometry:
    """A set of points that queries are related to: all data at inference, the training points of a fold in calibration.

    Attributes:
        points: the points in the coordinates of the geometry.
        n_anchors: k_a, the number of anchors.
        n_support: k, the number of points that the support distance averages over.
        collects: whether ``relate`` returns the neighbourhood of the queries.
    """

    points: Embedding
    n_anchors: int
    n_support: int
    collects: bool = False

    @cached_property
    def _support(self) -> Neighbors:
        return Neighbors(_rows(self.points.normalized))

    @cached_property
    def _anchors(self) -> Neighbors:
        return self._support if self.points.shared else Neighbors(_rows(self.points.z))

    def relate(self, queries: Embedding) -> Relation:
        """Anchors and features of the queries relative to the points (lines 8 and 14)."""
        flat, k_a, k = _rows(queries.normalized), self.n_anchors, self.n_support
        if self.points.shared:
            distances, nearest = self._support.nearest(flat, max(k_a, k))
            anchor_distance, anchors = distances[:, :k_a], nearest[:, :k_a]
            distances, nearest = distances[:, :k], nearest[:, :k]
        else:
            distances, nearest = self._support.nearest(flat, k)
            anchor_distance, anchors = self._anchors.nearest(_rows(queries.z), k_a)
        near = self._neighborhood(flat, distances, nearest) if self.collects else None
        return Relation(
            anchors=anchors,
            anchor_distance=anchor_distance,
            support_distance=support_distance(distances),
            queries=queries.z,
            points=self.points.z,
            neighborhood=near,
        )

    def _neighborhood(
        self, queries: Tensor, distances: Tensor, rows: Tensor
    ) -> Neighborhood:
        centre = anchor_mean(rows, _rows(self.points.normalized))
        length = torch.linalg.vector_norm(queries - centre, dim=1)
        side = length / distances.mean(dim=1).clamp(min=1e-12)
        return Neighborhood(rows.to(torch.int32), distances[:, 0], side)


def similar_points(geometry: Geometry) -> Int[Tensor, " n_points n_others"]:
    """The nearest other points of each point, in random order: the nearest one is the anchor of many tuples."""
    n = min(N_SIMILAR + 1, len(geometry.points))
    wider = Geometry(geometry.points, n_anchors=n, n_support=1)
    nearest = wider.relate(geometry.points).anchors
    order = permutation(n - 1) + 1
    return nearest[:, order.to(nearest.device)]


def _rows(points: Float[Tensor, " n *shape"]) -> Float[Tensor, " n n_dims"]:
    return points.reshape(len(points), -1)
