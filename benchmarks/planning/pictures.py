"""The picture of docs/next-runs.md: errors at planned queries while a design grows. ``python -m benchmarks.planning.pictures``."""

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.markdown import select
from benchmarks.record import ROOT, load

LINES = {"random": "0.5", "k-centre": "C0", "GP integrated variance": "C2", "propose": "C3"}
STYLES = (":", "-.", "--", "-")


def main():
    rows = load("propose")["rows"]
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained", sharey=True)
    for axes, plan in zip(panels, ("corner", "box"), strict=True):
        for (method, colour), style in zip(LINES.items(), STYLES, strict=True):
            own = select(rows, shift=plan, method=method)
            errors = np.log([np.array(r["errors"]) / r["errors"][0] for r in own])
            axes.semilogy(
                2.0 * np.arange(errors.shape[1]),
                np.exp(errors.mean(axis=0)),
                style,
                c=colour,
                label=method,
            )
        axes.set(title=f"the plan fills the {plan}", xlabel="new runs per input")
    panels[0].set_ylabel("error at planned queries / error at the start")
    panels[1].legend(frameon=False, loc="lower left")
    figure.savefig(ROOT / "docs" / "next-runs-errors.png", dpi=100)


if __name__ == "__main__":
    main()
