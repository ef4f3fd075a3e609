"""False alarms of ``Monitor`` on stable streams, and its delay after a change beside MAPIE's ``RiskMonitoring``.

python -m benchmarks.monitor.run [--small] [--out FILE]
"""

import warnings

import numpy as np
from mapie.exchangeability_testing import RiskMonitoring
from sklearn.neighbors import KNeighborsRegressor

from benchmarks import record
from benchmarks.runs import parser_of
from geoq import GeoQ, RandomFolds
from geoq.monitor import Monitor, evidence, gains_of_fraction, stepped

MISSED, OWN = 0.05, 0.05 / 3
# Verified queries before the change, and the fraction of errors outside the bound after it.
CHANGES = {"none": (2000, None), "0.2 after 50": (50, 0.2), "0.2 after 500": (500, 0.2)}
CHANGES |= {"0.1 after 500": (500, 0.1), "0.5 after 500": (500, 0.5), "0.2 after 2000": (2000, 0.2)}
AFTER = 1000


def geoq_delays(missed):
    """The first observation with an alarm in each stream; the length of the stream without one."""
    capital, first = np.zeros((len(missed), 7)), np.full(len(missed), missed.shape[1])
    for i, column in enumerate(missed.T):
        capital = stepped(capital, gains_of_fraction(column, MISSED), i + 1)
        found = evidence(capital, i + 1) >= 1 / OWN
        first = np.where(found & (first == missed.shape[1]), i, first)
    return first


def mapie_delays(missed):
    """The same with RiskMonitoring, whose lower bound of the risk has the same level and the same threshold."""
    first = []
    for stream in missed:
        monitor = RiskMonitoring("accuracy", test_level=2 * OWN, threshold=MISSED, warn=False)
        monitor.update(np.ones(len(stream), dtype=int), 1 - stream.astype(int))
        above = monitor.online_risk_lower_bound_sequence_history > MISSED
        first.append(int(above.argmax()) if above.any() else len(stream))
    return np.array(first)


def streams(change, n_streams):
    """Rows of both methods on the same streams of verified queries."""
    rng, (n_stable, fraction) = np.random.default_rng(0), CHANGES[change]
    missed = rng.random((n_streams, n_stable)) < MISSED
    if fraction is not None:
        missed = np.hstack([missed, rng.random((n_streams, AFTER)) < fraction])
    for method, delays, n in (
        ("Monitor", geoq_delays, n_streams),
        ("RiskMonitoring", mapie_delays, min(n_streams, 200)),  # it computes each stream anew
    ):
        first = delays(missed[:n])
        alarmed, late = first < n_stable, first[first >= n_stable] - n_stable + 1
        yield {
            "kind": "stream",
            "setting": change,
            "method": method,
            "seed": 0,
            "false_alarms": float(alarmed.mean()),
            "found": None if fraction is None else float((late <= AFTER).mean()),
            "delay": None if fraction is None else float(np.median(late)),
            "delay_90": None if fraction is None else float(np.quantile(late, 0.9)),
        }


def train(x, y):
    return KNeighborsRegressor(4, weights="distance").fit(x, y).predict


def calibrated(seed, n_points, n_inputs):
    """An estimator of a smooth function of numbers in a cube, the function, and its queries."""
    rng = np.random.default_rng(seed)

    def truth(x):
        return np.sin(3 * x[:, 0]) + x[:, 1] * x[:, -1]

    def queries(n, width=1.0):
        return rng.uniform(-width, width, size=(n, n_inputs))

    x = queries(n_points)
    estimator = GeoQ(train(x, truth(x)), train, folds=RandomFolds(5)).fit(x, truth(x))
    aside = queries(200)
    return estimator.conformalize(aside, truth(aside)), truth, queries


def whole(seed, n_points, n_inputs, n_queries):
    """Whole monitors of one calibration: a stable stream, and a stream that leaves the data after half of it."""
    estimator, truth, queries = calibrated(seed, n_points, n_inputs)
    for width in (1.0, 1.2, 1.5):
        monitor, half = Monitor(estimator, verify=0.2), n_queries // 2
        for x in (queries(half), queries(half, width)):
            rows = monitor.observe(x)[1]
            if len(rows):
                monitor.verified(x[rows], truth(x[rows]))
        status = monitor.status()
        numbers = [
            int(a.split("query ")[1].split(":")[0]) for a in status.alarms if "verified" not in a
        ]
        row = {"kind": "whole", "n": n_points, "n_inputs": n_inputs, "width": width, "seed": seed}
        yield row | {
            "alarm": float(bool(status.alarms)),
            "delay": None if width == 1 or not numbers else max(0, min(numbers) - half),
            "unsafe": status.numbers["unsafe"],
            "coverage": status.numbers["coverage"],
        }


def main(words=None):
    warnings.simplefilter("ignore")
    asked = parser_of(__doc__).parse_args(words)
    rows = [row for c in CHANGES for row in streams(c, 2 if asked.small else 1000)]
    sizes = [(60, 2, 100)] if asked.small else [(150, 2, 1000), (400, 4, 1000)]
    n_seeds = 1 if asked.small else 30
    rows += [row for size in sizes for seed in range(n_seeds) for row in whole(seed, *size)]
    return record.write("monitor", rows, asked.out, small=asked.small)


if __name__ == "__main__":
    main()
