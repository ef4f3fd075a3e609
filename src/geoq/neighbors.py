"""Exact nearest points in bounded memory, from one dimension to a hundred thousand."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple, Protocol, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Two ways to add up a squared distance in float64 differ by less than this fraction.
_ROUNDING = 1e-12
# A k-d tree serves up to here (CPU), products beyond.
_TREE_DIMS = 8
# Columns multiplied at once; partial sums keep rounding errors small.
_WIDTH = 4096
_Rows = slice | Tensor


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

    Raises:
        ValueError: If there is no point or no dimension.
    """

    def __init__(self, points: Float[Tensor, " n_points n_dims"]) -> None:
        if points.ndim != 2 or 0 in points.shape:
            raise ValueError(
                f"points has shape {tuple(points.shape)}, but each point is a row; "
                "give at least one row and one column."
            )
        self.points = points.detach()

    def nearest(
        self, queries: Float[Tensor, " n_queries n_dims"], k: int
    ) -> tuple[Float[Tensor, " n_queries k"], Int[Tensor, " n_queries k"]]:
        """Distances (ascending) and indices of the k points nearest to each query.

        Raises:
            ValueError: If there are fewer than k points, or queries and points
                differ in dimension.
        """
        n_points, n_dims = self.points.shape
        if queries.ndim != 2 or queries.shape[1] != n_dims:
            raise ValueError(
                f"queries has shape {tuple(queries.shape)}, but the points have "
                f"{n_dims} columns; give a row of as many columns for each query."
            )
        if not 1 <= k <= n_points:
            raise ValueError(
                f"k={k}, but there are {n_points} points; "
                f"choose k from 1 to {n_points}."
            )
        return self._search(queries.detach(), k, None)

    def nearest_other(
        self, k: int, *, position: Tensor | None = None, reach: float = 0
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
            ValueError: If some point has fewer than k others to choose from, or
                position or reach make no sense.
        """
        n_points = len(self.points)
        if position is None:
            if not 1 <= k < n_points:
                raise ValueError(
                    f"k={k}, but each of the {n_points} points has "
                    f"{n_points - 1} others; choose k from 1 to {n_points - 1}."
                )
            position, reach = torch.arange(n_points), 0
        if position.shape != (n_points,):
            raise ValueError(
                f"position has shape {tuple(position.shape)}, but there are "
                f"{n_points} points; give one number for each point."
            )
        if not 0 <= reach < math.inf:
            raise ValueError(
                f"reach={reach}, but it bounds a difference in position; "
                "give a finite number, zero or more."
            )
        position = position.to(self.points.device)
        left_out = _left_out(position, position, reach)
        fewest, at = (n_points - left_out.stop + left_out.start).min(dim=0)
        if not 1 <= k <= fewest:
            raise ValueError(
                f"k={k}, but point {int(at)} has {int(fewest)} others more than "
                f"reach={reach} away in position; lower k or reach."
            )
        # Each group against the others, where that keeps a quick engine in use;
        # more than a few groups take longer to prepare than to search by products.
        if reach == 0 and self._engine(k, left_out.most) is not self._engine(k, 0):
            groups = position.unique()
            if len(groups) <= 32:
                return self._nearest_outside(k, position, groups)
        return self._search(self.points, k, left_out)

    def _nearest_outside(
        self, k: int, position: Tensor, groups: Tensor
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
        left_out: "_LeftOut | None",
    ) -> tuple[Float[Tensor, " n_queries k"], Int[Tensor, " n_queries k"]]:
        answer = _blank(queries, k)
        pending = torch.arange(len(queries), device=queries.device)
        if left_out is not None:
            pending = left_out.order
        self._answer(queries, pending, left_out, answer)
        return answer

    def _answer(
        self,
        queries: Float[Tensor, " n_queries n_dims"],
        pending: Int[Tensor, " n_pending"],
        left_out: "_LeftOut | None",
        answer: tuple[Tensor, Tensor],
    ) -> None:
        """Write the answers of the pending queries: quickly, then with more care."""
        k = answer[0].shape[1]
        engine = self._engine(k, left_out.most if left_out else 0)
        pending = self._settle(
            queries, pending, left_out, answer, engine, k + 4 + k // 16
        )
        if not len(pending):
            return
        # Copies of a point that are never needed would all be tied.
        kept = _first_copies(self.points, k, left_out)
        if 2 * len(kept) <= len(self.points):
            fewer = left_out.among(kept) if left_out else None
            Neighbors(self.points[kept])._answer(queries, pending, fewer, answer)
            answer[1][pending] = kept[answer[1][pending]]
            return
        if engine is self._quick:
            engine = self._careful
        pending = self._settle(queries, pending, left_out, answer, engine, 16 * k + 64)
        self._exhaust(queries, pending, left_out, answer)

    def _settle(
        self,
        queries: Float[Tensor, " n_queries n_dims"],
        pending: Int[Tensor, " n_pending"],
        left_out: "_LeftOut | None",
        answer: tuple[Tensor, Tensor],
        engine: "_Engine",
        n_proposed: int,
    ) -> Int[Tensor, " n_undecided"]:
        """Answer from an engine's proposals; the queries these leave undecided."""
        k, n_points = answer[0].shape[1], len(self.points)
        size = max(1, min(engine.block, _work(queries) // min(n_proposed, n_points)))
        undecided = [pending[:0]]
        for some in _split(pending, size):
            block = _rows(some)
            if n_proposed < n_points:
                rows, bound = engine.propose(queries, block, n_proposed, left_out)
                rows = rows.sort(dim=1).values
            else:
                rows = torch.arange(n_points, device=some.device).repeat(len(some), 1)
                bound = torch.full_like(some, math.inf, dtype=torch.float64)
            distance = self._distances(queries, block, rows)
            distance[:, 1:].masked_fill_(rows[:, 1:] == rows[:, :-1], math.inf)
            if left_out is not None:
                distance.masked_fill_(left_out.hides(block, rows), math.inf)
            distance, by = distance.sort(dim=1, stable=True)
            answer[0][block] = distance[:, :k].to(queries.dtype)
            answer[1][block] = rows.gather(1, by[:, :k])
            decided = distance[:, k - 1].square() * (1 + _ROUNDING) < bound
            undecided.append(some[~decided])
        return torch.cat(undecided)

    def _exhaust(
        self,
        queries: Float[Tensor, " n_queries n_dims"],
        pending: Int[Tensor, " n_pending"],
        left_out: "_LeftOut | None",
        answer: tuple[Tensor, Tensor],
    ) -> None:
        """Answer from all points not provably beyond the k-th distance found."""
        k = answer[0].shape[1]
        for some in _split(pending, _work(queries) // len(self.points)):
            tiny = torch.finfo(queries.dtype).tiny
            radius = answer[0][some, k - 1].double() * (1 + 1e-6) + tiny
            which, rows = self._careful.within(queries, some, radius, left_out)
            distance = self._distances(queries, some[which], rows[:, None])[:, 0]
            by = rows.argsort(stable=True)
            by = by[distance[by].argsort(stable=True)]
            by = by[which[by].argsort(stable=True)]
            first = torch.arange(len(some), device=by.device)
            first = torch.searchsorted(which[by], first)
            by = by[first[:, None] + torch.arange(k, device=by.device)]
            answer[0][some], answer[1][some] = distance[by].to(queries.dtype), rows[by]

    def _engine(self, k: int, n_out: int) -> "_Engine":
        """What proposes neighbours when up to n_out points are left out."""
        if n_out <= 4 * k + 64:  # Sorted values and the tree propose these as well.
            if self.points.shape[1] == 1:
                return self._line
            if self.points.shape[1] <= _TREE_DIMS and self.points.device.type == "cpu":
                return self._tree
        return self._quick

    @cached_property
    def _line(self) -> "_Line":
        return _Line(self.points)

    @cached_property
    def _tree(self) -> "_Tree":
        return _Tree(self.points)

    @cached_property
    def _centred(self) -> "_Centred":
        return _Centred(self.points)

    @cached_property
    def _quick(self) -> "_Products":
        return _Products(self._centred, torch.float32)

    @cached_property
    def _careful(self) -> "_Products":
        return _Products(self._centred, torch.float64)

    def _distances(
        self,
        queries: Float[Tensor, " n_queries n_dims"],
        block: _Rows,
        rows: Int[Tensor, " n_block n_rows"],
    ) -> Float[Tensor, " n_block n_rows"]:
        """Distances in float64 of the queries of a block to points of their own."""
        n_points, n_dims = self.points.shape
        if (
            queries.device.type == "cpu"
            and n_dims > 2048
            and n_points < 2**14
            and rows.shape[1] > 1
        ):
            return self._centred.distances(queries, block, rows)
        return _differences(queries, block, self.points, rows)


class _LeftOut(NamedTuple):
    """Which points each query may not see: start <= rank < stop by position."""

    position: Tensor
    queried: Tensor
    reach: float
    order: Int[Tensor, " n_points"]
    rank: Int[Tensor, " n_points"]
    start: Int[Tensor, " n_queries"]
    stop: Int[Tensor, " n_queries"]
    most: int

    def hides(
        self, block: _Rows, rows: Int[Tensor, " n_block n_rows"]
    ) -> Bool[Tensor, " n_block n_rows"]:
        rank = self.rank[rows]
        return (rank >= self.start[block, None]) & (rank < self.stop[block, None])

    def among(self, kept: Int[Tensor, " n_kept"]) -> "_LeftOut":
        return _left_out(self.position[kept], self.queried, self.reach)


def _left_out(position: Tensor, queried: Tensor, reach: float) -> _LeftOut:
    """Ranges of points within reach of each queried position."""
    if position.is_floating_point():
        position, queried = position.double(), queried.double()
    else:
        position, queried, reach = position.long(), queried.long(), math.floor(reach)
    order = position.argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    ascending = position[order]
    start, stop = torch.zeros((2, len(queried)), dtype=torch.long, device=order.device)
    for step in reversed(range(len(order).bit_length())):  # Bisect by differences.
        for count, sign in ((start, 1), (stop, -1)):
            at = count + 2**step
            gap = queried - ascending[(at - 1).clamp(max=len(order) - 1)]
            passed = gap > reach if sign > 0 else -gap <= reach
            count += 2**step * (passed & (at <= len(order)))
    most = int((stop - start).max())
    return _LeftOut(position, queried, reach, order, rank, start, stop, most)


def _first_copies(
    points: Float[Tensor, " n_points n_dims"], k: int, left_out: _LeftOut | None
) -> Int[Tensor, " n_kept"]:
    """Points without copies that always have k nearer or lower-indexed twins."""
    n_points, n_dims = points.shape
    enough = k + (left_out.most if left_out else 0)
    group = torch.zeros(n_points, dtype=torch.long, device=points.device)
    if left_out is not None and left_out.most > k and left_out.reach == 0:
        enough, group = k, left_out.position.unique(return_inverse=True)[1]
    # Wrapping integer sums of the bits: equal rows have equal keys in any order.
    odd = torch.randint(
        2**62, (n_dims + 1,), generator=torch.Generator().manual_seed(0)
    )
    odd = (2 * odd + 1).to(points.device)
    bits = torch.int32 if points.dtype == torch.float32 else torch.int64
    key = group * odd[-1]
    for at in _split(slice(0, n_points), _work(points) // n_dims):
        key[at] += ((points[at] + 0.0).view(bits).long() * odd[:-1]).sum(dim=1)
    order = key.argsort(stable=True)
    same = torch.cat([order[:1] < 0, key[order[1:]] == key[order[:-1]]])
    for at in same.nonzero()[:, 0].split(max(1, _work(points) // n_dims)):
        one, two = order[at], order[at - 1]
        same[at] = (points[one] == points[two]).all(dim=1) & (group[one] == group[two])
    place = torch.arange(n_points, device=points.device)
    copies_before = place - torch.where(same, 0, place).cummax(dim=0).values
    return order[copies_before < enough].sort().values


def _differences(
    queries: Float[Tensor, " n_queries n_dims"],
    block: _Rows,
    points: Float[Tensor, " n_points n_dims"],
    rows: Int[Tensor, " n_block n_rows"],
) -> Float[Tensor, " n_block n_rows"]:
    """Distances from differences in float64; pair by pair, whatever the batch."""
    work = _work(points) // 2
    n_rows = max(1, min(rows.shape[1], work // points.shape[1]))
    size = max(1, work // (n_rows * points.shape[1]))
    distance = torch.empty(rows.shape, dtype=torch.float64, device=rows.device)
    for at, some in zip(
        _split(slice(0, len(rows)), size), _split(block, size), strict=True
    ):
        query = queries[some, None].double()
        for part in _split(slice(0, rows.shape[1]), n_rows):
            point = points[rows[at, part]].double()
            distance[at, part] = torch.cdist(
                query, point, compute_mode="donot_use_mm_for_euclid_dist"
            )[:, 0]
    return distance


@final
class _Centred:
    """The points about an origin amid them, where products lose little to rounding."""

    def __init__(self, points: Float[Tensor, " n_points n_dims"]) -> None:
        n_points, n_dims = points.shape
        n_sample = max(1, min(256, _work(points) // n_dims))
        sample = points[:: -(-n_points // n_sample)].double()
        mean = sample.mean(dim=0)
        spread = float((sample - mean).square().mean().sqrt())
        if spread > 0:  # A coarse grid keeps differences of short numbers exact.
            grid = 2.0 ** (math.floor(math.log2(spread)) - 2)
            mean = (mean / grid).round() * grid
        self.points, self.origin = points, mean.to(points.dtype)
        self.square = self.squares(points, slice(0, n_points))

    def squares(
        self, x: Float[Tensor, " n_x n_dims"], rows: _Rows
    ) -> Float[Tensor, " n_rows"]:
        """Squared distance of some rows to the origin."""
        origin, size = self.origin.double(), max(1, _work(x) // 8 // x.shape[1])
        return torch.cat(
            [(x[at].double() - origin).square().sum(dim=1) for at in _split(rows, size)]
        )

    def columns(
        self,
        x: Float[Tensor, " n_x n_dims"],
        rows: _Rows,
        start: int,
        factor: float,
        last: Tensor | float,
        dtype: torch.dtype,
    ) -> Float[Tensor, " n_rows n_columns"]:
        """Columns from start on of factor * (x - origin), one column "last" appended."""
        stop = min(start + _WIDTH, x.shape[1])
        kind = torch.promote_types(x.dtype, dtype)
        part = x[:, start:stop][rows].to(kind) * factor
        width = stop - start + (start + _WIDTH > x.shape[1])
        out = torch.empty((len(part), width), dtype=dtype, device=x.device)
        origin = self.origin[start:stop].to(kind) * factor
        torch.sub(part, origin, out=out[:, : stop - start])
        if width > stop - start:
            out[:, -1] = last
        return out

    def distances(
        self,
        queries: Float[Tensor, " n_queries n_dims"],
        block: _Rows,
        rows: Int[Tensor, " n_block n_rows"],
    ) -> Float[Tensor, " n_block n_rows"]:
        """Distances from float64 products, from differences where these cancel.

        In many dimensions on CPU a product at given pairs needs no gathered copy of
        the points and takes a fourth of the time of differences.
        """
        n_block, n_rows = rows.shape
        origin = self.origin.double()
        size = max(64, 2 * _work(queries) // (n_block + len(self.points)))
        begin = torch.arange(0, rows.numel() + 1, n_rows)
        product = torch.zeros(rows.numel(), dtype=torch.float64)
        for start in range(0, len(origin), size):
            at = slice(start, start + size)
            left = queries[:, at][block].double() - origin[at]
            right = self.points[:, at].double() - origin[at]
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Sparse CSR tensor support")
                pairs = torch.sparse_csr_tensor(
                    begin, rows.flatten(), product, (n_block, len(self.points))
                )
                product = torch.sparse.sampled_addmm(pairs, left, right.T).values()
        total = self.squares(queries, block)[:, None] + self.square[rows]
        square = total - 2 * product.view(n_block, n_rows)
        one, two = (square < total / 1024).nonzero(as_tuple=True)
        distance = square.clamp(min=0).sqrt()
        some = torch.arange(len(queries))[block][one]
        near = _differences(queries, some, self.points, rows[one, two][:, None])
        distance[one, two] = near[:, 0]
        return distance


class _Engine(Protocol):
    """Proposes neighbours, and bounds the squared distance of all other points."""

    block: int

    def propose(
        self,
        queries: Float[Tensor, " n_queries n_dims"],
        block: _Rows,
        n_proposed: int,
        left_out: _LeftOut | None,
    ) -> tuple[Int[Tensor, " n_block n_rows"], Float[Tensor, " n_block"]]: ...


@final
class _Line:
    """One dimension: the points on both sides of the query."""

    block = 2**15

    def __init__(self, points: Float[Tensor, " n_points 1"]) -> None:
        self.value, self.order = points[:, 0].double().sort(stable=True)

    def propose(
        self,
        queries: Float[Tensor, " n_queries 1"],
        block: _Rows,
        n_proposed: int,
        left_out: _LeftOut | None,
    ) -> tuple[Int[Tensor, " n_block n_rows"], Float[Tensor, " n_block"]]:
        n_points = len(self.value)
        n_side = n_proposed + (left_out.most if left_out else 0)
        n_rows = min(2 * n_side, n_points)
        query = queries[block, 0].double()
        first = torch.searchsorted(self.value, query) - n_side
        first = first.clamp(0, n_points - n_rows)
        end = first + n_rows
        before = query - self.value[(first - 1).clamp(min=0)]
        after = self.value[end.clamp(max=n_points - 1)] - query
        before = before.masked_fill(first == 0, math.inf)
        after = after.masked_fill(end == n_points, math.inf)
        at = first[:, None] + torch.arange(n_rows, device=first.device)
        return self.order[at], torch.minimum(before, after).square()


@final
class _Tree:
    """Few dimensions: SciPy's k-d tree, which cuts ties anywhere."""

    block = 2**15

    def __init__(self, points: Float[Tensor, " n_points n_dims"]) -> None:
        from scipy.spatial import cKDTree

        self.tree = cKDTree(points.numpy())

    def propose(
        self,
        queries: Float[Tensor, " n_queries n_dims"],
        block: _Rows,
        n_proposed: int,
        left_out: _LeftOut | None,
    ) -> tuple[Int[Tensor, " n_block n_rows"], Float[Tensor, " n_block"]]:
        n_rows = min(n_proposed + (left_out.most if left_out else 0), self.tree.n)
        found = self.tree.query(queries[block].numpy(), n_rows, workers=-1)
        distance, rows = (torch.from_numpy(array) for array in found)
        bound = distance[:, -1].square() * (1 - _ROUNDING)
        return rows, bound if n_rows < self.tree.n else torch.full_like(bound, math.inf)


@final
class _Products:
    r"""Many dimensions: squared distances from matrix products, bounded from below.

        .. math:: \lVert q - p
    Vert^2 \ge (1 - 2 \epsilon) \lVert p
    Vert^2
            - 2 q \cdot p + (1 - \epsilon) \lVert q
    Vert^2

        holds for the rounded products; the right-hand side without its last term is one
        product of rows with a column appended. Its least values stand in k groups of
        points, those with the least minima, so that few values are ever sorted.
    """

    def __init__(self, centred: _Centred, dtype: torch.dtype) -> None:
        self.centred, self.dtype = centred, dtype
        n_dims = centred.points.shape[1]
        # A sum of n rounded products is off by n units at worst, by 8 sqrt(n) with
        # probability 1 - 2 exp(-32) (Higham and Mary 2019); columns come in parts.
        likely = 8 * (math.sqrt(min(n_dims, _WIDTH)) + math.sqrt(n_dims / _WIDTH))
        unit = torch.finfo(dtype).eps / 2
        self.error = (min(n_dims, likely) + 8) * unit
        self.underflow = 8 * (n_dims + 8) * torch.finfo(dtype).tiny
        self.block = 512 if n_dims < 256 else 1024
        if centred.points.device.type == "cuda":
            self.block = 4096

    def propose(
        self,
        queries: Float[Tensor, " n_queries n_dims"],
        block: _Rows,
        n_proposed: int,
        left_out: _LeftOut | None,
    ) -> tuple[Int[Tensor, " n_block n_rows"], Float[Tensor, " n_block"]]:
        square, scale = self._scale(queries, block)
        n_points, n_block = len(self.centred.points), len(square)
        size = self._group_size(n_block, n_proposed)
        least = square.new_empty((-(-n_points // size), n_block), dtype=self.dtype)
        for start, tile in self._tiles(queries, block, scale, left_out, size):
            whole = len(tile) // size
            to = least[start // size :][:whole]
            torch.amin(tile[: whole * size].view(whole, size, n_block), dim=1, out=to)
            if whole * size < len(tile):
                least[-1] = tile[whole * size :].amin(dim=0)
        value, group = least.topk(n_proposed + 1, dim=0, largest=False)
        bound, rows = value[-1], group[:-1].T
        if size > 1:
            rows = rows[:, :, None] * size + torch.arange(size, device=rows.device)
            rows = rows.flatten(start_dim=1)
            value = self._values(queries, block, rows, scale, left_out)
            value, at = value.topk(n_proposed + 1, largest=False)
            bound, rows = torch.minimum(bound, value[:, -1]), rows.gather(1, at[:, :-1])
            rows = rows.clamp(max=n_points - 1)
        if left_out is not None:
            rows = left_out.order[rows]
        bound = bound.double() - self.underflow + square * scale**2 * (1 - self.error)
        return rows, bound / scale**2

    def within(
        self,
        queries: Float[Tensor, " n_queries n_dims"],
        block: Int[Tensor, " n_block"],
        radius: Float[Tensor, " n_block"],
        left_out: _LeftOut | None,
    ) -> tuple[Int[Tensor, " n_pairs"], Int[Tensor, " n_pairs"]]:
        """Pairs (place in the block, point) that may lie within the radius."""
        square, scale = self._scale(queries, block)
        limit = radius.square() - square * (1 - self.error)
        limit = limit * scale**2 + self.underflow
        found = []
        for start, tile in self._tiles(queries, block, scale, left_out, 1):
            hit = (tile <= limit).nonzero()
            hit[:, 0] += start
            found.append(hit)
        rows, which = torch.cat(found).unbind(dim=1)
        return which, rows if left_out is None else left_out.order[rows]

    def _scale(
        self, queries: Float[Tensor, " n_queries n_dims"], block: _Rows
    ) -> tuple[Float[Tensor, " n_block"], float]:
        """Squared norms of the queries, and a power of two that brings norms to one."""
        square = self.centred.squares(queries, block)
        largest = float(torch.maximum(square.max(), self.centred.square.max()))
        limit = 120 if queries.dtype == torch.float32 else 500
        exponent = math.ceil(math.log2(largest) / 2) if largest > 0 else 0
        return square, 2.0 ** -max(-limit, min(limit, exponent))

    def _group_size(self, n_block: int, n_proposed: int) -> int:
        """Points in a group: sorting minima and gathering groups take equal time."""
        n_points, n_dims = self.centred.points.shape
        size = math.sqrt(5 * n_points / (n_proposed * n_dims))
        size = max(size, n_points * n_block / (8 * _work(self.centred.points)))
        size = max(1, min(size, n_points // (n_proposed + 1), 2048))
        return int(2 ** math.floor(math.log2(size)))

    def _tiles(
        self,
        queries: Float[Tensor, " n_queries n_dims"],
        block: _Rows,
        scale: float,
        left_out: _LeftOut | None,
        multiple: int,
    ) -> Iterator[tuple[int, Float[Tensor, " n_rows n_block"]]]:
        """Values of consecutive points (by position where some are left out)."""
        points, centred = self.centred.points, self.centred
        n_points, n_dims = points.shape
        starts = range(0, n_dims + 1, _WIDTH)
        n_block = len(queries[block, 0])
        size = min(_work(points) // n_block, 4 * _work(points) // min(n_dims, _WIDTH))
        size = max(1, min(n_points, size) // multiple) * multiple
        tile = torch.empty((size, n_block), dtype=self.dtype, device=points.device)
        right = None
        hidden = (0, 0)
        if left_out is not None:
            first, last = left_out.start[block], left_out.stop[block]
            hidden = int(first.min()), int(last.max())
        for start in range(0, n_points, size):
            rows: _Rows = slice(start, min(start + size, n_points))
            if left_out is not None:
                rows = _rows(left_out.order[rows])
            weight = centred.square[rows] * (scale**2 * (1 - 2 * self.error))
            out = tile[: len(weight)]
            for at in starts:
                if right is None or len(starts) > 1:
                    right = centred.columns(
                        queries, block, at, -2 * scale, 1, self.dtype
                    )
                left = centred.columns(points, rows, at, scale, weight, self.dtype)
                with _full_precision():
                    torch.addmm(out, left, right.T, beta=int(at > 0), out=out)
            if left_out is not None and start < hidden[1] and start + size > hidden[0]:
                rank = start + torch.arange(len(out), device=out.device)[:, None]
                out.masked_fill_((rank >= first) & (rank < last), math.inf)
            yield start, out

    def _values(
        self,
        queries: Float[Tensor, " n_queries n_dims"],
        block: _Rows,
        rank: Int[Tensor, " n_block n_rows"],
        scale: float,
        left_out: _LeftOut | None,
    ) -> Float[Tensor, " n_block n_rows"]:
        """Values at chosen points, infinite past the last and where left out."""
        points, centred = self.centred.points, self.centred
        (n_block, n_rows), (n_points, n_dims) = rank.shape, points.shape
        weight = centred.square * (scale**2 * (1 - 2 * self.error))
        value = rank.new_zeros(rank.shape, dtype=self.dtype)
        size = max(1, 2 * _work(points) // (n_rows * min(n_dims, _WIDTH)))
        for at, some in zip(
            _split(slice(0, n_block), size), _split(block, size), strict=True
        ):
            rows = rank[at].clamp(max=n_points - 1).flatten()
            rows = rows if left_out is None else left_out.order[rows]
            for start in range(0, n_dims + 1, _WIDTH):
                left = centred.columns(
                    points, rows, start, scale, weight[rows], self.dtype
                )
                right = centred.columns(queries, some, start, -2 * scale, 1, self.dtype)
                left = left.view(len(right), n_rows, -1)
                with _full_precision():
                    value[at] += (left @ right[:, :, None])[:, :, 0]
        value.masked_fill_(rank >= n_points, math.inf)
        if left_out is not None:
            first, last = left_out.start[block, None], left_out.stop[block, None]
            value.masked_fill_((rank >= first) & (rank < last), math.inf)
        return value


@contextmanager
def _full_precision() -> Iterator[None]:
    """Products without TF32 or bfloat16, whose errors are outside the bounds."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _blank(queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (len(queries), k)
    return queries.new_empty(shape), queries.new_empty(shape, dtype=torch.long)


def _work(x: Tensor) -> int:
    """How many numbers a work array may hold: fits a CPU's cache, fills a GPU."""
    return 2**24 if x.device.type == "cuda" else 2**20


def _rows(index: Int[Tensor, " n_rows"]) -> _Rows:
    """The same rows as a slice, which copies nothing, where they are consecutive."""
    first = int(index[0])
    if bool((index.diff() == 1).all()):
        return slice(first, first + len(index))
    return index


def _split(rows: _Rows, size: int) -> Iterator[_Rows]:
    """The rows in parts of at most the given size."""
    size = max(1, size)
    if isinstance(rows, Tensor):
        yield from rows.split(size) if len(rows) else ()
    else:
        for start in range(rows.start, rows.stop, size):
            yield slice(start, min(start + size, rows.stop))
