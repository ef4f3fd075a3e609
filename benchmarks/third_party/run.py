"""GeoQ with models of other packages: neural operators, echo state networks, recurrent networks and two measured series.

    pip install -c constraints.txt ".[third-party]"
    python -m benchmarks.third_party.run --jobs 2         # all cases: about 15 minutes on two cores
    python -m benchmarks.third_party.run --small          # small sizes, no meaningful figures

Seconds are processor time of the process of a case.
"""

import importlib.util
import warnings
from dataclasses import replace

from benchmarks import record
from benchmarks.runs import Benchmark, parser_of, run
from benchmarks.third_party import chaos, fields, operators, series

SERIES = {"Sunspots": series.sunspots, "El Nino": series.el_nino}
FIELDS = {case.name: case for case in operators.FIELD_CASES}
CHAOS = {case.name: case for case in chaos.CHAOS_CASES}
# The packages that these cases need and that no other part of the repository needs, by the name of their module.
PACKAGES = {"neuralop": "neuraloperator"}
PACKAGES |= {name: name for name in ("reservoirpy", "dysts", "statsmodels")}
SMALL_STEPS = 10


def measure(name, seed, wanted, *, small=False):
    """Rows of one case and seed."""
    del wanted  # all rows come from one surrogate
    warnings.filterwarnings("ignore")
    if name in SERIES:
        return SERIES[name](seed)
    if name in CHAOS:
        return chaos.measure(CHAOS[name], seed, chaos.SMALL if small else chaos.FULL)
    case = FIELDS[name]
    if not small:
        return fields.measure(case, seed, fields.FULL)
    case = replace(case, recipe=replace(case.recipe, n_steps=SMALL_STEPS))
    return fields.measure(case, seed, fields.SMALL)


def packages():
    return {"packages": {name: record.installed(name) for name in PACKAGES.values()}}


CASES, SMALLEST = [*FIELDS, *CHAOS, *SERIES], ("Burgers", "Lorenz, ESN", "El Nino")
BENCHMARK = Benchmark(
    "third_party", CASES, measure, lambda _: ["GeoQ"], range(3), SMALLEST, packages
)


def main(words=None):
    asked = parser_of(__doc__).parse_args(words)
    if absent := [PACKAGES[name] for name in PACKAGES if not importlib.util.find_spec(name)]:
        raise SystemExit(
            f"{', '.join(absent)} cannot be imported, but the third-party cases need {', '.join(PACKAGES.values())}; run pip install "
            '-c constraints.txt ".[third-party]".'
        )
    return run(BENCHMARK, asked)


if __name__ == "__main__":
    main()
