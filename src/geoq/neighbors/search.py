"""The search: quick proposals, exact distances, and care where these do not decide."""

import math
from functools import cached_property
from typing import NamedTuple, Protocol, final, runtime_checkable

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from geoq.neighbors.block import Block
from geoq.neighbors.centred import Centred
from geoq.neighbors.copies import first_copies
from geoq.neighbors.distances import (
    ROUNDING,
    distances_by_differences,
    distances_by_products,
)
from geoq.neighbors.left_out import LeftOut, left_out
from geoq.neighbors.line import Line
from geoq.neighbors.products import Products
from geoq.neighbors.rows import Rows, work_size
from geoq.neighbors.tree import MAX_TREE_DIMS, Tree


@runtime_checkable
class Engine(Protocol):
    """Proposes neighbours, and bounds the squared distance of all other points."""

    block_size: int

    def propose(
        self, block: Block, n_proposed: int
    ) -> tuple[Int[Tensor, " n_block n_candidates"], Float[Tensor, " n_block"]]: ...


class _Answer(NamedTuple):
    """Distances and indices for all queries, written block by block."""

    distance: Float[Tensor, " n_queries k"]
    indices: Int[Tensor, " n_queries k"]

    @property
    def k(self) -> int:
        return self.distance.shape[1]


@final
class Neighbors:
    r"""Exact k nearest points, bounded memory, ties to the lower index.

    .. math:: \mathcal N_k(q) = \text{first } k \text{ of the pairs }
        (\lVert q - p_j \rVert_2, j) \text{ in lexicographic order}

    Distances are those of a loop over all points in float64: the root of the
    summed squared differences. A quick engine (sorted values, k-d tree or matrix
    products) proposes a few more than k points and a lower bound for all others;
    where the k-th distance is below it the answer is final. The rest is searched
    again with more care, at last among all points the bound does not rule out.

    Args:
        points: The cloud, finite, float32 or float64, on any device; not copied.
    """

    def __init__(self, points: Float[Tensor, " n_points n_dims"]) -> None:
        self.points = points.detach()

    def nearest(
        self, queries: Float[Tensor, " n_queries n_dims"], k: int
    ) -> tuple[Float[Tensor, " n_queries k"], Int[Tensor, " n_queries k"]]:
        """Distances (ascending) and indices of the k points nearest to each query.

        Raises:
            ValueError: If there are fewer than k points.
        """
        n_points = len(self.points)
        if not 1 <= k <= n_points:
            raise ValueError(
                f"k={k}, but there are {n_points} points; "
                f"choose k from 1 to {n_points}."
            )
        return self._search(queries.detach(), k, None)

    def nearest_other(
        self,
        k: int,
        *,
        position: Num[Tensor, " n_points"] | None = None,
        reach: float = 0,
    ) -> tuple[Float[Tensor, " n_points k"], Int[Tensor, " n_points k"]]:
        r"""Distances and indices of the k nearest other points, for every point.

        .. math:: \{ p_j : j \neq i \} \quad \text{or, with positions } t, \quad
            \{ p_j : |t_i - t_j| > \text{reach} \}

        A copy of a point is another point, at distance zero.

        Args:
            k: Number of neighbours.
            position: One number for each point, a time or a group code; points
                close in position are no neighbours.
            reach: Difference in position up to which points are left out; zero
                leaves out those of equal position.

        Raises:
            ValueError: If some point has fewer than k others to choose from.
        """
        n_points, device = len(self.points), self.points.device
        if not 1 <= k < n_points:
            raise ValueError(
                f"k={k}, but each of the {n_points} points has {n_points - 1} "
                "others; choose k from 1 to that number."
            )
        if position is None:
            position, reach = torch.arange(n_points), 0
        position = position.to(device)
        hidden = left_out(position, position, reach)
        fewest, at = (n_points - hidden.stop + hidden.start).min(dim=0)
        if k > fewest:
            raise ValueError(
                f"k={k}, but point {int(at)} has only {int(fewest)} others more "
                f"than reach={reach} away in position; lower k or reach."
            )
        # Large groups one by one, each against all others, keep a quick engine in
        # use; more than a few take longer to prepare than to search by products.
        if reach == 0 and self._engine(k, hidden.most) is not self._engine(k, 1):
            groups = position.unique()
            if len(groups) <= 32:
                return self._nearest_outside(k, position, groups)
        return self._search(self.points, k, hidden)

    def _nearest_outside(
        self, k: int, position: Num[Tensor, " n_points"], groups: Num[Tensor, " _"]
    ) -> tuple[Float[Tensor, " n_points k"], Int[Tensor, " n_points k"]]:
        """Neighbours of each group's points among the points of other groups."""
        distance, index = _blank(self.points, k)
        for group in groups:
            inside = (position == group).nonzero()[:, 0]
            outside = (position != group).nonzero()[:, 0]
            others = Neighbors(self.points[outside])
            distance[inside], at = others.nearest(self.points[inside], k)
            index[inside] = outside[at]
        return distance, index

    def _search(
        self,
        queries: Float[Tensor, " n_queries n_dims"],
        k: int,
        hidden: LeftOut | None,
    ) -> tuple[Float[Tensor, " n_queries k"], Int[Tensor, " n_queries k"]]:
        answer = _blank(queries, k)
        rows: Rows = slice(0, len(queries)) if hidden is None else hidden.order
        self._answer(Block(queries, rows, hidden), answer)
        return answer.distance, answer.indices

    def _answer(self, block: Block, answer: _Answer) -> None:
        """Write the answers of a block: quickly, then with more and more care."""
        k = answer.k
        engine = self._engine(k, block.n_left_out)
        kept = None
        if isinstance(engine, Tree) and self._mostly_copies:
            # A tree cannot part copies: it would compare them all with each query.
            kept = self._needed(k, block.left_out)
        if kept is None:
            n_asked = block.size
            block = self._settle(block, answer, engine, k + 4 + k // 16)
            if 100 * block.size > n_asked:  # Few undecided are no sign of copies.
                kept = self._needed(k, block.left_out)
        if kept is not None:
            self._answer_from(kept, block, answer)
            return
        engine = self._careful if isinstance(engine, Products) else engine
        block = self._settle(block, answer, engine, 16 * k + 64)
        for part in block.split(work_size(self.points) // len(self.points)):
            self._exhaust(part, answer)

    def _needed(self, k: int, hidden: LeftOut | None) -> Int[Tensor, " n_kept"] | None:
        """Points without the copies no answer needs; None where that is over half."""
        kept = first_copies(self.points, k, hidden)
        return kept if 2 * len(kept) <= len(self.points) else None

    def _answer_from(
        self, kept: Int[Tensor, " n_kept"], block: Block, answer: _Answer
    ) -> None:
        """Write the answers of a block that needs only some of the points."""
        fewer = block.left_out.among(kept) if block.left_out else None
        Neighbors(self.points[kept])._answer(block._replace(left_out=fewer), answer)
        answer.indices[block.rows] = kept[answer.indices[block.rows]]

    def _settle(
        self, block: Block, answer: _Answer, engine: Engine, n_proposed: int
    ) -> Block:
        """Answer from an engine's proposals; return what these leave undecided."""
        k, n_points, device = answer.k, len(self.points), self.points.device
        everything = torch.arange(n_points, device=device)
        size = work_size(self.points) // min(n_proposed, n_points)
        undecided = [everything[:0]]
        for part in block.split(min(engine.block_size, size)):
            if n_proposed < n_points:
                candidates, bound = engine.propose(part, n_proposed)
                candidates = candidates.sort(dim=1).values
            else:
                candidates = everything.expand(part.size, n_points)
                bound = torch.full((part.size,), math.inf, device=device)
            distance = self._distances(part, candidates)
            twice = candidates[:, 1:] == candidates[:, :-1]
            distance[:, 1:].masked_fill_(twice, math.inf)
            if part.left_out is not None:
                rank = part.left_out.rank[candidates]
                distance.masked_fill_(part.left_out.hides(part.rows, rank), math.inf)
            # Stable, and candidates ascend: ties go to the lower index.
            distance, by = distance.sort(dim=1, stable=True)
            answer.distance[part.rows] = distance[:, :k].to(answer.distance.dtype)
            answer.indices[part.rows] = candidates.gather(1, by[:, :k])
            decided = distance[:, k - 1].square() * (1 + ROUNDING) < bound
            undecided.append(part.indices[~decided])
        return block._replace(rows=torch.cat(undecided))

    def _exhaust(self, block: Block, answer: _Answer) -> None:
        """Answer from all points not provably beyond the k-th distance found."""
        k, tiny = answer.k, torch.finfo(answer.distance.dtype).tiny
        radius = answer.distance[block.rows, k - 1].double() * (1 + 1e-6) + tiny
        which, index = self._careful.within(block, radius)
        if 2 * len(which) > block.size * len(self.points):
            self._settle(block, answer, self._careful, len(self.points))
            return
        pairs = block._replace(rows=block.indices[which])
        distance = distances_by_differences(pairs, self.points, index[:, None])[:, 0]
        # By query, then distance, then index; each query's first k.
        by = index.argsort(stable=True)
        by = by[distance[by].argsort(stable=True)]
        by = by[which[by].argsort(stable=True)]
        first = torch.arange(block.size, device=by.device)
        first = torch.searchsorted(which[by], first)
        by = by[first[:, None] + torch.arange(k, device=by.device)]
        answer.distance[block.rows] = distance[by].to(answer.distance.dtype)
        answer.indices[block.rows] = index[by]

    def _distances(
        self, block: Block, candidates: Int[Tensor, " n_block n_candidates"]
    ) -> Float[Tensor, " n_block n_candidates"]:
        """Distances in float64 of each query to candidates of its own."""
        n_points, n_dims = self.points.shape
        if self.points.device.type == "cpu" and n_dims > 2048 and n_points < 2**14:
            return distances_by_products(block, self._centred, candidates)
        return distances_by_differences(block, self.points, candidates)

    def _engine(self, k: int, n_left_out: int) -> Engine:
        """What proposes neighbours when up to so many points are left out."""
        if n_left_out <= 4 * k + 64:  # Line and tree have to propose these, too.
            n_dims = self.points.shape[1]
            if n_dims == 1:
                return self._line
            if n_dims <= MAX_TREE_DIMS and self.points.device.type == "cpu":
                return self._tree
        return self._quick

    @cached_property
    def _mostly_copies(self) -> bool:
        return 2 * len(first_copies(self.points, 1, None)) <= len(self.points)

    @cached_property
    def _line(self) -> Line:
        return Line(self.points)

    @cached_property
    def _tree(self) -> Tree:
        return Tree(self.points)

    @cached_property
    def _centred(self) -> Centred:
        return Centred(self.points)

    @cached_property
    def _quick(self) -> Products:
        return Products(self._centred, torch.float32)

    @cached_property
    def _careful(self) -> Products:
        return Products(self._centred, torch.float64)


def _blank(queries: Float[Tensor, " n_queries n_dims"], k: int) -> _Answer:
    shape = (len(queries), k)
    indices = queries.new_empty(shape, dtype=torch.int64)
    return _Answer(queries.new_empty(shape), indices)
