"""Tables and the picture of the third-party cases."""

from benchmarks.markdown import average, group, joined, least, mean, number, page, select, table
from benchmarks.rollouts.table import HORIZONS

SIMPLE = ("per-cell conformal", "regression-scaled conformal", "per-step quantiles")


def best_simple(bounds):
    """The smallest mean pinball loss of the simple bounds, by case."""
    simple = [r for r in bounds if r["method"] in SIMPLE]
    return {
        setting: min(average(of, "pinball") for of in group(own, "method").values())
        for setting, own in group(simple, "setting").items()
    }


def over(column, usual):
    """The mean of a column over a number of the case."""
    return lambda own: number(average(own, column) / usual[own[0]["setting"]])


def summary(record):
    """Bounds, horizons and shifted queries; means over the seeds."""
    rows = record["rows"]
    bounds = [r for r in rows if r["kind"] in ("field", "rollout", "vector")]
    best = best_simple(bounds)
    of_bounds = {
        "pinball / best simple bound": over("pinball", best),
        "coverage": mean("coverage", 3),
        "lowest seed": least("coverage", 3),
        "least coordinate": mean("least_coverage"),
        "whole samples": mean("whole"),
        "safe": mean("safe_fraction"),
        "coverage of safe": mean("safe_coverage", 3),
        "fit / training": mean("cost"),
    }
    horizons = select(rows, kind="horizon")
    # Shifted initial states of rollouts were measured before their present test.
    shifted = [row for row in select(rows, kind="shift") if "trusted" not in row]
    plain = group(select(shifted, shift="none"), "setting")
    usual = {setting: average(own, "error") for setting, own in plain.items()}
    of_shifts = {
        "error / error without shift": over("error", usual),
        "coverage": mean("coverage"),
        "safe": mean("safe_fraction"),
        "coverage of safe": mean("safe_coverage"),
    }
    rules = group(horizons, "setting", "tolerance", "method")
    return page(
        "**Bounds of new queries.** Quantile level 0.95.",
        table("case | bound", joined(group(bounds, "setting", "method")), of_bounds),
        "**Horizons of rollouts.** Number of steps, and fraction of the rollouts that exceed the tolerance within it.",
        table("case | tolerance | rule", joined(rules), HORIZONS),
        table("mean of all", group(horizons, "method"), {"broken": mean("broken", 3)}),
        "**Shifted fields.**",
        table("case | shift", joined(group(shifted, "setting", "shift")), of_shifts),
    )
