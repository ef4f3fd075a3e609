"""Attack the files, checkpoints and processes of geoq, and count the outcomes.

python -m benchmarks.hostile.run            # ten thousand damaged files, 100 kills of calibrations and 100 of saves
python -m benchmarks.hostile.run --small    # a fifth of it
"""

import argparse
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from benchmarks import record
from benchmarks.hostile import mutations, processes
from benchmarks.hostile.cases import CASES
from benchmarks.hostile.table import ATTACKS, summary

SEED = 0
NUMBERS = {
    "damaged files": 10_000,
    "forged files": 2_000,
    "kills during fit": 100,
    "kills during save": 100,
    "two processes, one checkpoint": 25,
    "two processes, one file": 300,
    "full disk": 25,
    "limited file size": 100,
}
OF_PROCESSES = {
    "kills during fit": processes.kills_during_fit,
    "kills during save": processes.kills_during_save,
    "two processes, one checkpoint": processes.two_on_one_checkpoint,
    "two processes, one file": processes.two_on_one_file,
    "full disk": processes.full_disk,
    "limited file size": processes.limited_files,
}
OF_FILES = {
    "damaged files": mutations.count_damage,
    "forged files": mutations.count_forged,
}


def row(attack, target, counts):
    if counts is None:
        return {"attack": attack, "target": target, "seed": SEED, "skipped": True}
    outcomes = {key: int(n) for key, n in sorted(counts.items())}
    return {"attack": attack, "target": target, "seed": SEED, **outcomes}


def attack(numbers, folder, path):
    """One row per attack and kind of estimator; the results file is written after each attack."""
    rows = []
    for name in ATTACKS:
        started, rng = time.perf_counter(), np.random.default_rng(SEED)
        place = folder / name.replace(" ", "-")
        place.mkdir()
        if name in OF_FILES:
            counts = OF_FILES[name](CASES, numbers[name], place, rng)
            rows += [row(name, of, count) for of, count in counts.items()]
        else:
            counts = OF_PROCESSES[name](numbers[name], place, rng)
            rows.append(row(name, "default", counts))
        record.write("hostile", rows, path, numbers=numbers)
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a fifth of the tries")
    parser.add_argument("--out", type=Path, help="results file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    fraction = 5 if arguments.small else 1
    numbers = {name: max(2, n // fraction) for name, n in NUMBERS.items()}
    with tempfile.TemporaryDirectory() as folder:
        rows = attack(numbers, Path(folder), arguments.out)
    print(summary({"rows": rows}))
    n_wrong = sum(r.get("wrong", 0) for r in rows if r["attack"] != "forged files")
    if n_wrong:
        sys.exit(f"{n_wrong} silent wrong answers")


if __name__ == "__main__":
    main()
