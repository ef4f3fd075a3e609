"""Data frames of other packages: GeoQ beside MAPIE, boosted quantiles of residuals and the model's own standard deviation.

    pip install "geoq[table-bench]"
    python -m benchmarks.suite.tables --seeds 310 311 312 --jobs 2
    python -m benchmarks.suite.tables --small                         # one problem

A setting is a group of queries: inside the training data, mildly outside, far outside, in a gap, or with a category that the
training data do not contain. All methods bound the error of the same model at level 0.95, except that MAPIE's split method holds a
quarter of the data back from its model.
"""

import time
import warnings

import numpy as np
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.model_selection import KFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OrdinalEncoder

from benchmarks.record import QUANTILE
from benchmarks.runs import Benchmark, script
from benchmarks.suite.table_problems import PROBLEMS
from geoq.metrics import coverage, pinball
from geoq.sklearn import GeoQRegressor

# A method is fitted to a problem and the trained model, and returns a function of a table: prediction, bound and flags of the error of
# its own prediction; flags are None for methods without a safe region.


def geoq(problem, model):
    del model  # GeoQ trains it again
    fitted = GeoQRegressor(problem.model).fit(problem.train.x, problem.train.y)

    def answer(x):
        found = fitted.assess(x)
        return found.prediction, found.error_hat, found.safe

    return answer


def mapie_split(problem, model):
    from mapie.regression import SplitConformalRegressor

    del model
    x, y = problem.train.x, problem.train.y
    order = np.random.default_rng(0).permutation(len(y))
    n_rest = max(len(y) // 4, 25)  # MAPIE needs more than 20 at level 0.95
    rest, own = order[:n_rest], order[n_rest:]
    trained = clone(problem.model).fit(x.iloc[own], y[own])
    split = SplitConformalRegressor(trained, QUANTILE).conformalize(x.iloc[rest], y[rest])  # fmt: skip
    return lambda x: _half_width(*split.predict_interval(x), trained.predict(x))


def mapie_cv(problem, model):
    from mapie.regression import CrossConformalRegressor

    folds = KFold(5, shuffle=True, random_state=0)  # without it the folds are drawn anew each time
    cross = CrossConformalRegressor(problem.model, QUANTILE, method="plus", cv=folds)
    cross.fit_conformalize(problem.train.x, problem.train.y)
    return lambda x: _half_width(*cross.predict_interval(x), model.predict(x))


def _half_width(_, interval, prediction):
    ends = interval.reshape(len(prediction), 2)
    return prediction, abs(ends - prediction[:, None]).max(axis=1), None


def boosted_quantile(problem, model):
    """The 0.95 quantile of the absolute residuals of five folds, by boosted trees over the columns."""
    x, y = problem.train.x, problem.train.y
    residual = abs(y - cross_val_predict(clone(problem.model), x, y, cv=5))
    codes = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    category = [c for c in x if str(x[c].dtype) in ("str", "object")]
    settings = {"loss": "quantile", "quantile": QUANTILE, "max_iter": 60, "max_depth": 3}
    quantile = make_pipeline(
        make_column_transformer((codes, category), remainder="passthrough"),
        HistGradientBoostingRegressor(**settings, random_state=0),
    ).fit(_numeric(x), residual)
    return lambda x: (model.predict(x), quantile.predict(_numeric(x)).clip(0), None)


def _numeric(x):
    dates = [c for c in x if x[c].dtype.kind == "M"]
    return x.assign(**{c: x[c].astype("int64") for c in dates})


def own_deviation(problem, model):
    """1.96 standard deviations of a Gaussian process."""
    del problem

    def answer(x):
        prediction, deviation = model.predict(x, return_std=True)
        return prediction, 1.96 * deviation, None

    return answer


METHODS = {
    "GeoQ": geoq,
    "MAPIE split": mapie_split,
    "MAPIE CV+": mapie_cv,
    "boosted quantile of residuals": boosted_quantile,
    "own deviation": own_deviation,
}


def names(problem):
    """The methods of a problem; the model's own deviation only if it is a Gaussian process."""
    process = hasattr(PROBLEMS[problem](0).model[-1], "kernel")
    return [method for method in METHODS if method != "own deviation" or process]


def measure(name, seed, wanted, *, small=False):
    """A row for each method and setting of a problem."""
    del small
    warnings.filterwarnings("ignore")
    problem, rows = PROBLEMS[name](seed), []
    started = time.perf_counter()
    model = clone(problem.model).fit(problem.train.x, problem.train.y)
    once = time.perf_counter() - started
    for method in wanted:
        started = time.perf_counter()
        answer = METHODS[method](problem, model)
        cost = (time.perf_counter() - started) / once
        for setting, queries in problem.queries.items():
            prediction, bound, safe = answer(queries.x)
            error = abs(queries.y - prediction)
            about = {"problem": name, "method": method, "setting": setting, "seed": seed}
            scores = {
                "pinball": pinball(error, bound, QUANTILE),
                "coverage": coverage(error, bound),
                "bound": float(np.mean(bound)),
                "error": float(np.mean(error)),
                "safe_fraction": None if safe is None else float(safe.mean()),
                "safe_coverage": None if safe is None else coverage(error, bound, safe),
                "fit_over_training": cost,
            }
            rows.append(about | scores)
    return rows


BENCHMARK = Benchmark("tables", list(PROBLEMS), measure, names, (310, 311, 312), ("diabetes",))
main = script(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
