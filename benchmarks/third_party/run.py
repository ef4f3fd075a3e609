"""GeoQ with models of other packages: neural operators, echo state networks, recurrent networks and two measured series.

    pip install -c constraints.txt ".[third-party]"
    python -m benchmarks.third_party.run --jobs 2         # all cases: about 15 minutes on two cores
    python -m benchmarks.third_party.run --small          # every case at small size: a minute, no meaningful figures

Each case and seed is one task in a process of its own with one thread. Seconds are processor time of this process.
"""

import argparse
import os
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks import record
from benchmarks.third_party import chaos, fields, operators, series
from benchmarks.third_party.packages import PACKAGES, check_installed

N_SEEDS = 3
SERIES = {"Sunspots": series.sunspots, "El Nino": series.el_nino}
FIELDS = {case.name: case for case in operators.FIELD_CASES}
CHAOS = {case.name: case for case in chaos.CHAOS_CASES}
# The longest tasks first, so that they do not end last.
NAMES = (*FIELDS, *CHAOS, *SERIES)
SMALL_STEPS = 10


def measure(name, seed, small):
    """Rows of one case and seed, and the seconds that they took."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    started = time.process_time()
    if name in SERIES:
        rows = SERIES[name](seed)
    elif name in CHAOS:
        rows = chaos.measure(CHAOS[name], seed, chaos.SMALL if small else chaos.FULL)
    else:
        case, sizes = FIELDS[name], fields.FULL
        if small:
            case = replace(case, recipe=replace(case.recipe, n_steps=SMALL_STEPS))
            sizes = fields.SMALL
        rows = fields.measure(case, seed, sizes)
    return rows, time.process_time() - started


def measure_all(names, seeds, n_jobs, *, small, save):
    """Measure all cases, each task in a process of its own. ``save`` receives all rows so far, in the order of the names."""
    tasks = [(name, seed) for name in names for seed in seeds]
    found = {}
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    with ProcessPoolExecutor(
        n_jobs, mp_context=get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        running = {pool.submit(measure, *task, small): task for task in tasks}
        for done in as_completed(running):
            name, seed = task = running[done]
            found[task], seconds = done.result()
            print(f"{name}, seed {seed}: {seconds:.0f} s", flush=True)
            save([row for task in tasks for row in found.get(task, ())])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--seeds", nargs="+", type=int, default=range(N_SEEDS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--small", action="store_true", help="small sizes, one seed")
    parser.add_argument("--out", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    check_installed()
    small, out = arguments.small, arguments.out
    packages = {name: record.installed(name) for name in PACKAGES.values()}
    conditions = {"quantile": record.QUANTILE, "packages": packages}
    conditions |= {"small": True} if small else {}

    def save(rows):
        record.write("third_party", rows, out, **conditions)

    seeds = [0] if small else list(arguments.seeds)
    measure_all(arguments.cases, seeds, arguments.jobs, small=small, save=save)


if __name__ == "__main__":
    main()
