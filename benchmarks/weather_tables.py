"""Tables of the weather benchmark: mean and standard deviation over origins and seeds."""

import statistics

from weather_data import label

WHOLE_FIELD = "whole field"
STATIC = (
    "Lead scale x cell standard deviation",
    "One number per lead and cell",
    "One number per lead and channel",
    "Cell level blended with deviation",
    "U-Net of latitude and cell spread",
    "Split conformal per cell (last fifth, gap)",
    "Split conformal per cell (random fifth)",
)
# The paper's three baselines, each in the forms it was given.
BASELINES = ("MC dropout", "Deep ensemble", "Split conformal")
# Whose ratios are shown, where nobody asks for others.
REFERENCES = ("GeoQ (default)",)
QUARTERS = range(1, 5)
# Column heading: name in the rows, factor, digits.
POOLED = {
    "pinball x 1000": ("pinball", 1000, 2),
    "area-weighted": ("area_pinball", 1000, 2),
    "correlation": ("correlation", 1, 3),
    "which day": ("which_day", 1, 3),
    "which day, first quarter": ("which_day_q1", 1, 3),
    "which day, 24 h": ("which_day_24h", 1, 3),
    "coverage": ("coverage", 1, 3),
    "area-weighted coverage": ("area_coverage", 1, 3),
}
BY_LEAD = {
    **{f"pinball x 1000, quarter {q}": (f"pinball_q{q}", 1000, 2) for q in QUARTERS},
    **{f"coverage, quarter {q}": (f"coverage_q{q}", 1, 3) for q in QUARTERS},
}
FIELDS = {
    "share of the field covered": ("coverage", 1, 3),
    "least": ("field_least", 1, 3),
    "forecasts with 90 %": ("field_share_90", 1, 2),
    "forecasts with 95 %": ("field_share_95", 1, 2),
    "pinball x 1000": ("pinball", 1000, 2),
}
COSTS = {
    "calibration over training": ("calibration_over_training", 1, 1),
    "peak GPU memory, GiB": ("peak_gpu_gib", 1, 2),
    "safe fraction": ("safe_fraction", 1, 3),
    "safe pinball x 1000": ("safe_pinball", 1000, 2),
    "safe coverage": ("safe_coverage", 1, 3),
}
SURROGATE = {
    "steps": ("n_steps", 1, 0),
    "relative L2": ("relative_l2", 1, 3),
    "of climatology": ("relative_l2_climatology", 1, 3),
    "error in sample x 1000": ("mae_in_sample", 1000, 1),
    "error on test x 1000": ("mae_test", 1000, 1),
    **{
        f"skill over {r}, {lead}": (f"skill_{r}_{lead}", 1, 2)
        for r in ("persistence", "climatology")
        for lead in ("6h", "24h", "q1", "q2", "q3", "q4")
    },
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


def table(groups, columns, first):
    """A line per group of rows."""
    lines = [f"| {first} | " + " | ".join(columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for name, rows in groups.items():
        cells = [cell(rows, *column) for column in columns.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def grouped(rows, key):
    return {
        name: [row for row in rows if key(row) == name]
        for name in dict.fromkeys(map(key, rows))
    }


def method(row):
    return row["method"]


def case(row):
    return row["origin"], row["seed"]


def paired(rows, reference, others):
    """Pinball of the reference over that of the others, run by run: below 1 the reference is ahead."""
    mine = {case(row): row["pinball"] for row in rows if method(row) == reference}
    lines = [
        f"| pinball of {reference} over that of | mean | least | most | ahead in |",
        "|---|---|---|---|---|",
    ]
    for other in others:
        ratio = [
            mine[case(row)] / row["pinball"]
            for row in rows
            if method(row) == other and case(row) in mine
        ]
        if other == reference or not ratio:
            continue
        ahead = sum(r < 1 for r in ratio)
        lines.append(
            f"| {other} | {statistics.geometric_mean(ratio):.3f} | {min(ratio):.3f} | {max(ratio):.3f} | "
            f"{ahead} of {len(ratio)} |"
        )
    return "\n".join(lines)


def best_baseline(rows):
    """The paper's baseline with the least mean pinball."""
    candidates = {
        name: statistics.fmean(row["pinball"] for row in lines)
        for name, lines in grouped(rows, method).items()
        if name.startswith(BASELINES)
    }
    return min(candidates, key=candidates.get)


def summary(record, reference):
    """All tables of a results file."""
    rows, name = record["rows"], label(record["variables"])
    measured = {method(row) for row in rows}
    reference = next((m for m in (reference, *REFERENCES) if m in measured), None)
    parts = [
        f"**Surrogates on {name}**",
        table(grouped(record["surrogates"], lambda r: r["form"]), SURROGATE, "form"),
        f"**Folds on {name}**",
        table(
            grouped(record["leaks"], lambda r: f"{r['form']}, {r['folds']}"),
            LEAKS,
            "folds",
        ),
    ]
    for form, of_form in grouped(rows, lambda r: r["form"]).items():
        for folds in ("blocks", "clusters"):
            # What needs no folds stands beside both kinds.
            chosen = [r for r in of_form if r["folds"] in ("no folds", folds)]
            pointwise = [r for r in chosen if WHOLE_FIELD not in method(r)]
            whole = [r for r in chosen if WHOLE_FIELD in method(r)]
            groups = grouped(pointwise, method)
            title = f"{name}, {form}, {folds}"
            parts += [
                f"**{title}**",
                table(groups, POOLED, "method"),
                f"**By lead time: {title}**",
                table(groups, BY_LEAD, "method"),
                f"**Whole fields: {title}**",
                table(groups | grouped(whole, method), FIELDS, "method"),
                f"**Cost and safe region: {title}**",
                table(groups, COSTS, "method"),
            ]
            if reference in groups:
                parts += [
                    paired(pointwise, reference, groups),
                    f"Best of the paper's three baselines, each in its best form: {best_baseline(pointwise)}.",
                ]
    n_runs = len({case(row) for row in rows})
    parts.append(
        f"Mean ± standard deviation over {n_runs} runs (origins and seeds); test windows of one origin overlap, so it is "
        "no standard error."
    )
    return "\n\n".join(parts)
