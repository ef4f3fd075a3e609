"""Ablation of the default: the effect of each part, and a comparison of rules for the safe region.

    python -m benchmarks.suite.ablation --seeds 700 701 --jobs 16     # the first twelve problems
    python -m benchmarks.suite.ablation --methods "no *" --problems branin
    python -m benchmarks.suite.ablation --small                       # one problem, one seed

Every row drops or replaces one part and keeps the others. The variants of a problem and seed share the fold surrogates that
are trained on the same points. The rules for the safe region are compared on the default's bounds.
"""

from dataclasses import dataclass, replace
from unittest import mock

import numpy as np

from benchmarks.rivals import DistanceRegion
from benchmarks.runs import Benchmark, script
from benchmarks.suite.defaults import SUITE, Case, roc_areas
from benchmarks.suite.methods import eight_trainings, shortened, ten_trainings
from benchmarks.suite.problems import PROBLEMS
from benchmarks.suite.table import ALL
from geoq import CombinedFolds, GeoQ, NestedFolds, RandomFolds, Region, default_folds
from geoq.bounds import two_laws
from geoq.bounds.law import WORDS
from geoq.bounds.two_laws import LawPair, TwoLawBound
from geoq.data.metric import identity
from geoq.parts import NormScaledBound, PaperRegion, StandardizedMetric

# The distance and the anchor error also have other roles than as features of the laws.
FEATURES = {name: words for name, words in WORDS.items() if name not in ("distance", "anchor")}
RULES = {"several scores (default)": Region(), "distance": DistanceRegion(), "paper": PaperRegion()}


@dataclass(frozen=True)
class OneLaw(TwoLawBound):
    """One law for all queries: "inside", of the random folds, or "outside", of all folds."""

    law: str = "inside"

    def fit(self, tuples, quantile):
        fitted = super().fit(tuples, quantile)
        laws = [getattr(pair, self.law) for pair in (fitted.laws, fitted.plain)]
        both, plain = (LawPair(law, law) for law in laws)
        fitted = replace(fitted, laws=both, plain=plain, resemblance=None, shift=0.0)
        return fitted.recalibrated(tuples[tuples.interpolating])


class NoOverhang(TwoLawBound):
    """Without the overhang."""

    def fit(self, tuples, quantile):
        return replace(super().fit(tuples, quantile), metric=None)


@dataclass(frozen=True)
class WithoutFeature(TwoLawBound):
    """Laws in which one feature is the same for all queries."""

    feature: str = "nearest"

    def fit(self, tuples, quantile):
        name = self.feature

        class Blanked(two_laws.Known):
            def law_features(self, features, natural):
                known = super().law_features(features, natural)
                return {**known, name: np.zeros_like(known[name])}

        with mock.patch.object(two_laws, "Known", Blanked):
            return super().fit(tuples, quantile)


def variants(interpolation):
    """Arguments of GeoQ by variant; each variant changes one part."""
    families = default_folds(interpolation)
    _, clusters, nested = families.schemes
    few = NestedFolds(5, smallest=0.4)
    changes = {
        ALL: {},
        "equal weights of the inputs": {"representation": StandardizedMetric()},
        "raw inputs": {"representation": identity},
        "law of the random folds alone": {"bound_model": OneLaw()},
        "law of all folds alone": {"bound_model": OneLaw(law="outside")},
        "no overhang": {"bound_model": NoOverhang()},
        **{f"without {w}": {"bound_model": WithoutFeature(feature=f)} for f, w in FEATURES.items()},
        "the paper's increment": {"bound_model": NormScaledBound()},
        "no random folds": {"folds": CombinedFolds(clusters, nested)},
        "no cluster folds": {"folds": CombinedFolds(interpolation, nested)},
        "no nested folds": {"folds": CombinedFolds(interpolation, clusters)},
        "random folds alone": {"folds": interpolation},
        "cluster folds alone": {"folds": clusters},
        "nested folds down to 0.4 only": {"folds": CombinedFolds(interpolation, clusters, few)},
        "10 trainings": {"folds": ten_trainings(interpolation)},
        "8 trainings": {"folds": eight_trainings(interpolation)},
        "10 anchors": {"n_anchors": 10},
        "support of 5 points": {"n_support": 5},
    }
    return {name: {"folds": families} | change for name, change in changes.items()}


def measure(name, seed, wanted, *, small=False):
    """Rows of some variants on one problem and seed by shift, and rows of the rules for the safe region."""
    case, rows = Case(name, seed, small=small), []
    for variant, settings in variants(case.problem.folds or RandomFolds(5)).items():
        if variant not in wanted:
            continue
        fitted = GeoQ(case.surrogate, case.remembered, **settings)
        answer = (shortened(fitted) if small else fitted).fit(case.x, case.y).assess(case.queries)
        found = case.rows(variant, answer, answer.safe)
        rows += [row | {"part": "ingredients"} for row in found]
    folds = default_folds(case.problem.folds or RandomFolds(5))
    for rule, region in RULES.items():
        if rule in wanted:
            other = GeoQ(case.surrogate, case.remembered, folds=folds, safe_region=region)
            flags = other.fit(case.x, case.y).assess(case.queries)
            (row,) = [r for r in case.rows(rule, flags, flags.safe) if r["shift"] == "all"]
            areas = roc_areas(case.truth, flags, "rule", flags.support_score)
            rows.append(row | areas | {"part": "safe rules"})
    return rows


def names(problem):
    return [*variants(SUITE[problem].folds or RandomFolds(5)), *RULES]


BENCHMARK = Benchmark("ablation", list(PROBLEMS), measure, names, range(3), ("burgers",))
main = script(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
