"""Draw results.png and fill the table of results.md: pinball losses of every method by kind of query.

python docs/draw_results.py
"""

import json
import math
import re
import statistics
from pathlib import Path

from matplotlib.figure import Figure

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results" / "defaults.json"
KINDS = {
    "interpolation": "inside the data",
    "mild": "mildly outside",
    "strong": "far outside",
}
OURS = ("GeoQ", "GeoQ (paper)")
# Shown, but not one of the ten: it uses the spline of GeoQ's default.
BESIDE = ("Spline-scaled conformal",)
# Other forms of GeoQ, and methods that are calibrated on random folds alone, are in the tables of default.md only.
LEFT_OUT = re.compile(r"GeoQ \((?!paper\)).*|.* / random folds")
# The label of this method is too long for a picture.
SHORT = {"Boosted quantile (x, distance, prediction)": "Boosted quantile (x, d, F)"}


def relative_losses(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Return the pinball loss of each method over the best competing method of each problem.

    The best competing method is chosen in hindsight, for each problem and each kind of query. The ratios are combined
    by the geometric mean over the problems.
    """
    every = dict.fromkeys(row["method"] for row in rows)
    methods = [method for method in every if not LEFT_OUT.fullmatch(method)]
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    losses: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        key = row["problem"], row["shift"], row["method"]
        losses.setdefault(key, []).append(row["pinball"])
    mean = {key: statistics.fmean(values) for key, values in losses.items()}

    def ratio(method: str, kind: str) -> float:
        logarithms = []
        for problem in problems:
            rivals = [
                mean[problem, kind, other]
                for other in methods
                if other not in (*OURS, *BESIDE)
            ]
            logarithms.append(math.log(mean[problem, kind, method] / min(rivals)))
        return math.exp(statistics.fmean(logarithms))

    return {method: {kind: ratio(method, kind) for kind in KINDS} for method in methods}


def table(ratios: dict[str, dict[str, float]]) -> str:
    """Return the ratios as a Markdown table, in the order of the results file."""
    head = "| method | " + " | ".join(KINDS.values()) + " |\n|---|---|---|---|\n"
    lines = [
        f"| {method} | " + " | ".join(f"{by_kind[kind]:.2f}" for kind in KINDS) + " |"
        for method, by_kind in ratios.items()
    ]
    return head + "\n".join(lines)


def draw(ratios: dict[str, dict[str, float]], path: Path) -> None:
    """Draw one panel per kind of query, the best method at the top."""
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    largest = max(max(by_kind.values()) for by_kind in ratios.values())
    for axes, (kind, title) in zip(figure.subplots(1, 3), KINDS.items(), strict=True):
        order = sorted(ratios, key=lambda method: -ratios[method][kind])
        colors = ["#c1440e" if method == "GeoQ" else "#9db4cf" for method in order]
        values = [ratios[method][kind] for method in order]
        axes.barh([SHORT.get(method, method) for method in order], values, color=colors)
        for place, value in enumerate(values):
            axes.text(
                max(value, 1) + 0.08, place, f"{value:.2f}", va="center", fontsize=8
            )
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xlim(0, 1.15 * largest)
        axes.tick_params(axis="y", labelsize=8)
        axes.set_title(title, fontsize=10)
    figure.supxlabel(
        "pinball loss over the best competing method of each problem, chosen in hindsight",
        fontsize=9,
    )
    figure.savefig(path, dpi=110)


def main() -> None:
    """Write the picture and the table."""
    ratios = relative_losses(json.loads(RESULTS.read_text())["rows"])
    draw(ratios, DOCS / "results.png")
    page = DOCS / "results.md"
    marked = re.compile(r"(<!-- kinds -->\n).*?(<!-- /kinds -->)", flags=re.DOTALL)
    page.write_text(
        marked.sub(lambda m: f"{m[1]}\n{table(ratios)}\n{m[2]}", page.read_text())
    )


if __name__ == "__main__":
    main()
