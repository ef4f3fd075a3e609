"""Seconds and memory of exact nearest-neighbour searches by geoq and by other libraries, and of GeoQ as a whole.

Each engine answers the same queries in a process of its own, so that its peak memory can be measured. Compare seconds only
within one table: its engines run one after the other on the same machine, which may be busy.

    python -m benchmarks.costs.speed [--small] [--out FILE]
"""

import json
import sys
import time
from importlib.util import find_spec

import numpy as np

from benchmarks import record
from benchmarks.costs.memory import apart, extra_bytes
from benchmarks.runs import parser_of
from geoq import GeoQ
from geoq.neighbors import Neighbors

# n_points, n_dims, n_queries, k, repetitions
CASES = {
    "2e5 x 3": (200_000, 3, 200_000, 20, 3),
    "1e6 x 16": (1_000_000, 16, 100_000, 20, 1),
    "1e5 x 64": (100_000, 64, 10_000, 20, 3),
    "1e3 x 100,000": (1_000, 100_000, 1_000, 20, 3),
}
SMALL_CASES = {"2e3 x 3": (2_000, 3, 500, 20, 1)}
# Numbers of calibration points and queries, in 16 dimensions, with a trivial surrogate.
ESTIMATOR, SMALL_ESTIMATOR = (200_000, 100_000), (2_000, 2_000)


def geoq(points, queries, k):
    return Neighbors(points).nearest(queries, k)


def sklearn_brute(points, queries, k, algorithm="brute", n_jobs=None):
    from sklearn.neighbors import NearestNeighbors

    engine = NearestNeighbors(n_neighbors=k, algorithm=algorithm, n_jobs=n_jobs)
    return engine.fit(points).kneighbors(queries)


def sklearn_tree(points, queries, k):
    return sklearn_brute(points, queries, k, algorithm="kd_tree", n_jobs=-1)


def faiss_flat(points, queries, k):
    import faiss

    return faiss.knn(queries, points, k)


ENGINES = {f.__name__: f for f in (geoq, sklearn_brute, sklearn_tree, faiss_flat)}


def engines_for(n_dims):
    """The exact engines that are compared for this number of dimensions."""
    if n_dims <= 8:  # brute force takes fifty times as long
        return ["geoq", "sklearn_tree"]
    return ["geoq", "sklearn_brute", *(["faiss_flat"] if find_spec("faiss") else [])]


def normal(n, n_dims, rng):
    return rng.standard_normal((n, n_dims), dtype=np.float32)


def measure_engine(engine, case):
    """Smallest seconds over the repetitions and extra memory of one engine."""
    n_points, n_dims, n_queries, k, repetitions = case
    rng, seconds = np.random.default_rng(0), []
    ENGINES[engine](*(normal(64, n_dims, rng) for _ in range(2)), 2)
    points, queries = normal(n_points, n_dims, rng), normal(n_queries, n_dims, rng)

    def work():
        start = time.perf_counter()
        ENGINES[engine](points, queries, k)
        seconds.append(time.perf_counter() - start)

    extra = [extra_bytes(work) for _ in range(repetitions)]
    data = points.nbytes + queries.nbytes
    return {"seconds": min(seconds), "extra_over_data": extra[0] / data}


def measure_estimator(form, case):
    """Seconds of fit and assess and extra memory of GeoQ, with 16 inputs and a trivial surrogate."""
    rng, (n_points, n_queries) = np.random.default_rng(0), case
    x, queries = normal(n_points, 16, rng), normal(n_queries, 16, rng)
    y, make = (x**2).sum(axis=1, keepdims=True), GeoQ.paper if form == "paper" else GeoQ
    estimator, row = make(lambda x: 16 + 0 * x[:, :1], None), {"form": form}

    def work():
        start = time.perf_counter()
        estimator.fit(x, y, progress=None)
        row["fit_seconds"] = time.perf_counter() - start
        row["safe_fraction"] = float(estimator.assess(queries).safe.mean())
        row["assess_seconds"] = time.perf_counter() - start - row["fit_seconds"]

    row["extra_gib"] = extra_bytes(work) / 2**30
    return row | {"n_points": n_points, "n_queries": n_queries}


def search_rows(cases):
    """Rows of all cases and engines."""
    rows = []
    for points, case in cases.items():
        engines = engines_for(case[1])
        found = {e: apart("benchmarks.costs.speed", "--measure", e, case) for e in engines}
        fastest = min(row["seconds"] for row in found.values())
        for engine, row in found.items():
            about = {"kind": "search", "seed": 0, "points": points, "engine": engine}
            about |= {"n_queries": case[2], "k": case[3]}
            rows.append(about | row | {"ratio": row["seconds"] / fastest})
            print(rows[-1], flush=True)
    return rows


def main(words=None):
    asked = parser_of(__doc__).parse_args(words)
    rows = search_rows(SMALL_CASES if asked.small else CASES)
    size = SMALL_ESTIMATOR if asked.small else ESTIMATOR
    for form in ("default",) if asked.small else ("default", "paper"):
        row = apart("benchmarks.costs.speed", "--measure", form, size)
        rows.append({"kind": "estimator", "seed": 0} | row)
        print(rows[-1], flush=True)
    return record.write("speed", rows, asked.out, small=asked.small)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        what, case = sys.argv[2], json.loads(sys.argv[3].replace("(", "[").replace(")", "]"))
        print(json.dumps((measure_engine if what in ENGINES else measure_estimator)(what, case)))
    else:
        main()
