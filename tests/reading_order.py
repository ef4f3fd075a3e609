"""The modules of geoq in the order of the data and of Algorithm 1. A folder stands for those of its modules that are not listed."""

READING_ORDER = [
    "checks",
    "data.column",
    "data.table",
    "arrays",
    "quantiles",
    "surrogate",
    "neighbors",
    "data",
    "core.geometry",
    "core.folds",
    "core.plan",
    "core.tuples",
    "nets",
    "training",
    "bounds",
    "regions",
    "state",
    "core",
    "rollout",
    "metrics",
    "plots",
    "parts",
    "sklearn",
    "xarray",
    "report.evidence",
    "report.svg",
    "report.contents",
    "report.render",
    "report",
    "cli",
    "__main__",
]

# Imports of what stands below, inside a function: a network is called through its adapter, and a file names the classes of all modules.
UPWARD = {("surrogate", "training.recipe"), ("state", "parts")}
