"""False trust when one input leaves its range at a time, and in families of data that distance alone misses.

    python -m benchmarks.suite.one_input --seed-list 500 --jobs 16 --minutes 8
    python -m benchmarks.suite.one_input --problems hole-2 ridge --surrogates gbr mlp
    python -m benchmarks.suite.one_input --small                      # two cases: within a minute

A case is a problem, a surrogate and a seed. A query is falsely trusted if it is called safe and its error exceeds the bound;
with several outputs it counts by the fraction of outputs that exceed their bounds. The two rules have the same bounds and
differ in the safe region. ``--variants`` adds GeoQ with fewer trainings and with equal weights of the inputs.

The results file has one row per case and is written after each of them. A rerun with the same code measures the missing
cases.
"""

import argparse
import statistics
from functools import partial

import numpy as np
from sklearn.ensemble import GradientBoostingRegressor, RandomForestRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.multioutput import MultiOutputRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks import record
from benchmarks.record import QUANTILE
from benchmarks.rivals import RememberedTraining
from benchmarks.suite.methods import eight_trainings, shortened, ten_trainings
from benchmarks.suite.one_input_families import ONE_INPUT
from benchmarks.suite.recipes import Regressor, network
from benchmarks.suite.runs import (
    add_options,
    chosen_problems,
    chosen_seeds,
    finished,
)
from geoq import DistanceRegion, GeoQ, RandomFolds, StandardizedMetric

SEEDS = 1
# Processes and networks take longest and start first.
SURROGATES = ("gp", "mlp", "gbr", "forest")
SMALL = ("hole-2", "constant")
# Cases whose surrogate explains less of the variance on held-out points are left out.
MIN_R2 = 0.5
# Up to this many half-widths a query is near the range.
NEAR = 1.1
# Cells of an input and a distance with more false trust are counted.
MAX_FALSE_TRUST = 0.05
# A cell up to this many half-widths is harmless if 90 % of its errors are at most this multiple of the inside's 95 % quantile.
HARMLESS_WIDTH, HARMLESS_ERROR = 1.5, 1.2
COLUMNS = ("safe", "false trust", "coverage", "pinball")
SAFE, FALSE_TRUST, COVERAGE, PINBALL = range(4)


# Surrogates.


class PerOutput:
    """A regressor of one output, or one regressor per output."""

    def __init__(self, model):
        self.model = model

    def fit(self, x, y):
        model = self.model if y.ndim == 1 else MultiOutputRegressor(self.model)
        return model.fit(x, y)


def gradient_boosting(random_state):
    return PerOutput(
        GradientBoostingRegressor(
            n_estimators=200,
            max_depth=3,
            learning_rate=0.08,
            random_state=random_state,
        )
    )


def forest(random_state):
    return RandomForestRegressor(80, random_state=random_state)


def process(_random_state, *, n_inputs):
    length = np.ones(n_inputs) if n_inputs <= 8 else 1.0
    kernel = ConstantKernel() * RBF(length) + WhiteKernel(1e-4)
    model = GaussianProcessRegressor(
        kernel, normalize_y=True, n_restarts_optimizer=2, random_state=0
    )
    return make_pipeline(StandardScaler(), model)


def recipe(surrogate, seed, n_inputs):
    """The recipe of a surrogate."""
    if surrogate == "mlp":
        return network(seed)
    make = {
        "gbr": gradient_boosting,
        "forest": forest,
        "gp": partial(process, n_inputs=n_inputs),
    }[surrogate]
    return Regressor(make, seed)


# Measurement.


def run(name, surrogate, seed, *, small=False, variants=False):
    """The row of one case: safe fraction, false trust, coverage and pinball loss of each rule by label."""
    problem = ONE_INPUT[name]
    x, y, queries, query_y = problem.data(seed)
    train = recipe(surrogate, seed, x.shape[1])
    remembered = RememberedTraining(shortened(train) if small else train)
    deployed = remembered(x, y)
    rows = {label: queries.label == label for label in dict.fromkeys(queries.label)}
    found, facts = {}, {}
    for rule, settings in rules(variants=variants).items():
        geoq = GeoQ(deployed, remembered, **settings).fit(x, y)
        answer = geoq.assess(queries.x)
        error = _flat(abs(query_y - answer.prediction))
        found[rule] = _measures(error, _flat(answer.error_hat), answer.safe, rows)
        if not facts:
            importance = geoq.metric_.importance.tolist()
            facts = {
                "r2": r_squared(geoq.calibration_, y),
                "harmless": _harmless(error, rows),
                "top": max(problem.movable, key=importance.__getitem__, default=None),
            }
    return [
        {
            "problem": name,
            "surrogate": surrogate,
            "seed": seed,
            "family": problem.family,
            **facts,
            "columns": list(COLUMNS),
            "rules": found,
        }
    ]


def rules(*, variants=False):
    """Arguments of GeoQ by rule."""
    few = {
        "GeoQ (10 trainings)": {"folds": ten_trainings(RandomFolds(5))},
        "GeoQ (8 trainings)": {"folds": eight_trainings(RandomFolds(5))},
        "GeoQ (equal weights)": {"representation": StandardizedMetric()},
    }
    return {
        "GeoQ": {},
        "GeoQ (DistanceRegion)": {"safe_region": DistanceRegion()},
        **(few if variants else {}),
    }


def _flat(values):
    return np.asarray(values, dtype=float).reshape(len(values), -1)


def _measures(error, bound, safe, rows):
    exceeds = (error > bound).mean(axis=1)
    gap = error - bound
    loss = np.maximum(QUANTILE * gap, (QUANTILE - 1) * gap).mean(axis=1)
    return {
        label: [
            float(safe[mine].mean()),
            float((exceeds * safe)[mine].mean()),
            float(1 - exceeds[mine].mean()),
            float(loss[mine].mean()),
        ]
        for label, mine in rows.items()
    }


def _harmless(error, rows):
    """Labels of cells just outside a range whose errors are hardly larger than inside."""
    largest = HARMLESS_ERROR * np.quantile(error[rows["inside"]], 0.95, axis=0)
    return [
        label
        for label, mine in rows.items()
        if label.startswith("input")
        and half_widths(label) <= HARMLESS_WIDTH
        and (np.quantile(error[mine], 0.9, axis=0) <= largest).all()
    ]


def r_squared(calibration, y):
    """The fraction of the variance that the surrogates of the random folds explain on held-out points."""
    error = _flat(calibration.error[calibration.interpolating].cpu().numpy())
    outputs = _flat(y)
    return float(1 - (error**2).sum() / ((outputs - outputs.mean(axis=0)) ** 2).sum())


def half_widths(label):
    """The distance u in a label "input j u"."""
    return float(label.split()[2])


# Tables.


def case_name(row):
    return f"{row['problem']}-{row['surrogate']} {row['seed']}"


def mean(values):
    values = list(values)
    return statistics.fmean(values) if values else float("nan")


def summary(rows):
    """Tables of the safe flags, by rule: all families together, each family, each special kind of query, and each u."""
    poor = [r for r in rows if r["r2"] is None or r["r2"] < MIN_R2]
    kept = [r for r in rows if r not in poor]
    left_out = ", ".join(f"{case_name(r)} ({_shown(r['r2'])})" for r in poor) or "none"
    lines = [
        f"{len(kept)} cases; left out, because R2 < {MIN_R2:g}: {left_out}.",
        "",
    ]
    if not kept:
        return "\n".join(lines)
    for family in ("all", *dict.fromkeys(r["family"] for r in kept)):
        mine = [r for r in kept if family in ("all", r["family"])]
        lines += [f"**{family}**, {len(mine)} cases", "", *_by_rule(mine), ""]
    return "\n".join([*lines, *_special(kept), "", *_by_width(kept)])


def _shown(r2):
    return "-" if r2 is None else f"{r2:.2f}"


def _cells(rows, rule, wanted):
    """Triples of a row, a label and its measures, for the labels that are wanted."""
    return [
        (row, label, measures)
        for row in rows
        for label, measures in row["rules"][rule].items()
        if wanted(label)
    ]


def _worst(cells):
    """The largest false trust and its case."""
    if not cells:
        return "-"
    row, label, measures = max(cells, key=lambda cell: cell[2][FALSE_TRUST])
    return f"{measures[FALSE_TRUST]:.2f} ({case_name(row)}, {label})"


def _by_rule(rows):
    lines = [
        "| rule | interior safe | least | on | worst false trust, u <= 1.1 | u > 1.1 | cells above 5 % | harmless safe | far unsafe | least |",
        "|---" * 10 + "|",
    ]
    for rule in rows[0]["rules"]:
        inside = _cells(rows, rule, lambda label: label == "inside")
        least = min(inside, key=lambda cell: cell[2][SAFE])
        moved = _cells(rows, rule, lambda label: label.startswith("input"))
        near, farther = (
            [cell for cell in moved if (half_widths(cell[1]) <= NEAR) == is_near]
            for is_near in (True, False)
        )
        above = mean(m[FALSE_TRUST] > MAX_FALSE_TRUST for *_, m in moved)
        harmless = mean(m[SAFE] for r, label, m in moved if label in r["harmless"])
        far = [
            1 - m[SAFE] for *_, m in _cells(rows, rule, lambda label: label == "far")
        ]
        shown = [
            f"{mean(m[SAFE] for *_, m in inside):.3f}",
            f"{least[2][SAFE]:.3f}",
            case_name(least[0]),
            _worst(near),
            _worst(farther),
            f"{above:.3f}",
            f"{harmless:.2f}",
            f"{mean(far):.3f}",
            f"{min(far, default=float('nan')):.3f}",
        ]
        lines.append(f"| {rule} | {' | '.join(shown)} |")
    return lines


def _special(rows):
    lines = [
        "| queries | rule | cases | safe | false trust | worst |",
        "|---" * 6 + "|",
    ]
    cells = _cells(rows, "GeoQ", lambda label: label.startswith("special"))
    for family, label in dict.fromkeys((r["family"], name) for r, name, _ in cells):
        mine = [r for r in rows if r["family"] == family]
        for rule in rows[0]["rules"]:
            found = _cells(mine, rule, label.__eq__)
            safe, false_trust = (
                mean(m[column] for *_, m in found) for column in (SAFE, FALSE_TRUST)
            )
            lines.append(
                f"| {family}, {label.removeprefix('special ')} | {rule} | {len(found)} | {safe:.3f} | {false_trust:.3f} | {_worst(found)} |"
            )
    return lines


def _by_width(rows):
    lines = [
        "| u | rule | safe | false trust | worst | cells above 5 % | coverage | coverage, most influential input |",
        "|---" * 8 + "|",
    ]
    moved = _cells(rows, "GeoQ", lambda label: label.startswith("input"))
    for u in sorted({half_widths(label) for _, label, _ in moved}):
        for rule in rows[0]["rules"]:
            found = _cells(
                rows,
                rule,
                lambda label, u=u: (
                    label.startswith("input") and half_widths(label) == u
                ),
            )
            top = [m for r, label, m in found if label.split()[1] == str(r["top"])]
            above = mean(m[FALSE_TRUST] > MAX_FALSE_TRUST for *_, m in found)
            shown = [
                f"{mean(m[SAFE] for *_, m in found):.3f}",
                f"{mean(m[FALSE_TRUST] for *_, m in found):.3f}",
                _worst(found),
                f"{above:.3f}",
                f"{mean(m[COVERAGE] for *_, m in found):.3f}",
                f"{mean(m[COVERAGE] for m in top):.3f}",
            ]
            lines.append(f"| {u:g} | {rule} | {' | '.join(shown)} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, SEEDS)
    parser.add_argument("--surrogates", nargs="+", choices=SURROGATES)
    parser.add_argument(
        "--variants",
        action="store_true",
        help="also GeoQ with 10 and 8 trainings and with equal weights",
    )
    arguments = parser.parse_args()
    names = chosen_problems(parser, arguments, ONE_INPUT, SMALL)
    surrogates = arguments.surrogates or (
        ("mlp",) if arguments.small else list(SURROGATES)
    )
    file = "one_input-small.json" if arguments.small else "one_input.json"
    path = arguments.out or record.RESULTS / file
    conditions = {
        "source": record.source("benchmarks.suite.one_input"),
        "small": arguments.small,
        "variants": arguments.variants,
    }
    rows = record.measured(path, **conditions)
    done = {(r["problem"], r["surrogate"], r["seed"]) for r in rows}
    # Problems with many rows take longest.
    longest = sorted(names, key=lambda name: -ONE_INPUT[name].n)
    cases = [
        (name, surrogate, seed)
        for surrogate in sorted(surrogates, key=SURROGATES.index)
        for name in longest
        for seed in chosen_seeds(arguments)
    ]
    task = partial(run, small=arguments.small, variants=arguments.variants)
    missing = [case for case in cases if case not in done]
    for new in finished(task, missing, jobs=arguments.jobs, minutes=arguments.minutes):
        rows += new
        record.write("one_input", rows, path, **conditions)
    print(path)
    wanted = set(cases)
    asked = [r for r in rows if (r["problem"], r["surrogate"], r["seed"]) in wanted]
    print(summary(asked) if asked else "no results")


if __name__ == "__main__":
    main()
