"""The exact search of geoq relative to ``torch.cdist`` and ``topk`` on a GPU: time, peak memory and agreement.

python -m benchmarks.costs.gpu_search          # on a machine with CUDA
python -m benchmarks.costs.gpu_search --cpu    # small sizes, for the agreement alone
"""

import argparse
import time
from pathlib import Path

import torch

from benchmarks import record
from benchmarks.costs.speed import torch_cdist
from geoq.neighbors import Neighbors

# Numbers of points, dimensions and queries.
CASES = (
    (1_000, 100_000, 1_000),
    (2_000, 24_576, 2_000),
    (100_000, 64, 10_000),
    (200_000, 16, 20_000),
    (200_000, 3, 20_000),
)
SMALL_CASES = ((200, 5_000, 100), (500, 300, 100), (2_000, 16, 300), (2_000, 3, 300))
K, N_CHECKED = 20, 50


def measure(work, device):
    """The smallest seconds of three calls after a first one, and the peak memory above the memory in use, in MiB."""
    work()
    seconds, peak = [], 0
    for _ in range(3):
        if device == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
            peak = max(peak, torch.cuda.max_memory_allocated() - before)
        seconds.append(time.perf_counter() - start)
    return min(seconds), peak / 2**20


def n_wrong(neighbors, queries):
    """How many indices differ from those of differences in float64, for a few queries."""
    some, points = queries[:N_CHECKED], neighbors.points.double()
    squared = [(points - one).square().sum(1) for one in some.double()]
    truth = torch.stack([part.argsort(stable=True)[:K] for part in squared])
    return int((neighbors.nearest(some, K)[1] != truth).sum())


def row(case, dtype, device):
    """One row of the results file."""
    n_points, n_dims, n_queries = case
    torch.manual_seed(0)
    points, queries = (
        torch.randn(n, n_dims, dtype=dtype, device=device)
        for n in (n_points, n_queries)
    )
    neighbors = Neighbors(points)
    own, own_peak = measure(lambda: neighbors.nearest(queries, K), device)
    plain, plain_peak = measure(lambda: torch_cdist(points, queries, K), device)
    return {
        "seed": 0,
        "points": f"{n_points:,} x {n_dims:,}",
        "queries": n_queries,
        "dtype": str(dtype)[6:],
        "seconds": own,
        "over_cdist": own / plain,
        "peak_mib": own_peak,
        "peak_mib_cdist": plain_peak,
        "indices_differ": n_wrong(neighbors, queries),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="small sizes on a CPU")
    parser.add_argument("--out", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    device = "cpu" if arguments.cpu else "cuda"
    rows = [
        row(case, dtype, device)
        for case in (SMALL_CASES if arguments.cpu else CASES)
        for dtype in (torch.float32, torch.float64)
    ]
    print(record.write("gpu_search", rows, arguments.out, small=arguments.cpu))


if __name__ == "__main__":
    main()
