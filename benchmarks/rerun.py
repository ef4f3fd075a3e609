"""Measure all results files again: what fits two CPU cores in an hour, and the rest on a GPU with 16 cores.

python -m benchmarks.rerun two-cores --list     # the commands, their minutes, and which results are finished
python -m benchmarks.rerun two-cores            # make results
python -m benchmarks.rerun gpu                  # make results-gpu; ERA5 (a folder) and SIMULATIONS (a file) name the data

A result is finished if neither the package nor the benchmarks changed since its commit. A run that was stopped continues with the
first result that is not finished; the commands of the suite and of the rollouts also keep their own finished rows.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import RESULTS, ROOT

CODE = ("src", "benchmarks/*.py", "benchmarks/*/*.py")
# These modules make pages from results.
PAGES_ONLY = ("rerun", "prose", "derived", "signs", "tables")
MACHINES = ("two-cores", "gpu")
SEEDS = "--seed-list 700 701 702 --jobs 16"
DATA = {
    "$ERA5": "a folder with reanalysis data",
    "$SIMULATIONS": "the file of benchmarks.richtmyer_meshkov.data",
}


@dataclass(frozen=True)
class Run:
    """A command, the results file that it writes, its minutes, and the part of the file that has a commit of its own."""

    machine: str
    minutes: int
    file: str
    command: str
    part: str = ""

    def commit(self, folder: Path = RESULTS) -> str:
        """The commit of the result; empty if there is none."""
        path = folder / f"{self.file}.json"
        if not path.is_file():
            return ""
        record = json.loads(path.read_text())
        return (record.get(self.part) or {} if self.part else record).get("commit", "")


RUNS = (
    Run("two-cores", 1, "assessment", "costs.assessment"),
    Run("two-cores", 1, "forced", "rollouts.forced"),
    Run("two-cores", 2, "small_states", "rollouts.small_states"),
    Run("two-cores", 3, "trusted_horizon", "rollouts.trusted_horizon"),
    Run("two-cores", 5, "tables", "suite.tables --seed-list 310 311 312 --jobs 2"),
    Run("two-cores", 5, "hostile", "hostile.run"),
    Run("two-cores", 7, "cost", "costs.cost --picture docs/cost.png"),
    Run("two-cores", 8, "memory", "costs.memory"),
    Run("two-cores", 5, "fields", "fields.run --seeds 10"),
    Run("two-cores", 11, "forrester", "forrester --jobs 2 --pictures docs"),
    Run("two-cores", 12, "speed", "costs.speed"),
    Run("gpu", 2, "cost", "costs.cost --quality --jobs 16", "quality"),
    Run("gpu", 1, "gpu_search", "costs.gpu_search"),
    Run("gpu", 10, "fresh", f"suite.defaults --set fresh {SEEDS}"),
    Run("gpu", 10, "second_fresh", f"suite.defaults --set second {SEEDS}"),
    Run(
        "gpu",
        10,
        "third_fresh",
        f"suite.defaults --set third {SEEDS}",
    ),
    Run("gpu", 8, "fields_bounds", "fields.bounds --processes 16 --seeds 0 1 2"),
    Run("gpu", 5, "third_party", "third_party.run --jobs 16"),
    Run("gpu", 10, "one_input", "suite.one_input --seed-list 800 --jobs 16"),
    Run("gpu", 15, "ablation", "suite.ablation --seed-list 700 701 --jobs 16"),
    Run(
        "gpu",
        15,
        "defaults",
        f"suite.defaults {SEEDS}",
    ),
    Run(
        "gpu",
        15,
        "kuramoto_sivashinsky_ablation",
        "rollouts.kuramoto_sivashinsky --ablation --first-seed 20 --jobs 16",
    ),
    Run(
        "gpu",
        30,
        "kuramoto_sivashinsky",
        "rollouts.kuramoto_sivashinsky --first-seed 20 --jobs 16 --device cuda --pictures docs",
    ),
    Run(
        "gpu",
        10,
        "weather_era5_direct",
        "weather.weatherbench --data $ERA5 --form direct --seeds 2 --jobs 9 --out benchmarks/results/weather_era5_direct.json",
    ),
    Run(
        "gpu",
        15,
        "weather_era5",
        "weather.weatherbench --data $ERA5 --form anomalies --first-seed 20 --jobs 6 --out benchmarks/results/weather_era5.json",
    ),
    Run(
        "gpu",
        80,
        "richtmyer_meshkov",
        "richtmyer_meshkov.run --data $SIMULATIONS --work work --device cuda",
    ),
    Run(
        "gpu",
        60,
        "richtmyer_meshkov_coarse",
        "richtmyer_meshkov.run --coarse --device cpu",
    ),
    Run(
        "gpu",
        30,
        "few_fields",
        "richtmyer_meshkov.few_fields --data $SIMULATIONS --jobs 16",
    ),
    Run(
        "gpu",
        4,
        "cost-h200",
        "costs.cost --device cuda --out benchmarks/results/cost-h200.json",
    ),
    Run("gpu", 6, "speed-h200", "costs.speed --out benchmarks/results/speed-h200.json"),
)


def same_code(commit: str) -> bool:
    """Whether the package and the benchmarks are as they were at a commit."""
    if not commit or commit.endswith("+changes"):
        return False
    aside = [f":!benchmarks/**/{name}.py" for name in PAGES_ONLY]
    paths = [f":(glob){path}" if "*" in path else path for path in CODE]
    command = ["git", "diff", "--quiet", commit, "--", *paths, *aside]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    return done.returncode == 0


def line(run: Run) -> str:
    state = "finished" if same_code(run.commit()) else f"{run.minutes} min"
    name = run.file + (f" ({run.part})" if run.part else "")
    return f"{name:32} {state:>9}  python -m benchmarks.{run.command}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machine", choices=MACHINES)
    parser.add_argument("--list", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    runs = [run for run in RUNS if run.machine == arguments.machine]
    for run in runs:
        print(line(run), flush=True)
        if arguments.list or same_code(run.commit()):
            continue
        missing = [
            name for name in DATA if name in run.command and name[1:] not in os.environ
        ]
        if missing:
            print(f"    left out: set {missing[0][1:]} to {DATA[missing[0]]}")
            continue
        words = [os.path.expandvars(word) for word in run.command.split()]
        command = [sys.executable, "-m", f"benchmarks.{words[0]}", *words[1:]]
        subprocess.run(command, cwd=ROOT, check=True)
    print(f"about {sum(run.minutes for run in runs)} minutes in all")


if __name__ == "__main__":
    main()
