"""Ablation of the default: the effect of each ingredient, and a comparison of rules for the safe region.

    python -m benchmarks.suite.ablation --jobs 2      # the first twelve problems, 3 seeds
    python -m benchmarks.suite.ablation --small       # one problem, one seed: within a minute

Every row drops or replaces one ingredient and keeps the others. The variants of a problem and seed share the fold
surrogates that are trained on the same points. The rules for the safe region are compared on the default's bounds.
"""

import argparse
import math
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from geoq.increments.power_law import PowerLaw
from joblib import Parallel, delayed
from threadpoolctl import threadpool_limits

from benchmarks import record
from benchmarks.rivals import RememberedTraining
from benchmarks.suite.defaults import SMALL, geometric_mean, roc_areas, shortened
from benchmarks.suite.defaults import mean as mean_of
from benchmarks.suite.problems import PROBLEMS, SHIFTS
from geoq import (
    CombinedFolds,
    DistanceRegion,
    GeoQ,
    NestedFolds,
    PowerLawIncrement,
    RandomFolds,
    SafeRegion,
    default_folds,
    identity,
)
from geoq.geometry import GeometricFeatures
from geoq.increments.edge import STEEPNESS
from geoq.quantiles import inverse_cdf_quantile
from geoq.safe_region import FittedDistanceRegion

SEEDS = 3
ALL = "all of it"
N_NEIGHBORS = 20


class LawAlone(PowerLaw):
    """Beyond the edge, the power law continues."""

    def __call__(self, distance, anchor, reference=1.0, *, factor=1.0, lift=1.0):
        law = factor * self.inside(distance, anchor, reference)
        at_edge = factor * self.inside(distance.clamp(max=self.edge), anchor, reference)
        return lift * at_edge + law - at_edge


class LineAlone(PowerLaw):
    """Beyond the edge, the bound grows along a straight line."""

    def __call__(self, distance, anchor, reference=1.0, *, factor=1.0, lift=1.0):
        at_edge = factor * self.inside(distance.clamp(max=self.edge), anchor, reference)
        line = (distance - self.edge).clamp(min=0)[:, None] * self.slope
        return lift * at_edge + line * STEEPNESS


class EdgeAlone(PowerLaw):
    """Beyond the edge, the bound does not grow."""

    def __call__(self, distance, anchor, reference=1.0, *, factor=1.0, lift=1.0):
        return (
            lift
            * factor
            * self.inside(distance.clamp(max=self.edge), anchor, reference)
        )


@dataclass
class Continued(PowerLawIncrement):
    """The default increment with another continuation beyond the edge."""

    law: type[PowerLaw] = PowerLaw

    def fit(self, calibration):
        super().fit(calibration)
        self.law_ = self.law(**vars(self.law_))
        return self


class Unlifted(PowerLawIncrement):
    """The default increment without the final lift."""

    def fit(self, calibration):
        super().fit(calibration)
        self.lift_ = 1.0
        return self


def equal_scale(error, _weight, _quantile):
    """Scale 1 for all coordinates of the error."""
    return torch.ones_like(error[0])


def variants(interpolation):
    """Arguments of GeoQ by variant; each variant changes one ingredient."""
    families = default_folds(interpolation)
    _, clusters, nested = families.schemes
    changes = {
        ALL: {},
        "no anchor error (kappa = 0)": {
            "increment_model": PowerLawIncrement(anchor_weights=(0.0,))
        },
        "exponent 1": {"increment_model": PowerLawIncrement(exponents=(1.0,))},
        "no distance (exponent 0)": {
            "increment_model": PowerLawIncrement(exponents=(0.0,))
        },
        "one scale for all coordinates": {
            "increment_model": PowerLawIncrement(scale=equal_scale)
        },
        "no learned factor": {"increment_model": PowerLawIncrement(factor=None)},
        "no lift": {"increment_model": Unlifted()},
        "beyond the edge: the law alone": {"increment_model": Continued(law=LawAlone)},
        "beyond the edge: the line alone": {
            "increment_model": Continued(law=LineAlone)
        },
        "beyond the edge: no growth": {"increment_model": Continued(law=EdgeAlone)},
        "no random folds": {"folds": CombinedFolds(clusters, nested)},
        "no cluster folds": {"folds": CombinedFolds(interpolation, nested)},
        "no nested folds": {"folds": CombinedFolds(interpolation, clusters)},
        "random folds alone": {"folds": interpolation},
        "nested folds down to 0.4 only": {
            "folds": CombinedFolds(
                interpolation, clusters, NestedFolds(5, smallest=0.4)
            )
        },
        "10 anchors": {"n_anchors": 10},
        "support of 5 points": {"n_support": 5},
        "raw inputs": {"representation": identity},
    }
    return {name: {"folds": families} | change for name, change in changes.items()}


def safe_rules(calibration, features):
    """Support score over threshold of each query under each rule; a query with at most 1 is safe."""
    all_distances = calibration.features.support_distance
    by_fold = replace(calibration, position=calibration.fold, reach=0)
    paper = SafeRegion(n_neighbors=N_NEIGHBORS)

    def relative(region):
        return region.support_score(features) / region.threshold

    scores = {
        "distance, interpolating folds (default)": relative(
            DistanceRegion().fit(calibration)
        ),
        "distance, all folds": relative(
            FittedDistanceRegion(float(inverse_cdf_quantile(all_distances, 0.95)))
        ),
        "paper": relative(paper.fit(calibration)),
        "paper, thresholds leave a fold out": relative(paper.fit(by_fold)),
    }
    default = scores["distance, interpolating folds (default)"]
    scores["default and paper"] = torch.maximum(default, scores["paper"])
    scores["default and paper, a fold left out"] = torch.maximum(
        default, scores["paper, thresholds leave a fold out"]
    )
    return {name: score.numpy() for name, score in scores.items()}


def run(name, seed, *, small=False):
    """Rows of all variants on one problem and seed, by shift, and rows of the rules for the safe region."""
    torch.set_num_threads(1)
    with threadpool_limits(1):
        return _run(PROBLEMS[name], seed, small=small)


def _run(problem, seed, *, small):
    recipe = problem.recipe(seed)
    if small:
        problem, recipe = replace(problem, n_train=120), shortened(recipe)
    data = problem.data(seed)
    remembered = RememberedTraining(recipe)
    surrogate = remembered(data.x, data.y)
    x, y = (
        np.concatenate([data.tests[shift][part] for shift in SHIFTS]) for part in (0, 1)
    )
    shift_of_row = np.repeat(SHIFTS, [len(data.tests[shift][0]) for shift in SHIFTS])
    line = partial(record.row, seed=seed, train_seconds=0.0, inference_seconds=0.0)
    rows = []
    for variant, geoq in fitted_variants(problem, data, surrogate, remembered):
        answer = geoq.assess(x)
        for shift in (*SHIFTS, "all"):
            where = (shift_of_row == shift) | (shift == "all")
            rows.append(
                line(
                    variant,
                    setting=f"{problem.name}, {shift}",
                    y=y[where],
                    prediction=answer.prediction[where],
                    error_hat=answer.error_hat[where],
                    safe=answer.safe[where],
                )
                | {"problem": problem.name, "shift": shift, "part": "ingredients"}
            )
        if variant == ALL:
            rows += _rows_of_rules(problem, line, y, answer, geoq)
    return rows


def fitted_variants(problem, data, surrogate, recipe):
    """Name and fitted GeoQ of each variant."""
    for variant, settings in variants(problem.folds or RandomFolds(5)).items():
        yield variant, GeoQ(surrogate, recipe, **settings).fit(data.x, data.y)


def _rows_of_rules(problem, line, y, answer, geoq):
    features = GeometricFeatures(
        *(
            torch.as_tensor(part)
            for part in (
                answer.features.displacement,
                answer.features.support_distance,
                answer.anchor_error,
                answer.prediction,
                answer.features.displacement,
            )
        )
    )
    for rule, score in safe_rules(geoq.calibration_, features).items():
        yield (
            line(
                rule,
                setting=f"{problem.name}, all",
                y=y,
                prediction=answer.prediction,
                error_hat=answer.error_hat,
                safe=score <= 1,
            )
            | roc_areas(y, answer, {"rule": score})
            | {"problem": problem.name, "shift": "all", "part": "safe rules"}
        )


def summary(rows):
    """Two tables: the pinball loss of each variant relative to the default, and the rules for the safe region."""
    parts = {
        part: [r for r in rows if r["part"] == part]
        for part in ("ingredients", "safe rules")
    }
    ingredients, rules = parts["ingredients"], parts["safe rules"]
    problems = list(dict.fromkeys(r["problem"] for r in rows))
    lines = [
        "Pinball loss relative to the default, geometric mean over the problems; above 1 the ingredient helps:",
        "",
        "| | all | interpolation | mild | strong | largest | on | smallest | on | safe coverage |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for variant in dict.fromkeys(r["method"] for r in ingredients):
        ratio = {
            shift: {
                p: mean_of(
                    ingredients, "pinball", method=variant, problem=p, shift=shift
                )
                / mean_of(ingredients, "pinball", method=ALL, problem=p, shift=shift)
                for p in problems
            }
            for shift in ("all", *SHIFTS)
        }
        cells = [f"{geometric_mean(r.values()):.2f}" for r in ratio.values()]
        for extreme in (max, min):
            at = extreme(ratio["all"], key=ratio["all"].get)
            cells += [f"{ratio['all'][at]:.2f}", at]
        cells.append(
            f"{mean_of(ingredients, 'safe_coverage', method=variant, shift='all'):.3f}"
        )
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    lines += [
        "",
        "Rules for the safe region on the default's bounds, mean over the problems; areas under the ROC curves of their scores:",
        "",
        "| rule | safe fraction | safe coverage | least safe coverage | on | error exceeds the bound | large error |",
        "|---|---|---|---|---|---|---|",
    ]
    for rule in dict.fromkeys(r["method"] for r in rules):
        of = partial(mean_of, rules, method=rule)
        covered = {p: of("safe_coverage", problem=p) for p in problems}
        known = {p: c for p, c in covered.items() if not math.isnan(c)}
        least = min(known, key=known.get) if known else "-"
        cells = [
            f"{of('safe_fraction'):.2f}",
            f"{of('safe_coverage'):.3f}",
            f"{known.get(least, math.nan):.3f}",
            least,
            f"{of('rule_roc_exceeds'):.2f}",
            f"{of('rule_roc_large'):.2f}",
        ]
        lines.append(f"| {rule} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="one problem, one seed, short trainings"
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of seeds")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    names = SMALL[:1] if arguments.small else list(PROBLEMS)
    seeds = range(1 if arguments.small else arguments.seeds)
    file = "ablation-small.json" if arguments.small else "ablation.json"
    path = arguments.out or record.RESULTS / file
    conditions = {
        "source": record.source("benchmarks.suite.ablation"),
        "small": arguments.small,
    }
    rows = record.measured(path, **conditions)
    done = {(r["problem"], r["seed"]) for r in rows}
    pairs = [(n, seed) for n in names for seed in seeds if (n, seed) not in done]
    started = time.perf_counter()
    parallel = Parallel(n_jobs=arguments.jobs, return_as="generator_unordered")
    for new in parallel(delayed(run)(*pair, small=arguments.small) for pair in pairs):
        rows += new
        record.write("ablation", rows, path, **conditions)
        seconds = time.perf_counter() - started
        print(new[0]["problem"], new[0]["seed"], f"{seconds:.0f} s", flush=True)
    print(path)
    print(summary(rows))


if __name__ == "__main__":
    main()
