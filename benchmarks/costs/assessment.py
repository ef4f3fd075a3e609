"""CPU time of an assessment of 10,000 queries relative to its neighbour search, and of one query above the surrogate's call.

CPU time is compared, the smallest of several calls, because other programs change the wall time of a busy machine. The time of
the surrogate's call is subtracted.

    python -m benchmarks.costs.assessment [--small] [--out FILE]
"""

import argparse
import time
import warnings
from pathlib import Path

import numpy as np
import torch

from benchmarks import record
from geoq import GeoQ

SEED = 0
# Numbers of inputs and of outputs.
CASES = ((4, 1), (4, 64), (16, 1), (16, 64))
SIZES, SMALL_SIZES = (2_000, 10_000), (200, 500)


def cpu_seconds(work, repetitions):
    """The smallest CPU time of several calls."""
    seconds = []
    for _ in range(repetitions):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def measure(n_inputs, n_outputs, n_points, n_queries):
    """One row of the table."""
    rng = np.random.default_rng(SEED)
    x, queries = (rng.normal(size=(n, n_inputs)) for n in (n_points, n_queries))
    weights = rng.normal(size=(n_inputs, n_outputs))

    def surrogate(x):
        return 0.9 * np.sin(x @ weights)

    estimator = GeoQ(surrogate, None).fit(x, np.sin(x @ weights))
    geometry, one = estimator.geometry_, queries[:1]
    points = torch.as_tensor(queries) * estimator.metric_.weight
    estimator.assess(queries)
    assess = cpu_seconds(lambda: estimator.assess(queries), 7)
    assess -= cpu_seconds(lambda: surrogate(queries), 7)
    search = cpu_seconds(
        lambda: geometry._support.nearest(points, geometry.n_support), 7
    )
    alone = cpu_seconds(lambda: estimator.assess(one), 300)
    alone -= cpu_seconds(lambda: surrogate(one), 300)
    return {
        "n_inputs": n_inputs,
        "n_outputs": n_outputs,
        "seed": SEED,
        "assess_over_search": assess / search,
        "one_query_ms": 1e3 * alone,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="reduced sizes")
    parser.add_argument("--out", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        rows.append(measure(*case, *(SMALL_SIZES if arguments.small else SIZES)))
        print(rows[-1], flush=True)
    print(record.write("assessment", rows, arguments.out))
