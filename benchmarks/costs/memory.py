"""Peak memory of a calibration and an assessment above the data, and the size of the saved file, as the data grow.

The surrogate is given and costs nothing, so nothing is trained but a small network of the increment model for fields. Each case
runs in a separate process. Sizes are relative to the data, which are the inputs and outputs given to ``fit``.

    python -m benchmarks.costs.memory [--small] [--out FILE]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

from benchmarks import record
from benchmarks.costs.speed import ROOT, SEED, extra_bytes

SIZES = {
    "scalars": (1_000, 10_000),
    "vectors": (1_000, 4_000),
    "fields": (250, 500, 1_000),
    "rollouts": (1_000, 4_000),
}
SMALL_SIZES = {
    "scalars": (200,),
    "vectors": (200,),
    "fields": (40,),
    "rollouts": (300,),
}
N_QUERIES = 100


def table(n, n_outputs):
    """Eight inputs and some outputs, and a surrogate that is 10 % too small."""
    rng = np.random.default_rng(SEED)
    x, weights = rng.normal(size=(n, 8)), rng.normal(size=(8, n_outputs))
    return x, np.sin(x @ weights), lambda x: 0.9 * np.sin(x @ weights)


def fields(n):
    """Fields of 3 x 64 x 128 values in float32, and a surrogate that returns its input."""
    x = np.random.default_rng(SEED).normal(size=(n, 3, 64, 128)).astype(np.float32)
    return x, np.float32(1.1) * x, lambda x: x


def states(n):
    """A noisy oscillator with 16 coordinates, and a step that turns a little too slowly."""
    rng = np.random.default_rng(SEED)
    angle = 0.1 * np.arange(n)[:, None] + rng.normal(size=16)
    now, ahead = np.sin(angle), np.cos(angle)
    values = np.concatenate([now, ahead], axis=1)

    def step(values):
        one, other = np.split(values, 2, axis=1)
        c, s = np.cos(0.095), np.sin(0.095)
        return np.concatenate([c * one + s * other, c * other - s * one], axis=1)

    return values, step


def problem(kind, n):
    """The estimator, the arrays for ``fit``, and a function that assesses queries."""
    from geoq import FieldScaleIncrement, GeoQ, RolloutGeoQ, Training
    from geoq.increments import FieldFactor

    if kind == "rollouts":
        values, step = states(n)
        estimator = RolloutGeoQ(step, None, n_calibration=20)
        return estimator, (values,), lambda: estimator.assess(values[:N_QUERIES], 20)
    if kind == "fields":
        x, y, surrogate = fields(n)
        brief = Training(n_steps=2, check_every=2, batch_size=8)
        brief = FieldFactor(widths=(4,), n_splits=2, training=brief)
        estimator = GeoQ(
            surrogate, None, increment_model=FieldScaleIncrement(factor=brief)
        )
    else:
        x, y, surrogate = table(n, 1 if kind == "scalars" else 64)
        estimator = GeoQ(surrogate, None)
    return estimator, (x, y), lambda: estimator.assess(x[:N_QUERIES])


def file_bytes(save, **settings):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "estimator.geoq"
        save(path, **settings)
        return path.stat().st_size


def measure(kind, n):
    """Memory and file sizes of one case, relative to the data; runs in a separate process."""
    warnings.simplefilter("ignore")
    # A small case first, so that imported modules do not count.
    estimator, data, assess = problem(kind, 40 if kind == "fields" else 200)
    estimator.fit(*data)
    assess()
    estimator, data, assess = problem(kind, n)
    n_bytes = sum(array.nbytes for array in data)
    started = time.perf_counter()
    fit = extra_bytes(lambda: estimator.fit(*data))
    seconds = time.perf_counter() - started
    row = {"kind": kind, "n": n, "seed": SEED, "data_mib": n_bytes / 2**20}
    row |= {"fit_over_data": fit / n_bytes, "fit_seconds": seconds}
    row["assess_mib"] = extra_bytes(assess) / 2**20
    row["file_over_data"] = file_bytes(estimator.save) / n_bytes
    row["short_file_over_data"] = None
    if kind != "rollouts":
        short = file_bytes(estimator.save, calibration=False)
        row["short_file_over_data"] = short / n_bytes
    return row


def in_own_process(kind, n):
    command = [sys.executable, "-m", "benchmarks.costs.memory", "--measure", kind]
    command.append(str(n))
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(run.stdout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="reduced sizes")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure[0], int(arguments.measure[1]))))
    else:
        sizes = SMALL_SIZES if arguments.small else SIZES
        rows = []
        for kind, numbers in sizes.items():
            for n in numbers:
                rows.append(in_own_process(kind, n))
                print(rows[-1], flush=True)
        print(record.write("memory", rows, arguments.out))
