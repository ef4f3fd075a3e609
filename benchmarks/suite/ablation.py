"""Ablation of the default: the effect of each part, and a comparison of rules for the safe region.

    python -m benchmarks.suite.ablation --jobs 16                     # the first twelve problems, 3 seeds
    python -m benchmarks.suite.ablation --all --seed-list 400 401     # all twenty problems
    python -m benchmarks.suite.ablation --small                       # one problem, one seed: within a minute

Every row drops or replaces one part and keeps the others. The variants of a problem and seed share the fold surrogates that
are trained on the same points. The rules for the safe region are compared on the default's bounds.
"""

import argparse
import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from benchmarks import record
from benchmarks.record import QUANTILE
from benchmarks.rivals import RememberedTraining
from benchmarks.suite.confirmation import CONFIRMATION
from benchmarks.suite.defaults import SMALL, in_order
from benchmarks.suite.methods import eight_trainings, shortened, ten_trainings
from benchmarks.suite.problems import PROBLEMS, SHIFTS
from benchmarks.suite.runs import (
    add_options,
    chosen_problems,
    chosen_seeds,
    finished,
)
from benchmarks.suite.table import Comparison, geometric_mean, roc_areas
from benchmarks.suite.table import mean as mean_of
from geoq import (
    CombinedFolds,
    DistanceRegion,
    GeoQ,
    NestedFolds,
    NormScaledIncrement,
    RandomFolds,
    SafeRegion,
    StandardizedMetric,
    SupportRegion,
    TwoLawIncrement,
    default_folds,
    identity,
)
from geoq.increments.law import WORDS

SEEDS = 3
ALL = "all of it"
# The distance and the anchor error also have other roles than as features of the laws.
FEATURES = {
    name: words for name, words in WORDS.items() if name not in ("distance", "anchor")
}
SUITE = PROBLEMS | CONFIRMATION


class InsideLawAlone(TwoLawIncrement):
    """The law of the random folds for all queries."""

    def fit(self, calibration):
        super().fit(calibration)
        self.outside_, self.resemblance_ = self.inside_, None
        return self


class OutsideLawAlone(TwoLawIncrement):
    """The law of all folds for all queries."""

    def fit(self, calibration):
        super().fit(calibration)
        self.inside_, self.resemblance_ = self.outside_, None
        return self


class NoOverhang(TwoLawIncrement):
    """Without the overhang."""

    def _add_overhang(self, bound, features):
        del bound, features


@dataclass
class WithoutFeature(TwoLawIncrement):
    """Laws in which one feature is the same for all queries."""

    feature: str = "nearest"

    def _law_features(self, features, spline):
        known = super()._law_features(features, spline)
        constant = torch.zeros_like(getattr(known, self.feature))
        return replace(known, **{self.feature: constant})


def variants(interpolation):
    """Arguments of GeoQ by variant; each variant changes one part."""
    families = default_folds(interpolation)
    _, clusters, nested = families.schemes
    changes = {
        ALL: {},
        "equal weights of the inputs": {"representation": StandardizedMetric()},
        "raw inputs": {"representation": identity},
        "law of the random folds alone": {"increment_model": InsideLawAlone()},
        "law of all folds alone": {"increment_model": OutsideLawAlone()},
        "no overhang": {"increment_model": NoOverhang()},
        **{
            f"without {words}": {"increment_model": WithoutFeature(feature=name)}
            for name, words in FEATURES.items()
        },
        "the paper's increment": {"increment_model": NormScaledIncrement(QUANTILE)},
        "no random folds": {"folds": CombinedFolds(clusters, nested)},
        "no cluster folds": {"folds": CombinedFolds(interpolation, nested)},
        "no nested folds": {"folds": CombinedFolds(interpolation, clusters)},
        "random folds alone": {"folds": interpolation},
        "cluster folds alone": {"folds": clusters},
        "nested folds down to 0.4 only": {
            "folds": CombinedFolds(
                interpolation, clusters, NestedFolds(5, smallest=0.4)
            )
        },
        "10 trainings": {"folds": ten_trainings(interpolation)},
        "8 trainings": {"folds": eight_trainings(interpolation)},
        "10 anchors": {"n_anchors": 10},
        "support of 5 points": {"n_support": 5},
    }
    return {name: {"folds": families} | change for name, change in changes.items()}


SAFE_RULES = {
    "several scores (default)": SupportRegion(),
    "distance": DistanceRegion(),
    "paper": SafeRegion(),
}


def run(name, seed, *, small=False):
    """Rows of all variants on one problem and seed, by shift, and rows of the rules for the safe region."""
    problem = SUITE[name]
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
            for rule, region in SAFE_RULES.items():
                other = GeoQ(
                    surrogate, remembered, folds=geoq.folds, safe_region=region
                )
                flags = other.fit(data.x, data.y).assess(x)
                rows.append(
                    line(
                        rule,
                        setting=f"{problem.name}, all",
                        y=y,
                        prediction=flags.prediction,
                        error_hat=flags.error_hat,
                        safe=flags.safe,
                    )
                    | roc_areas(y, flags, {"rule": flags.support_score})
                    | {"problem": problem.name, "shift": "all", "part": "safe rules"}
                )
    return rows


def fitted_variants(problem, data, surrogate, recipe):
    """Name and fitted GeoQ of each variant."""
    for variant, settings in variants(problem.folds or RandomFolds(5)).items():
        yield variant, GeoQ(surrogate, recipe, **settings).fit(data.x, data.y)


def summary(rows):
    """Two tables: the pinball loss of each variant relative to the default, and the rules for the safe region."""
    parts = {
        part: [r for r in rows if r["part"] == part]
        for part in ("ingredients", "safe rules")
    }
    ingredients, rules = parts["ingredients"], parts["safe rules"]
    problems = list(dict.fromkeys(r["problem"] for r in rows))
    lines = [
        "Pinball loss relative to the default, geometric mean over the problems, for all queries with the range of two standard errors:",
        "",
        "| | all | range | interpolation | mild | strong | largest | on | smallest | on | safe coverage |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
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
        cells.insert(1, Comparison.of(ratio["all"].values()).range)
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
    add_options(parser, SEEDS)
    parser.add_argument("--all", action="store_true", help="all twenty problems")
    arguments = parser.parse_args()
    known = SUITE if arguments.all or arguments.problems else PROBLEMS
    names = chosen_problems(parser, arguments, known, SMALL[:1])
    file = "ablation-small.json" if arguments.small else "ablation.json"
    path = arguments.out or record.RESULTS / file
    conditions = {
        "source": record.source("benchmarks.suite.ablation"),
        "small": arguments.small,
    }
    rows = record.measured(path, **conditions)
    done = {(r["problem"], r["seed"]) for r in rows}
    pairs = [
        (name, seed)
        for name in in_order(names)
        for seed in chosen_seeds(arguments)
        if (name, seed) not in done
    ]
    task = partial(run, small=arguments.small)
    for new in finished(task, pairs, jobs=arguments.jobs, minutes=arguments.minutes):
        rows += new
        record.write("ablation", rows, path, **conditions)
    print(path)
    print(summary(rows) if rows else "no results")


if __name__ == "__main__":
    main()
