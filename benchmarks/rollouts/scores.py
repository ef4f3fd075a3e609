"""Scores and costs of one bound of rollouts."""

import time
from dataclasses import dataclass

import numpy as np

from benchmarks import record
from benchmarks.record import QUANTILE
from benchmarks.rollouts.data import Data, Settings
from geoq.metrics import coverage, pinball


@dataclass
class Clock:
    """Rows of bounds; seconds are compared with the surrogate's training and rollout."""

    training_seconds: float
    data: Data
    settings: Settings
    dt: float
    seed: int

    def own_rollout(self, rolled_out):
        started = time.perf_counter()
        rolled_out(self.data.x0)
        self.rollout_seconds = time.perf_counter() - started

    def of(self, work, remembered):
        saved, started = remembered.seconds_saved, time.perf_counter()
        work()
        return time.perf_counter() - started + remembered.seconds_saved - saved

    def row(self, method, bound, safe, fit_seconds, inference_seconds):
        """A row of scores. ``safe`` is None for methods without a safe region; their columns of the safe region are empty."""
        truth, n_steps = self.data.truth, self.settings.n_test
        line = record.row(
            method,
            setting=f"dt={self.dt}",
            seed=self.seed,
            y=truth,
            prediction=bound.prediction,
            error_hat=bound.error_hat,
            safe=np.ones(truth.shape[:2], dtype=bool) if safe is None else safe,
            train_seconds=fit_seconds,
            inference_seconds=inference_seconds,
        )
        if safe is None:
            line |= dict.fromkeys([name for name in line if name.startswith("safe_")])
        error = abs(truth - bound.prediction)
        quarters = np.array_split(np.arange(n_steps), 4)
        for number, steps in enumerate(quarters, start=1):
            line[f"coverage_q{number}"] = coverage(
                error[:, steps], bound.error_hat[:, steps]
            )
        within = slice(0, self.settings.n_calibration)
        line["pinball_calibrated"] = pinball(
            error[:, within], bound.error_hat[:, within], QUANTILE
        )
        first = slice(0, 50)
        line["pinball_first50"] = pinball(
            error[:, first], bound.error_hat[:, first], QUANTILE
        )
        line["coverage_first50"] = coverage(error[:, first], bound.error_hat[:, first])
        line["fit_over_training"] = fit_seconds / self.training_seconds
        line["answer_over_rollout"] = inference_seconds / self.rollout_seconds
        by_quarter = " ".join(f"{line[f'coverage_q{q}']:.3f}" for q in range(1, 5))
        print(
            f"dt {self.dt} seed {self.seed}  {method:36s} pinball {line['pinball']:.4f}  first 50 "
            f"{line['pinball_first50']:.4f}  correlation {line['correlation']:.3f}  coverage {line['coverage']:.3f} "
            f"({by_quarter})  safe {line['safe_fraction']}  {fit_seconds:.0f} s, {inference_seconds:.1f} s",
            flush=True,
        )
        return line
