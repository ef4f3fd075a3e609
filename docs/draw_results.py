"""Draw results.png and fill the tables of results.md: pinball losses of every method by kind of query.

python -m docs.draw_results
"""

import json
import re
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.pictures import save
from benchmarks.suite.methods import is_ours
from benchmarks.suite.table import Comparison, error_ratios

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
# The table between the markers of a page, and the results file that it is made from.
TABLES = {"kinds": "defaults", "kinds_confirmation": "third_fresh"}
KINDS = {
    "interpolation": "inside the data",
    "mild": "mildly outside",
    "strong": "far outside",
    "all": "all",
}
# The label of this method is too long for a picture.
SHORT = {"Boosted quantile (x, distance, prediction)": "Boosted quantile (x, d, F)"}


def shown_as(method: str) -> str | None:
    """Return the name of a method without its version; None for forms of GeoQ that only default.md shows."""
    if is_ours(method) and method not in ("GeoQ", "GeoQ (paper)"):
        return None
    return method.split(" / ")[0]


def relative_losses(rows: list[dict]) -> dict[str, dict[str, Comparison]]:
    """Return the pinball loss of each method over that of the best rival of each problem.

    The best rival, and the version of each rival, are chosen in hindsight for each problem and kind of query.
    """
    ratios: dict[str, dict[str, list[float]]] = {}
    for kind in KINDS:
        for of_problem in error_ratios(rows, kind).values():
            versions: dict[str, float] = {}
            for method, ratio in of_problem.items():
                if name := shown_as(method):
                    versions[name] = min(ratio, versions.get(name, ratio))
            for name, ratio in versions.items():
                ratios.setdefault(name, {}).setdefault(kind, []).append(ratio)
    return {
        name: {kind: Comparison.of(values) for kind, values in by_kind.items()}
        for name, by_kind in ratios.items()
    }


def table(ratios: dict[str, dict[str, Comparison]]) -> str:
    """Return the ratios as a Markdown table, in the order of the results file."""
    lines = [f"| method | {' | '.join(KINDS.values())} |", "|---" * 5 + "|"]
    for method, by_kind in ratios.items():
        cells = [f"{by_kind[k].ratio:.2f} ({by_kind[k].range})" for k in KINDS]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(
    ratios: dict[str, dict[str, Comparison]], rows: list[dict], path: Path
) -> None:
    """Draw one panel per kind of query, the best method at the top, with two standard errors."""
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    kinds = [kind for kind in KINDS if kind != "all"]
    largest = max(by[kind].high for by in ratios.values() for kind in kinds)
    for axes, kind in zip(figure.subplots(1, 3), kinds, strict=True):
        order = sorted(ratios, key=lambda method: -ratios[method][kind].ratio)
        colors = ["#c1440e" if method == "GeoQ" else "#9db4cf" for method in order]
        found = [ratios[method][kind] for method in order]
        values = [one.ratio for one in found]
        reach = [
            [one.ratio - one.low for one in found],
            [one.high - one.ratio for one in found],
        ]
        labels = [SHORT.get(method, method) for method in order]
        axes.barh(labels, values, color=colors, xerr=reach, ecolor="#555555")
        for place, one in enumerate(found):
            text = f"{one.ratio:.2f}"
            axes.text(max(one.high, 1) * 1.1, place, text, va="center", fontsize=8)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xlim(0.15, 2.6 * largest)
        axes.set_xticks([0.25, 0.5, 1, 2, 4], ["0.25", "0.5", "1", "2", "4"])
        axes.minorticks_off()
        axes.tick_params(axis="y", labelsize=8)
        axes.set_title(KINDS[kind], fontsize=10)
    figure.supxlabel(
        "pinball loss over the best competing method of each problem, chosen in hindsight; two standard errors",
        fontsize=9,
    )
    save(figure, path, rows)


def main() -> None:
    """Write the picture and the tables."""
    page = DOCS / "results.md"
    for name, file in TABLES.items():
        rows = json.loads((RESULTS / f"{file}.json").read_text())["rows"]
        ratios = relative_losses(rows)
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text = f"\n{table(ratios)}\n"
        page.write_text(
            marked.sub(lambda m, new=text: m[1] + new + m[2], page.read_text())
        )
        if name == "kinds":
            draw(ratios, rows, DOCS / "results.png")


if __name__ == "__main__":
    main()
