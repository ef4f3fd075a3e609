"""Measure all results files again: what fits two CPU cores in an hour, and the rest on a GPU with 16 cores.

    python -m benchmarks.rerun two-cores --list     # the commands, their minutes, and which results are finished
    python -m benchmarks.rerun two-cores            # make results
    python -m benchmarks.rerun gpu                  # make results-gpu; ERA5 (a folder) and SIMULATIONS (a file) name the data

The commands are those of the results files. A result is finished if neither the package nor the benchmarks changed since its commit. A
run that was stopped continues with the first result that is not finished; most commands also keep their own finished rows.
"""

import argparse
import os
import subprocess
import sys

from benchmarks.record import ROOT, path_of, read

# The minutes of each command on its machine, and the variable that names the data that it needs.
# fmt: off
MINUTES = {
    "two-cores": {"forced": 1, "small_states": 2, "trusted_horizon": 3, "tables": 5, "fields": 5, "cost": 7, "memory": 8,
                  "forrester": 11, "speed": 12, "serving": 2, "monitor": 6, "designs": 15, "transients": 6, "decades": 5,
                  "features": 4},
    "gpu": {"third_party": 5, "fields_bounds": 8, "fresh": 10, "second_fresh": 10, "third_fresh": 10, "one_input": 10,
            "weather_era5_direct": 10, "ablation": 15, "defaults": 15, "kuramoto_sivashinsky_ablation": 15, "weather_era5": 15,
            "kuramoto_sivashinsky": 30, "richtmyer_meshkov_coarse": 60, "richtmyer_meshkov": 80},
}
# fmt: on
DATA = dict.fromkeys(("weather_era5", "weather_era5_direct"), "ERA5")
DATA["richtmyer_meshkov"] = "SIMULATIONS"
# The code that rows depend on: all but the modules that make pages from results.
CODE = ("src", "benchmarks/*.py", "benchmarks/*/*.py")
PAGES_ONLY = ("rerun", "markdown", "tables", "table", "paper", "pictures")


def is_finished(commit):
    """Whether the package and the benchmarks are as they were at a commit."""
    aside = [f":!benchmarks/**/{name}.py" for name in PAGES_ONLY]
    paths = [f":(glob){path}" if "*" in path else path for path in CODE]
    command = ["git", "diff", "--quiet", commit, "--", *paths, *aside]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    return done.returncode == 0


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machine", choices=MINUTES)
    parser.add_argument("--list", action="store_true", help="run nothing")
    asked = parser.parse_args(words)
    known = MINUTES[asked.machine]
    for name, minutes in known.items():
        record = read(path_of(name))
        finished = is_finished(record["commit"])
        state = "finished" if finished else f"{minutes} min"
        print(f"{name:30} {state:>9}  {record['command']}", flush=True)
        if asked.list or finished:
            continue
        if DATA.get(name, "PATH") not in os.environ:
            print(f"    left out: set {DATA[name]} to the data, see the script")
            continue
        jobs = ["--jobs", str(os.cpu_count())]
        command = [sys.executable, *record["command"].split()[1:], *jobs]
        subprocess.run(command, cwd=ROOT, check=True)
    print(f"about {sum(known.values())} minutes in all")


if __name__ == "__main__":
    main()
