"""The picture of docs/next-runs.md: errors at planned queries while a design grows. ``python -m benchmarks.planning.pictures``."""

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.markdown import select
from benchmarks.record import ROOT, load

LINES = {"random": ("0.5", ":o"), "k-centre": ("#4c78a8", "-.s")}
LINES |= {"GP integrated variance": ("#e0a030", "--D"), "propose": ("#1b1b1b", "-^")}


def main():
    rows = load("propose")["rows"]
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained", sharey=True)
    for axes, plan in zip(panels, ("corner", "box"), strict=True):
        for method, (colour, style) in LINES.items():
            own = select(rows, shift=plan, method=method)
            errors = np.log([np.array(r["errors"]) / r["errors"][0] for r in own])
            at, mean = 2 * np.arange(errors.shape[1]), np.exp(errors.mean(axis=0))
            axes.semilogy(at, mean, style, c=colour, ms=4, label=method)
        axes.set(title=f"the plan fills the {plan}", xlabel="new runs per input")
    panels[0].set_ylabel("error at planned queries\n/ error at the start")
    panels[0].set_yticks([1, 0.7, 0.5, 0.3], ["1", "0.7", "0.5", "0.3"])
    panels[0].minorticks_off()
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(ROOT / "docs" / "next-runs-errors.png", dpi=100)


if __name__ == "__main__":
    main()
