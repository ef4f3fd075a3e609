"""Tables of other packages: GeoQ beside MAPIE, boosted quantiles of residuals and the model's own standard deviation.

    pip install "geoq[table-bench]"
    python -m benchmarks.suite.tables --seed-list 0 --jobs 2
    python -m benchmarks.suite.tables --small                         # two problems: within a minute

A setting is a group of queries: inside the training data, mildly outside, far outside, in a gap, or with a category that the
training data do not contain. All methods bound the error of the same model at level 0.95, except that MAPIE's split method holds a
quarter of the data back from its model. The results file has one row per problem, method, setting and seed.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OrdinalEncoder

from benchmarks import record
from benchmarks.record import QUANTILE
from benchmarks.suite.runs import add_options, chosen_problems, chosen_seeds, finished
from benchmarks.suite.table_problems import PROBLEMS, TableProblem
from geoq.metrics import coverage, pinball
from geoq.sklearn import GeoQRegressor

SEEDS = 1
SMALL = ("diabetes",)
SETTINGS = ("inside", "mild", "far", "gap", "unseen")
OURS = "GeoQ"
# A method bounds the error of its own prediction: table -> prediction, bound, safe (None without a flag).
Answers = Callable[[pd.DataFrame], tuple[np.ndarray, np.ndarray, np.ndarray | None]]


def geoq(problem: TableProblem, model: Any) -> Answers:
    del model  # GeoQ trains it again
    fitted = GeoQRegressor(problem.model).fit(problem.train.x, problem.train.y)

    def answer(x: pd.DataFrame) -> Any:
        found = fitted.assess(x)
        return found.prediction, found.error_hat, found.safe

    return answer


def mapie_split(problem: TableProblem, model: Any) -> Answers:
    from mapie.regression import SplitConformalRegressor

    del model
    x, y = problem.train.x, problem.train.y
    order = np.random.default_rng(0).permutation(len(y))
    n_rest = max(len(y) // 4, 25)  # MAPIE needs more than 20 at level 0.95
    rest, own = order[:n_rest], order[n_rest:]
    trained = clone(problem.model).fit(x.iloc[own], y[own])
    split = SplitConformalRegressor(trained, QUANTILE).conformalize(x.iloc[rest], y[rest])  # fmt: skip
    return lambda x: _half_width(*split.predict_interval(x), trained.predict(x))


def mapie_cv(problem: TableProblem, model: Any) -> Answers:
    from mapie.regression import CrossConformalRegressor

    cross = CrossConformalRegressor(problem.model, QUANTILE, method="plus", cv=5)
    cross.fit_conformalize(problem.train.x, problem.train.y)
    return lambda x: _half_width(*cross.predict_interval(x), model.predict(x))


def _half_width(_: Any, interval: np.ndarray, prediction: np.ndarray) -> Any:
    ends = interval.reshape(len(prediction), 2)
    return prediction, abs(ends - prediction[:, None]).max(axis=1), None


def boosted_quantile(problem: TableProblem, model: Any) -> Answers:
    """The 0.95 quantile of the absolute residuals of five folds, by boosted trees over the columns."""
    x, y = problem.train.x, problem.train.y
    residual = abs(y - cross_val_predict(clone(problem.model), x, y, cv=5))
    unknown = {"handle_unknown": "use_encoded_value", "unknown_value": -1}
    category = [c for c in x if str(x[c].dtype) in ("str", "object")]
    quantile = make_pipeline(
        make_column_transformer(
            (OrdinalEncoder(**unknown), category), remainder="passthrough"
        ),
        HistGradientBoostingRegressor(
            loss="quantile", quantile=QUANTILE, max_iter=60, max_depth=3, random_state=0
        ),
    ).fit(_numeric(x), residual)
    return lambda x: (model.predict(x), quantile.predict(_numeric(x)).clip(0), None)


def _numeric(x: pd.DataFrame) -> pd.DataFrame:
    dates = [c for c in x if x[c].dtype.kind == "M"]
    return x.assign(**{c: x[c].astype("int64") for c in dates})


def own_deviation(problem: TableProblem, model: Any) -> Answers:
    """1.96 standard deviations of a Gaussian process."""
    del problem

    def answer(x: pd.DataFrame) -> Any:
        prediction, deviation = model.predict(x, return_std=True)
        return prediction, 1.96 * deviation, None

    return answer


METHODS: dict[str, Callable[[TableProblem, Any], Answers]] = {
    OURS: geoq,
    "MAPIE split": mapie_split,
    "MAPIE CV+": mapie_cv,
    "boosted quantile of residuals": boosted_quantile,
    "own deviation": own_deviation,
}


def run(name: str, seed: int) -> list[dict[str, Any]]:
    """All methods on one problem; the model's own deviation only if it is a Gaussian process."""
    warnings.filterwarnings("ignore")
    problem = PROBLEMS[name](seed)
    started = time.perf_counter()
    model = clone(problem.model).fit(problem.train.x, problem.train.y)
    once = time.perf_counter() - started
    rows = []
    for method, make in METHODS.items():
        process = hasattr(problem.model[-1], "kernel")
        if method == "own deviation" and not process:
            continue
        started = time.perf_counter()
        answer = make(problem, model)
        fit_over_training = (time.perf_counter() - started) / once
        for setting, queries in problem.queries.items():
            prediction, bound, safe = answer(queries.x)
            error = abs(queries.y - prediction)
            rows.append(
                {
                    "problem": name,
                    "method": method,
                    "setting": setting,
                    "seed": seed,
                    "pinball": pinball(error, bound, QUANTILE),
                    "coverage": coverage(error, bound),
                    "bound": float(np.mean(bound)),
                    "error": float(np.mean(error)),
                    "safe_fraction": None if safe is None else float(safe.mean()),
                    "safe_coverage": None
                    if safe is None or not safe.any()
                    else coverage(error, bound, safe),
                    "fit_over_training": fit_over_training,
                }
            )
    return rows


def summary(rows: list[dict[str, Any]]) -> str:
    """A table over the problems, and a table of each setting."""
    settings = [s for s in SETTINGS if any(r["setting"] == s for r in rows)]
    return "\n\n".join(
        [
            "Pinball loss of GeoQ divided by the smallest of the rivals' (below 1: GeoQ is best), and coverage at level 0.95:",
            _losses(rows, settings),
            *(f"**{setting}**\n\n{_of_setting(rows, setting)}" for setting in settings),
        ]
    )


def _mean(rows: list[dict[str, Any]], column: str, **conditions: Any) -> float | None:
    found = [
        r[column]
        for r in rows
        if all(r[k] == v for k, v in conditions.items()) and r[column] is not None
    ]
    return statistics.mean(found) if found else None


def _text(value: float | None, digits: str = ".2f") -> str:
    return "-" if value is None else format(value, digits)


def _losses(rows: list[dict[str, Any]], settings: list[str]) -> str:
    lines = [
        "| problem | "
        + " | ".join(f"{s}: loss, coverage, safe" for s in settings)
        + " | trainings |",
        "|---" * (len(settings) + 2) + "|",
    ]
    for problem in dict.fromkeys(r["problem"] for r in rows):
        cells = []
        for setting in settings:
            here = {"problem": problem, "setting": setting}
            ours = _mean(rows, "pinball", method=OURS, **here)
            rivals = [
                loss
                for method in METHODS
                if method != OURS
                and (loss := _mean(rows, "pinball", method=method, **here)) is not None
            ]
            if ours is None or not rivals:
                cells.append("-")
                continue
            covered, safe = (
                _mean(rows, column, method=OURS, **here)
                for column in ("coverage", "safe_fraction")
            )
            cells.append(
                f"{_text(ours / min(rivals))}, {_text(covered)}, {_text(safe)}"
            )
        trainings = _mean(rows, "fit_over_training", problem=problem, method=OURS)
        lines.append(f"| {problem} | {' | '.join(cells)} | {_text(trainings, '.0f')} |")
    return "\n".join(lines)


def _of_setting(rows: list[dict[str, Any]], setting: str) -> str:
    """Mean coverage, and the pinball loss relative to GeoQ as a geometric mean over the problems."""
    lines = [
        "| method | problems | pinball relative to GeoQ | coverage | least coverage | safe | mean bound / mean error |",
        "|---|---|---|---|---|---|---|",
    ]
    for method in METHODS:
        own = [r for r in rows if r["method"] == method and r["setting"] == setting]
        if not own:
            continue
        problems = dict.fromkeys(r["problem"] for r in own)
        ratios, covered, sharp = [], [], []
        for problem in problems:
            here = {"problem": problem, "setting": setting}
            ours = _mean(rows, "pinball", method=OURS, **here)
            loss = _mean(own, "pinball", **here)
            if ours and loss:
                ratios.append(loss / ours)
            covered.append(_mean(own, "coverage", **here))
            error = _mean(own, "error", **here)
            sharp.append(_mean(own, "bound", **here) / error if error else None)
        ratio = statistics.geometric_mean(ratios) if ratios else None
        typical = [s for s in sharp if s is not None]
        lines.append(
            f"| {method} | {len(problems)} | {_text(ratio)} | {_text(statistics.mean(covered))} | {_text(min(covered))} | "
            f"{_text(_mean(own, 'safe_fraction'))} | {_text(statistics.median(typical) if typical else None)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, SEEDS)
    arguments = parser.parse_args()
    names = chosen_problems(parser, arguments, PROBLEMS, SMALL)
    file = "tables-small.json" if arguments.small else "tables.json"
    path = arguments.out or record.RESULTS / file
    conditions = {"source": record.source("benchmarks.suite.tables")}
    rows = record.measured(path, **conditions)
    done = {(r["problem"], r["seed"]) for r in rows}
    cases = [(n, s) for n in names for s in chosen_seeds(arguments)]
    missing = [case for case in cases if case not in done]
    for new in finished(run, missing, jobs=arguments.jobs, minutes=arguments.minutes):
        rows += new
        record.write("tables", rows, path, **conditions)
    print(path)
    asked = [r for r in rows if (r["problem"], r["seed"]) in set(cases)]
    print(summary(asked) if asked else "no results")


if __name__ == "__main__":
    main()
