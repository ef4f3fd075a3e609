"""Tables of the comparison: pinball losses relative to rivals with standard errors, coverage, and the safe region."""

import math
import statistics
from dataclasses import dataclass
from functools import partial

import numpy as np
from sklearn.metrics import roc_auc_score

from benchmarks.record import QUANTILE
from benchmarks.suite.methods import is_ours
from benchmarks.suite.problems import SHIFTS

AREAS = ("exceeds", "large")
# A coverage inside the data that differs from the level by at most this much counts as right.
TOLERANCE = 0.02
# Queries far outside dominate the column of all queries, so it comes last.
COLUMNS = (*SHIFTS, "all")
FORM_COLUMNS = (
    "method",
    *COLUMNS,
    "coverage inside",
    "right",
    *("safe fraction inside", "mild", "strong"),
    *("safe coverage", "least", "on"),
    "in the safe region",
)


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


def losses_by_seed(rows, shift="all", metric="pinball"):
    """Loss of each method for each seed, by problem."""
    values = {}
    for r in rows:
        if r["shift"] == shift and r[metric] is not None:
            of_problem = values.setdefault(r["problem"], {})
            of_problem.setdefault(r["method"], {})[r["seed"]] = r[metric]
    return values


def mean_ratio(losses, others):
    """Mean loss relative to another method, over the seeds that both have."""
    both = losses.keys() & others.keys()
    return sum(losses[seed] for seed in both) / sum(others[seed] for seed in both)


def error_ratios(rows, shift="all", *, metric="pinball"):
    """Mean loss of each method relative to the best rival, by problem.

    Rows of untrained networks are left out. Therefore two methods are compared on the seeds that both have, and the best rival
    of a method is the one with the largest ratio.
    """
    result = {}
    for problem, losses in losses_by_seed(rows, shift, metric).items():
        rivals = [found for method, found in losses.items() if not is_ours(method)]
        result[problem] = {
            method: max(
                (mean_ratio(found, r) for r in rivals if found.keys() & r.keys()),
                default=math.nan,
            )
            for method, found in losses.items()
        }
    return result


def geometric_mean(values):
    return math.exp(statistics.fmean(map(math.log, values)))


@dataclass(frozen=True)
class Comparison:
    """Geometric mean of ratios over the problems, and its range of two standard errors of the mean logarithm."""

    ratio: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios):
        """The comparison of one ratio per problem."""
        logarithms = [math.log(ratio) for ratio in ratios]
        mean = statistics.fmean(logarithms)
        n = len(logarithms)
        error = statistics.stdev(logarithms) / math.sqrt(n) if n > 1 else math.inf
        return cls(
            math.exp(mean),
            math.exp(mean - 2 * error),
            math.exp(min(mean + 2 * error, 700)),
        )

    @property
    def word(self):
        """Ahead or behind if the difference exceeds two standard errors, otherwise level."""
        return "ahead" if self.high < 1 else "behind" if self.low > 1 else "level"

    @property
    def range(self):
        return f"{self.low:.2f} to {self.high:.2f}" if self.low else "one problem"

    def __str__(self):
        return f"{self.ratio:.2f} ({self.range}) {self.word}"


def summary(rows):
    """All tables of a set of problems."""
    parts = by_problem(rows), by_method(rows), safety(rows), forms(rows), levels(rows)
    return "\n\n".join("\n".join(part) for part in parts if part)


def by_problem(rows):
    """Lines of a table of GeoQ's loss relative to the best rival of each problem and shift."""
    ratios = {shift: error_ratios(rows, shift) for shift in COLUMNS}
    n_rivals = len({r["method"] for r in rows if not is_ours(r["method"])})
    lines = [
        (
            f"Pinball loss of GeoQ relative to the best of {n_rivals} rivals, which is chosen afterwards for each problem and shift. "
            "The last rows have the geometric mean, its range of two standard errors over the problems, and the number of problems "
            "on which GeoQ has the smaller loss:"
        ),
        "",
        f"| problem | {' | '.join(COLUMNS)} | best rival on all |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for problem, of_method in ratios["all"].items():
        best = min((r, m) for m, r in of_method.items() if not is_ours(m))[1]
        cells = [f"{ratios[shift][problem]['GeoQ']:.2f}" for shift in COLUMNS]
        lines.append(f"| {problem} | {' | '.join(cells)} | {best} |")
    ours = [[of["GeoQ"] for of in ratios[shift].values()] for shift in COLUMNS]
    compared = [Comparison.of(values) for values in ours]
    better = [f"{sum(v < 1 for v in values)} of {len(values)}" for values in ours]
    for name, cells in (
        ("**worst**", [f"{max(values):.2f}" for values in ours]),
        ("**geometric mean**", [f"{c.ratio:.2f}" for c in compared]),
        ("**two standard errors**", [c.range for c in compared]),
        ("**GeoQ is**", [c.word for c in compared]),
        ("**smaller on**", better),
    ):
        lines.append(f"| {name} | {' | '.join(cells)} | |")
    return lines


def paired(rows, other, shift):
    """GeoQ's loss over that of another method on the same data, where both were measured; None if nowhere."""
    loss = {
        (r["problem"], r["seed"], r["method"]): r["pinball"]
        for r in rows
        if r["shift"] == shift and r["method"] in ("GeoQ", other)
    }
    of_problem = {}
    for (problem, seed, method), value in loss.items():
        if method == other and (problem, seed, "GeoQ") in loss:
            ratio = loss[problem, seed, "GeoQ"] / value
            of_problem.setdefault(problem, []).append(ratio)
    means = [geometric_mean(ratios) for ratios in of_problem.values()]
    return Comparison.of(means) if means else None


def problems_of(method, rows):
    """Problems on which a method was measured."""
    return {r["problem"] for r in rows if r["method"] == method}


def named(method, rows):
    """Name of a method, with the number of its problems if it was not measured on all of them."""
    n = len(problems_of(method, rows))
    complete = n == len({r["problem"] for r in rows})
    return method if complete else f"{method}, {n} problem{'s' * (n > 1)}"


def by_method(rows):
    """Lines of a table of GeoQ's loss relative to each other method on the same data, and of all coverages."""
    methods = list(dict.fromkeys(r["method"] for r in rows))
    titles = [*COLUMNS, *(f"coverage {shift}" for shift in SHIFTS)]
    lines = [
        (
            "Pinball loss of GeoQ relative to each method on the same data: geometric mean over the problems, in brackets its range of "
            "two standard errors over the problems. GeoQ is ahead or behind where this range excludes 1. Coverage of each method:"
        ),
        "",
        f"| method | {' | '.join(titles)} |",
        "|---" * (len(titles) + 1) + "|",
    ]
    for method in methods:
        cells = [
            "" if method == "GeoQ" else str(paired(rows, method, shift))
            for shift in COLUMNS
        ]
        cells += [
            f"{mean(rows, 'coverage', method=method, shift=shift):.3f}"
            for shift in SHIFTS
        ]
        lines.append(f"| {named(method, rows)} | {' | '.join(cells)} |")
    return lines


def safety(rows):
    """Lines of a table of GeoQ's coverage, safe region and support score by problem."""
    lines = [
        "The relative L2 error of the surrogate inside the data; GeoQ's coverage, its safe region, and ROC areas of support score / distance to the data:",
        "",
        "| problem | surrogate's error inside | coverage | safe fraction | safe coverage | error exceeds the bound | large error |",
        "|---|---|---|---|---|---|---|",
    ]
    for problem in dict.fromkeys(r["problem"] for r in rows):
        of = partial(mean, rows, problem=problem, method="GeoQ", shift="all")
        inside = mean(
            rows, "relative_l2", problem=problem, method="GeoQ", shift=SHIFTS[0]
        )
        cells = [inside, of("coverage"), of("safe_fraction"), of("safe_coverage")]
        pairs = [
            f"{of(f'support_score_roc_{e}'):.2f} / {of(f'distance_roc_{e}'):.2f}"
            for e in AREAS
        ]
        shown = " | ".join([*(f"{c:.3f}" for c in cells), *pairs])
        lines.append(f"| {problem} | {shown} |")
    return lines


def forms(rows):
    """Lines of a table of GeoQ's forms: losses relative to the best rival, coverage and safe region."""
    methods = [m for m in dict.fromkeys(r["method"] for r in rows) if is_ours(m)]
    problems = list(dict.fromkeys(r["problem"] for r in rows))
    by_shift = {shift: error_ratios(rows, shift) for shift in COLUMNS}
    in_safe = error_ratios(rows, metric="safe_pinball")
    lines = [
        (
            "The forms of GeoQ. Pinball loss relative to the best rival, geometric mean over the problems and the worst problem in "
            f"brackets; coverage inside the data, and the fraction of problems where it is within {TOLERANCE:g} of the level; the safe "
            "region. The last column is the relative pinball loss in the safe region:"
        ),
        "",
        f"| {' | '.join(FORM_COLUMNS)} |",
        "|---" * len(FORM_COLUMNS) + "|",
    ]
    for method in methods:
        cells = []
        for ratios in by_shift.values():
            values = [r[method] for r in ratios.values() if method in r]
            cells.append(f"{geometric_mean(values):.2f} ({max(values):.2f})")
        of = partial(mean, rows, method=method)
        measured = problems_of(method, rows)
        inside = [of("coverage", problem=p, shift=SHIFTS[0]) for p in measured]
        right = [abs(value - QUANTILE) <= TOLERANCE for value in inside]
        cells += [f"{statistics.fmean(inside):.3f}", f"{statistics.fmean(right):.2f}"]
        cells += [f"{of('safe_fraction', shift=shift):.3f}" for shift in SHIFTS]
        covered = {p: of("safe_coverage", problem=p, shift="all") for p in problems}
        known = {p: c for p, c in covered.items() if not math.isnan(c)}
        least = min(known, key=known.get) if known else "-"
        cells += [
            f"{of('safe_coverage', shift='all'):.3f}",
            f"{known.get(least, math.nan):.3f}",
            least,
        ]
        ratios = [r[method] for r in in_safe.values() if method in r]
        # The rivals' losses are measured in the safe region of the default.
        own = method == "GeoQ" and ratios
        cells.append(f"{geometric_mean(ratios):.2f}" if own else "")
        lines.append(f"| {named(method, rows)} | {' | '.join(cells)} |")
    return lines


def levels(rows):
    """Lines of a table of GeoQ's coverage at several quantile levels."""
    known = [r for r in rows if r.get("coverage_by_level")]
    if not known:
        return []
    lines = [
        "Coverage of GeoQ's bounds at other quantile levels, mean over the problems:",
        "",
        f"| level | {' | '.join(COLUMNS)} |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for level in known[0]["coverage_by_level"]:
        found = [r | {"at": r["coverage_by_level"][level]} for r in known]
        cells = [f"{mean(found, 'at', shift=shift):.3f}" for shift in COLUMNS]
        lines.append(f"| {level} | {' | '.join(cells)} |")
    return lines
