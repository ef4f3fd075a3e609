"""Tables of the weather benchmark: mean and standard deviation over tasks, each an origin and a seed."""

import math
import statistics

from benchmarks.paper_numbers import PAPER_SECONDS
from benchmarks.suite.table import Comparison
from benchmarks.weather.data import HOURS, label

WHOLE_FIELD = "whole field"
# The method of the ratios, and the methods that are shown by lead time.
REFERENCE = "GeoQ (default)"
MAIN = (
    REFERENCE,
    "GeoQ (default, no factor)",
    "Cell quantile blended with deviation x activity",
    "Cell quantile blended with deviation",
    "Horizon x climatology",
    "Lead scale x cell standard deviation",
    "One number per lead and cell",
    "UQNO-style network (x)",
    "GeoQ (paper, k_a = 10)",
    "Split conformal per cell (random fifth)",
)
# Beginnings of the names of the paper's three baselines.
BASELINES = ("MC dropout", "Deep ensemble", "Split conformal")
QUARTERS = range(1, 5)
LEADS = {"6 h": "6h", "24 h": "24h", **{f"quarter {q}": f"q{q}" for q in QUARTERS}}
# Column heading: name in the rows, factor, digits.
POOLED = {
    "area-weighted": ("area_pinball", 1000, 2),
    "correlation": ("correlation", 1, 3),
    "which day": ("which_day", 1, 3),
    "which day, first quarter": ("which_day_q1", 1, 3),
    "which day, to 24 h": ("which_day_24h", 1, 3),
    "coverage": ("coverage", 1, 3),
}
PINBALL = {"pinball x 1000": ("pinball", 1000, 2)}
BY_LEAD = {
    **{f"pinball x 1000, quarter {q}": (f"pinball_q{q}", 1000, 2) for q in QUARTERS},
    **{f"coverage, quarter {q}": (f"coverage_q{q}", 1, 3) for q in QUARTERS},
}
FIELDS = {
    "fraction of the field covered": ("coverage", 1, 3),
    "least": ("field_least", 1, 3),
    "forecasts with 95 %": ("field_fraction_95", 1, 2),
}
COSTS = {
    "calibration over training": ("calibration_over_training", 1, 1),
    "calibration, s": ("train_seconds", 1, 1),
    "relative L2": ("relative_l2", 1, 3),
    "peak GPU memory, GiB": ("peak_gpu_gib", 1, 2),
}
TIMES = {
    "calibration, s": ("train_seconds", 1, 1),
    "inference, s": ("inference_seconds", 1, 2),
}
SAFE = {
    "fraction": ("safe_fraction", 1, 2),
    "pinball x 1000, safe": ("safe_pinball", 1000, 2),
    "coverage, safe": ("safe_coverage", 1, 3),
}
SURROGATE = {
    "steps": ("n_steps", 1, 0),
    "relative L2": ("relative_l2", 1, 3),
    "of persistence": ("relative_l2_persistence", 1, 3),
    "of climatology": ("relative_l2_climatology", 1, 3),
    "error in sample x 1000": ("mae_in_sample", 1000, 1),
    "on test x 1000": ("mae_test", 1000, 1),
    "training, s": ("training_seconds", 1, 1),
    "choosing the steps, s": ("choosing_seconds", 1, 1),
}
LEAKS = {
    "held-out targets trained on": ("shared_targets", 1, 2),
    "error in sample x 1000": ("mae_fold_in_sample", 1000, 1),
    "held out x 1000": ("mae_held_out", 1000, 1),
    "test x 1000": ("mae_test", 1000, 1),
    "error and distance, held out": ("distance_correlation_held_out", 1, 2),
    "error and distance, test": ("distance_correlation_test", 1, 2),
}


def cell(lines, name, factor, digits):
    numbers = [factor * line[name] for line in lines if line[name] is not None]
    if not numbers:
        return "-"
    mean, deviation = statistics.fmean(numbers), statistics.pstdev(numbers)
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}"


def cells(lines, columns):
    return [cell(lines, *column) for column in columns.values()]


def as_table(heading, lines):
    rows = [heading, ["---"] * len(heading), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def table(groups, columns, first):
    """A table with one line per group of rows."""
    lines = [[name, *cells(rows, columns)] for name, rows in groups.items()]
    return as_table([first, *columns], lines)


def grouped(rows, key):
    return {
        name: [row for row in rows if key(row) == name]
        for name in dict.fromkeys(map(key, rows))
    }


def method(row):
    return row["method"]


def form(row):
    return row["form"]


def by_pinball(rows):
    """Rows by method, in the order of the mean pinball loss."""
    groups = grouped(rows, method)
    order = sorted(groups, key=lambda m: statistics.fmean(column(groups[m])))
    return {name: groups[name] for name in order}


def column(rows, name="pinball"):
    return [row[name] for row in rows]


def error_ratios(rows, others, name="pinball"):
    """Ratios of rows to other rows of the same task."""
    task = {(row["origin"], row["seed"]): row[name] for row in others}
    pairs = ((row[name], task.get((row["origin"], row["seed"]))) for row in rows)
    return [mine / theirs for mine, theirs in pairs if theirs]


def compared(reference, rows):
    """Geometric mean and range of the ratios, and the number of tasks in which the reference is better."""
    found = error_ratios(reference, rows)
    if not found or reference is rows:
        return ["", ""]
    mean = f"{statistics.geometric_mean(found):.3f}"
    ahead = f"{sum(ratio < 1 for ratio in found)} of {len(found)}"
    return [f"{mean} ({min(found):.2f} to {max(found):.2f})", ahead]


def two_standard_errors(ratios):
    """Two standard errors of the mean logarithm of ratios; a dash for fewer than two ratios."""
    if len(ratios) < 2:
        return "-"
    compared = Comparison.of(ratios)
    return f"{math.log(compared.high / compared.ratio):.3f}"


def main_table(groups, reference):
    heading = ["method", *PINBALL, f"{reference} over it", "two standard errors"]
    heading += ["ahead in", *POOLED]
    mine = groups.get(reference, [])
    lines = []
    for name, rows in groups.items():
        ratio, ahead = compared(mine, rows)
        error = two_standard_errors(error_ratios(mine, rows)) if ratio else ""
        line = [name, *cells(rows, PINBALL), ratio, error, ahead, *cells(rows, POOLED)]
        lines.append(line)
    return as_table(heading, lines)


def time_table(groups):
    """Times of the reference and of the methods whose times the paper gives."""
    paper = {m: f"{a:g} / {b:g}" for m, (a, b) in PAPER_SECONDS["weather"].items()}
    shown = [m for m in groups if m == REFERENCE or m in paper]
    lines = [[name, *cells(groups[name], TIMES), paper.get(name, "")] for name in shown]
    return as_table(["method", *TIMES, "the paper, s"], lines)


def skill_table(surrogates):
    lines = [
        [f"{name}, over {reference}"]
        + [cell(rows, f"skill_{reference}_{lead}", 1, 2) for lead in LEADS.values()]
        for name, rows in grouped(surrogates, form).items()
        for reference in ("persistence", "climatology")
    ]
    return as_table(["skill", *LEADS], lines)


def by_origin(groups, columns, repeated):
    """All columns, and one column separately for each origin."""
    name, factor, digits = columns[repeated]
    origins = sorted({row["origin"] for rows in groups.values() for row in rows})
    days = [f"{repeated}, after {origin * HOURS / 24:g} days" for origin in origins]
    lines = [
        [title, *cells(rows, columns)]
        + [
            cell([r for r in rows if r["origin"] == o], name, factor, digits)
            for o in origins
        ]
        for title, rows in groups.items()
    ]
    return as_table(["method", *columns, *days], lines)


def ratios_by_origin(groups, reference):
    """Pinball loss of the reference relative to each method, for each origin."""
    origins = sorted({row["origin"] for rows in groups.values() for row in rows})
    heading = [f"{reference} over"]
    heading += [f"after {origin * HOURS / 24:g} days" for origin in origins]
    lines = [
        [name]
        + [
            compared([r for r in groups[reference] if r["origin"] == origin], rows)[0]
            for origin in origins
        ]
        for name, rows in groups.items()
        if name != reference
    ]
    return as_table(heading, lines)


def leaking(blocks, clusters, reference):
    """Each method with both kinds of folds, and the reference with blocks compared with the method with clusters."""
    heading = ["method", "pinball x 1000, clusters", "blocks", "clusters over blocks"]
    heading += ["coverage, clusters", "blocks"]
    heading += [f"{reference}, blocks, over clusters", "two standard errors"]
    lines = []
    for name in (m for m in blocks if m in clusters):
        kinds = clusters[name], blocks[name]
        lost = statistics.geometric_mean(error_ratios(*kinds))
        loss, covered = (
            [cell(rows, *shown) for rows in kinds]
            for shown in (PINBALL["pinball x 1000"], POOLED["coverage"])
        )
        ratio, _ = compared(blocks[reference], clusters[name])
        error = two_standard_errors(error_ratios(blocks[reference], clusters[name]))
        lines.append([name, *loss, f"{lost:.3f}", *covered, ratio, error])
    return as_table(heading, lines)


def summary(record, reference=REFERENCE, chosen=()):
    """All tables of a results file, or the first table of the chosen methods."""
    rows, name = record["rows"], label(record["variables"])
    reference = reference if reference in map(method, rows) else REFERENCE
    parts = []
    if not chosen:
        folds = grouped(record["leaks"], lambda r: f"{r['form']}, {r['folds']}")
        parts += [
            f"**Surrogates on {name}**",
            skill_table(record["surrogates"]),
            table(grouped(record["surrogates"], form), SURROGATE, "form"),
            f"**Folds on {name}**",
            table(folds, LEAKS, "folds"),
        ]
    for title, of_form in grouped(rows, form).items():
        parts += tables_of(of_form, f"{name}, {title}", reference, chosen)
    tasks = {(row["form"], row["origin"], row["seed"]) for row in rows}
    origins = {row["origin"] for row in rows}
    parts.append(
        f"Mean ± standard deviation over {len(tasks)} tasks ({len(origins)} origins and seeds); test windows overlap, so "
        "this deviation is not a standard error. Ratios are geometric means over tasks, with the smallest and the largest "
        "ratio in parentheses. Two standard errors belong to the mean logarithm of the ratio over the tasks, as if the tasks were "
        "independent."
    )
    return "\n\n".join(parts)


def flagging(groups):
    """The methods with a safe flag."""
    return {m: g for m, g in groups.items() if g[0]["safe_fraction"] is not None}


def tables_of(rows, name, reference, chosen):
    """Tables of one form of the surrogate; methods without folds are shown with the block folds."""
    here = [r for r in rows if r["folds"] in ("no folds", "blocks")]
    pointwise = by_pinball([r for r in here if WHOLE_FIELD not in method(r)])
    whole = grouped([r for r in here if WHOLE_FIELD in method(r)], method)
    if chosen:
        kept = {m: g for m, g in pointwise.items() if m in (reference, *chosen)}
        return [
            f"**{name}, blocks**",
            main_table(kept, reference),
            f"**Safe region: {name}, blocks**",
            by_origin(flagging(kept), SAFE, "fraction"),
        ]
    clusters = grouped([r for r in rows if r["folds"] == "clusters"], method)
    main = {m: g for m, g in pointwise.items() if m in MAIN}
    stated = {m: g for m, g in pointwise.items() if any(m in other for other in whole)}
    stated[REFERENCE] = pointwise[REFERENCE]
    baseline = next(m for m in pointwise if m.startswith(BASELINES))
    return [
        f"**{name}, blocks**",
        main_table(pointwise, reference),
        f"Best of the paper's three baselines, each in its best form: {baseline}.",
        f"**By lead time: {name}, blocks**",
        table(main, BY_LEAD, "method"),
        f"**By origin: {name}, blocks**",
        ratios_by_origin(main, REFERENCE),
        f"**Whole fields: {name}, blocks**",
        by_origin(stated | whole, FIELDS | PINBALL, "forecasts with 95 %"),
        f"**Clusters and blocks: {name}**",
        leaking(pointwise, clusters, REFERENCE),
        f"**Safe region: {name}, blocks**",
        by_origin(flagging(pointwise), SAFE, "fraction"),
        f"**Cost: {name}, blocks**",
        table(pointwise, COSTS, "method"),
        f"**Time: {name}, blocks**",
        time_table(pointwise),
    ]
