"""Markdown tables of the results: mean and standard deviation over seeds, beside the paper's numbers.

python -m benchmarks.tables forrester                       # print the tables of a problem
python -m benchmarks.tables forrester --into README.md      # write them between the markers of a page
"""

import argparse
import math
import re
import statistics
from pathlib import Path

from benchmarks.costs.tables import (
    assessment,
    cost,
    gpu_search,
    memory,
    quality,
    speed,
)
from benchmarks.fields import table as fields_table
from benchmarks.hostile.table import summary as hostile_summary
from benchmarks.paper_numbers import PAPER, PAPER_SAFE, PAPER_SECONDS
from benchmarks.record import RESULTS, load, where
from benchmarks.rollouts import forced, small_states, trusted_horizon
from benchmarks.signs import marked, other_runs, with_signs
from benchmarks.suite import ablation, one_input
from benchmarks.suite import table as suite_table
from benchmarks.suite import tables as suite_tables
from benchmarks.third_party import table as third_party
from benchmarks.weather import tables as weather_tables

# Notes below the tables.
NOTES = {
    "richtmyer_meshkov": "The paper's simulations are not public; its numbers belong to other data and to an error that it "
    'does not define, and its pinball loss is not multiplied by 1000. "(background penalty)" uses the paper\'s loss and is '
    'not a bound of level 0.95; "expected error" is a map and not a bound. Neither is ranked by its pinball loss.'
}

# The module of benchmarks that writes each results file.
SCRIPTS = {
    "forrester": "forrester",
    "defaults": "suite.defaults",
    "fresh": "suite.defaults --set fresh",
    "second_fresh": "suite.defaults --set second",
    "third_fresh": "suite.defaults --set third",
    "one_input": "suite.one_input",
    "ablation": "suite.ablation",
    "tables": "suite.tables",
    "kuramoto_sivashinsky": "rollouts.kuramoto_sivashinsky",
    "kuramoto_sivashinsky_ablation": "rollouts.kuramoto_sivashinsky",
    "small_states": "rollouts.small_states",
    "trusted_horizon": "rollouts.trusted_horizon",
    "forced": "rollouts.forced",
    "weather_era5": "weather.weatherbench",
    "weather_era5_direct": "weather.weatherbench",
    "weatherbench": "weather.weatherbench",
    "richtmyer_meshkov": "richtmyer_meshkov.run",
    "richtmyer_meshkov_coarse": "richtmyer_meshkov.run --coarse",
    "few_fields": "richtmyer_meshkov.few_fields",
    "fields": "fields.run",
    "fields_bounds": "fields.bounds",
    "third_party": "third_party.run",
    "cost": "costs.cost",
    "speed": "costs.speed",
    "hostile": "hostile.run",
}
# Files whose tables combine the seeds.
COMBINED = (
    "defaults",
    "ablation",
    "one_input",
    "tables",
    "small_states",
    "trusted_horizon",
)
COMBINED += ("third_party", "fields_bounds", "forced", "richtmyer_meshkov_coarse")
# Sets of problems on which all methods are compared.
SUITE_SETS = ("defaults", "fresh", "second_fresh", "third_fresh")
# The column of the table of a family that names the case with the least interior fraction.
LEAST_ON = 3
METRICS = ("pinball", "correlation", "coverage", "relative_l2")
SAFE_METRICS = ("safe_fraction", "safe_pinball", "safe_correlation", "safe_coverage")
# Losses of sparse errors are too small for four digits.
THOUSANDTHS = {"pinball": "pinball x 1000", "safe_pinball": "safe pinball x 1000"}
# Metrics of rollouts: along the horizon, and costs relative to the surrogate.
HORIZON_METRICS = ("pinball_calibrated", "pinball_first50", "coverage_first50")
HORIZON_METRICS += tuple(f"coverage_q{quarter}" for quarter in range(1, 5))
HORIZON_METRICS += ("fit_over_training", "answer_over_rollout")
# Metrics of the ablation of the paper's sum.
ABLATION_METRICS = (*METRICS[:-1], "pinball_calibrated", "n_steps")
# Metrics of sparse errors: near the predicted interface, wrong cells found and area flagged.
SPARSE_METRICS = ("band_coverage", "band_correlation", "recall", "flagged")
SPARSE_METRICS += ("mean_bound", "case_correlation")
TIMES_SHOWN = (1, 3, 6, 9, 12)
SMALLER_IS_BETTER = {"pinball", "safe_pinball", "relative_l2", "pinball_first50"}
SMALLER_IS_BETTER |= {"pinball_calibrated"}
SMALLER_IS_BETTER |= {"pinball x 1000", "safe pinball x 1000"}
SMALLER_IS_BETTER |= {f"t = {t}" for t in TIMES_SHOWN}
# Parts of the names of methods that are no bounds of level 0.95.
NO_BOUNDS = ("expected error", "background penalty", "oracle")
# Beginnings of the names of methods that bound the deployed network of rollouts; the others train networks of their own.
OF_DEPLOYED = ("GeoQ", "One number per horizon", "Horizon x climatology")
# Beginnings of the names of the operators that the paper's baselines need; GeoQ needs the deployed operator and the folds.
OPERATORS = {
    "Split conformal": ("split",),
    "MC dropout": ("deployed",),
    "Deep ensemble": ("deployed", "member"),
}
LARGER_IS_BETTER = {"correlation", "safe_correlation", "band_correlation"}
HEADINGS = {"relative_l2": "relative L2", "train_seconds": "calibration over training"}
HEADINGS |= {"pinball_first50": "pinball, first 50 steps"}
HEADINGS |= {"pinball_calibrated": "pinball, calibration horizon"}
HEADINGS |= {"n_steps": "training steps"}
HEADINGS |= {"coverage_first50": "coverage, first 50 steps"}
HEADINGS |= {f"coverage_q{q}": f"coverage, quarter {q}" for q in range(1, 5)}
HEADINGS |= {"recall": "wrong cells found", "flagged": "area flagged"}
HEADINGS |= {"case_correlation": "correlation of case means"}
HEADINGS |= {
    "fit_over_training": "fit / training",
    "answer_over_rollout": "answer / rollout",
}


def command(problem):
    """The command that writes the results file of a problem."""
    return f"python -m benchmarks.{SCRIPTS[problem.split('-')[0]]}"


def values(rows, method, setting, metric):
    picked = [
        r[metric] for r in rows if (r["method"], r["setting"]) == (method, setting)
    ]
    return [value for value in picked if value is not None]


def spread(numbers):
    if not numbers:
        return "-"
    mean, deviation = statistics.fmean(numbers), statistics.pstdev(numbers)
    if all(isinstance(number, int) for number in numbers):
        return f"{mean:.0f} ± {deviation:.0f}" if len(numbers) > 1 else f"{mean:.0f}"
    digits = 3 if abs(mean) >= 0.1 else 4
    if len(numbers) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}"


def ranked(rows, methods, setting, metric):
    """Cells of a column; the best mean is bold, the second is underlined. Coverage is not ranked.

    Methods that are no bounds, or that use the test errors, are ranked by correlation only.
    """
    cells = {m: spread(values(rows, m, setting, metric)) for m in methods}
    if metric in SMALLER_IS_BETTER | LARGER_IS_BETTER:
        means = {
            m: statistics.fmean(v)
            for m in methods
            if (v := values(rows, m, setting, metric))
            and (metric in LARGER_IS_BETTER or is_bound(m))
        }
        order = sorted(means, key=means.get, reverse=metric in LARGER_IS_BETTER)
        for method, (before, after) in zip(
            order, (("**", "**"), ("<u>", "</u>")), strict=False
        ):
            cells[method] = before + cells[method] + after
    return cells


def is_bound(method):
    return not any(name in method for name in NO_BOUNDS)


def table(rows, methods, setting, metrics, paper):
    columns = {metric: ranked(rows, methods, setting, metric) for metric in metrics}
    names = [HEADINGS.get(m, m.replace("safe_", "").replace("_", " ")) for m in metrics]
    lines = [
        "| method | " + " | ".join(names) + " | the paper |",
        "|---" * (len(metrics) + 2) + "|",
    ]
    for method in methods:
        theirs = " / ".join(
            "-" if v is None else f"{v:.3f}" for v in paper.get(method, ())
        )
        cells = " | ".join(columns[metric][method] for metric in metrics)
        name = marked(rows, method, setting)
        lines.append(f"| {name} | {cells} | {theirs} |")
    return "\n".join(lines)


def error_ratios(rows, methods, setting, reference):
    """Pinball loss of the reference relative to each method on the same seed; below 1 the reference is better."""
    by_seed = {
        m: {
            r["seed"]: r["pinball"]
            for r in rows
            if (r["method"], r["setting"]) == (m, setting)
        }
        for m in methods
    }
    lines = [
        f"| pinball loss of {reference} relative to | mean | range of two standard errors | smallest | largest | better on |",
        "|---|---|---|---|---|---|",
    ]
    for method in filter(is_bound, methods):
        pairs = [
            by_seed[reference][seed] / by_seed[method][seed]
            for seed in by_seed[reference]
            if by_seed[method].get(seed)
        ]
        if method == reference or not pairs:
            continue
        mean = math.exp(statistics.fmean(map(math.log, pairs)))
        ahead = sum(ratio < 1 for ratio in pairs)
        name = marked(rows, method, setting)
        reach = suite_table.Comparison.of(pairs).range if len(pairs) > 1 else "-"
        lines.append(
            f"| {name} | {mean:.2f} | {reach} | {min(pairs):.2f} | {max(pairs):.2f} | {ahead} of {len(pairs)} seeds |"
        )
    return "\n".join(lines)


def by_case(rows, reference="GeoQ (default)"):
    """Table of losses, and of their differences from the reference, paired by test case."""
    titles = {"binary": "wrong cells", "probability": "probabilities"}
    heads = [
        f"{title}: pinball x 1000 | minus the default's | two standard errors | {title}: coverage"
        for title in titles.values()
    ]
    lines = [
        f"| method | {' | '.join(heads)} |",
        "|---" * (1 + 4 * len(titles)) + "|",
    ]
    of = {}
    for r in rows:
        of.setdefault((r["method"], r["setting"]), []).append(r)
    for method in dict.fromkeys(r["method"] for r in rows):
        if "expected error" in method:
            continue
        cells = [method]
        for setting in titles:
            mine, known = of[reference, setting], of.get((method, setting), [])
            if not known:
                cells += ["-"] * 4
                continue
            pairs = zip(known, mine, strict=True)
            apart = [
                1000 * (a - b)
                for other, default in pairs
                for a, b in zip(
                    other["pinball_by_case"], default["pinball_by_case"], strict=True
                )
            ]
            error = statistics.stdev(apart) / math.sqrt(len(apart))
            cells += [
                f"{1000 * statistics.fmean(r['pinball'] for r in known):.2f}",
                "" if method == reference else f"{statistics.fmean(apart):.2f}",
                "" if method == reference else f"{2 * error:.2f}",
                f"{statistics.fmean(r['coverage'] for r in known):.3f}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def few_fields(rows):
    """Table of pinball losses times 1000: one row per method, one column per number of simulations."""
    sizes = list(dict.fromkeys(r["setting"] for r in rows))
    lines = [
        "| pinball x 1000 | " + " | ".join(sizes) + " |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    for method in dict.fromkeys(r["method"] for r in rows):
        losses = [values(rows, method, size, "pinball") for size in sizes]
        cells = [spread([1000 * loss for loss in one]) for one in losses]
        name = marked(rows, method, sizes[0])
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def columns_of(text, wanted):
    """Lines of a Markdown table with some of its columns."""
    head, _, *found = [line.split("|")[1:-1] for line in text.splitlines()]
    lines = [
        "|".join(["", *(cells[i] for i in wanted), ""]) for cells in (head, *found)
    ]
    return [lines[0], "|---" * len(wanted) + "|", *lines[1:]]


def one_input_tables(rows):
    """Tables of one input at a time for a page: the families in one table, special queries, and distances."""
    left_out, *blocks, special, by_width = one_input.summary(rows).split("\n\n")
    lines = []
    for title, text in zip(blocks[::2], blocks[1::2], strict=True):
        family, n_cases = re.match(r"\*\*(.*)\*\*, (\d+) cases", title).groups()
        n_columns = text.splitlines()[0].count("|") - 1
        kept = [i for i in range(n_columns) if i != LEAST_ON]
        head, _, *found = columns_of(text, kept)
        if not lines:
            lines = [f"| family | cases {head}", "|---" * (n_columns + 1) + "|"]
        lines += [f"| {family} | {n_cases} {line}" for line in found]
    tables = "\n\n".join([left_out, "\n".join(lines), special, by_width])
    # The case of a largest value of zero is any case.
    return re.sub(r"\b0\.00 \([^)]*\)", "0.00", tables).replace(" nan ", " - ")


def render(problem, reference="GeoQ", chosen=(), folder=RESULTS):
    """All tables of a results file in Markdown."""
    if problem == "quality":
        return quality(load("cost", folder))
    record = load(problem, folder)
    if problem.startswith("speed"):
        return speed(record)
    if problem.startswith("cost"):
        return cost(record)
    of_costs = {"assessment": assessment, "memory": memory, "gpu_search": gpu_search}
    if problem in of_costs:
        return of_costs[problem](record)
    rows = record["rows"]
    if problem == "hostile":
        return f"{hostile_summary(record)}\n\n`make hostile`, {where(record)}."
    suite = dict.fromkeys(SUITE_SETS, suite_table.summary)
    suite |= {"ablation": ablation.summary, "one_input": one_input_tables}
    suite |= {"tables": suite_tables.summary, "small_states": small_states.summary}
    suite |= {"trusted_horizon": trusted_horizon.summary}
    suite |= {"fields": fields_table.summary, "third_party": third_party.summary}
    suite |= {"fields_bounds": fields_table.bounds}
    suite |= {"forced": forced.summary, "richtmyer_meshkov_coarse": by_case}
    if problem in suite:
        parts = [suite[problem](rows)]
    elif problem == "few_fields":
        parts = [few_fields(rows), *other_runs(rows)]
    elif "leaks" in record:
        parts = [with_signs(weather_tables.summary(record, reference, chosen), rows)]
        parts += [f"In some of the tasks: {note}" for note in other_runs(rows)]
    else:
        parts = []
        if "surrogates" in record:
            rows = with_operators(rows, record["surrogates"])
        for setting in dict.fromkeys(r["setting"] for r in rows):
            parts += of_setting(problem, rows, setting, reference, chosen)
        parts += other_runs(rows)
    source = f"`{command(problem)}`, {where_measured(record)}{left_out(record)}"
    notes = [NOTES[problem]] if problem in NOTES else []
    return "\n\n".join([*parts, *notes, source])


def where_measured(record):
    """Seeds, machine, GPU and commit."""
    seeds = record["seeds"]
    if len(seeds) == 1:
        return f"seed {seeds[0]} alone, {where(record)}."
    combined = "leaks" in record or record["problem"] in COMBINED
    over = "" if combined else "; mean ± standard deviation over seeds"
    return f"seeds {seeds[0]} to {seeds[-1]}, {where(record)}{over}."


def left_out(record):
    """A sentence about the rows that were left out because their networks were not trained; empty if there are none."""
    found = {}
    for r in record.get("untrained", []):
        case = f"{r['setting'].split(', ')[0]} {r['seed']}".strip()
        found.setdefault(r["method"], {})[case] = r
    if not found:
        return ""
    cases = "; ".join(f"{method} ({', '.join(of)})" for method, of in found.items())
    return f" Left out, because no step of the training lowered the held-out loss (problem and seed): {cases}."


def of_setting(problem, rows, setting, reference, chosen):
    methods = list(dict.fromkeys(r["method"] for r in rows if r["setting"] == setting))
    title = f" ({setting})" if setting else ""
    paper, paper_safe = PAPER.get(problem, {}), PAPER_SAFE.get(problem, {})
    if chosen:
        kept = [m for m in chosen if m in methods]
        return [
            f"**All queries{title}**",
            table(rows, kept, setting, METRICS, paper),
            f"**Inside the safe region{title}**",
            table(rows, kept, setting, SAFE_METRICS, paper_safe),
        ]
    if problem.endswith("_ablation"):
        in_order = sorted(methods, key=[*paper, *methods].index)
        cells = table(rows, in_order, setting, present(rows, ABLATION_METRICS), paper)
        return [f"**The {setting}**", cells.replace("| method |", "| choice |")]
    metrics, safe_metrics = METRICS, SAFE_METRICS
    if "band_coverage" in rows[0]:
        rows = [r | in_thousandths(r) for r in rows]
        metrics, safe_metrics = (
            [THOUSANDTHS.get(m, m) for m in group] for group in (METRICS, SAFE_METRICS)
        )
    return [
        f"**All queries{title}**",
        table(rows, methods, setting, metrics, paper),
        f"**Inside the safe region{title}**",
        table(rows, flagging(rows, methods), setting, safe_metrics, paper_safe),
        *seconds(problem, rows, methods, setting, title),
        *by_seed(problem, rows, methods, setting, title),
        *trainings_of_the_sum(rows, setting, title),
        *near_the_interface(rows, methods, setting, title),
        *along_the_horizon(rows, methods, setting, title),
        *(
            [error_ratios(rows, methods, setting, reference)]
            if reference in methods
            else []
        ),
        *paired(rows, methods, setting, reference, title),
    ]


def paired(rows, methods, setting, reference, title):
    """For rollouts: losses of the reference relative to each method on the same seed, over parts of the horizon."""
    if "pinball_first50" not in rows[0] or reference not in methods:
        return []
    parts = {
        "first 50 steps": "pinball_first50",
        "calibration horizon": "pinball_calibrated",
        "all steps": "pinball",
    }
    heads = [f"{name} | two standard errors" for name in parts]
    lines = [
        f"| pinball loss of {reference} relative to | {' | '.join(heads)} |",
        "|---" * (2 * len(parts) + 1) + "|",
    ]
    for method in methods:
        if method == reference:
            continue
        cells = [marked(rows, method, setting)]
        for metric in parts.values():
            mine, theirs = (
                {
                    r["seed"]: r[metric]
                    for r in rows
                    if (r["method"], r["setting"]) == (name, setting)
                }
                for name in (reference, method)
            )
            ratios = [mine[seed] / theirs[seed] for seed in mine if seed in theirs]
            cells.append(f"{statistics.geometric_mean(ratios):.3f}")
            cells.append(weather_tables.two_standard_errors(ratios))
        lines.append(f"| {' | '.join(cells)} |")
    note = (
        "Two standard errors belong to the mean logarithm of the ratio over the seeds."
    )
    return [f"**Paired over seeds{title}**", "\n".join(lines), note]


def seconds(problem, rows, methods, setting, title):
    """A table of training and inference times, for problems whose times the paper gives."""
    if problem not in PAPER_SECONDS:
        return []
    heading, columns = "**Time**, one thread", ["training, s", "inference, s"]
    metrics = ["train_seconds", "inference_seconds"]
    if "fit_over_training" in rows[0]:
        heading, rows = f"**Time{title}**", [*map(with_deployed, rows)]
    elif "operator_seconds" in rows[0]:
        heading = f"**Time{title}**"
        columns = ["training of operators, s", "fit and answer, s"]
        metrics = ["operator_seconds", "seconds"]
        methods = [m for m in methods if m in with_own_time(problem, rows, setting)]
        if not methods:
            return []
    lines = [f"| method | {' | '.join(columns)} | the paper |", "|---|---|---|---|"]
    for method in methods:
        cells = [
            f"{statistics.fmean(values(rows, method, setting, metric)):.3g}"
            for metric in metrics
        ]
        paper = PAPER_SECONDS[problem].get(method)
        cells.append("{:g} / {:g}".format(*paper) if paper else "")
        lines.append(f"| {marked(rows, method, setting)} | {' | '.join(cells)} |")
    return [heading, "\n".join(lines)]


def with_deployed(row):
    """A row of rollouts whose training time includes the training of the deployed network."""
    if not row["method"].startswith(OF_DEPLOYED):
        return row
    deployed = row["train_seconds"] / row["fit_over_training"]
    return row | {"train_seconds": row["train_seconds"] + deployed}


def with_operators(rows, surrogates):
    """Rows with the training time of all operators that their methods need."""
    times = {one["seed"]: one["training_seconds"] for one in surrogates}

    def needed(row):
        kinds = OPERATORS.get(row["method"], ("deployed", "fold"))
        trained = times[row["seed"]].items()
        return sum(time for name, time in trained if name.startswith(kinds))

    return [row | {"operator_seconds": needed(row)} for row in rows]


def with_own_time(problem, rows, setting):
    """Methods that trained a network in the first setting, or whose times the paper gives; the others use their results."""
    if setting != rows[0]["setting"]:
        return set()
    trained = {
        r["method"]
        for r in rows
        if r["best_step"] is not None and is_bound(r["method"])
    }
    trained = {method for method in trained if not method.endswith("(rounded)")}
    return trained | PAPER_SECONDS[problem].keys()


def by_seed(problem, rows, methods, setting, title):
    """For operators: losses and best training steps of each seed, for the methods with a time of their own."""
    if "operator_seconds" not in rows[0] or setting != rows[0]["setting"]:
        return []
    seeds = sorted({r["seed"] for r in rows})
    shown = with_own_time(problem, rows, setting) | {"Zero bound"}
    heads = [
        f"{name}, seed {s}" for name in ("pinball x 1000", "best step") for s in seeds
    ]
    lines = [
        f"| method | {' | '.join(heads)} |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for method in (m for m in methods if m in shown):
        found = {
            r["seed"]: r
            for r in rows
            if (r["method"], r["setting"]) == (method, setting)
        }
        losses = [
            f"{1000 * found[s]['pinball']:.2f}" if s in found else "" for s in seeds
        ]
        steps = [found[s]["best_step"] if s in found else None for s in seeds]
        cells = [marked(rows, method, setting), *losses]
        cells += ["" if step is None else str(step) for step in steps]
        lines.append(f"| {' | '.join(cells)} |")
    return [f"**By seed{title}**", "\n".join(lines)]


def trainings_of_the_sum(rows, setting, title):
    """A table of the trainings of the paper's sum: steps, and the fall of the loss of each held-out fold."""
    found = [
        r
        for r in rows
        if (r["method"], r["setting"]) == ("GeoQ (paper)", setting)
        and "coverage_q1" in r
        and "trainings" in r
    ]
    if not found:
        return []
    lines = [
        "| seed | steps, each fold | steps of the final training | least fall | mean fall | largest fall |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        steps = [training["best_step"] for training in row["trainings"]]
        falls = [1 - t["best_loss"] / t["first_loss"] for t in row["trainings"]]
        cells = [f"seed {row['seed']}", ", ".join(map(str, steps))]
        cells += [str(round(statistics.fmean(steps)))]
        cells += [f"{v:.3f}" for v in (min(falls), statistics.fmean(falls), max(falls))]
        lines.append(f"| {' | '.join(cells)} |")
    return [f"**Training of the sum{title}**", "\n".join(lines)]


def in_thousandths(row):
    return {
        new: None if row[old] is None else 1000 * row[old]
        for old, new in THOUSANDTHS.items()
    }


def present(rows, metrics):
    """The metrics that a results file has."""
    return [metric for metric in metrics if metric in rows[0]]


def along_the_horizon(rows, methods, setting, title):
    """For rollouts: a table of the first steps, the quarters of the horizon and the costs."""
    if "coverage_q1" not in rows[0]:
        return []
    cells = table(rows, methods, setting, present(rows, HORIZON_METRICS), {})
    return [f"**Along the horizon{title}**", cells.replace(" | the paper |", " | |")]


def flagging(rows, methods):
    """The methods with a safe flag, their own or another method's."""
    return [
        method
        for method in methods
        if any(r["method"] == method and r["safe_fraction"] is not None for r in rows)
    ]


def near_the_interface(rows, methods, setting, title):
    """For sparse errors: tables of the band around the interface and of the pinball loss by time."""
    if "band_coverage" not in rows[0]:
        return []
    cells = table(rows, methods, setting, SPARSE_METRICS, {})
    by_time = [
        r | {f"t = {t}": 1000 * r["pinball_by_time"][t - 1] for t in TIMES_SHOWN}
        for r in rows
        if r["pinball_by_time"]
    ]
    bounds = list(filter(is_bound, methods))
    over_time = table(by_time, bounds, setting, [f"t = {t}" for t in TIMES_SHOWN], {})
    return [
        f"**Near the interface{title}**",
        cells.replace(" | the paper |", " | |"),
        f"**Pinball x 1000 by time{title}**",
        over_time.replace(" | the paper |", " | |"),
    ]


def insert(path, problem, text):
    start, end = f"<!-- {problem} -->", f"<!-- /{problem} -->"
    page = path.read_text()
    if start not in page or end not in page:
        raise SystemExit(
            f"{path} has no markers for the tables; add the lines {start} and {end}."
        )
    before, after = page.split(start)[0], page.split(end)[1]
    path.write_text(f"{before}{start}\n\n{text}\n\n{end}{after}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "problem", help="a file name in benchmarks/results, without its ending"
    )
    parser.add_argument("--reference", default="GeoQ", help="method of the ratios")
    parser.add_argument(
        "--method",
        action="append",
        default=[],
        help="a method to show; may be repeated",
    )
    parser.add_argument("--into", type=Path, help="a page with markers for the tables")
    arguments = parser.parse_args()
    text = render(arguments.problem, arguments.reference, arguments.method)
    if arguments.into:
        insert(arguments.into, arguments.problem, text)
    else:
        print(text)


if __name__ == "__main__":
    main()
