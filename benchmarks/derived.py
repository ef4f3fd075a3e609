"""Numbers of the pages that are computed from the results files and stand in no table, by the name in their anchor."""

import math
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.record import load
from benchmarks.weather.tables import error_ratios


def broken_rollouts() -> dict[tuple[str, float], list[float]]:
    """Percentages of rollouts that exceed the tolerance within the trusted horizon, by system and tolerance, for each seed."""
    found: dict[tuple[str, float], list[float]] = {}
    for row in load("trusted_horizon")["rows"]:
        if row["method"] == "held out":
            key = row["setting"], row["tolerance"]
            found.setdefault(key, []).append(100 * row["broken"])
    return found


def mean_broken() -> list[float]:
    return [statistics.fmean(by_seed) for by_seed in broken_rollouts().values()]


def relative_horizons() -> list[float]:
    """Mean trusted horizons relative to the same number of steps for all rollouts, by system and tolerance."""
    total: dict[tuple[str, float, str], float] = {}
    for row in load("trusted_horizon")["rows"]:
        if row["method"] in ("held out", "same for all"):
            key = row["setting"], row["tolerance"], row["method"]
            total[key] = total.get(key, 0.0) + row["mean_horizon"]
    return [
        total[*key, "held out"] / same
        for (*key, method), same in total.items()
        if method == "same for all" and same > 0
    ]


BLEND = "Cell quantile blended with deviation"
ACTIVITY = f"{BLEND} x activity"
DEFAULT = "GeoQ (default)"
CLASSIFIERS = "Classifier of wrong cells (x, p), 3 networks"


def weather(method: str, folds: str = "blocks") -> list[dict[str, Any]]:
    """Rows of a method of the weather benchmark."""
    rows = load("weather_era5")["rows"]
    return [r for r in rows if (r["method"], r["folds"]) == (method, folds)]


def loss_smaller(
    method: str, folds: str, origin: int = 0, column: str = "pinball"
) -> float:
    """Percentage by which the loss of a bound is smaller than the loss of the default with block folds; negative if it is larger."""
    others = [r for r in weather(method, folds) if origin in (0, r["origin"])]
    ratios = error_ratios(others, weather(DEFAULT), column)
    return 100 * (1 - statistics.geometric_mean(ratios))


def effect_of_factor() -> list[float]:
    """Percentages by which the learned factor reduces the loss in the first quarter of the leads, for each task."""
    plain = weather("GeoQ (default, no factor)")
    ratios = error_ratios(weather(DEFAULT), plain, "pinball_q1")
    return [100 * (1 - ratio) for ratio in ratios]


def richtmyer_meshkov(method: str, setting: str, seed: int) -> dict[str, Any]:
    rows = load("richtmyer_meshkov")["rows"]
    key = method, setting, seed
    (row,) = [r for r in rows if (r["method"], r["setting"], r["seed"]) == key]
    return row


def by_case(setting: str, seed: int = 1) -> list[float]:
    """Loss of the default minus the loss of three classifiers, for each test case."""
    default, others = (
        richtmyer_meshkov(method, setting, seed)["pinball_by_case"]
        for method in (DEFAULT, CLASSIFIERS)
    )
    return [mine - theirs for mine, theirs in zip(default, others, strict=True)]


def standard_errors(differences: list[float]) -> float:
    """Mean of the differences in standard errors."""
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences) / error


def wrong_cells(part: str) -> float:
    """Percentage of wrong cells of the first seed."""
    return 100 * load("richtmyer_meshkov")["surrogates"][0][f"wrong_cells {part}"]


def classifiers_ahead(setting: str) -> float:
    """Percentage by which the mean loss of three classifiers is smaller than the mean loss of the default."""
    mine, theirs = (
        sum(richtmyer_meshkov(method, setting, seed)["pinball"] for seed in (0, 1))
        for method in (DEFAULT, CLASSIFIERS)
    )
    return 100 * (1 - theirs / mine)


def first_steps(setting: str, other: str = "Horizon x climatology") -> float:
    """Loss of the default over the first 50 steps relative to another method: geometric mean over the seeds."""
    mine, theirs = (
        {
            r["seed"]: r["pinball_first50"]
            for r in load("kuramoto_sivashinsky")["rows"]
            if (r["method"], r["setting"]) == (method, setting)
        }
        for method in ("GeoQ", other)
    )
    return statistics.geometric_mean(mine[seed] / theirs[seed] for seed in mine)


def growth_slope(name: str) -> float:
    """Slope of the logarithm of seconds over the logarithm of the number of points."""
    return load("cost")["growth"]["slopes"][name]


NUMBERS: dict[str, Callable[[], float]] = {
    "horizon.least_broken": lambda: min(mean_broken()),
    "horizon.most_broken": lambda: max(mean_broken()),
    "horizon.mean_broken": lambda: statistics.fmean(mean_broken()),
    "horizon.least_ratio": lambda: min(relative_horizons()),
    "horizon.mean_ratio": lambda: statistics.geometric_mean(relative_horizons()),
    "horizon.most_ratio": lambda: max(relative_horizons()),
    "weather.static_blocks_smaller": lambda: loss_smaller(BLEND, "blocks"),
    "weather.static_clusters_smaller": lambda: loss_smaller(BLEND, "clusters"),
    "weather.activity_blocks_smaller": lambda: loss_smaller(ACTIVITY, "blocks"),
    "weather.activity_clusters_smaller": lambda: loss_smaller(ACTIVITY, "clusters"),
    "weather.activity_55_smaller": lambda: loss_smaller(ACTIVITY, "blocks", 220),
    "weather.activity_q1_smaller": lambda: loss_smaller(
        ACTIVITY, "blocks", column="pinball_q1"
    ),
    "weather.static_q4_smaller": lambda: loss_smaller(
        BLEND, "blocks", column="pinball_q4"
    ),
    "weather.horizon_q4_smaller": lambda: loss_smaller(
        "Horizon x climatology", "blocks", column="pinball_q4"
    ),
    "weather.factor_least": lambda: min(effect_of_factor()),
    "weather.factor_most": lambda: max(effect_of_factor()),
    "rmi.wrong_held_out": lambda: wrong_cells("cross_fit"),
    "rmi.wrong_test": lambda: wrong_cells("test"),
    "rmi.classifier_binary": lambda: classifiers_ahead("binary"),
    "rmi.cases_binary": lambda: sum(d > 0 for d in by_case("binary")),
    "rmi.cases_probability": lambda: sum(d > 0 for d in by_case("probability")),
    "rmi.errors_binary": lambda: standard_errors(by_case("binary")),
    "rmi.errors_probability": lambda: standard_errors(by_case("probability")),
    "ks.first50_025": lambda: first_steps("dt=0.25"),
    "ks.first50_005": lambda: first_steps("dt=0.05"),
    "ks.first50_one_005": lambda: first_steps("dt=0.05", "One number per horizon"),
    "cost.slope_fit": lambda: growth_slope("fit_seconds"),
    "cost.slope_assess": lambda: growth_slope("assess_1000_seconds"),
    "horizon.worst_run": lambda: max(map(max, broken_rollouts().values())),
}
