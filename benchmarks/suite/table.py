"""Tables of the comparison: pinball losses relative to the best rival, coverage, and the safe region."""

import math
import statistics
from functools import partial

import numpy as np
from sklearn.metrics import roc_auc_score

from benchmarks.record import QUANTILE
from benchmarks.suite.methods import (
    ON_RANDOM_FOLDS,
    is_ours,
    is_rival,
    is_rival_on_any_folds,
)
from benchmarks.suite.problems import SHIFTS

AREAS = ("exceeds", "large")
# A coverage inside the data that differs from the level by at most this much counts as right.
TOLERANCE = 0.02
FORM_COLUMNS = (
    "method",
    *("all", *SHIFTS),
    *("of eighteen: all", *SHIFTS),
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


def error_ratios(rows, shift="all", *, metric="pinball", against=is_rival):
    """Mean pinball loss of each method relative to the best rival, by problem."""
    result = {}
    for problem in dict.fromkeys(r["problem"] for r in rows):
        found = [r for r in rows if (r["problem"], r["shift"]) == (problem, shift)]
        methods = dict.fromkeys(r["method"] for r in found)
        loss = {m: mean(found, metric, method=m) for m in methods}
        best = min(
            (loss[m] for m in methods if against(m) and not math.isnan(loss[m])),
            default=math.nan,
        )
        result[problem] = {method: value / best for method, value in loss.items()}
    return result


def geometric_mean(values):
    return math.exp(statistics.fmean(map(math.log, values)))


def summary(rows):
    """Tables of pinball losses relative to the best rival, and of GeoQ's safe region and support score."""
    by_shift = {shift: error_ratios(rows, shift) for shift in ("all", *SHIFTS)}
    pooled = by_shift["all"]
    lines = [
        "Pinball loss of GeoQ relative to the best rival, which is chosen afterwards for each problem and shift:",
        "",
        "| problem | all | interpolation | mild | strong | best rival on all |",
        "|---|---|---|---|---|---|",
    ]
    for problem, of_method in pooled.items():
        best = min((r, m) for m, r in of_method.items() if is_rival(m))[1]
        cells = [f"{by_shift[shift][problem]['GeoQ']:.2f}" for shift in by_shift]
        lines.append(f"| {problem} | {' | '.join(cells)} | {best} |")
    held_back = {r["problem"] for r in rows if r["held_back"]}
    for name, combine, kept in (
        ("**worst**", max, set(pooled)),
        ("**geometric mean**", geometric_mean, set(pooled)),
        ("geometric mean, not held back", geometric_mean, set(pooled) - held_back),
        ("geometric mean, held back", geometric_mean, held_back),
    ):
        chosen = [
            [part[p]["GeoQ"] for p in part if p in kept] for part in by_shift.values()
        ]
        if kept:
            cells = [f"{combine(values):.2f}" for values in chosen]
            lines.append(f"| {name} | {' | '.join(cells)} | |")
    lines += [
        "",
        "The same for every method, over the problems (all shifts together):",
        "",
        "| method | worst | on | geometric mean | not held back | held back | worst on one shift |",
        "|---|---|---|---|---|---|---|",
    ]
    for method in next(iter(pooled.values())):
        behind = {p: r[method] for p, r in pooled.items() if method in r}
        worst = max(behind, key=behind.get)
        apart = max(
            r[method] for s in SHIFTS for r in by_shift[s].values() if method in r
        )
        halves = [
            [
                ratio
                for problem, ratio in behind.items()
                if (problem in held_back) == half
            ]
            for half in (False, True)
        ]
        means = " | ".join(
            f"{geometric_mean(half):.2f}" if half else "-" for half in halves
        )
        lines.append(
            f"| {method} | {behind[worst]:.2f} | {worst} | {geometric_mean(behind.values()):.2f} | {means} | {apart:.2f} |"
        )
    lines += [
        "",
        "GeoQ's coverage, its safe region, and ROC areas of support score / distance to the data:",
        "",
        "| problem | coverage | safe fraction | safe coverage | error exceeds the bound | large error |",
        "|---|---|---|---|---|---|",
    ]
    for problem in pooled:
        of = partial(mean, rows, problem=problem, method="GeoQ", shift="all")
        cells = [of("coverage"), of("safe_fraction"), of("safe_coverage")]
        pairs = [
            f"{of(f'support_score_roc_{e}'):.2f} / {of(f'distance_roc_{e}'):.2f}"
            for e in AREAS
        ]
        shown = " | ".join([*(f"{c:.3f}" for c in cells), *pairs])
        lines.append(f"| {problem} | {shown} |")
    if any(r["method"].endswith(ON_RANDOM_FOLDS) for r in rows):
        lines += ["", *forms(rows), "", *paired(rows), "", *levels(rows)]
    return "\n".join(lines)


def forms(rows):
    """Lines of a table of GeoQ's forms: losses relative to the best rival, coverage and safe region."""
    methods = [m for m in dict.fromkeys(r["method"] for r in rows) if is_ours(m)]
    problems = list(dict.fromkeys(r["problem"] for r in rows))
    shifts = ("all", *SHIFTS)
    ten = {s: error_ratios(rows, s) for s in shifts}
    every = {s: error_ratios(rows, s, against=is_rival_on_any_folds) for s in shifts}
    in_safe = error_ratios(rows, metric="safe_pinball")
    lines = [
        "The forms of GeoQ. Pinball loss relative to the best of the ten rivals, and to the best of all eighteen:",
        "geometric mean over the problems, and the worst problem in brackets. Coverage inside the data, and the fraction of",
        f"problems where it is right within {TOLERANCE:g}. The last column is the relative pinball loss in the safe region:",
        "",
        f"| {' | '.join(FORM_COLUMNS)} |",
        "|---" * len(FORM_COLUMNS) + "|",
    ]
    for method in methods:
        cells = []
        for ratios in (*ten.values(), *every.values()):
            values = [r[method] for r in ratios.values()]
            cells.append(f"{geometric_mean(values):.2f} ({max(values):.2f})")
        of = partial(mean, rows, method=method)
        inside = [of("coverage", problem=p, shift=SHIFTS[0]) for p in problems]
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
        ratios = [r[method] for r in in_safe.values() if not math.isnan(r[method])]
        # The rivals' losses are measured in the safe region of the default.
        own = method == "GeoQ" and ratios
        cells.append(f"{geometric_mean(ratios):.2f}" if own else "")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


def paired(rows):
    """Lines of a table of GeoQ's loss over that of each other method on the same data."""
    loss = {
        (r["problem"], r["seed"], r["shift"], r["method"]): r["pinball"] for r in rows
    }
    others = [m for m in dict.fromkeys(r["method"] for r in rows) if m != "GeoQ"]
    shifts = ("all", *SHIFTS)
    lines = [
        "Pinball loss of GeoQ relative to each method on the same data: geometric mean over the problems, and two standard errors of its logarithm:",
        "",
        f"| method | {' | '.join(shifts)} |",
        "|---" * (len(shifts) + 1) + "|",
    ]
    for other in others:
        cells = []
        for shift in shifts:
            by_problem = {}
            for (problem, seed, at, method), value in loss.items():
                if method == "GeoQ" and at == shift:
                    ratio = value / loss[problem, seed, shift, other]
                    by_problem.setdefault(problem, []).append(math.log(ratio))
            logs = [statistics.fmean(values) for values in by_problem.values()]
            spread = (
                2 * statistics.stdev(logs) / math.sqrt(len(logs))
                if len(logs) > 1
                else math.nan
            )
            cells.append(f"{math.exp(statistics.fmean(logs)):.2f} ± {spread:.2f}")
        lines.append(f"| {other} | {' | '.join(cells)} |")
    return lines


def levels(rows):
    """Lines of a table of GeoQ's coverage at several quantile levels."""
    known = [r for r in rows if r.get("coverage_by_level")]
    if not known:
        return []
    shifts = (*SHIFTS, "all")
    lines = [
        "Coverage of GeoQ's bounds at other quantile levels, mean over the problems:",
        "",
        f"| level | {' | '.join(shifts)} |",
        "|---" * (len(shifts) + 1) + "|",
    ]
    for level in known[0]["coverage_by_level"]:
        found = [r | {"at": r["coverage_by_level"][level]} for r in known]
        cells = [f"{mean(found, 'at', shift=shift):.3f}" for shift in shifts]
        lines.append(f"| {level} | {' | '.join(cells)} |")
    return lines
