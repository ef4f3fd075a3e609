"""Tables of the benchmarks of planning."""

import statistics

from benchmarks.markdown import (
    compare,
    group,
    joined,
    mean,
    number,
    only,
    page,
    select,
    table,
    values,
)

PAIRED = {"over": ("problem",), "within": ("setting", "seed")}


def runs_needed(rows, others):
    """The fraction of the runs after which the error is at most the last error of the others; 1 if it never is."""
    last = {(r["problem"], r["setting"], r["seed"], r["shift"]): r["errors"][-1] for r in others}
    found = []
    for r in rows:
        goal = last[r["problem"], r["setting"], r["seed"], r["shift"]]
        steps = [i for i, error in enumerate(r["errors"]) if error <= goal]
        found.append(min([*steps, len(r["errors"]) - 1]) / (len(r["errors"]) - 1))
    return statistics.fmean(found) if found else float("nan")


def propose(record):
    """Errors over the errors of random choice for both plans, the runs that are needed, and coverage after a new fit."""
    parts, rows = [], record["rows"]
    for plan, where in (("corner", "a corner of the box"), ("box", "the box")):
        own = select(rows, shift=plan)
        random, centre = select(own, method="random"), select(own, method="k-centre")
        over = {
            "error / random": lambda r, o=random: compare(r, o, "log_error", **PAIRED),
            "error / k-centre": lambda r, o=centre: compare(r, o, "log_error", **PAIRED),
            "runs needed": lambda r, o=random: number(runs_needed(r, o)),
        }
        each = {
            m: lambda r, m=m: compare(
                select(r, method=m), select(r, method="random"), "log_error", **PAIRED
            )
            for m in ("propose", "k-centre", "GP integrated variance")
        }
        by = group(own, "problem") | group(own, "setting")
        columns = over | {"coverage": mean("coverage"), "safe": mean("safe")}
        parts += [f"The plan fills {where}:", table("method", group(own, "method"), columns)]
        parts += ["Error / random, case by case:", table("problem or surrogate", by, each)]
    return page(*parts)


def optimise(record):
    """What each method reaches with how many calls, over all problems and for each of them."""
    rows = record["rows"]
    columns = {
        "above the minimum, median": lambda own: number(statistics.median(values(own, "above")), 3),
        "mean": mean("above", 3),
        "calls": mean("calls", 1),
        "ends safe": mean("safe"),
        "worse than the best data": mean("worse"),
        "error within the bound": mean("within"),
    }
    methods = list(group(rows, "method"))
    each = {"best data": mean("start", 3)}
    for method in methods:
        each[method] = only(mean("above", 3), method=method)
    calls = {"calls of the search": only(mean("calls", 1), method="TrustRegionSearch")}
    return page(
        table("method", group(rows, "method"), columns),
        "Mean distance above the minimum, in standard deviations of the outputs:",
        table("problem", group(rows, "problem"), each | calls),
        table("surrogate", group(rows, "setting"), each | calls),
    )


def matched_folds(record):
    """Losses over the losses of the default folds at each width of the plan, and how well held-out errors estimate the error."""
    parts, rows = [], record["rows"]
    default = select(rows, method="default folds, 15 trainings")
    columns = {
        "loss / default folds": lambda own: compare(own, default, **PAIRED),
        "coverage": mean("coverage"),
        "safe": mean("safe_fraction"),
        "coverage of safe queries": mean("safe_coverage"),
        "estimated / true error": lambda own: number(
            statistics.geometric_mean(values(own, "estimated_over_true"))
        ),
        "mean abs(log) of it": mean("bias"),
    }
    for width, own in group(rows, "setting").items():
        parts += [f"The plan is {width} times as wide as the data:"]
        parts += [table("folds", group(own, "method"), columns)]
    return page(*parts)


def planned_guarantees(record):
    """Coverage with and without weights, and false decisions."""
    rows = record["rows"]
    covered = {"coverage": mean("coverage", 3), "standard error": mean("standard_error", 3)}
    covered |= {"infinite": mean("infinite", 3), "effective pairs": mean("n_effective", 0)}
    false = {"false": mean("false", 3), "standard error": mean("standard_error", 3)}
    false |= {"accepted": mean("accepted", 3)}
    of = {p: select(rows, problem=p) for p in ("coverage", "acceptance")}
    each = joined(group(of["acceptance"], "method", "tolerance", "n"))
    return page(
        "Coverage at the nominal level 0.9:",
        table("weights | pairs", joined(group(of["coverage"], "method", "n")), covered),
        "False decisions among the accepted queries:",
        table("pairs and weights | allowed | pairs", each, false),
    )
