"""Scores and costs of one bound of rollouts."""

from dataclasses import dataclass

import numpy as np

from benchmarks.record import QUANTILE
from benchmarks.rollouts.data import Data, Settings
from benchmarks.scores import row
from benchmarks.timing import now
from geoq.metrics import coverage, pinball


@dataclass
class Clock:
    """Rows of bounds; seconds are compared with the surrogate's training and rollout."""

    training_seconds: float
    data: Data
    settings: Settings
    setting: str
    seed: int

    def own_rollout(self, rolled_out):
        self.rollout_seconds = self.timed(lambda: rolled_out(self.data.x0))[1]

    def timed(self, work, remembered=None):
        """Result and seconds of a call; remembered trainings count with the seconds that they took."""
        saved, started = getattr(remembered, "seconds_saved", 0.0), now()
        result = work()
        return result, now() - started + getattr(remembered, "seconds_saved", 0.0) - saved

    def row(self, method, bound, safe, fit_seconds, inference_seconds):
        """A row of scores. ``safe`` is None for methods without a safe region."""
        truth, n_steps = self.data.truth, self.settings.n_test
        about = {"method": method, "setting": self.setting, "seed": self.seed}
        line = row(about, truth, bound, safe, (fit_seconds, inference_seconds))
        error = abs(truth - bound.prediction)

        def over(steps):
            return error[:, steps], bound.error_hat[:, steps]

        for number, steps in enumerate(np.array_split(np.arange(n_steps), 4), start=1):
            line[f"coverage_q{number}"] = coverage(*over(steps))
        within, first = slice(0, self.settings.n_calibration), slice(0, 50)
        line["pinball_calibrated"] = pinball(*over(within), QUANTILE)
        line["pinball_first50"] = pinball(*over(first), QUANTILE)
        line["coverage_first50"] = coverage(*over(first))
        line["fit_over_training"] = fit_seconds / self.training_seconds
        line["answer_over_rollout"] = inference_seconds / self.rollout_seconds
        shown = ("pinball", "pinball_first50", "coverage")
        print(method, *(f"{name} {line[name]:.4f}" for name in shown), flush=True)
        return line
