"""Tables of the suite: pinball losses relative to the rivals, coverage, the safe region, the ablation, and one input at a time."""

import math
import statistics
from functools import partial

from benchmarks.markdown import (
    NONE,
    Ratio,
    as_table,
    average,
    compare,
    group,
    mean,
    number,
    only,
    select,
    table,
    values,
)
from benchmarks.record import QUANTILE
from benchmarks.suite import SHIFTS, is_ours

# Queries far outside dominate the column of all queries, so it comes last.
COLUMNS = (*SHIFTS, "all")
KINDS = dict(zip(COLUMNS, ("inside the data", "mildly outside", "far outside", "all"), strict=True))
# A coverage inside the data that differs from the level by at most this much counts as right.
TOLERANCE = 0.02


def losses(rows, column="pinball"):
    """Loss of each method for each seed, by problem."""
    found = {}
    for r in rows:
        if r[column] is not None:
            of_problem = found.setdefault(r["problem"], {})
            of_problem.setdefault(r["method"], {})[r["seed"]] = r[column]
    return found


def mean_ratio(mine, others):
    """Mean loss relative to another method, over the seeds that both have."""
    both = mine.keys() & others.keys()
    return sum(mine[seed] for seed in both) / sum(others[seed] for seed in both)


def over_best_rival(rows, column="pinball"):
    """Mean loss of each method relative to the best rival, by problem.

    Rows of untrained networks are left out. Therefore two methods are compared on the seeds that both have, and the best rival
    of a method is the one with the largest ratio.
    """
    result = {}
    for problem, known in losses(rows, column).items():
        rivals = [found for method, found in known.items() if not is_ours(method)]
        result[problem] = {
            method: max(
                (mean_ratio(found, r) for r in rivals if found.keys() & r.keys()), default=math.nan
            )
            for method, found in known.items()
        }
    return result


def named(method, rows, n_problems):
    """Name of a method, with the number of its problems if it was not measured on all of them."""
    n = len({r["problem"] for r in rows})
    return method if n == n_problems else f"{method}, {n} problem{'s' * (n > 1)}"


def summary(record):
    """All tables of a set of problems."""
    rows = record["rows"]
    return "\n\n".join(part(rows) for part in (by_problem, by_method, safety, forms, levels))


def by_problem(rows):
    """GeoQ's loss relative to the best rival of each problem and shift."""
    ratios = {shift: over_best_rival(select(rows, shift=shift)) for shift in COLUMNS}
    n_rivals = len({r["method"] for r in rows if not is_ours(r["method"])})
    lines = []
    for problem, of_method in ratios["all"].items():
        best = min((r, m) for m, r in of_method.items() if not is_ours(m))[1]
        cells = [number(ratios[shift][problem]["GeoQ"]) for shift in COLUMNS]
        lines.append([problem, *cells, best])
    ours = [[of["GeoQ"] for of in ratios[shift].values()] for shift in COLUMNS]
    found = [Ratio.of(of) for of in ours]
    lines += [
        ["**worst**", *(number(max(of)) for of in ours), ""],
        ["**geometric mean**", *(number(r.mean) for r in found), ""],
        ["**95 % interval**", *(r.range for r in found), ""],
        ["**GeoQ is**", *(r.word for r in found), ""],
        ["**smaller on**", *(f"{r.better} of {r.n}" for r in found), ""],
    ]
    return (
        f"Pinball loss of GeoQ relative to the best of {n_rivals} rivals, which is chosen afterwards for each problem and shift; mean "
        "losses over the seeds. The last rows have the geometric mean over the problems, its interval by Student's t, and the number "
        "of problems on which GeoQ has the smaller loss:\n\n"
    ) + as_table(["problem", *COLUMNS, "best rival on all"], lines)


def by_method(rows):
    """GeoQ's loss relative to each other method on the same data, and all coverages."""
    n_problems = len({r["problem"] for r in rows})
    ours, lines = select(rows, method="GeoQ"), []
    for method, own in group(rows, "method").items():
        cells = [compare(select(ours, shift=s), select(own, shift=s)) for s in COLUMNS]
        cells += [number(average(select(own, shift=s), "coverage"), 3) for s in SHIFTS]
        lines.append([named(method, own, n_problems), *cells])
    return (
        "Pinball loss of GeoQ relative to each method on the same data: geometric mean over the problems of the geometric means over "
        "the seeds, with its 95 % interval by Student's t. GeoQ is ahead or behind where this interval excludes 1. Coverage of each "
        "method:\n\n"
    ) + as_table(["method", *COLUMNS, *(f"coverage {s}" for s in SHIFTS)], lines)


def safety(rows):
    """GeoQ's coverage, safe region and ROC areas by problem."""
    ours, columns = select(rows, method="GeoQ"), {}
    columns["surrogate's error inside"] = only(mean("relative_l2", 3), shift=SHIFTS[0])
    for name in ("coverage", "safe_fraction", "safe_coverage"):
        columns[name.replace("_", " ")] = only(mean(name, 3), shift="all")
    for title, event in (("error exceeds the bound", "exceeds"), ("large error", "large")):
        columns[title] = only(partial(_areas, event=event), shift="all")
    return (
        "The relative L2 error of the surrogate inside the data; GeoQ's coverage, its safe region, and ROC areas of support score / "
        "distance to the data:\n\n"
    ) + table("problem", group(ours, "problem"), columns)


def _areas(rows, event):
    """ROC areas of the support score and of the distance."""
    scores = "support_score", "distance"
    return " / ".join(mean(f"{score}_roc_{event}")(rows) for score in scores)


def forms(rows):
    """GeoQ's forms: losses relative to the best rival, coverage and safe region."""
    by_shift = [over_best_rival(select(rows, shift=shift)) for shift in COLUMNS]
    # The rivals' losses in the safe region are measured with the flags of the default.
    in_safe = over_best_rival(select(rows, shift="all"), "safe_pinball")
    n_problems, lines = len(by_shift[0]), []
    for method, own in group((r for r in rows if is_ours(r["method"])), "method").items():
        cells = []
        for ratios in by_shift:
            known = [r[method] for r in ratios.values() if method in r]
            cells.append(f"{statistics.geometric_mean(known):.2f} ({max(known):.2f})")
        inside = group(select(own, shift=SHIFTS[0]), "problem").values()
        covered = [average(of, "coverage") for of in inside]
        right = [abs(value - QUANTILE) <= TOLERANCE for value in covered]
        cells += [number(statistics.fmean(covered), 3), number(statistics.fmean(right))]
        cells += [number(average(select(own, shift=s), "safe_fraction"), 3) for s in SHIFTS]
        together = select(own, shift="all")
        cells += [number(average(together, "safe_coverage"), 3), *least(together, "safe_coverage")]
        known = [r["GeoQ"] for r in in_safe.values() if method == "GeoQ" and "GeoQ" in r]
        cells.append(number(statistics.geometric_mean(known)) if known else "")
        lines.append([named(method, own, n_problems), *cells])
    head = ["method", *COLUMNS, "coverage inside", "right"]
    head += ["safe fraction inside", "mild", "strong", "safe coverage", "least", "on"]
    return (
        "The forms of GeoQ. Pinball loss relative to the best rival, geometric mean over the problems and the worst problem in "
        f"brackets; coverage inside the data, and the fraction of problems where it is within {TOLERANCE:g} of the level; the safe "
        "region. The last column is the relative pinball loss in the safe region:\n\n"
    ) + as_table([*head, "in the safe region"], lines)


def least(rows, column):
    """The smallest mean over the problems, and its problem."""
    known = {p: average(own, column) for p, own in group(rows, "problem").items()}
    known = {p: value for p, value in known.items() if not math.isnan(value)}
    at = min(known, key=known.get, default=None)
    return (NONE, NONE) if at is None else (number(known[at], 3), at)


def levels(rows):
    """GeoQ's coverage at several quantile levels."""
    known = [r for r in rows if r.get("coverage_by_level")]
    groups = {
        q: [r | {"at": r["coverage_by_level"][q]} for r in known]
        for q in known[0]["coverage_by_level"]
    }
    columns = {s: only(mean("at", 3), shift=s) for s in COLUMNS}
    return (
        "Coverage of GeoQ's bounds at other quantile levels, mean over the problems:\n\n"
        + table("level", groups, columns)
    )


# By kind of query: each method in the best of its versions


def relative_losses(rows):
    """The loss of each method over that of the best rival of each problem, by method and kind of query.

    The best rival, and the version of each rival, are chosen in hindsight for each problem and kind of query.
    """
    ratios = {}
    for shift in COLUMNS:
        for of_problem in over_best_rival(select(rows, shift=shift)).values():
            versions = {}
            for method, ratio in of_problem.items():
                name = method.split(" / ")[0]
                if not is_ours(method) or method in ("GeoQ", "GeoQ (paper)"):
                    versions[name] = min(ratio, versions.get(name, math.inf))
            for name, ratio in versions.items():
                ratios.setdefault(name, {}).setdefault(shift, []).append(ratio)
    return {
        name: {shift: Ratio.of(known) for shift, known in of.items()} for name, of in ratios.items()
    }


def kinds(record):
    """Losses of every method relative to the best rival, by kind of query."""
    found = relative_losses(record["rows"])
    lines = [[method, *(str(of[shift]) for shift in COLUMNS)] for method, of in found.items()]
    return as_table(["method", *KINDS.values()], lines)


# Ablation

ALL = "all of it"


def ablation(record):
    """The pinball loss of each variant relative to the default, and the rules for the safe region."""
    rows = record["rows"]
    parts = select(rows, part="ingredients")
    lines = []
    for variant, own in group(parts, "method").items():
        ratio = {
            shift: {
                p: average(select(own, problem=p, shift=shift), "pinball")
                / average(select(parts, method=ALL, problem=p, shift=shift), "pinball")
                for p in group(rows, "problem")
            }
            for shift in ("all", *SHIFTS)
        }
        cells = [number(statistics.geometric_mean(of.values())) for of in ratio.values()]
        cells.insert(1, Ratio.of(ratio["all"].values()).range)
        for extreme in (max, min):
            at = extreme(ratio["all"], key=ratio["all"].get)
            cells += [number(ratio["all"][at]), at]
        lines.append([variant, *cells, mean("safe_coverage", 3)(select(own, shift="all"))])
    head = ["", "all", "95 % interval", *SHIFTS, "largest", "on", "smallest", "on", "safe coverage"]
    columns = {
        "safe fraction": mean("safe_fraction"),
        "safe coverage": mean("safe_coverage", 3),
        "least safe coverage": lambda own: least(own, "safe_coverage")[0],
        "on": lambda own: least(own, "safe_coverage")[1],
        "error exceeds the bound": mean("rule_roc_exceeds"),
        "large error": mean("rule_roc_large"),
    }
    rules = group(select(rows, part="safe rules"), "method")
    return "\n\n".join(
        [
            "Pinball loss relative to the default, geometric mean over the problems, for all queries with its 95 % interval:",
            as_table(head, lines),
            "Rules for the safe region on the default's bounds, mean over the problems; areas under the ROC curves of their scores:",
            table("rule", rules, columns),
        ]
    )


# One input at a time

# Cases whose surrogate explains less of the variance on held-out points are left out.
MIN_R2 = 0.5
# Up to this many half-widths a query is near the range; cells with more false trust are counted.
NEAR, MAX_FALSE_TRUST = 1.1, 0.05
MEASURES = ("safe", "false trust", "coverage", "pinball")


def one_input(record):
    """The safe flags by rule: the families, each special kind of query, and each distance."""
    cases = {_case(r): r for r in record["rows"]}
    poor = {case: r["r2"] for case, r in cases.items() if r["r2"] is None or r["r2"] < MIN_R2}
    left_out = ", ".join(f"{case} ({number(r2)})" for case, r2 in poor.items()) or "none"
    cells = [cell for r in record["rows"] if _case(r) not in poor for cell in _cells(r)]
    families = {"all": cells} | group(cells, "family")
    lines = []
    for family, own in families.items():
        for rule, of_rule in group(own, "rule").items():
            n = len({cell["case"] for cell in own})
            lines.append([family, str(n), rule, *_of_rule(of_rule)])
    head = ["family", "cases", "rule", "interior safe", "least", "worst false trust, u <= 1.1"]
    head += ["u > 1.1", "cells above 5 %", "harmless safe", "far unsafe", "least"]
    special = [c for c in cells if c["label"].startswith("special")]
    of_special = {
        "cases": lambda own: str(len(own)),
        "safe": mean("safe", 3),
        "false trust": mean("false trust", 3),
        "worst": _worst,
    }
    moved = sorted((c for c in cells if c["u"]), key=lambda c: c["u"])
    of_width = {
        "safe": mean("safe", 3),
        "false trust": mean("false trust", 3),
        "worst": _worst,
        "cells above 5 %": _above,
        "coverage": mean("coverage", 3),
        "coverage, most influential input": only(mean("coverage", 3), top=True),
    }

    def labelled(found, *keys):
        groups = group(found, *keys)
        return {f"{key[0]}, {key[1]} | {key[2]}": own for key, own in groups.items()}

    return "\n\n".join(
        [
            f"{len(cases) - len(poor)} cases; left out, because R2 < {MIN_R2:g}: {left_out}.",
            as_table(head, lines),
            table("queries | rule", labelled(special, "family", "name", "rule"), of_special),
            table(
                "u | rule",
                {f"{k[0]:g} | {k[1]}": v for k, v in group(moved, "u", "rule").items()},
                of_width,
            ),
        ]
    )


def _case(row):
    return f"{row['problem']} {row['seed']}"


def _cells(row):
    """One entry for each label of a case and rule."""
    for label, measures in row["labels"].items():
        u = float(label.split()[2]) if label.startswith("input") else 0.0
        yield dict(zip(MEASURES, measures, strict=True)) | {
            "case": _case(row),
            "family": row["family"],
            "rule": row["method"],
            "label": label,
            "name": label.removeprefix("special "),
            "u": u,
            "top": bool(u) and label.split()[1] == str(row["top"]),
            "harmless": label in row["harmless"],
        }


def _of_rule(cells):
    inside = select(cells, label="inside")
    moved = [c for c in cells if c["u"]]
    near, farther = ([c for c in moved if (c["u"] <= NEAR) == is_near] for is_near in (True, False))
    far = [1 - c["safe"] for c in select(cells, label="far")]
    fewest = min(inside, key=lambda c: c["safe"])
    return [
        mean("safe", 3)(inside),
        f"{fewest['safe']:.3f} ({fewest['case']})",
        _worst(near),
        _worst(farther),
        _above(moved),
        mean("safe")(select(moved, harmless=True)),
        number(statistics.fmean(far), 3) if far else NONE,
        number(min(far), 3) if far else NONE,
    ]


def _above(cells):
    """The fraction of the cells with much false trust."""
    above = [value > MAX_FALSE_TRUST for value in values(cells, "false trust")]
    return number(statistics.fmean(above), 3) if above else NONE


def _worst(cells):
    """The largest false trust and its case."""
    at = max(cells, key=lambda c: c["false trust"], default=None)
    if at is None or not at["false trust"]:
        return NONE if at is None else "0.00"
    return f"{at['false trust']:.2f} ({at['case']}, {at['label']})"


# Data frames

OURS = "GeoQ"
SETTINGS = ("inside", "mild", "far", "gap", "unseen")


def data_frames(record):
    """A table over the problems, and a table of each setting."""
    rows = record["rows"]
    settings = [s for s in SETTINGS if select(rows, setting=s)]
    losses_of = {
        f"{setting}: loss, coverage, safe": partial(_loss, setting=setting) for setting in settings
    }
    trainings = {"trainings": only(mean("fit_over_training", 0), method=OURS)}
    parts = [
        "Pinball loss of GeoQ divided by the smallest of the rivals' (below 1: GeoQ is best), and coverage at level 0.95:",
        table("problem", group(rows, "problem"), losses_of | trainings),
    ]
    columns = {
        "problems": lambda own: str(len(group(own, "problem"))),
        "coverage": lambda own: number(statistics.fmean(_by_problem(own, "coverage"))),
        "least coverage": lambda own: number(min(_by_problem(own, "coverage"))),
        "safe": mean("safe_fraction"),
        "mean bound / mean error": lambda own: number(statistics.median(_sharpness(own))),
    }
    for setting in settings:
        here = select(rows, setting=setting)
        ours = select(here, method=OURS)
        versus = {"pinball of GeoQ over it": lambda own, ours=ours: compare(ours, own)}
        parts += [f"**{setting}**", table("method", group(here, "method"), versus | columns)]
    return "\n\n".join(parts)


def _by_problem(rows, column):
    return [average(own, column) for own in group(rows, "problem").values()]


def _sharpness(rows):
    pairs = (
        (average(own, "bound"), average(own, "error")) for own in group(rows, "problem").values()
    )
    return [bound / error for bound, error in pairs if error]


def _loss(rows, setting):
    here = group(select(rows, setting=setting), "method")
    rivals = [average(own, "pinball") for method, own in here.items() if method != OURS]
    if OURS not in here or not rivals:
        return NONE
    ratio = average(here[OURS], "pinball") / min(rivals)
    return f"{ratio:.2f}, {mean('coverage')(here[OURS])}, {mean('safe_fraction')(here[OURS])}"
