"""Markdown tables of speed, cost and quality, and the picture of the cost.

python -m benchmarks.costs.tables docs/cost.png      # the picture, from the results file
"""

import json
import statistics
import sys

from benchmarks.record import RESULTS, where


def speed(record):
    """Tables of the neighbour searches by engine and of GeoQ as a whole."""
    lines = [
        "| points | engine | ratio to the fastest | extra memory over the data |",
        "|---|---|---|---|",
    ]
    for r in record["neighbour_search"]:
        lines.append(
            f"| {r['points']} | {r['engine']} | {r['ratio']:.2f} | {r['extra_over_data']:.2f} |"
        )
    lines += [
        "",
        "| GeoQ, 16 inputs | calibration points | queries | fit, s | assess, s | extra memory, GiB |",
        "|---" * 6 + "|",
    ]
    for r in record["estimator"]:
        numbers = (
            f"{r['fit_seconds']:.0f} | {r['assess_seconds']:.0f} | {r['extra_gib']:.2f}"
        )
        lines.append(
            f"| {r['form']} | {r['n_points']} | {r['n_queries']} | {numbers} |"
        )
    source = f"`python -m benchmarks.costs.speed`, {record['machine']}, {record['threads']} threads, commit {record['commit'][:10]}."
    return "\n".join([*lines, "", source])


def assessment(record):
    """Table of the CPU time of assessments."""
    lines = [
        "| GeoQ, 2,000 calibration points | 10,000 queries: assessment over its search | one query above the surrogate, ms |",
        "|---" * 3 + "|",
    ]
    for r in record["rows"]:
        outputs = "1 output" if r["n_outputs"] == 1 else f"{r['n_outputs']} outputs"
        lines.append(
            f"| {r['n_inputs']} inputs, {outputs} | {r['assess_over_search']:.2f} | {r['one_query_ms']:.2f} |"
        )
    source = f"`python -m benchmarks.costs.assessment`, {where(record)}."
    return "\n".join([*lines, "", source])


def memory(record):
    """Table of the memory of calibrations and the sizes of files, relative to the data."""
    columns = ("data", "samples", "MiB", "fit: peak above the data, over the data")
    columns += ("assess, 100 queries: peak, MiB", "file over the data")
    columns += ("file without calibration tuples",)
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for r in record["rows"]:
        short = r["short_file_over_data"]
        lines.append(
            f"| {r['kind']} | {r['n']} | {r['data_mib']:.2g} | {r['fit_over_data']:.1f} | {r['assess_mib']:.0f} | "
            f"{r['file_over_data']:.2f} | {'-' if short is None else f'{short:.2f}'} |"
        )
    source = f"`python -m benchmarks.costs.memory`, {where(record)}."
    return "\n".join([*lines, "", source])


def cost(record):
    """Tables of the time of calibrations and assessments."""
    columns = ("problem", "form", "folds", "processes", "calibration over training")
    columns += ("in CPU seconds", "assessment over prediction", "of which search")
    lines = ["| " + " | ".join(columns) + " |", "|---" * 8 + "|"]
    for r in record["rows"]:
        if r["form"] == "folds alone":
            continue
        assessed, searched = (
            " / ".join(f"{value:.0f}" for value in r[name].values()) if r[name] else "-"
            for name in ("assessment_over_prediction", "search_over_prediction")
        )
        cpu = r["calibration_over_training_cpu"]
        lines.append(
            f"| {r['problem']} | {r['form']} | {r['n_folds']} | {r['n_jobs']} | {r['calibration_over_training']:.2f} | "
            f"{'-' if cpu is None else f'{cpu:.2f}'} | {assessed} | {searched} |"
        )
    alone = [r for r in record["rows"] if r["form"] == "folds alone"]
    if alone:
        lines += [
            "",
            "| the folds' trainings alone, over one training | folds | one by one | together |",
            "|---" * 4 + "|",
        ]
    lines += [
        f"| {r['problem']} | {r['n_folds']} | {r['one_by_one_over_training']:.2f} | {r['together_over_training']:.2f} |"
        for r in alone
    ]
    lines += ["", "Assessments of 1 / 100 / 10,000 queries."]
    source = f"`python -m benchmarks.costs.cost`, {record['device']}, {record['machine']}, commit {record['commit'][:10]}."
    return "\n".join([*lines, "", source])


def quality(record):
    """Table of calibrations with fewer trainings: cost, pinball loss and coverage, means over the seeds."""
    rows = record["quality"]["rows"]
    problems = list(dict.fromkeys(r["problem"] for r in rows))
    lines = [
        "| way | " + " | ".join(problems) + " |",
        "|---" * (len(problems) + 1) + "|",
    ]
    for way in dict.fromkeys(r["way"] for r in rows):
        cells = []
        for problem in problems:
            picked = [r for r in rows if (r["way"], r["problem"]) == (way, problem)]
            cost, loss, covered, safe = (
                statistics.fmean(r[name] for r in picked)
                for name in (
                    "calibration_over_training",
                    "pinball",
                    "coverage",
                    "safe_coverage",
                )
            )
            cells.append(f"{cost:.1f}: {loss:.3f} / {covered:.2f} / {safe:.2f}")
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    seeds = len({r["seed"] for r in rows})
    note = (
        "Each cell: CPU seconds of the calibration divided by the CPU seconds of the training: pinball / coverage / coverage "
        f"inside the safe region; means over {seeds} seeds. `python -m benchmarks.costs.cost --quality`, commit "
        f"{record['quality']['commit'][:10]}."
    )
    return "\n".join([*lines, "", note])


def gpu_search(record):
    """Table of the exact search relative to ``torch.cdist`` and ``topk`` on a GPU."""
    lines = [
        "| points | dtype | geoq over cdist: time | memory | indices that differ from differences in float64 |",
        "|---|---|---|---|---|",
    ]
    for r in record["rows"]:
        memory = r["peak_mib"] / max(r["peak_mib_cdist"], 1)
        lines.append(
            f"| {r['points']} | {r['dtype']} | {r['over_cdist']:.2f} | {memory:.2f} | {r['indices_differ']} |"
        )
    source = f"`python -m benchmarks.costs.gpu_search`, {record['device']}, commit {record['commit'][:10]}."
    return "\n".join(lines) + f"\n\n{source}"


def draw(grown, path):
    """Seconds of a calibration without training and of 1,000 assessments over the number of points."""
    from matplotlib.figure import Figure

    from benchmarks.pictures import save

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    names = {
        "fit_seconds": "calibration without training",
        "assess_1000_seconds": "1,000 assessments",
    }
    for name, label in names.items():
        slope = grown["slopes"][name]
        axes.loglog(
            [row["n"] for row in grown["rows"]],
            [row[name] for row in grown["rows"]],
            marker="o",
            label=f"{label}, slope {slope:.2f}",
        )
    axes.set_xlabel("calibration points")
    axes.set_ylabel(f"seconds ({grown['device']})")
    axes.legend()
    save(figure, path, grown["rows"])


if __name__ == "__main__":
    draw(json.loads((RESULTS / "cost.json").read_text())["growth"], sys.argv[1])
