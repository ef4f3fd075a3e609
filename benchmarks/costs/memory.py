"""Peak memory of a calibration and an assessment above the data, and the size of the saved file, as the data grow.

The surrogate is given and costs nothing, so nothing is trained but a small network of the bound for fields. Each case runs in a
process of its own. Sizes are relative to the data, which are the inputs and outputs given to ``fit``.

    python -m benchmarks.costs.memory [--small] [--out FILE]
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

from benchmarks import record
from benchmarks.runs import parser_of
from geoq import GeoQ, RolloutGeoQ

SEED, N_QUERIES = 0, 100
SIZES = {
    "scalars": (1_000, 10_000),
    "vectors": (1_000, 4_000),
    "fields": (250, 500, 1_000),
    "rollouts": (1_000, 4_000),
}
SMALL_SIZES = {"scalars": (200,), "rollouts": (300,)}


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
    c, s = np.cos(0.095), np.sin(0.095)

    def step(values):
        one, other = np.split(values, 2, axis=1)
        return np.concatenate([c * one + s * other, c * other - s * one], axis=1)

    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1), step


def problem(kind, n):
    """The estimator, the arrays for ``fit``, and a function that assesses queries."""
    if kind == "rollouts":
        values, step = states(n)
        estimator = RolloutGeoQ(step, None, n_calibration=20)
        return estimator, (values,), lambda: estimator.assess(values[:N_QUERIES], 20)
    if kind == "fields":
        from geoq import Training
        from geoq.parts import FieldBound, FieldFactor

        x, y, surrogate = fields(n)
        training = Training(n_steps=2, check_every=2, batch_size=8)
        brief = FieldFactor(widths=(4,), n_splits=2, training=training)
        estimator = GeoQ(surrogate, None, bound_model=FieldBound(factor=brief))
    else:
        x, y, surrogate = table(n, 1 if kind == "scalars" else 64)
        estimator = GeoQ(surrogate, None)
    return estimator, (x, y), lambda: estimator.assess(x[:N_QUERIES])


def extra_bytes(work):
    """Peak memory during a call beyond the memory that was in use before it."""
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if reset.exists():  # Linux: resets the peak, which the imports would determine otherwise
        reset.write_text("5")
        before = _resident(status, "VmRSS")
        work()
        return _resident(status, "VmHWM") - before
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def _resident(status, name):
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def file_bytes(save, **settings):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "estimator.geoq"
        save(path, **settings)
        return path.stat().st_size


def measure(kind, n):
    """Memory and file sizes of one case, relative to the data."""
    warnings.simplefilter("ignore")
    # A small case first, so that imported modules do not count.
    estimator, data, assess = problem(kind, 40 if kind == "fields" else 200)
    estimator.fit(*data, progress=None)
    assess()
    estimator, data, assess = problem(kind, n)
    n_bytes = sum(array.nbytes for array in data)
    started = time.perf_counter()
    fit = extra_bytes(lambda: estimator.fit(*data, progress=None))
    row = {"kind": kind, "n": n, "seed": SEED, "data_mib": n_bytes / 2**20}
    row |= {"fit_over_data": fit / n_bytes, "fit_seconds": time.perf_counter() - started}
    row["assess_mib"] = extra_bytes(assess) / 2**20
    row["file_over_data"] = file_bytes(estimator.save) / n_bytes
    short = None if kind == "rollouts" else file_bytes(estimator.save, calibration=False) / n_bytes
    return row | {"short_file_over_data": short}


def apart(module, *words):
    """What another process measures: it prints JSON in its last line."""
    command = [sys.executable, "-m", module, *map(str, words)]
    done = subprocess.run(command, cwd=record.ROOT, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(words=None):
    asked = parser_of(__doc__).parse_args(words)
    sizes = (SMALL_SIZES if asked.small else SIZES).items()
    cases = [(kind, n) for kind, numbers in sizes for n in numbers]
    rows = [apart("benchmarks.costs.memory", "--measure", *case) for case in cases]
    return record.write("memory", rows, asked.out, small=asked.small)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
    else:
        main()
