"""The search: an engine proposes points, their distances are measured, and undecided queries are searched again."""

import math
from functools import cached_property
from typing import NamedTuple, TypeAlias, final

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from geoq.neighbors.blocks import Block, Excluded, Rows, exclude_within, work_size
from geoq.neighbors.distances import (
    ROUNDING,
    Centred,
    distances_by_differences,
    distances_by_products,
    distances_to_all,
    first_copies,
)
from geoq.neighbors.engines import MAX_TREE_DIMS, Products, Tree

Engine: TypeAlias = Tree | Products


class _Answer(NamedTuple):
    """Distances and indices for all queries, filled in block by block."""

    distance: Float[Tensor, " n_queries k"]
    indices: Int[Tensor, " n_queries k"]

    @property
    def k(self) -> int:
        return self.distance.shape[1]


@final
class Neighbors:
    r"""Exact k nearest points in bounded memory; ties go to the lower index.

    .. math:: \mathcal N_k(q) = \text{first } k \text{ of the pairs }
        (\lVert q - p_j \rVert_2, j) \text{ in lexicographic order}

    Distances are computed in float64. An engine (k-d tree or matrix products) proposes a few more than k points and a lower
    bound of the distance to all other points. Where the k-th distance is below the bound, the answer is final. The other
    queries are searched again with more proposals, and finally among all points. The answer for a query does not depend on
    the other queries.

    Args:
        points: The points to search, finite, in float32 or float64, on any device. They are not copied.

    Example:
        >>> points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
        >>> neighbors = Neighbors(points)
        >>> distance, index = neighbors.nearest(torch.tensor([[0.0, 0.0]]), k=4)
        >>> distance.tolist(), index.tolist()
        ([[0.0, 0.0, 1.0, 5.0]], [[0, 3, 1, 2]])

        For each point, the nearest other point, and the nearest point of another group:

        >>> neighbors.nearest_other(1)[1].flatten().tolist()
        [3, 0, 1, 0]
        >>> group = torch.tensor([0, 0, 1, 0])
        >>> neighbors.nearest_other(1, position=group)[1].flatten().tolist()
        [2, 2, 1, 2]
    """

    def __init__(self, points: Float[Tensor, " n_points n_dims"]) -> None:
        self.points = points.detach()

    def nearest(
        self, queries: Float[Tensor, " n_queries n_dims"], k: int
    ) -> tuple[Float[Tensor, " n_queries k"], Int[Tensor, " n_queries k"]]:
        """Distances (ascending, in the precision of the queries) and indices of the k points nearest to each query."""
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
        r"""Distances (ascending, in the precision of the points) and indices of the k nearest other points, for each point.

        .. math:: \{ p_j : j \neq i \} \quad \text{or, with positions } t, \quad
            \{ p_j : |t_i - t_j| > \text{reach} \}

        A copy of a point counts as another point, at distance zero.

        Args:
            k: Number of neighbours.
            position: One number for each point, such as a time or a group number.
            reach: Largest difference in position that excludes a point; zero excludes points of equal position.
        """
        n_points, device = len(self.points), self.points.device
        if not 1 <= k < n_points:
            raise ValueError(
                f"k={k}, but each of the {n_points} points has {n_points - 1} other "
                f"points; choose k from 1 to {n_points - 1}."
            )
        if position is None:
            position, reach = torch.arange(n_points), 0
        position = position.to(device)
        excluded = exclude_within(position, position, reach)
        fewest, at = (n_points - excluded.stop + excluded.start).min(dim=0)
        if k > fewest:
            raise ValueError(
                f"k={k}, but only {int(fewest)} points differ from point {int(at)} by "
                f"more than reach={reach} in position; lower k or reach."
            )
        # A tree cannot exclude many points. A few large groups are searched one
        # by one, each among all other groups; many groups are searched by products.
        if reach == 0 and self._engine(k, excluded.most) is not self._engine(k, 1):
            groups = position.unique()
            if len(groups) <= 32:
                return self._nearest_outside(k, position, groups)
        return self._search(self.points, k, excluded)

    def _nearest_outside(
        self, k: int, position: Num[Tensor, " n_points"], groups: Num[Tensor, " _"]
    ) -> tuple[Float[Tensor, " n_points k"], Int[Tensor, " n_points k"]]:
        """Neighbours of the points of each group among the points of all other groups."""
        distance, index = _empty_answer(self.points, k)
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
        excluded: Excluded | None,
    ) -> tuple[Float[Tensor, " n_queries k"], Int[Tensor, " n_queries k"]]:
        """Answer all queries, in the order of their positions where points are excluded."""
        answer = _empty_answer(queries, k)
        rows: Rows = slice(0, len(queries)) if excluded is None else excluded.order
        self._answer(Block(queries, rows, excluded), answer)
        return answer.distance, answer.indices

    def _answer(self, block: Block, answer: _Answer) -> None:
        """Fill in the answers of a block, with more proposals for the queries that remain undecided."""
        k = answer.k
        engine = self._engine(k, block.n_excluded)
        kept = None
        if isinstance(engine, Tree) and self._mostly_copies:
            # A tree cannot separate copies: it would compare all of them with a query.
            kept = self._needed(k, block.excluded)
        if kept is None and self._is_wide and self.points.is_cuda:
            self._answer_proposed(block, answer, engine, len(self.points))
            return
        if kept is None:
            n_queries = block.size
            block = self._answer_proposed(block, answer, engine, k + 4 + k // 16)
            if 100 * block.size > n_queries:  # Copies leave many queries undecided.
                kept = self._needed(k, block.excluded)
        if kept is not None:
            self._answer_among(kept, block, answer)
            return
        engine = self._precise if isinstance(engine, Products) else engine
        if not block.size:
            return
        block = self._answer_proposed(block, answer, engine, 16 * k + 64)
        self._answer_proposed(block, answer, engine, len(self.points))

    def _needed(
        self, k: int, excluded: Excluded | None
    ) -> Int[Tensor, " n_kept"] | None:
        """Points without unneeded copies; None if more than half of the points remain."""
        kept = first_copies(self.points, k, excluded)
        return kept if 2 * len(kept) <= len(self.points) else None

    def _answer_among(
        self, kept: Int[Tensor, " n_kept"], block: Block, answer: _Answer
    ) -> None:
        """Fill in the answers of a block from the kept points."""
        fewer = block.excluded.among(kept) if block.excluded else None
        Neighbors(self.points[kept])._answer(block._replace(excluded=fewer), answer)
        answer.indices[block.rows] = kept[answer.indices[block.rows]]

    def _answer_proposed(
        self, block: Block, answer: _Answer, engine: Engine, n_proposed: int
    ) -> Block:
        """Fill in answers from the proposals of an engine; return the undecided queries."""
        if not block.size:
            return block
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
            if part.excluded is not None:
                rank = part.excluded.rank[candidates]
                distance.masked_fill_(part.excluded.mask(part.rows, rank), math.inf)
            # The sort is stable and candidates ascend, so ties go to the lower index.
            distance, by = distance.sort(dim=1, stable=True)
            answer.distance[part.rows] = distance[:, :k].to(answer.distance.dtype)
            answer.indices[part.rows] = candidates.gather(1, by[:, :k])
            decided = distance[:, k - 1].square() * (1 + ROUNDING) < bound
            undecided.append(part.indices[~decided])
        return block._replace(rows=torch.cat(undecided))

    def _distances(
        self, block: Block, candidates: Int[Tensor, " n_block n_candidates"]
    ) -> Float[Tensor, " n_block n_candidates"]:
        """Distances of each query to its candidates, in float64."""
        if self._is_wide and self.points.device.type == "cpu":
            return distances_by_products(block, self._centred, candidates)
        if self._is_wide and candidates.shape[1] == len(self.points):
            return distances_to_all(block, self._centred)
        return distances_by_differences(block, self.points, candidates)

    def _engine(self, k: int, n_excluded: int) -> Engine:
        """Fastest engine for k neighbours with up to ``n_excluded`` excluded points."""
        few_dims = (
            self.points.shape[1] <= MAX_TREE_DIMS and self.points.device.type == "cpu"
        )
        # A tree must propose excluded points, too.
        return self._tree if few_dims and n_excluded <= 4 * k + 64 else self._fast

    @property
    def _is_wide(self) -> bool:
        """Whether there are few points in many dimensions."""
        n_points, n_dims = self.points.shape
        return n_dims > 2048 and n_points < 2**14

    @cached_property
    def _mostly_copies(self) -> bool:
        """Whether at least half of the points are copies of earlier points."""
        return 2 * len(first_copies(self.points, 1, None)) <= len(self.points)

    @cached_property
    def _tree(self) -> Tree:
        return Tree(self.points)

    @cached_property
    def _centred(self) -> Centred:
        return Centred(self.points)

    @cached_property
    def _fast(self) -> Products:
        return Products(self._centred, torch.float32)

    @cached_property
    def _precise(self) -> Products:
        return Products(self._centred, torch.float64)


def _empty_answer(queries: Float[Tensor, " n_queries n_dims"], k: int) -> _Answer:
    shape = (len(queries), k)
    indices = queries.new_empty(shape, dtype=torch.int64)
    return _Answer(queries.new_empty(shape), indices)
