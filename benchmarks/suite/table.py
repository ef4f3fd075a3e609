"""Tables of the suite: pinball losses relative to the rivals, coverage, the safe region, the ablation, and one input at a time."""

import math
import statistics
from functools import partial

from benchmarks import markdown as md
from benchmarks.record import QUANTILE
from benchmarks.suite import SHIFTS, is_ours

# Queries far outside dominate the column of all queries, so it comes last.
COLUMNS = (*SHIFTS, "all")
KINDS = dict(zip(COLUMNS, ("inside the data", "mildly outside", "far outside", "all"), strict=True))
# A coverage inside the data that differs from the level by at most this much counts as right.
TOLERANCE = 0.02


def over_best_rival(rows, column="pinball"):
    """Mean loss of each method relative to the best rival, by problem.

    Rows of untrained networks are left out. Therefore two methods are compared on the seeds that both have, and the best rival
    of a method is the one with the largest ratio.
    """
    result = {}
    for problem, own in md.group((r for r in rows if r[column] is not None), "problem").items():
        known = {m: {r["seed"]: r[column] for r in of} for m, of in md.group(own, "method").items()}
        rivals = [found for method, found in known.items() if not is_ours(method)]
        result[problem] = {m: max(_ratios(of, rivals), default=math.nan) for m, of in known.items()}
    return result


def _ratios(mine, rivals):
    """Mean loss relative to each rival, over the seeds that both have."""
    for others in rivals:
        if both := mine.keys() & others.keys():
            yield sum(mine[seed] for seed in both) / sum(others[seed] for seed in both)


def named(method, rows, n_problems):
    """Name of a method, with the number of its problems if it was not measured on all of them."""
    n = len({r["problem"] for r in rows})
    return method if n == n_problems else f"{method}, {n} problem{'s' * (n > 1)}"


def summary(record):
    """All tables of a set of problems."""
    rows = record["rows"]
    return md.page(*(part(rows) for part in (by_problem, by_method, safety, forms, levels)))


def by_problem(rows):
    """GeoQ's loss relative to the best rival of each problem and shift."""
    ratios = {shift: over_best_rival(md.select(rows, shift=shift)) for shift in COLUMNS}
    n_rivals = len({r["method"] for r in rows if not is_ours(r["method"])})
    lines = []
    for problem, of_method in ratios["all"].items():
        best = min((r, m) for m, r in of_method.items() if not is_ours(m))[1]
        cells = [md.number(ratios[shift][problem]["GeoQ"]) for shift in COLUMNS]
        lines.append([problem, *cells, best])
    ours = [[of["GeoQ"] for of in ratios[shift].values()] for shift in COLUMNS]
    found = [md.Ratio.of(of) for of in ours]
    lines += [
        ["**worst**", *(md.number(max(of)) for of in ours), ""],
        ["**geometric mean**", *(md.number(r.mean) for r in found), ""],
        ["**95 % interval**", *(r.range for r in found), ""],
        ["**GeoQ is**", *(r.word for r in found), ""],
        ["**smaller on**", *(f"{r.better} of {r.n}" for r in found), ""],
    ]
    return (
        f"Pinball loss of GeoQ relative to the best of {n_rivals} rivals, which is chosen afterwards for each problem and shift; mean "
        "losses over the seeds. The last rows have the geometric mean over the problems, its interval by Student's t, and the number "
        "of problems on which GeoQ has the smaller loss:\n\n"
    ) + md.as_table(["problem", *COLUMNS, "best rival on all"], lines)


def by_method(rows):
    """GeoQ's loss relative to each other method on the same data, and all coverages."""
    n_problems = len({r["problem"] for r in rows})
    ours, lines = md.select(rows, method="GeoQ"), []
    for method, own in md.group(rows, "method").items():
        cells = [md.compare(md.select(ours, shift=s), md.select(own, shift=s)) for s in COLUMNS]
        cells += [md.number(md.average(md.select(own, shift=s), "coverage"), 3) for s in SHIFTS]
        lines.append([named(method, own, n_problems), *cells])
    return (
        "Pinball loss of GeoQ relative to each method on the same data: geometric mean over the problems of the geometric means over "
        "the seeds, with its 95 % interval by Student's t. GeoQ is ahead or behind where this interval excludes 1. Coverage of each "
        "method:\n\n"
    ) + md.as_table(["method", *COLUMNS, *(f"coverage {s}" for s in SHIFTS)], lines)


def safety(rows):
    """GeoQ's coverage, safe region and ROC areas by problem."""
    ours, columns = md.select(rows, method="GeoQ"), {}
    columns["surrogate's error inside"] = md.only(md.mean("relative_l2", 3), shift=SHIFTS[0])
    for name in ("coverage", "safe_fraction", "safe_coverage"):
        columns[name.replace("_", " ")] = md.only(md.mean(name, 3), shift="all")
    for title, event in (("error exceeds the bound", "exceeds"), ("large error", "large")):
        columns[title] = md.only(partial(_areas, event=event), shift="all")
    return (
        "The relative L2 error of the surrogate inside the data; GeoQ's coverage, its safe region, and ROC areas of support score / "
        "distance to the data:\n\n"
    ) + md.table("problem", md.group(ours, "problem"), columns)


def _areas(rows, event):
    """ROC areas of the support score and of the distance."""
    scores = "support_score", "distance"
    return " / ".join(md.mean(f"{score}_roc_{event}")(rows) for score in scores)


def forms(rows):
    """GeoQ's forms: losses relative to the best rival, coverage and safe region."""
    by_shift = [over_best_rival(md.select(rows, shift=shift)) for shift in COLUMNS]
    # The rivals' losses in the safe region are measured with the flags of the default.
    in_safe = over_best_rival(md.select(rows, shift="all"), "safe_pinball")
    n_problems, lines = len(by_shift[0]), []
    for method, own in md.group((r for r in rows if is_ours(r["method"])), "method").items():
        cells = []
        for ratios in by_shift:
            known = [r[method] for r in ratios.values() if method in r]
            cells.append(f"{statistics.geometric_mean(known):.2f} ({max(known):.2f})")
        inside = md.group(md.select(own, shift=SHIFTS[0]), "problem").values()
        covered = [md.average(of, "coverage") for of in inside]
        right = [abs(value - QUANTILE) <= TOLERANCE for value in covered]
        cells += [md.number(statistics.fmean(covered), 3), md.number(statistics.fmean(right))]
        cells += [
            md.number(md.average(md.select(own, shift=s), "safe_fraction"), 3) for s in SHIFTS
        ]
        together = md.select(own, shift="all")
        cells += [
            md.number(md.average(together, "safe_coverage"), 3),
            *least(together, "safe_coverage"),
        ]
        known = [r["GeoQ"] for r in in_safe.values() if method == "GeoQ" and "GeoQ" in r]
        cells.append(md.number(statistics.geometric_mean(known)) if known else "")
        lines.append([named(method, own, n_problems), *cells])
    head = ["method", *COLUMNS, "coverage inside", "right"]
    head += ["safe fraction inside", "mild", "strong", "safe coverage", "least", "on"]
    return (
        "The forms of GeoQ. Pinball loss relative to the best rival, geometric mean over the problems and the worst problem in "
        f"brackets; coverage inside the data, and the fraction of problems where it is within {TOLERANCE:g} of the level; the safe "
        "region. The last column is the relative pinball loss in the safe region:\n\n"
    ) + md.as_table([*head, "in the safe region"], lines)


def least(rows, column):
    """The smallest mean over the problems, and its problem."""
    known = {p: md.average(own, column) for p, own in md.group(rows, "problem").items()}
    known = {p: value for p, value in known.items() if not math.isnan(value)}
    at = min(known, key=known.get, default=None)
    return (md.NONE, md.NONE) if at is None else (md.number(known[at], 3), at)


def levels(rows):
    """GeoQ's coverage at several quantile levels."""
    known = [r for r in rows if r.get("coverage_by_level")]
    groups = {
        q: [r | {"at": r["coverage_by_level"][q]} for r in known]
        for q in known[0]["coverage_by_level"]
    }
    columns = {s: md.only(md.mean("at", 3), shift=s) for s in COLUMNS}
    return (
        "Coverage of GeoQ's bounds at other quantile levels, mean over the problems:\n\n"
        + md.table("level", groups, columns)
    )


# By kind of query: each method in the best of its versions


def relative_losses(rows):
    """The loss of each method over that of the best rival of each problem, by method and kind of query.

    The best rival, and the version of each rival, are chosen in hindsight for each problem and kind of query.
    """
    ratios = {}
    for shift in COLUMNS:
        for of_problem in over_best_rival(md.select(rows, shift=shift)).values():
            versions = {}
            for method, ratio in of_problem.items():
                name = method.split(" / ")[0]
                if not is_ours(method) or method in ("GeoQ", "GeoQ (paper)"):
                    versions[name] = min(ratio, versions.get(name, math.inf))
            for name, ratio in versions.items():
                ratios.setdefault(name, {}).setdefault(shift, []).append(ratio)
    return {
        name: {shift: md.Ratio.of(known) for shift, known in of.items()}
        for name, of in ratios.items()
    }


def kinds(record):
    """Losses of every method relative to the best rival, by kind of query."""
    found = relative_losses(record["rows"])
    lines = [[method, *(str(of[shift]) for shift in COLUMNS)] for method, of in found.items()]
    return md.as_table(["method", *KINDS.values()], lines)


# The methods that a reader would use instead, by the names of the rows.
PUBLIC = {
    "GeoQ": "**geoq**",
    "Split conformal": "split conformal",
    "CV+": "CV+, as in MAPIE",
    "kNN-distance conformal": "conformal, scaled by the distance to the data",
    "Spline-scaled conformal": "conformal, scaled by the difference to a spline",
    "Opinion-scaled conformal": "conformal, scaled by the second opinion of geoq",
    "GP": "a Gaussian process in place of the model, 1.96 deviations",
}


def unseen(record):
    """The loss of named methods divided by the loss of GeoQ, and their coverage, by kind of query."""
    lines, words = [], {"ahead": "geoq is behind", "behind": "geoq is ahead"}
    for method, name in PUBLIC.items():
        found = [versus(record["rows"], method, shift) for shift in SHIFTS]
        cells = [f"{r.mean:.2f} ({words.get(r.word, r.word)})" for r, _ in found]
        cells = ["1"] * len(SHIFTS) if method == "GeoQ" else cells
        lines.append([name, *cells, *(md.number(covered) for _, covered in found)])
    kinds = ("inside", "just outside", "far outside")
    head = ["method", *(f"loss, {k}" for k in kinds), *(f"coverage, {k}" for k in kinds)]
    return md.as_table(head, lines)


def in_short(record):
    """The loss of named methods divided by the loss of GeoQ over all queries, and their coverage by kind of query."""
    lines = []
    for method, name in PUBLIC.items():
        found = {shift: versus(record["rows"], method, shift) for shift in COLUMNS}
        ratio = found["all"][0]
        loss = f"{ratio.mean:.1f} ({ratio.range})"
        covered = (md.number(found[shift][1]) for shift in SHIFTS)
        lines.append([name, "1" if method == "GeoQ" else loss, *covered])
    return md.as_table(["method", "loss", "inside", "just outside", "far outside"], lines)


def versus(rows, method, shift):
    """The loss of a method over the loss of GeoQ, and its coverage; in its version with the smallest loss over all queries."""
    ours = md.select(rows, method="GeoQ")

    def ratio(own, shift):
        here = [md.select(r, shift=shift) for r in (own, ours)]
        return md.Ratio.of(md.paired(*here))

    every = md.group(rows, "method").items()
    versions = [own for name, own in every if name.split(" / ")[0] == method]
    own = min(versions, key=lambda version: ratio(version, "all").mean)
    return ratio(own, shift), md.average(md.select(own, shift=shift), "coverage")


# Ablation

ALL = "all of it"


def ablation(record):
    """The pinball loss of each variant relative to the default, and the rules for the safe region."""
    rows = record["rows"]
    parts = md.select(rows, part="ingredients")
    lines = []
    for variant, own in md.group(parts, "method").items():
        ratio = {
            shift: {
                p: md.average(md.select(own, problem=p, shift=shift), "pinball")
                / md.average(md.select(parts, method=ALL, problem=p, shift=shift), "pinball")
                for p in md.group(rows, "problem")
            }
            for shift in ("all", *SHIFTS)
        }
        cells = [md.number(statistics.geometric_mean(of.values())) for of in ratio.values()]
        cells.insert(1, md.Ratio.of(ratio["all"].values()).range)
        for extreme in (max, min):
            at = extreme(ratio["all"], key=ratio["all"].get)
            cells += [md.number(ratio["all"][at]), at]
        lines.append([variant, *cells, md.mean("safe_coverage", 3)(md.select(own, shift="all"))])
    head = ["", "all", "95 % interval", *SHIFTS, "largest", "on", "smallest", "on", "safe coverage"]
    columns = {
        **md.means("safe_fraction"),
        **md.means("safe_coverage", digits=3),
        "least safe coverage": lambda own: least(own, "safe_coverage")[0],
        "on": lambda own: least(own, "safe_coverage")[1],
        "error exceeds the bound": md.mean("rule_roc_exceeds"),
        "large error": md.mean("rule_roc_large"),
    }
    rules = md.group(md.select(rows, part="safe rules"), "method")
    return md.page(
        "Pinball loss relative to the default, geometric mean over the problems, for all queries with its 95 % interval:",
        md.as_table(head, lines),
        "Rules for the safe region on the default's bounds, mean over the problems; areas under the ROC curves of their scores:",
        md.table("rule", rules, columns),
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
    left_out = ", ".join(f"{case} ({md.number(r2)})" for case, r2 in poor.items()) or "none"
    cells = [cell for r in record["rows"] if _case(r) not in poor for cell in _cells(r)]
    families = {"all": cells} | md.group(cells, "family")
    lines = []
    for family, own in families.items():
        for rule, of_rule in md.group(own, "rule").items():
            n = len({cell["case"] for cell in own})
            lines.append([family, str(n), rule, *_of_rule(of_rule)])
    head = ["family", "cases", "rule", "interior safe", "least", "worst false trust, u <= 1.1"]
    head += ["u > 1.1", "cells above 5 %", "harmless safe", "far unsafe", "least"]
    trust = {**md.means("safe", "false trust", digits=3), "worst": _worst}
    covered = md.mean("coverage", 3)
    of_width = {"cells above 5 %": _above, "coverage": covered}
    of_width["coverage, most influential input"] = md.only(covered, top=True)
    special = [c | {"queries": f"{c['family']}, {c['name']}"} for c in cells if c["name"]]
    special = md.joined(md.group(special, "queries", "rule"))
    moved = sorted((c for c in cells if c["u"]), key=lambda c: c["u"])
    return md.page(
        f"{len(cases) - len(poor)} cases; left out, because R2 < {MIN_R2:g}: {left_out}.",
        md.as_table(head, lines),
        md.table("queries | rule", special, {"cases": lambda own: str(len(own))} | trust),
        md.table("u | rule", md.joined(md.group(moved, "u", "rule")), trust | of_width),
    )


def designs(record):
    """Designs of experiments between their runs, with and without five further ones."""
    rows = md.select(record["rows"], kind="design")
    lines = []
    for name, own in md.group(rows, "problem").items():
        line = [name, str(own[0]["n"])]
        for of_method in md.group(own, "method").values():
            covered = md.mean("safe_coverage")(of_method)
            line.append(f"{md.mean('safe')(of_method)}, {covered}")
        lines.append(line)
    return md.as_table(["design", "runs", *md.group(rows, "method")], lines)


def exchange(record):
    """Harmless queries that are safe, and false trust, by the change that is allowed beyond a range."""
    rows = [r for r in md.select(record["rows"], kind="exchange") if (r["r2"] or 0) >= MIN_R2]
    lines = []
    for method, own in md.group(rows, "method").items():
        moved = [cell for row in own for cell in _cells(row) if cell["u"]]
        far = [cell for cell in moved if cell["u"] > NEAR]
        calm = md.mean("safe")(md.select(moved, harmless=True))
        lines.append([method, str(len(own)), calm, _above(moved), _worst(moved), _worst(far)])
    head = ["change beyond a range", "cases", "harmless safe", "cells above 5 %"]
    return md.as_table([*head, "worst false trust", "worst, u > 1.1"], lines)


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
            "name": label.removeprefix("special ") if label.startswith("special") else "",
            "u": u,
            "top": bool(u) and label.split()[1] == str(row["top"]),
            "harmless": label in row["harmless"],
        }


def _of_rule(cells):
    inside = md.select(cells, label="inside")
    moved = [c for c in cells if c["u"]]
    near, farther = ([c for c in moved if (c["u"] <= NEAR) == is_near] for is_near in (True, False))
    far = [1 - c["safe"] for c in md.select(cells, label="far")]
    fewest = min(inside, key=lambda c: c["safe"])
    cells = [md.mean("safe", 3)(inside), f"{fewest['safe']:.3f} ({fewest['case']})"]
    cells += [_worst(near), _worst(farther), _above(moved)]
    cells.append(md.mean("safe")(md.select(moved, harmless=True)))
    unsafe = (statistics.fmean(far), min(far)) if far else (None, None)
    return [*cells, *(md.number(value, 3) for value in unsafe)]


def _above(cells):
    """The fraction of the cells with much false trust."""
    above = [value > MAX_FALSE_TRUST for value in md.values(cells, "false trust")]
    return md.number(statistics.fmean(above), 3) if above else md.NONE


def _worst(cells):
    """The largest false trust and its case."""
    at = max(cells, key=lambda c: c["false trust"], default=None)
    if at is None or not at["false trust"]:
        return md.NONE if at is None else "0.00"
    return f"{at['false trust']:.2f} ({at['case']}, {at['label']})"


def decades(record):
    """Geometric means of the loss ratios with their intervals over the draws, and coverages."""

    def cell(own):
        return f"{md.Ratio.of(md.values(own, 'loss'))}, {md.mean('coverage')(own)}"

    rows = record["rows"]
    columns = {form: md.only(cell, method=form) for form in md.group(rows, "method")}
    settings = md.group(rows, "setting").values()
    settings = {f"{md.average(own, 'decades'):.1f} | {own[0]['noise']}": own for own in settings}
    return md.table("decades | noise of log(y)", settings, columns)


# Data frames

OURS = "GeoQ"
SETTINGS = ("inside", "mild", "far", "gap", "unseen")


def data_frames(record):
    """A table over the problems, and a table of each setting."""
    rows = record["rows"]
    settings = [s for s in SETTINGS if md.select(rows, setting=s)]
    losses_of = {f"{s}: loss, coverage, safe": partial(_loss, setting=s) for s in settings}
    trainings = {"trainings": md.only(md.mean("fit_over_training", 0), method=OURS)}
    parts = [
        "Pinball loss of GeoQ divided by the smallest of the rivals' (below 1: GeoQ is best), and coverage at level 0.95:",
        md.table("problem", md.group(rows, "problem"), losses_of | trainings),
    ]
    columns = {
        "problems": lambda own: str(len(md.group(own, "problem"))),
        "coverage": lambda own: md.number(statistics.fmean(_by_problem(own, "coverage"))),
        "least coverage": lambda own: md.number(min(_by_problem(own, "coverage"))),
        "safe": md.mean("safe_fraction"),
        "mean bound / mean error": lambda own: md.number(statistics.median(_sharpness(own))),
    }
    for setting in settings:
        here = md.select(rows, setting=setting)
        ours = md.select(here, method=OURS)
        versus = {"pinball of GeoQ over it": lambda own, ours=ours: md.compare(ours, own)}
        parts += [f"**{setting}**", md.table("method", md.group(here, "method"), versus | columns)]
    return md.page(*parts)


def _by_problem(rows, column):
    return [md.average(own, column) for own in md.group(rows, "problem").values()]


def _sharpness(rows):
    pairs = zip(_by_problem(rows, "bound"), _by_problem(rows, "error"), strict=True)
    return [bound / error for bound, error in pairs if error]


def _loss(rows, setting):
    here = md.group(md.select(rows, setting=setting), "method")
    rivals = [md.average(own, "pinball") for method, own in here.items() if method != OURS]
    if OURS not in here or not rivals:
        return md.NONE
    ratio = md.average(here[OURS], "pinball") / min(rivals)
    return f"{ratio:.2f}, {md.mean('coverage')(here[OURS])}, {md.mean('safe_fraction')(here[OURS])}"
