"""Kill a calibration at random moments, start it again, and compare its answer bit by bit with an undisturbed one.

    python benchmarks/kill.py             # 24 kills: about two minutes
    python benchmarks/kill.py --kills 50

The folds are of two kinds: some trained together as one stack, which is lost as a whole, and some one by one.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from geoq import GeoQ, NormScaledIncrement, RandomFolds, Training, TrainNetwork
from geoq.nets.mlp import MLP

N_FOLDS = 8
# Kills of one run, after which it may finish.
MOST_KILLS = 4


@dataclass(frozen=True)
class InPairs:
    """A recipe that trains two networks at a time."""

    recipe: TrainNetwork

    def __call__(self, x, y):
        return self.recipe(x, y)

    def n_together(self, x, y):
        del x, y
        return 2

    def train_many(self, x, y, subsets, seeds=None):
        return self.recipe.train_many(x, y, subsets, seeds)


def calibrate(checkpoint, answer):
    """A calibration of a second or so; writes what it says at some queries."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=(300, 2))
    y = np.sin(3 * x[:, :1]) + x[:, 1:] ** 2
    training = Training(n_steps=400, check_every=25)
    recipe = TrainNetwork(partial(MLP, 2, 1, hidden=(32, 32)), training=training)
    increment = NormScaledIncrement(training=Training(n_steps=50, check_every=25))
    geoq = GeoQ(
        recipe(x, y),
        InPairs(recipe),
        folds=RandomFolds(N_FOLDS),
        increment_model=increment,
    )
    answer.with_name("started").touch()
    geoq.fit(x, y, checkpoint=checkpoint)
    np.save(answer, geoq.predict(rng.uniform(-2, 2, size=(500, 2))))


def start(folder):
    """Start a calibration, and wait until its fit begins: kills during the imports would show nothing."""
    marker = folder / "started"
    marker.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--fit", folder, folder / "answer.npy"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None and not marker.exists():
        time.sleep(0.001)
    return process


def killed(folder, seconds):
    """Start, and kill after so many seconds of fitting; whether it was still running."""
    process = start(folder)
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return True
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fit", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.fit:
        calibrate(*arguments.fit)
        return
    moments = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "undisturbed"
        whole.mkdir()
        process, started = start(whole), time.perf_counter()
        assert process.wait() == 0
        seconds = time.perf_counter() - started
        expected = np.load(whole / "answer.npy")
        n_kills = n_runs = 0
        while n_kills < arguments.kills:
            n_runs += 1
            folder = Path(scratch) / f"run-{n_runs}"
            folder.mkdir()
            for _ in range(MOST_KILLS):
                if not killed(folder, moments.uniform(0.0, 1.0) * seconds):
                    break
                n_kills += 1
                n_folds = len([*folder.glob("fold-*.geoq")])
                print(f"run {n_runs}: killed with {n_folds} of {N_FOLDS} folds done")
            else:
                assert start(folder).wait() == 0
            same = np.array_equal(np.load(folder / "answer.npy"), expected)
            print(f"run {n_runs}: finished, {'the same bits' if same else 'DIFFERENT'}")
            if not same:
                raise SystemExit(1)
    print(f"{n_kills} kills in {n_runs} runs: all ended with the same bits")


if __name__ == "__main__":
    main()
