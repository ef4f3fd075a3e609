"""Markdown tables of the results, written into docs/*.md and benchmarks/results/*.md between ``<!-- NAME -->`` and ``<!-- /NAME -->``.

python -m benchmarks.tables forrester                         # print the tables of a results file
python -m benchmarks.tables forrester --into benchmarks/results/forrester.md
python -m benchmarks.tables --check                           # do the tables of all pages equal the results files?
"""

import argparse
import re
from pathlib import Path

from benchmarks.fields import table as fields
from benchmarks.markdown import footer, group, joined, mean, select, signed, table
from benchmarks.paper import everywhere_and_safe, methods_table, ratios, seconds_of_paper
from benchmarks.planning import table as planning
from benchmarks.record import RESULTS, ROOT, load
from benchmarks.richtmyer_meshkov import table as richtmyer_meshkov
from benchmarks.rollouts import table as rollouts
from benchmarks.suite import table as suite
from benchmarks.third_party import table as third_party
from benchmarks.weather import table as weather

# The results files of tables with another name.
FILES = {
    "kinds": "defaults",
    "kinds_confirmation": "third_fresh",
    "unseen": "fourth_fresh",
    "in_short": "fourth_fresh",
    "exchange": "designs",
}


def forrester(record):
    rows = record["rows"]
    times = {"training, s": mean("train_seconds"), "inference, s": mean("inference_seconds", 4)}
    parts = everywhere_and_safe("forrester", rows)
    parts += ["**Time**, one thread", methods_table(rows, times | seconds_of_paper("forrester"))]
    return "\n\n".join([*parts, ratios(rows)])


def cost(record):
    """Calibration over training, assessment over prediction, and the growth with the number of points."""
    rows = [r for r in select(record["rows"], kind="calibration") if r["form"] != "folds alone"]
    alone = select(record["rows"], form="folds alone")

    def batches(column):
        return lambda own: " / ".join(f"{v:.0f}" for v in (own[0][column] or {}).values()) or "-"

    columns = {
        "calibration over training": mean("calibration_over_training"),
        "in CPU seconds": mean("calibration_over_training_cpu"),
        "assessment over prediction": batches("assessment_over_prediction"),
        "of which search": batches("search_over_prediction"),
    }
    of_folds = {
        "one by one": mean("one_by_one_over_training"),
        "together": mean("together_over_training"),
    }
    growth = {"fit without trainings, s": mean("fit_seconds")}
    growth |= {"1,000 queries, s": mean("assess_1000_seconds", 3)}
    return "\n\n".join(
        [
            table(
                "problem | form | folds | processes",
                joined(group(rows, "problem", "form", "n_folds", "n_jobs")),
                columns,
            ),
            "Assessments of 1 / 100 / 10,000 queries. The folds' trainings alone, over one training:",
            table("problem", group(alone, "problem"), of_folds),
            table("points", group(select(record["rows"], kind="growth"), "n"), growth),
        ]
    )


def memory(record):
    columns = {
        "MiB": mean("data_mib"),
        "fit: peak above the data, over the data": mean("fit_over_data", 1),
        "assess, 100 queries: peak, MiB": mean("assess_mib", 0),
        "file over the data": mean("file_over_data"),
        "file without calibration tuples": mean("short_file_over_data"),
    }
    return table("data | samples", joined(group(record["rows"], "kind", "n")), columns)


def speed(record):
    search = {"seconds": mean("seconds"), "ratio to the fastest": mean("ratio")}
    search |= {"extra memory over the data": mean("extra_over_data")}
    whole = {"fit, s": mean("fit_seconds", 1), "assess, s": mean("assess_seconds", 1)}
    whole |= {"extra memory, GiB": mean("extra_gib")}
    engines = group(select(record["rows"], kind="search"), "points", "engine")
    estimators = group(select(record["rows"], kind="estimator"), "form", "n_points", "n_queries")
    return "\n\n".join(
        [
            table("points | engine", joined(engines), search),
            table("GeoQ, 16 inputs | calibration points | queries", joined(estimators), whole),
        ]
    )


def serving(record):
    columns = {"queries per second": mean("queries_per_second", 0)}
    columns |= {"CPU ms per request": mean("cpu_milliseconds", 1), "of assess": mean("ratio")}
    columns |= {"median time of a request, s": mean("p50", 3), "p99, s": mean("p99", 3)}
    return table("form | queries per request", joined(group(record["rows"], "form", "n")), columns)


def monitor(record):
    """Streams of verified queries, and whole monitors."""
    stable, changed = {"false alarms": mean("false_alarms", 3)}, {"found": mean("found", 3)}
    changed |= {"median delay": mean("delay", 0), "90 % within": mean("delay_90", 0)}
    streams = joined(group(select(record["rows"], kind="stream"), "setting", "method"))
    monitors = select(record["rows"], kind="whole")
    whole = {
        "any alarm": mean("alarm", 3),
        "delay": mean("delay", 1),
        "not safe": mean("unsafe", 3),
    }
    whole |= {"coverage": mean("coverage", 3)}
    keys = joined(group(monitors, "n", "n_inputs", "width"))
    return "\n\n".join(
        [
            table("change | method", streams, stable | changed),
            table("points | inputs | width of the later queries", keys, whole),
        ]
    )


TABLES = {
    **dict.fromkeys(
        ("defaults", "fresh", "second_fresh", "third_fresh", "fourth_fresh"), suite.summary
    ),
    **dict.fromkeys(("kinds", "kinds_confirmation"), suite.kinds),
    "unseen": suite.unseen,
    "in_short": suite.in_short,
    "ablation": suite.ablation,
    "one_input": suite.one_input,
    "designs": suite.designs,
    "exchange": suite.exchange,
    "tables": suite.data_frames,
    "decades": suite.decades,
    "forrester": forrester,
    "kuramoto_sivashinsky": rollouts.kuramoto_sivashinsky,
    "kuramoto_sivashinsky_ablation": rollouts.ablation,
    "trusted_horizon": rollouts.trusted_horizon,
    "forced": rollouts.forced,
    "transients": rollouts.transients,
    "small_states": rollouts.small_states,
    **dict.fromkeys(("weather_era5", "weather_era5_direct", "weatherbench"), weather.summary),
    "richtmyer_meshkov": richtmyer_meshkov.summary,
    "richtmyer_meshkov_coarse": richtmyer_meshkov.coarse,
    "fields": fields.summary,
    "fields_bounds": fields.bounds,
    "features": fields.features,
    "third_party": third_party.summary,
    "propose": planning.propose,
    "optimise": planning.optimise,
    "matched_folds": planning.matched_folds,
    "planned_guarantees": planning.planned_guarantees,
    "cost": cost,
    "memory": memory,
    "speed": speed,
    "serving": serving,
    "monitor": monitor,
}


def render(name, folder=RESULTS):
    """All tables of a name in Markdown, with the signs of other runs and the footer."""
    record = load(FILES.get(name, name), folder)
    text = TABLES[name](record)
    return text if name == "in_short" else f"{signed(text, record['rows'])}\n\n{footer(record)}"


def marked(page):
    """The names and the contents of the tables of a page; the README has no markers, and its table begins with this row."""
    text = page.read_text()
    if page.name == "README.md":
        return {"in_short": re.search(r"^\| method \|(.|\n)*?(?=\n\n)", text, re.MULTILINE)[0]}
    pattern = r"^<!-- (\w+) -->$(.*?)^<!-- /\1 -->$"
    found = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
    return {name: table.strip() for name, table in found}


def pages():
    """README.md, the pages of docs, and the pages of long tables beside the results files."""
    folders = ROOT / "docs", RESULTS
    return [ROOT / "README.md", *(page for f in folders for page in sorted(f.glob("*.md")))]


def insert(page, name, text):
    end = f"<!-- /{name} -->"
    if (old := marked(page).get(name)) is None:
        raise SystemExit(f"{page} has no markers for the tables; add <!-- {name} --> and {end}.")
    new = text if old else f"\n{text}\n\n{end}"
    page.write_text(page.read_text().replace(old or end, new))


def check():
    """The tables of the pages that differ from their results files."""
    return [
        f"{page.relative_to(ROOT)}: {name}"
        for page in pages()
        for name, text in marked(page).items()
        if text != render(name)
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=TABLES, help="the tables; all of a page without")
    parser.add_argument("--into", type=Path, help="a page with markers for the tables")
    parser.add_argument("--check", action="store_true", help="list tables that are out of date")
    asked = parser.parse_args()
    if asked.check:
        raise SystemExit("\n".join(check()) or 0)
    if asked.into:
        for name in [asked.name] if asked.name else marked(asked.into):
            insert(asked.into, name, render(name))
    elif asked.name:
        print(render(asked.name))
    else:
        parser.error("name a table, a page with --into, or --check.")


if __name__ == "__main__":
    main()
