"""Weighted conformal bounds and accepted queries over 2,000 repetitions, without any training.

    python -m benchmarks.planning.guarantees --jobs 2

The design is uniform in the unit square, the plan has the density 16 x^3 y^3, near a corner, and the errors grow towards this corner: they are
half-normal with the scale exp(2 (x + y)). The bounds are constant for the coverage, and this scale for the acceptance. A row has means over
the repetitions with their standard errors; the nominal coverage is 0.9, and an accepted query with an error above 20 is a false decision.
"""

import numpy as np

from benchmarks.runs import Benchmark, script
from geoq import GeoQ, RandomFolds
from geoq.planning import EstimatedRatio
from geoq.planning.guarantee import curve_of, factors_of, selected

LEVEL, N_QUERIES, TOLERANCE = 0.9, 20, 20.0
COVERAGE, ACCEPTANCE = "coverage", "acceptance"
METHODS = {
    COVERAGE: ("without weights", "known ratio", "estimated ratio"),
    ACCEPTANCE: ("pairs of the plan", "known ratio", "pairs of the design without weights"),
}
SIZES, FALSE_SHARES = (40, 100, 300, 1000), (0.1, 0.2)


def scale(x):
    return np.exp(2 * x.sum(axis=1))


def density(x):
    return (4 * x**3).prod(axis=1)


def draw(rng, n, *, of_plan):
    """Inputs and their errors."""
    x = rng.beta(4, 1, size=(n, 2)) if of_plan else rng.uniform(size=(n, 2))
    return x, scale(x) * abs(rng.normal(size=n))


def weights_of(method, fitted, rng, x, asked):
    """The weights of pairs and queries."""
    if method != "estimated ratio":
        known = method == "known ratio"
        return [density(part) if known else np.ones(len(part)) for part in (x, asked)]
    at_pairs, log_ratio = EstimatedRatio(rng.beta(4, 1, size=(200, 2))).fit(fitted, x)
    return [np.exp(at_pairs), np.exp(log_ratio(asked))]


def covered(method, fitted, rng, n):
    """The fraction of queries within their bounds, the fraction of infinite bounds, and the effective number of pairs."""
    (x, error), (asked, own) = (draw(rng, k, of_plan=p) for k, p in ((n, False), (N_QUERIES, True)))
    weight, of_query = weights_of(method, fitted, rng, x, asked)
    factor = factors_of(curve_of(error[:, None], weight), of_query, LEVEL)
    n_effective = weight.sum() ** 2 / (weight**2).sum()
    return [(own <= factor).mean(), np.isinf(factor).mean(), n_effective]


def accepted(method, rng, n, false_share):
    """The fraction of false decisions among the accepted queries, and the fraction that is accepted."""
    x, error = draw(rng, n, of_plan=method == "pairs of the plan")
    asked, own = draw(rng, N_QUERIES, of_plan=True)
    weight, of_query = weights_of(method, None, rng, x, asked)
    bad = error > TOLERANCE
    case = scale(x)[bad], weight[bad], weight.sum(), scale(asked), of_query, false_share
    chosen = selected(*case)
    return [(chosen & (own > TOLERANCE)).sum() / max(1, chosen.sum()), chosen.mean()]


def measure(problem, seed, wanted, *, small=False):
    n_repeats, rows = 20 if small else 2000, []
    x = np.random.default_rng(seed).uniform(size=(30, 2))
    fitted = GeoQ(lambda x: x[:, 0], None, folds=RandomFolds(3)).fit(x, x.sum(axis=1)).fitted_
    for method in wanted:
        for n in SIZES:
            for share in FALSE_SHARES if problem == ACCEPTANCE else (None,):
                rng = np.random.default_rng([seed, n])
                if problem == COVERAGE:
                    if method == "estimated ratio" and n == SIZES[-1]:
                        continue  # the longest part
                    found = [covered(method, fitted, rng, n) for _ in range(n_repeats)]
                    names = ("coverage", "infinite", "n_effective")
                else:
                    found = [accepted(method, rng, n, share) for _ in range(n_repeats)]
                    names = ("false", "accepted")
                means, errors = np.mean(found, axis=0), np.std(found, axis=0) / n_repeats**0.5
                about = {"problem": problem, "method": method, "seed": seed, "n": n}
                about |= {"tolerance": share} if share else {}
                scores = dict(zip(names, means.tolist(), strict=True))
                rows.append(about | scores | {"standard_error": float(errors[0])})
    return rows


BENCHMARK = Benchmark(
    "planned_guarantees", list(METHODS), measure, METHODS.get, (0,), (ACCEPTANCE,)
)
main = script(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
