"""GeoQ with its defaults against the rivals on the twenty problems of the suite.

    python -m benchmarks.suite.defaults --jobs 2            # all problems, 5 seeds: about a minute per problem and seed
    python -m benchmarks.suite.defaults --design --seeds 2  # the twelve problems of the design
    python -m benchmarks.suite.defaults --small             # two problems, one seed, short trainings: within a minute

Losses are relative to the best rival of each problem, chosen in hindsight. Rivals that calibrate on held-out errors use
the same fold surrogates and the default folds, which gave the rivals their smallest losses: random folds (blocks of time
for data in the order of time), cluster folds and nested folds. The row "GeoQ" is ``GeoQ(surrogate, train_surrogate)``; for
data in the order of time it has the argument ``folds=default_folds(TemporalFolds(5, gap=10))``.

The results file is written after each pair of problem and seed. A rerun with the same code measures the missing pairs;
rows measured by other code are dropped.
"""

import argparse
import math
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from joblib import Parallel, delayed
from sklearn.metrics import roc_auc_score
from threadpoolctl import threadpool_limits

from benchmarks import record
from benchmarks.record import QUANTILE, Stopwatch
from benchmarks.rivals import (
    BoostedQuantile,
    KNNDistanceConformal,
    KNNResidualConformal,
    MeanErrorPredictor,
    QuantileNetwork,
    RememberedTraining,
    of_x,
    of_x_distance_and_prediction,
)
from benchmarks.rivals.constant import Constant
from benchmarks.rivals.gp_scaled import GPScaledConformal
from benchmarks.suite.confirmation import CONFIRMATION
from benchmarks.suite.problems import PROBLEMS, SHIFTS
from benchmarks.suite.recipes import Network
from geoq import (
    ClusterFolds,
    GeoQ,
    NormScaledIncrement,
    RandomFolds,
    SafeRegion,
    Training,
    default_folds,
    identity,
)
from geoq.baselines import DeepEnsemble, SplitConformal

SEEDS = 5
SUITE = PROBLEMS | CONFIRMATION
OURS = ("GeoQ", "GeoQ (paper)")
OWN_SURROGATE = ("Split conformal", "Deep ensemble")
SMALL = ("branin", "burgers")
AREAS = ("exceeds", "large")


def run(name, seed, *, small=False):
    """Rows of all methods on one problem and seed, for each shift and for all shifts together."""
    torch.set_num_threads(1)
    with threadpool_limits(1):
        return _run(SUITE[name], seed, small=small)


def _run(problem, seed, *, small):
    recipe = problem.recipe(seed)
    if small:
        problem, recipe = replace(problem, n_train=120), shortened(recipe)
    data = problem.data(seed)
    x, y = data.x, data.y
    remembered = RememberedTraining(recipe)
    deployed = Stopwatch()
    with deployed.running():
        surrogate = remembered(x, y)

    default = GeoQ(surrogate, remembered, folds=default_folds(problem.folds))
    composed = default_folds(problem.folds or RandomFolds(5, random_state=seed))
    shared = GeoQ(surrogate, remembered, folds=composed)
    boosted = partial(BoostedQuantile, shared, QUANTILE, random_state=seed)
    methods = {
        "GeoQ": default,
        "GeoQ (paper)": GeoQ(
            surrogate,
            remembered,
            representation=identity,
            folds=ClusterFolds(5),
            increment_model=NormScaledIncrement(QUANTILE),
            safe_region=SafeRegion(),
        ),
        "Constant": Constant(shared, QUANTILE),
        "Split conformal": SplitConformal(
            recipe,
            QUANTILE,
            calibration_fraction=max(0.2, 20 / len(x)),
            random_state=seed,
        ),
        "Deep ensemble": DeepEnsemble(recipe, random_state=1000 * (seed + 1)),
        "kNN-distance conformal": KNNDistanceConformal(shared, QUANTILE),
        "kNN-residual conformal": KNNResidualConformal(shared, QUANTILE),
        "GP-scaled conformal": GPScaledConformal(shared, QUANTILE, random_state=seed),
        "Boosted quantile (x)": boosted(inputs=of_x),
        "Boosted quantile (x, distance, prediction)": boosted(
            inputs=of_x_distance_and_prediction
        ),
        "Quantile network": QuantileNetwork(
            shared,
            QUANTILE,
            training=Training(n_steps=5000, batch_size=256, random_state=seed),
        ),
        "Mean-error predictor": MeanErrorPredictor(shared, QUANTILE, random_state=seed),
    }
    if small:
        methods = {name: shortened(method) for name, method in methods.items()}
    x_test, y_test = (
        np.concatenate([data.tests[shift][part] for shift in SHIFTS]) for part in (0, 1)
    )
    shift_of_row = np.repeat(SHIFTS, [len(data.tests[shift][0]) for shift in SHIFTS])
    rows, safe = [], None
    for method, estimator in methods.items():
        own = method in OWN_SURROGATE
        watch = Stopwatch(remembered, 0.0 if own else deployed.seconds)
        with watch.running():
            estimator.fit(x, y)
        started = time.perf_counter()
        ours = method in OURS
        bound = estimator.assess(x_test) if ours else estimator.predict(x_test)
        seconds = time.perf_counter() - started
        if method == "GeoQ":
            safe = bound.safe  # also for the rivals' safe columns
        for shift in (*SHIFTS, "all"):
            where = (shift_of_row == shift) | (shift == "all")
            line = record.row(
                method,
                setting=f"{problem.name}, {shift}",
                seed=seed,
                y=y_test[where],
                prediction=bound.prediction[where],
                error_hat=bound.error_hat[where],
                safe=(bound.safe if ours else safe)[where],
                train_seconds=watch.seconds,
                inference_seconds=seconds * where.mean(),
            )
            line |= {
                "problem": problem.name,
                "shift": shift,
                "held_back": problem.name in CONFIRMATION,
            }
            if ours:
                scores = {
                    "support_score": bound.support_score,
                    "distance": bound.features.support_distance,
                }
                line |= roc_areas(y_test, bound, scores, where)
            rows.append(line)
    return rows


def shortened(trained):
    """The same recipe or rival with a short training; GeoQ is not changed."""
    if isinstance(trained, Network | QuantileNetwork):
        return replace(trained, training=replace(trained.training, n_steps=100))
    if isinstance(trained, BoostedQuantile | MeanErrorPredictor):
        return replace(trained, n_trees=50)
    return trained


def roc_areas(y, assessment, scores, where=...):
    """Areas under the ROC curves of scores, for two events.

    "exceeds": more than the fraction 1 - tau of the errors of a row exceed their bounds. "large": the mean error of the
    row is in the upper tenth.
    """
    error = abs(y - assessment.prediction).reshape(len(y), -1)[where]
    bound = assessment.error_hat.reshape(len(y), -1)[where]
    size = error.mean(axis=1)
    events = {
        "exceeds": (error > bound).mean(axis=1) > 1 - QUANTILE,
        "large": size > np.quantile(size, 0.9),
    }
    return {
        f"{score}_roc_{event}": float(roc_auc_score(happened, values[where]))
        if 0 < happened.sum() < len(happened)
        else math.nan
        for event, happened in events.items()
        for score, values in scores.items()
    }


def mean(rows, metric, **wanted):
    """Mean of a metric over the matching rows that have a value; nan if there is none."""
    values = [r[metric] for r in rows if all(r[k] == v for k, v in wanted.items())]
    known = [v for v in values if v is not None and not math.isnan(v)]
    return statistics.fmean(known) if known else math.nan


def error_ratios(rows, shift="all"):
    """Mean pinball loss of each method relative to the best rival, by problem."""
    result = {}
    for problem in dict.fromkeys(r["problem"] for r in rows):
        methods = dict.fromkeys(r["method"] for r in rows if r["problem"] == problem)
        loss = {
            m: mean(rows, "pinball", problem=problem, method=m, shift=shift)
            for m in methods
        }
        best = min(value for method, value in loss.items() if method not in OURS)
        result[problem] = {method: value / best for method, value in loss.items()}
    return result


def geometric_mean(values):
    return math.exp(statistics.fmean(map(math.log, values)))


def summary(rows):
    """Tables of pinball losses relative to the best rival, and of GeoQ's safe region and support score."""
    by_shift = {shift: error_ratios(rows, shift) for shift in ("all", *SHIFTS)}
    pooled = by_shift["all"]
    lines = [
        "Pinball loss of GeoQ relative to the best rival, which is chosen afterwards for each problem and shift:",
        "",
        "| problem | all | interpolation | mild | strong | best rival on all |",
        "|---|---|---|---|---|---|",
    ]
    for problem, of_method in pooled.items():
        best = min((r, m) for m, r in of_method.items() if m not in OURS)[1]
        cells = [f"{by_shift[shift][problem]['GeoQ']:.2f}" for shift in by_shift]
        lines.append(f"| {problem} | {' | '.join(cells)} | {best} |")
    held_back = {r["problem"] for r in rows if r["held_back"]}
    for name, combine, kept in (
        ("**worst**", max, set(pooled)),
        ("**geometric mean**", geometric_mean, set(pooled)),
        ("geometric mean, not held back", geometric_mean, set(pooled) - held_back),
        ("geometric mean, held back", geometric_mean, held_back),
    ):
        chosen = [
            [part[p]["GeoQ"] for p in part if p in kept] for part in by_shift.values()
        ]
        if kept:
            cells = [f"{combine(values):.2f}" for values in chosen]
            lines.append(f"| {name} | {' | '.join(cells)} | |")
    lines += [
        "",
        "The same for every method, over the problems (all shifts together):",
        "",
        "| method | worst | on | geometric mean | not held back | held back | worst on one shift |",
        "|---|---|---|---|---|---|---|",
    ]
    for method in next(iter(pooled.values())):
        behind = {p: r[method] for p, r in pooled.items() if method in r}
        worst = max(behind, key=behind.get)
        apart = max(
            r[method] for s in SHIFTS for r in by_shift[s].values() if method in r
        )
        halves = [
            [
                ratio
                for problem, ratio in behind.items()
                if (problem in held_back) == half
            ]
            for half in (False, True)
        ]
        means = " | ".join(
            f"{geometric_mean(half):.2f}" if half else "-" for half in halves
        )
        lines.append(
            f"| {method} | {behind[worst]:.2f} | {worst} | {geometric_mean(behind.values()):.2f} | {means} | {apart:.2f} |"
        )
    lines += [
        "",
        "GeoQ's coverage, its safe region, and ROC areas of support score / distance to the data:",
        "",
        "| problem | coverage | safe fraction | safe coverage | error exceeds the bound | large error |",
        "|---|---|---|---|---|---|",
    ]
    for problem in pooled:
        of = partial(mean, rows, problem=problem, method="GeoQ", shift="all")
        cells = [of("coverage"), of("safe_fraction"), of("safe_coverage")]
        pairs = [
            f"{of(f'support_score_roc_{e}'):.2f} / {of(f'distance_roc_{e}'):.2f}"
            for e in AREAS
        ]
        shown = " | ".join([*(f"{c:.3f}" for c in cells), *pairs])
        lines.append(f"| {problem} | {shown} |")
    return "\n".join(lines)


def draw(path, name="branin"):
    """Draw the power law of the default and the held-out errors that it was fitted to, on one problem."""
    from matplotlib.figure import Figure

    from benchmarks.pictures import error_over_distance

    problem = PROBLEMS[name]
    data = problem.data(0)
    fitted = GeoQ(None, problem.recipe(0)).fit(data.x, data.y)
    calibration, law = fitted.calibration_, fitted.increment_model_.law_
    distance = calibration.features.support_distance
    curve = torch.linspace(float(distance.min()), 1.5 * float(distance.max()), 200)
    anchor = calibration.features.anchor_error.median().expand(len(curve), 1)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = error_over_distance(
        figure.subplots(),
        distance.numpy(),
        calibration.error.numpy(),
        calibration.interpolating.numpy(),
        (curve.numpy(), law(curve.double(), anchor)[:, 0].numpy()),
        law.edge,
    )
    axes.set_title(f"{name}: {fitted.increment_model_.describe()}", fontsize=10)
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="two problems, one seed, short trainings"
    )
    parser.add_argument("--problems", help="names, separated by commas")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of seeds")
    parser.add_argument(
        "--design",
        action="store_true",
        help="only the twelve problems that the default was designed with",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--fresh", action="store_true", help="measure all pairs again")
    parser.add_argument("--out", type=Path, help="where to write the results")
    parser.add_argument(
        "--picture",
        type=Path,
        help="only draw the power law on one problem into this file",
    )
    arguments = parser.parse_args()
    if arguments.picture:
        draw(arguments.picture)
        return
    names = list(SMALL if arguments.small else SUITE)
    if arguments.problems:
        names = arguments.problems.split(",")
        if unknown := set(names) - set(SUITE):
            parser.error(
                f"--problems {', '.join(unknown)} does not exist; choose from {', '.join(SUITE)}"
            )
    if arguments.design:
        names = [name for name in names if name not in CONFIRMATION]
    seeds = range(1 if arguments.small else arguments.seeds)
    file = "defaults-small.json" if arguments.small else "defaults.json"
    path = arguments.out or record.RESULTS / file

    conditions = {
        "source": record.source("benchmarks.suite.defaults"),
        "small": arguments.small,
    }
    rows = [] if arguments.fresh else record.measured(path, **conditions)
    done = {(r["problem"], r["seed"]) for r in rows}
    pairs = [(n, seed) for seed in seeds for n in names if (n, seed) not in done]
    started = time.perf_counter()
    parallel = Parallel(n_jobs=arguments.jobs, return_as="generator_unordered")
    tasks = (delayed(run)(*pair, small=arguments.small) for pair in pairs)
    for new in parallel(tasks):
        rows += new
        record.write("defaults", rows, path, **conditions)
        print(
            f"{new[0]['problem']}, seed {new[0]['seed']}: {time.perf_counter() - started:.0f} s",
            flush=True,
        )
    print(path)
    # Rows of other problems in the file are not shown.
    asked = [r for r in rows if r["problem"] in names and r["seed"] in seeds]
    print(summary(asked))


if __name__ == "__main__":
    main()
