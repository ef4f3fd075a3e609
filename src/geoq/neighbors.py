"""Exact nearest points in bounded memory, from one dimension to a hundred thousand."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, Protocol, final

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

# Two ways to add up a squared distance in float64 differ by less than this fraction.
_ROUNDING = 1e-12
# Dimensions up to which a k-d tree serves on CPU: at 2e5 points it takes half the
# time of products in 8 dimensions, the same in 9 and twice as long in 10.
_TREE_DIMS = 8
# Columns multiplied at once; sums in parts keep rounding errors small.
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
        left_out = _left_out(position, position, reach)
        fewest, at = (n_points - left_out.stop + left_out.start).min(dim=0)
        if k > fewest:
            raise ValueError(
                f"k={k}, but point {int(at)} has only {int(fewest)} others more "
                f"than reach={reach} away in position; lower k or reach."
            )
        # Large groups one by one, each against all others, keep a quick engine in
        # use; more than a few take longer to prepare than to search by products.
        if reach == 0 and self._engine(k, left_out.most) is not self._engine(k, 1):
            groups = position.unique()
            if len(groups) <= 32:
                return self._nearest_outside(k, position, groups)
        return self._search(self.points, k, left_out)

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
        left_out: "_LeftOut | None",
    ) -> tuple[Float[Tensor, " n_queries k"], Int[Tensor, " n_queries k"]]:
        answer = _blank(queries, k)
        rows: _Rows = slice(0, len(queries))
        if left_out is not None:
            rows = left_out.order
        self._answer(_Block(queries, rows, left_out), answer)
        return answer

    def _answer(self, block: "_Block", answer: tuple[Tensor, Tensor]) -> None:
        """Write the answers of a block: quickly, then with more and more care."""
        k, left_out = answer[0].shape[1], block.left_out
        engine = self._engine(k, left_out.most if left_out else 0)
        kept = None
        if isinstance(engine, _Tree) and self._mostly_copies:
            # A tree cannot part copies: it would compare them all with each query.
            kept = self._needed(k, left_out)
        if kept is None:
            n_asked = block.size
            block = self._settle(block, answer, engine, k + 4 + k // 16)
            if 100 * block.size > n_asked:  # Few undecided are no sign of copies.
                kept = self._needed(k, left_out)
        if kept is not None:
            fewer = left_out.among(kept) if left_out else None
            Neighbors(self.points[kept])._answer(block._replace(left_out=fewer), answer)
            answer[1][block.rows] = kept[answer[1][block.rows]]
            return
        engine = self._careful if isinstance(engine, _Products) else engine
        block = self._settle(block, answer, engine, 16 * k + 64)
        for part in block.split(_work(self.points) // len(self.points)):
            self._exhaust(part, answer)

    def _needed(
        self, k: int, left_out: "_LeftOut | None"
    ) -> Int[Tensor, " n_kept"] | None:
        """Points without the copies no answer needs; None where that is over half."""
        kept = _first_copies(self.points, k, left_out)
        return kept if 2 * len(kept) <= len(self.points) else None

    def _settle(
        self,
        block: "_Block",
        answer: tuple[Tensor, Tensor],
        engine: "_Engine",
        n_proposed: int,
    ) -> "_Block":
        """Answer from an engine's proposals; return what these leave undecided."""
        k, n_points, device = answer[0].shape[1], len(self.points), self.points.device
        everything = torch.arange(n_points, device=device)
        size = _work(self.points) // min(n_proposed, n_points)
        undecided = [everything[:0]]
        for part in block.split(min(engine.block, size)):
            if n_proposed < n_points:
                rows, bound = engine.propose(part, n_proposed)
                rows = rows.sort(dim=1).values
            else:
                rows = everything.expand(part.size, n_points)
                bound = torch.full((part.size,), math.inf, device=device)
            distance = self._distances(part, rows)
            distance[:, 1:].masked_fill_(rows[:, 1:] == rows[:, :-1], math.inf)
            if part.left_out is not None:
                rank = part.left_out.rank[rows]
                distance.masked_fill_(part.left_out.hides(part.rows, rank), math.inf)
            distance, by = distance.sort(dim=1, stable=True)
            answer[0][part.rows] = distance[:, :k].to(answer[0].dtype)
            answer[1][part.rows] = rows.gather(1, by[:, :k])
            decided = distance[:, k - 1].square() * (1 + _ROUNDING) < bound
            undecided.append(part.numbers[~decided])
        return block._replace(rows=torch.cat(undecided))

    def _exhaust(self, block: "_Block", answer: tuple[Tensor, Tensor]) -> None:
        """Answer from all points not provably beyond the k-th distance found."""
        k, tiny = answer[0].shape[1], torch.finfo(answer[0].dtype).tiny
        radius = answer[0][block.rows, k - 1].double() * (1 + 1e-6) + tiny
        which, rows = self._careful.within(block, radius)
        if 2 * len(which) > block.size * len(self.points):
            self._settle(block, answer, self._careful, len(self.points))
            return
        pairs = block._replace(rows=block.numbers[which])
        distance = _differences(pairs, self.points, rows[:, None])[:, 0]
        by = rows.argsort(stable=True)
        by = by[distance[by].argsort(stable=True)]
        by = by[which[by].argsort(stable=True)]
        first = torch.arange(block.size, device=by.device)
        first = torch.searchsorted(which[by], first)
        by = by[first[:, None] + torch.arange(k, device=by.device)]
        answer[0][block.rows] = distance[by].to(answer[0].dtype)
        answer[1][block.rows] = rows[by]

    def _distances(
        self, block: "_Block", rows: Int[Tensor, " n_block n_rows"]
    ) -> Float[Tensor, " n_block n_rows"]:
        """Distances in float64 of each query to points of its own."""
        n_points, n_dims = self.points.shape
        if self.points.device.type == "cpu" and n_dims > 2048 and n_points < 2**14:
            return self._centred.distances(block, rows)
        return _differences(block, self.points, rows)

    def _engine(self, k: int, n_out: int) -> "_Engine":
        """What proposes neighbours when up to n_out points are left out."""
        if n_out <= 4 * k + 64:  # Sorted values and tree have to propose these, too.
            if self.points.shape[1] == 1:
                return self._line
            if self.points.shape[1] <= _TREE_DIMS and self.points.device.type == "cpu":
                return self._tree
        return self._quick

    @cached_property
    def _mostly_copies(self) -> bool:
        return 2 * len(_first_copies(self.points, 1, None)) <= len(self.points)

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


class _LeftOut(NamedTuple):
    """Points no query may see, by rank of position: start <= rank < stop."""

    position: Num[Tensor, " n_points"]
    queried: Num[Tensor, " n_queries"]
    reach: float
    order: Int[Tensor, " n_points"]
    rank: Int[Tensor, " n_points"]
    start: Int[Tensor, " n_queries"]
    stop: Int[Tensor, " n_queries"]
    most: int

    def hides(
        self, rows: _Rows, rank: Int[Tensor, " n_block n_rows"]
    ) -> Bool[Tensor, " n_block n_rows"]:
        start, stop = self.start[rows], self.stop[rows]
        return (rank >= start[:, None]) & (rank < stop[:, None])

    def among(self, kept: Int[Tensor, " n_kept"]) -> "_LeftOut":
        return _left_out(self.position[kept], self.queried, self.reach)


def _left_out(
    position: Num[Tensor, " n_points"], queried: Num[Tensor, " n_queries"], reach: float
) -> _LeftOut:
    """Ranges of points within reach of each queried position."""
    kind = torch.float64 if position.is_floating_point() else torch.int64
    position, queried = position.to(kind), queried.to(kind)
    reach = reach if kind is torch.float64 else math.floor(reach)
    order = position.argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    ascending = position[order]
    start, stop = torch.zeros((2, len(queried)), dtype=torch.int64, device=order.device)
    for step in reversed(range(len(order).bit_length())):  # Bisects differences.
        for count, before in ((start, True), (stop, False)):
            at = count + 2**step
            gap = queried - ascending[at.clamp(max=len(order)) - 1]
            passed = gap > reach if before else gap >= -reach
            count += 2**step * (passed & (at <= len(order)))
    most = int((stop - start).max())
    return _LeftOut(position, queried, reach, order, rank, start, stop, most)


class _Block(NamedTuple):
    """Some queries, and what they may not see."""

    queries: Float[Tensor, " n_queries n_dims"]
    rows: _Rows
    left_out: _LeftOut | None

    @property
    def numbers(self) -> Int[Tensor, " n_block"]:
        if isinstance(self.rows, Tensor):
            return self.rows
        device = self.queries.device
        return torch.arange(self.rows.start, self.rows.stop, device=device)

    @property
    def size(self) -> int:
        if isinstance(self.rows, Tensor):
            return len(self.rows)
        return len(range(self.rows.start, self.rows.stop))

    def split(self, size: int) -> "Iterator[_Block]":
        for part in _split(self.rows, size):
            rows = _run(part) if isinstance(part, Tensor) else part
            yield self._replace(rows=rows)


def _first_copies(
    points: Float[Tensor, " n_points n_dims"], k: int, left_out: _LeftOut | None
) -> Int[Tensor, " n_kept"]:
    """All points but those with k copies of lower index that every query may see."""
    n_points, n_dims = points.shape
    enough = k + (left_out.most if left_out else 0)
    group = torch.zeros(n_points, dtype=torch.int64, device=points.device)
    if left_out is not None and left_out.most > k and left_out.reach == 0:
        enough, group = k, left_out.position.unique(return_inverse=True)[1]
    # Integer sums of the bits wrap around: equal rows have equal keys.
    generator = torch.Generator().manual_seed(0)
    odd = torch.randint(2**61, (n_dims + 1,), generator=generator)
    odd = (2 * odd + 1).to(points.device)
    bits = torch.int32 if points.dtype == torch.float32 else torch.int64
    key = group * odd[-1]
    for some in _split(slice(0, n_points), _work(points) // n_dims):
        key[some] += ((points[some] + 0.0).view(bits).long() * odd[:-1]).sum(dim=1)
    order = key.argsort(stable=True)
    same = torch.cat([order[:1] < 0, key[order[1:]] == key[order[:-1]]])
    for at in same.nonzero()[:, 0].split(max(1, _work(points) // n_dims)):
        one, two = order[at], order[at - 1]
        same[at] = (points[one] == points[two]).all(dim=1) & (group[one] == group[two])
    place = torch.arange(n_points, device=points.device)
    n_before = place - torch.where(same, 0, place).cummax(dim=0).values
    return order[n_before < enough].sort().values


def _differences(
    block: _Block,
    points: Float[Tensor, " n_points n_dims"],
    rows: Int[Tensor, " n_block n_rows"],
) -> Float[Tensor, " n_block n_rows"]:
    """Distances from differences in float64; pair by pair, whatever the batch."""
    work, n_dims = _work(points) // 2, points.shape[1]
    n_rows = max(1, min(rows.shape[1], work // n_dims))
    distance = torch.empty(rows.shape, dtype=torch.float64, device=rows.device)
    done = 0
    for part in block.split(work // (n_rows * n_dims)):
        query = block.queries[part.rows, None].double()
        at = slice(done, done := done + part.size)
        for some in _split(slice(0, rows.shape[1]), n_rows):
            point = points[rows[at, some]].double()
            mode = "donot_use_mm_for_euclid_dist"
            distance[at, some] = torch.cdist(query, point, compute_mode=mode)[:, 0]
    return distance


@final
class _Centred:
    """Points about an origin amid them, where products lose little to rounding."""

    def __init__(self, points: Float[Tensor, " n_points n_dims"]) -> None:
        n_points, n_dims = points.shape
        n_sample = max(1, min(256, _work(points) // n_dims))
        sample = points[:: -(-n_points // n_sample)].double()
        mean = sample.mean(dim=0)
        spread = float((sample - mean).square().mean().sqrt())
        if spread > 0:  # On a coarse grid, differences of short numbers are exact.
            grid = 2.0 ** (math.floor(math.log2(spread)) - 2)
            mean = (mean / grid).round() * grid
        self.points, self.origin = points, mean.to(points.dtype)
        self.square = self.squares(_Block(points, slice(0, n_points), None))

    def squares(self, block: _Block) -> Float[Tensor, " n_block"]:
        """Squared distances of queries to the origin."""
        parts = block.split(_work(self.points) // 8 // len(self.origin))
        x, origin = block.queries, self.origin.double()
        squares = [(x[p.rows].double() - origin).square_().sum(dim=1) for p in parts]
        return torch.cat(squares)

    def columns(
        self,
        x: Float[Tensor, " n_x n_dims"],
        rows: _Rows,
        start: int,
        factor: float,
        last: Tensor | float,
        dtype: torch.dtype,
    ) -> Float[Tensor, " n_rows n_columns"]:
        """Columns of factor * (x - origin) from start on; after all of them, last."""
        n_dims = len(self.origin)
        stop = min(start + _WIDTH, n_dims)
        kind = torch.promote_types(x.dtype, dtype)
        part, origin = x[:, start:stop][rows].to(kind), self.origin[start:stop].to(kind)
        if factor != 1:
            part, origin = part * factor, origin * factor
        width = stop - start + (start + _WIDTH > n_dims)
        out = torch.empty((len(part), width), dtype=dtype, device=x.device)
        torch.sub(part, origin, out=out[:, : stop - start])
        if width > stop - start:
            out[:, -1] = last
        return out

    def distances(
        self, block: _Block, rows: Int[Tensor, " n_block n_rows"]
    ) -> Float[Tensor, " n_block n_rows"]:
        """Distances from float64 products, from differences where these cancel.

        Products at chosen pairs gather nothing: with 100,000 dimensions on CPU they
        take a fifth of the time of differences.
        """
        n_points, shape = len(self.points), rows.shape
        begin = torch.arange(0, rows.numel() + 1, shape[1])
        product = torch.zeros(rows.numel(), dtype=torch.float64)
        total = self.square[rows]
        # As many columns for one query as for a thousand, for the same sums.
        n_columns = max(64, min(1024, _work(self.points) // n_points))
        for at in _split(slice(0, len(self.origin)), n_columns):
            origin = self.origin[at].double()
            left = block.queries[:, at][block.rows].double() - origin
            right = self.points[:, at].double() - origin
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Sparse CSR tensor support")
                pairs = torch.sparse_csr_tensor(
                    begin,
                    rows.flatten(),
                    product,
                    (block.size, n_points),
                    check_invariants=False,
                )
            product = torch.sparse.sampled_addmm(pairs, left, right.T).values()
            total += left.square_().sum(dim=1, keepdim=True)
        square = total - 2 * product.view(shape)
        distance = square.clamp(min=0).sqrt()
        one, two = (square < total / 1024).nonzero(as_tuple=True)
        near = block._replace(rows=block.numbers[one])
        near_distance = _differences(near, self.points, rows[one, two][:, None])
        distance[one, two] = near_distance[:, 0]
        return distance


class _Engine(Protocol):
    """Proposes neighbours, and bounds the squared distance of all other points."""

    block: int

    def propose(
        self, block: _Block, n_proposed: int
    ) -> tuple[Int[Tensor, " n_block n_rows"], Float[Tensor, " n_block"]]: ...


@final
class _Line:
    """One dimension: the points on both sides of a query."""

    block = 2**13

    def __init__(self, points: Float[Tensor, " n_points 1"]) -> None:
        self.value, self.order = points[:, 0].double().sort(stable=True)

    def propose(
        self, block: _Block, n_proposed: int
    ) -> tuple[Int[Tensor, " n_block n_rows"], Float[Tensor, " n_block"]]:
        n_points = len(self.value)
        n_side = n_proposed + (block.left_out.most if block.left_out else 0)
        n_rows = min(2 * n_side, n_points)
        query = block.queries[block.rows, 0].double()
        first = torch.searchsorted(self.value, query) - n_side
        first = first.clamp(0, n_points - n_rows)
        end = first + n_rows
        before = query - self.value[(first - 1).clamp(min=0)]
        after = self.value[end.clamp(max=n_points - 1)] - query
        before = before.masked_fill(first == 0, math.inf)
        after = after.masked_fill(end == n_points, math.inf)
        rows = first[:, None] + torch.arange(n_rows, device=first.device)
        return self.order[rows], torch.minimum(before, after).square()


@final
class _Tree:
    """Few dimensions: SciPy's k-d tree, which breaks ties anyhow."""

    block = 2**13

    def __init__(self, points: Float[Tensor, " n_points n_dims"]) -> None:
        from scipy.spatial import cKDTree  # Here, to keep the import of geoq quick.

        self.tree = cKDTree(points.numpy())

    def propose(
        self, block: _Block, n_proposed: int
    ) -> tuple[Int[Tensor, " n_block n_rows"], Float[Tensor, " n_block"]]:
        n_rows = n_proposed + (block.left_out.most if block.left_out else 0)
        n_rows = min(n_rows, self.tree.n)
        query = block.queries[block.rows].numpy()
        distance, rows = self.tree.query(query, n_rows, workers=-1)
        bound = torch.from_numpy(distance[:, -1] ** 2 * (1 - _ROUNDING))
        if n_rows == self.tree.n:
            bound.fill_(math.inf)
        return torch.from_numpy(rows), bound


@final
class _Products:
    r"""Many dimensions: squared distances from matrix products, bounded from below.

    .. math:: \lVert q - p \rVert^2 \ge (1 - 2 \epsilon) \lVert p \rVert^2
        - 2 q \cdot p + (1 - \epsilon) \lVert q \rVert^2

    holds for rounded products. All but the last term, the value of a pair, is one
    product of rows with a column appended; the k least values stand in the k groups
    of points with the least minima, so few values are computed twice or sorted.

    Written here for its speed: on one CPU thread, with exact distances included, it
    takes a third of the time of FAISS and of scikit-learn at 1e6 points in 16
    dimensions, and as long as FAISS, half of scikit-learn, at 1e5 points in 64.
    """

    def __init__(self, centred: _Centred, dtype: torch.dtype) -> None:
        self.centred, self.dtype = centred, dtype
        n_dims, unit = len(centred.origin), torch.finfo(dtype).eps / 2
        # A sum of n rounded products is off by n units at worst, and by more than
        # 8 sqrt(n) with a probability below 2 exp(-32) (Higham and Mary, 2019).
        likely = 8 * (math.sqrt(min(n_dims, _WIDTH)) + math.sqrt(n_dims / _WIDTH))
        self.error = (min(n_dims, likely) + 8) * unit
        self.underflow = 8 * (n_dims + 8) * torch.finfo(dtype).tiny
        self.block = 512 if n_dims < 256 else 1024
        if centred.points.device.type == "cuda":
            self.block = 4096

    def propose(
        self, block: _Block, n_proposed: int
    ) -> tuple[Int[Tensor, " n_block n_rows"], Float[Tensor, " n_block"]]:
        n_points = len(self.centred.points)
        square, scale = self._scale(block)
        n_group = self._group(block.size, n_proposed)
        value, rows = _least(self._minima(block, scale, n_group), n_proposed + 1)
        bound, rows = value[:, -1], rows[:, :-1]
        if n_group > 1:
            rows = _members(rows, n_group)
            value = self._values(block, scale, rows)
            value, at = value.topk(n_proposed + 1, largest=False)
            bound = torch.minimum(bound, value[:, -1])
            rows = rows.gather(1, at[:, :-1]).clamp(max=n_points - 1)
        if block.left_out is not None:
            rows = block.left_out.order[rows]
        bound = (bound.double() - self.underflow) / scale**2
        return rows, bound + square * (1 - self.error)

    def within(
        self, block: _Block, radius: Float[Tensor, " n_block"]
    ) -> tuple[Int[Tensor, " n_pairs"], Int[Tensor, " n_pairs"]]:
        """Pairs (place in the block, point) that may lie within the radius."""
        square, scale = self._scale(block)
        limit = (radius.square() - square * (1 - self.error)) * scale**2
        found = []
        for start, tile in self._tiles(block, scale, 1, None):
            hit = (tile <= limit + self.underflow).nonzero()
            hit[:, 0] += start
            found.append(hit)
        rows, which = torch.cat(found).unbind(dim=1)
        return which, rows if block.left_out is None else block.left_out.order[rows]

    def _scale(self, block: _Block) -> tuple[Float[Tensor, " n_block"], float]:
        """Squared norms of the queries; a power of two that tames extreme norms."""
        square = self.centred.squares(block)
        largest = float(torch.maximum(square.max(), self.centred.square.max()))
        exponent = math.ceil(math.log2(largest) / 2) if largest > 0 else 0
        limit = 120 if block.queries.dtype == torch.float32 else 500
        if abs(exponent) < 30:
            return square, 1.0
        return square, 2.0 ** -max(-limit, min(limit, exponent))

    def _group(self, n_block: int, n_proposed: int) -> int:
        """Points in a group: as few as the memory for all minima allows."""
        n_points = len(self.centred.points)
        size = n_points * n_block / (8 * _work(self.centred.points))
        size = min(2 ** math.ceil(math.log2(size)), n_points // (n_proposed + 1))
        return int(max(1, size))

    def _minima(
        self, block: _Block, scale: float, n_group: int
    ) -> Float[Tensor, " n_groups n_block"]:
        """Least value of each group of consecutive points, for each query."""
        n_points = len(self.centred.points)
        least = self._empty(-(-n_points // n_group), block.size)
        keep = least if n_group == 1 else None
        for start, tile in self._tiles(block, scale, n_group, keep):
            if keep is not None:
                continue
            whole = len(tile) // n_group
            groups = tile[: whole * n_group].view(whole, n_group, block.size)
            torch.amin(groups, dim=1, out=least[start // n_group :][:whole])
            if whole * n_group < len(tile):
                least[-1] = tile[whole * n_group :].amin(dim=0)
        return least

    def _tiles(
        self, block: _Block, scale: float, multiple: int, keep: Tensor | None
    ) -> Iterator[tuple[int, Float[Tensor, " n_rows n_block"]]]:
        """Values of consecutive points (by position where some are left out).

        Each tile is written over the last, or into its part of the array to keep.
        """
        centred, points, left_out = self.centred, self.centred.points, block.left_out
        n_points, n_dims = points.shape
        work, n_columns = _work(points), min(n_dims, _WIDTH)
        size = min(work // block.size, 4 * work // n_columns, n_points)
        size = max(1, size // multiple) * multiple
        tile = self._empty(size, block.size) if keep is None else keep
        right = None
        hidden = range(0)
        if left_out is not None:
            begin, end = left_out.start[block.rows], left_out.stop[block.rows]
            hidden = range(int(begin.min()), int(end.max()))
        for start in range(0, n_points, size):
            rows: _Rows = slice(start, min(start + size, n_points))
            if left_out is not None:
                rows = _run(left_out.order[rows])
            weight = self._weight(rows, scale)
            out = tile[0 if keep is None else start :][: len(weight)]
            for at in range(0, n_dims + 1, _WIDTH):
                if right is None or n_dims >= _WIDTH:
                    right = self._right(block, at, scale)
                left = centred.columns(points, rows, at, scale, weight, self.dtype)
                with _full_precision(points.device):
                    torch.addmm(out, left, right.T, beta=int(at > 0), out=out)
            if left_out and start < hidden.stop and start + size > hidden.start:
                rank = start + torch.arange(len(out), device=out.device)[:, None]
                out.masked_fill_((rank >= begin) & (rank < end), math.inf)
            yield start, out

    def _values(
        self, block: _Block, scale: float, rank: Int[Tensor, " n_block n_rows"]
    ) -> Float[Tensor, " n_block n_rows"]:
        """Values at chosen points, infinite past the last and where left out."""
        centred, points, left_out = self.centred, self.centred.points, block.left_out
        n_points, n_dims = points.shape
        value = torch.zeros_like(rank, dtype=self.dtype)
        done, n_rows = 0, rank.shape[1]
        for part in block.split(_work(points) // 4 // (n_rows * min(n_dims, _WIDTH))):
            at = slice(done, done := done + part.size)
            rows = rank[at].clamp(max=n_points - 1).flatten()
            rows = left_out.order[rows] if left_out else rows
            weight = self._weight(rows, scale)
            for start in range(0, n_dims + 1, _WIDTH):
                left = centred.columns(points, rows, start, scale, weight, self.dtype)
                left = left.view(part.size, n_rows, left.shape[1])
                with _full_precision(points.device):
                    product = left @ self._right(part, start, scale)[:, :, None]
                value[at] += product[:, :, 0]
        value.masked_fill_(rank >= n_points, math.inf)
        if left_out is not None:
            value.masked_fill_(left_out.hides(block.rows, rank), math.inf)
        return value

    def _right(
        self, block: _Block, start: int, scale: float
    ) -> Float[Tensor, " n_block n_columns"]:
        x, rows = block.queries, block.rows
        return self.centred.columns(x, rows, start, -2 * scale, 1, self.dtype)

    def _weight(self, rows: _Rows, scale: float) -> Float[Tensor, " n_rows"]:
        return self.centred.square[rows] * (scale**2 * (1 - 2 * self.error))

    def _empty(self, *shape: int) -> Float[Tensor, " n_rows n_block"]:
        return torch.empty(shape, dtype=self.dtype, device=self.centred.origin.device)


def _least(
    values: Float[Tensor, " n_values n_block"], n_least: int
) -> tuple[Float[Tensor, " n_block n_least"], Int[Tensor, " n_block n_least"]]:
    """The least values of each column, ascending, and where they stand."""
    n_values, n_block = values.shape
    n_groups = n_values // 8
    if n_groups < 4 * n_least:
        return values.T.contiguous().topk(n_least, largest=False)
    # The least of groups first: minima take less time than sorting all values.
    groups = values[: 8 * n_groups].view(n_groups, 8, n_block)
    rows = _members(_least(groups.amin(dim=1), n_least)[1], 8)
    rest = torch.arange(8 * n_groups, n_values, device=rows.device)
    rows = torch.cat([rows, rest.expand(n_block, -1)], dim=1)
    value, at = values.T.gather(1, rows).topk(n_least, largest=False)
    return value, rows.gather(1, at)


def _members(
    groups: Int[Tensor, " n_block n_groups"], n_group: int
) -> Int[Tensor, " n_block n_rows"]:
    """The consecutive rows that groups of equal size consist of."""
    member = torch.arange(n_group, device=groups.device)
    return (groups[:, :, None] * n_group + member).flatten(start_dim=1)


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Products without TF32 or bfloat16, whose errors are outside the bounds."""
    cuda = device.type == "cuda"
    backend: Any = torch.backends.cuda if cuda else torch.backends.mkldnn
    flags = backend.matmul
    before, flags.fp32_precision = flags.fp32_precision, "ieee"
    try:
        yield
    finally:
        flags.fp32_precision = before


def _blank(queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (len(queries), k)
    return queries.new_empty(shape), queries.new_empty(shape, dtype=torch.int64)


def _work(x: Tensor) -> int:
    """How many numbers a work array may hold: fits a CPU's cache, fills a GPU."""
    return 2**24 if x.device.type == "cuda" else 2**20


def _run(index: Int[Tensor, " n_rows"]) -> _Rows:
    """The same rows as a slice, which copies nothing, if they are consecutive."""
    if not bool((index.diff() == 1).all()):
        return index
    return slice(int(index[0]), int(index[0]) + len(index))


def _split(rows: _Rows, size: int) -> Iterator[_Rows]:
    """The rows in parts of at most the given size."""
    if isinstance(rows, Tensor):
        if len(rows):
            yield from rows.split(max(1, size))
        return
    for start in range(rows.start, rows.stop, max(1, size)):
        yield slice(start, min(start + max(1, size), rows.stop))
