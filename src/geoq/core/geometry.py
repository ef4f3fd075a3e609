"""The geometry of a query relative to a set of points: its anchors, its displacement and its support distance."""

from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from geoq.arrays import flat
from geoq.data.process import Opinion
from geoq.neighbors import Neighbors


def anchor_mean(
    anchors: Int[np.ndarray, " n n_anchors"], values: Float[np.ndarray, " n_points *shape"]
) -> Float[np.ndarray, " n *shape"]:
    r"""Mean of the values of the anchors, such as their observed errors.

    .. math:: \overline E_{k_a}(x) = \frac{1}{k_a} \sum_{x_j \in \mathcal N_{\phi, k_a}(x)} E(x_j)  (eq:anchor_average)
    """
    total = values[anchors[:, 0]]
    for column in anchors.T[
        1:
    ]:  # one anchor at a time, to avoid an array (queries, anchors, field)
        total = total + values[column]
    return total / anchors.shape[1] if anchors.shape[1] > 1 else total


def displacement(
    z: Float[np.ndarray, " n *z"],
    anchors: Int[np.ndarray, " n n_anchors"],
    z_points: Float[np.ndarray, " n_points *z"],
) -> Float[np.ndarray, " n *z"]:
    r"""Mean displacement from the anchors to the query.

    .. math:: \Delta z_{k_a}(x) = \frac{1}{k_a} \sum_{x_j \in \mathcal N_{\phi, k_a}(x)} (\phi(x) - \phi(x_j))  (eq:dz)
    """
    return z - anchor_mean(anchors, z_points)


@dataclass(frozen=True)
class Space:
    """Inputs in the coordinates of the geometry.

    ``z`` is the representation phi(x). ``normalized`` are the standardised inputs nu(x), in which support distances are measured, or
    the same array as ``z`` if one metric serves both. ``inputs`` are the coordinates T(x) that bounds and safe regions see.
    """

    z: Float[np.ndarray, " n *z"]
    normalized: Float[np.ndarray, " n *coordinates"]
    inputs: Float[np.ndarray, " n *inputs"]

    def __len__(self) -> int:
        return len(self.z)

    def __getitem__(self, rows: slice | np.ndarray) -> "Space":
        z = self.z[rows]
        normalized = z if self.shared else self.normalized[rows]
        return Space(z, normalized, z if self.inputs is self.z else self.inputs[rows])

    @property
    def shared(self) -> bool:
        """Whether phi is nu, so that one neighbour search gives both anchors and support distance."""
        return self.z is self.normalized


@dataclass(frozen=True)
class Relation:
    """Queries related to a set of points.

    ``anchors`` are the rows of the nearest points in representation space, ``near`` of the points that the support distance averages over, both
    nearest first, and ``nearest`` is the distance to the nearest point. ``side`` is the length of the mean displacement to the near points,
    divided by the support distance: about 0 amid the points and about 1 outside.
    """

    anchors: Int[np.ndarray, " n n_anchors"]
    anchor_distance: Float[np.ndarray, " n n_anchors"]
    support_distance: Float[np.ndarray, " n"]
    near: Int[np.ndarray, " n k"]
    nearest: Float[np.ndarray, " n"]
    side: Float[np.ndarray, " n"]

    def __len__(self) -> int:
        return len(self.anchors)

    def __getitem__(self, rows: slice | np.ndarray) -> "Relation":
        return Relation(*(getattr(self, part.name)[rows] for part in fields(self)))

    @staticmethod
    def cat(parts: "list[Relation]") -> "Relation":
        """The rows of all parts, in order."""
        columns = ([getattr(part, f.name) for part in parts] for f in fields(Relation))
        return Relation(*map(np.concatenate, columns))


@dataclass(frozen=True)
class Geometry:
    """A set of points that queries are related to: all data at inference, the training points of a fold in calibration.

    ``n_anchors`` is k_a, ``n_support`` is k, and ``sided`` states whether ``relate`` computes the side, which needs the coordinates of
    all neighbours.
    """

    points: Space
    n_anchors: int
    n_support: int
    sided: bool = True

    @cached_property
    def _support(self) -> Neighbors:
        return Neighbors(flat(self.points.normalized))

    @cached_property
    def _anchors(self) -> Neighbors:
        return self._support if self.points.shared else Neighbors(flat(self.points.z))

    def relate(self, queries: Space) -> Relation:
        r"""Anchors of the queries, and their distances to the points (lines 8 and 14).

        .. math:: \Delta d_k(x) = \frac{1}{k} \sum_{x_j \in \mathcal N_{\nu, k}(x)} \|\nu(x) - \nu(x_j)\|  (eq:dd)
        """
        rows, k_a, k = flat(queries.normalized), self.n_anchors, self.n_support
        if self.points.shared:
            distances, near = self._support.nearest(rows, max(k_a, k))
            anchor_distance, anchors = distances[:, :k_a], near[:, :k_a]
            distances, near = distances[:, :k], near[:, :k]
        else:
            distances, near = self._support.nearest(rows, k)
            anchor_distance, anchors = self._anchors.nearest(flat(queries.z), k_a)
        distance = distances.mean(axis=1)
        side = np.zeros(len(rows))
        if self.sided:
            centre = anchor_mean(near, flat(self.points.normalized))
            side = np.linalg.norm(rows - centre, axis=1) / distance.clip(min=1e-12)
        return Relation(anchors, anchor_distance, distance, near, distances[:, 0], side)


@dataclass(frozen=True)
class Features:
    r"""The features of queries, which are available before the reference output is.

    .. math:: \psi_{k_a, k}(x) = (\Delta z_{k_a}(x), \Delta d_k(x))  (eq:psi)

    The paper's bounds use only ``displacement`` and ``support_distance``. Other bounds can also use the anchor error, the
    prediction of the surrogate and the coordinates of the inputs, which psi does not contain.

    Attributes:
        displacement: mean displacement from the anchors, in representation space.
        support_distance: mean distance to the nearest points, in standardised inputs.
        anchor_error: mean observed error of the anchors.
        prediction: prediction of the surrogate.
        inputs: coordinates T(x).
        relation: the anchors and the nearest points; None along rollouts.
        opinion: what a second model of the data predicts, one row of numbers per query; None without one.
        change: how much prediction and second model change beyond the ranges of the inputs, relative to the expected error; None for
            calibration tuples.
        user: the features of the user, standardised; None without them, or if they do not help.
    """

    displacement: Float[np.ndarray, " n *z"]
    support_distance: Float[np.ndarray, " n"]
    anchor_error: Float[np.ndarray, " n *field"]
    prediction: Float[np.ndarray, " n *output"]
    inputs: Float[np.ndarray, " n *coordinates"]
    relation: Relation | None = None
    opinion: Opinion | None = None
    change: Float[np.ndarray, " n"] | None = None
    user: Float[np.ndarray, " n k"] | None = None

    def __len__(self) -> int:
        return len(self.support_distance)

    def __getitem__(self, rows: slice | np.ndarray) -> "Features":
        known = {name: part for name, part in vars(self).items() if part is not None}
        return replace(self, **{name: part[rows] for name, part in known.items()})

    @property
    def flat(self) -> Float[np.ndarray, " n n_features"]:
        """Psi as one vector per query."""
        distance = self.support_distance[:, None]
        return np.concatenate([flat(self.displacement), distance], axis=1)

    @property
    def distance(self) -> Float[np.ndarray, " n"]:
        """Length of the displacement."""
        return np.linalg.norm(flat(self.displacement), axis=1)

    @property
    def expected_error(self) -> Float[np.ndarray, " n p"]:
        r"""The error that the second opinion expects, :math:`q = \sqrt{(\widehat F - m)^2 + v}`."""
        assert self.opinion is not None
        gap = flat(self.prediction).astype(float) - self.opinion.mean
        return np.hypot(gap, self.opinion.deviation)

    @property
    def norm(self) -> Float[np.ndarray, " n"]:
        r"""Length of psi, :math:`\|\psi\|_{\mathscr P}`."""
        return np.hypot(self.distance, self.support_distance)
