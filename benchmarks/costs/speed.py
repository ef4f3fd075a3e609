"""Seconds and memory of exact nearest-neighbour searches by geoq and by other libraries, and of GeoQ as a whole.

Each engine answers the same queries in a separate process, so that its peak memory can be measured. Compare seconds only
within one table: its engines run one after the other on the same machine, which may be busy.

    python -m benchmarks.costs.speed [--small] [--out FILE]
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks import record

SEED = 0
RESULTS = record.RESULTS / "speed.json"
ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# n_points, n_dims, n_queries, k, repetitions
CASES = {
    "2e5 x 3": (200_000, 3, 200_000, 20, 3),
    "1e6 x 16": (1_000_000, 16, 100_000, 20, 1),
    "1e5 x 64": (100_000, 64, 10_000, 20, 3),
    "1e3 x 100,000": (1_000, 100_000, 1_000, 20, 3),
}
SMALL_CASES = {
    "2e4 x 3": (20_000, 3, 20_000, 20, 3),
    "5e4 x 16": (50_000, 16, 2_000, 20, 3),
    "2e4 x 64": (20_000, 64, 2_000, 20, 3),
    "2e2 x 20,000": (200, 20_000, 200, 20, 3),
}


# Numbers of calibration points and queries, in 16 dimensions, with a trivial surrogate.
ESTIMATORS = {"cpu": (200_000, 100_000), "cuda": (1_000_000, 100_000)}
SMALL_ESTIMATOR = (5_000, 5_000)


def geoq(points, queries, k):
    from geoq.neighbors import Neighbors

    return Neighbors(points).nearest(queries, k)


def sklearn_brute(points, queries, k):
    from sklearn.neighbors import NearestNeighbors

    engine = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(points.numpy())
    return engine.kneighbors(queries.numpy())


def sklearn_tree(points, queries, k):
    from sklearn.neighbors import NearestNeighbors

    engine = NearestNeighbors(n_neighbors=k, algorithm="kd_tree", n_jobs=-1)
    return engine.fit(points.numpy()).kneighbors(queries.numpy())


def faiss_flat(points, queries, k):
    import faiss

    return faiss.knn(queries.numpy(), points.numpy(), k)


def torch_cdist(points, queries, k):
    """The simplest search on a GPU: all distances of a chunk of queries, and the smallest of them."""
    size = max(1, 2**28 // len(points))
    found = [
        torch.cdist(some, points).topk(k, largest=False) for some in queries.split(size)
    ]
    return torch.cat([f.values for f in found]), torch.cat([f.indices for f in found])


ENGINES = {
    f.__name__: f for f in (geoq, sklearn_brute, sklearn_tree, faiss_flat, torch_cdist)
}


def engines_for(n_dims):
    """The exact engines that are compared for this number of dimensions."""
    if DEVICE == "cuda":
        return ["geoq", "torch_cdist"]
    if n_dims <= 8:  # brute force takes fifty times as long
        return ["geoq", "sklearn_tree"]
    names = ["geoq", "sklearn_brute"]
    if find_spec("faiss"):
        return [*names, "faiss_flat"]
    print("skipping FAISS: not installed (pip install faiss-cpu)")
    return names


def measure(engine, case):
    """Smallest seconds over the repetitions and extra memory of one engine; runs in a separate process."""
    n_points, n_dims, n_queries, k, repetitions = case
    generator = torch.Generator(DEVICE).manual_seed(SEED)
    ENGINES[engine](*(torch.randn(64, n_dims, device=DEVICE) for _ in range(2)), 2)
    points, queries = (
        torch.randn(n, n_dims, generator=generator, device=DEVICE)
        for n in (n_points, n_queries)
    )
    seconds = []

    def work():
        start = time.perf_counter()
        float(ENGINES[engine](points, queries, k)[0].sum())  # waits for the device
        seconds.append(time.perf_counter() - start)

    data = points.nbytes + queries.nbytes
    extra = [extra_bytes(work) for _ in range(repetitions)]
    return {"seconds": min(seconds), "extra_over_data": extra[0] / data}


def measure_estimator(form, case):
    """Seconds of fit and assess and extra memory of GeoQ, with 16 inputs and a trivial surrogate."""
    from geoq import ClusterFolds, GeoQ, NormScaledIncrement, SafeRegion

    n_points, n_queries = case
    generator = torch.Generator(DEVICE).manual_seed(SEED)
    x, queries = (
        torch.randn(n, 16, generator=generator, device=DEVICE)
        for n in (n_points, n_queries)
    )
    y = x.square().sum(dim=1, keepdim=True)

    def surrogate(x):
        return 16 + 0 * x[:, :1]

    estimator = {
        "default": GeoQ(surrogate, None),
        "paper": GeoQ(
            surrogate,
            None,
            folds=ClusterFolds(5),
            increment_model=NormScaledIncrement(),
            safe_region=SafeRegion(),
        ),
    }[form]
    row = {"n_points": n_points, "n_queries": n_queries}

    def work():
        start = time.perf_counter()
        estimator.fit(x, y)
        row["fit_seconds"] = time.perf_counter() - start
        assessment = estimator.assess(queries)
        row["safe_fraction"] = float(assessment.safe.double().mean())
        row["assess_seconds"] = time.perf_counter() - start - row["fit_seconds"]

    row["extra_gib"] = extra_bytes(work) / 2**30
    return row


def whole_estimator(case):
    print(
        "\n| GeoQ, 16 inputs | calibration points | queries | fit, s | assess, s | extra memory, GiB |\n|---|---|---|---|---|---|"
    )
    rows = []
    for form in ("default", "paper"):
        row = in_own_process(form, case) | {"form": form}
        print(
            f"| {form} | {row['n_points']} | {row['n_queries']} | {row['fit_seconds']:.0f} | {row['assess_seconds']:.0f} | {row['extra_gib']:.2f} |",
            flush=True,
        )
        rows.append(row)
    return rows


def extra_bytes(work):
    """Peak memory during a call beyond the memory that was in use before it."""
    if DEVICE == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if (
        reset.exists()
    ):  # Linux: resets the peak, which the imports would determine otherwise
        reset.write_text("5")
        before = resident(status, "VmRSS")
        work()
        return resident(status, "VmHWM") - before
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def resident(status, name):
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def neighbour_search(cases):
    """Rows of all cases and engines, printed as a Markdown table."""
    print(
        "| points | engine | seconds | ratio to the fastest | extra memory / data |\n|---|---|---|---|---|"
    )
    rows = []
    for name, case in cases.items():
        table = {
            engine: in_own_process(engine, case) for engine in engines_for(case[1])
        }
        fastest = min(row["seconds"] for row in table.values())
        for engine, row in table.items():
            row |= {
                "points": name,
                "engine": engine,
                "n_queries": case[2],
                "k": case[3],
                "ratio": row["seconds"] / fastest,
            }
            print(
                f"| {name} | {engine} | {row['seconds']:.2f} | {row['ratio']:.2f} | {row['extra_over_data']:.2f} |",
                flush=True,
            )
            rows.append(row)
    return rows


def in_own_process(engine, case):
    command = [sys.executable, "-m", "benchmarks.costs.speed"]
    command += ["--measure", engine, json.dumps(case)]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(run.stdout)


def environment():
    packages = ("geoq", "torch", "numpy", "scipy", "scikit-learn", "faiss-cpu")
    versions = {package: record.installed(package) for package in packages}
    name = (
        torch.cuda.get_device_name()
        if DEVICE == "cuda"
        else platform.processor() or platform.machine()
    )
    return {
        "device": DEVICE,
        "machine": name,
        "threads": torch.get_num_threads(),
        "commit": record.COMMIT,
        "seed": SEED,
    } | {"versions": versions}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--small", action="store_true", help="reduced sizes, a few seconds"
    )
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="where to write the results"
    )
    arguments = parser.parse_args()
    if arguments.measure:
        what, case = arguments.measure[0], json.loads(arguments.measure[1])
        work = measure if what in ENGINES else measure_estimator
        print(json.dumps(work(what, case)))
    else:
        results = environment() | {"small": arguments.small}
        results["neighbour_search"] = neighbour_search(
            SMALL_CASES if arguments.small else CASES
        )
        results["estimator"] = whole_estimator(
            SMALL_ESTIMATOR if arguments.small else ESTIMATORS[DEVICE]
        )
        arguments.out.parent.mkdir(exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")
