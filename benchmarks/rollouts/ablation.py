"""The paper's ablation of the additive recursion on the Kuramoto-Sivashinsky equation, one choice at a time.

    python -m benchmarks.rollouts.ablation --seeds 20 21 22 --jobs 6
    python -m benchmarks.rollouts.ablation --small

Each row varies one choice; the sum and the capped sum are measured.
"""

import time
from functools import partial

import numpy as np

from benchmarks.paper import PAPER
from benchmarks.rollouts.data import SMALL, Settings, load, recipe_of
from benchmarks.rollouts.methods import RecordedSum, Remembered, RolledOut, capped
from benchmarks.rollouts.scores import Clock
from benchmarks.runs import Benchmark, script
from geoq import ClusterFolds, RolloutGeoQ, Training
from geoq.data.metric import identity

TIME_STEPS = ("dt=0.25", "dt=0.05")
SETTINGS = {False: Settings(), True: SMALL}
N_FOLDS = {f"K_f = {n}": n for n in (2, 10, 20)}
CHOICES = list(PAPER["kuramoto_sivashinsky_ablation"])


def absolute_displacement(features):
    return _joined(abs(features.displacement), features)


def length_of_displacement(features):
    return _joined(np.linalg.norm(_flat(features.displacement), axis=2, keepdims=True), features)


def displacement_alone(features):
    return _flat(features.displacement)


def _flat(values):
    return values.reshape(*values.shape[:2], -1)


def _joined(values, features):
    return np.concatenate([_flat(values), features.support_distance[..., None]], axis=2)


def training_of(settings):
    """The default training of the sum, or a short one."""
    known = settings.increment_training
    return known or Training(n_steps=1500, batch_size=16, check_every=10, patience=30)


def choices(surrogate, seed, settings):
    """Arguments of RolloutGeoQ for each row of the paper's table ; each row varies one choice."""
    form = partial(RecordedSum, training=training_of(settings))
    default = {"representation": surrogate.encoder, "scheme": form(), "n_anchors": 50}
    default["folds"] = ClusterFolds(5, random_state=seed)
    varied = {
        "phi = identity": {"representation": identity},
        "psi = (abs dz, dd)": {"scheme": form(psi=absolute_displacement)},
        "psi = (length of dz, dd)": {"scheme": form(psi=length_of_displacement)},
        "psi = dz": {"scheme": form(psi=displacement_alone)},
        **{f"k_a = {n}": {"n_anchors": n} for n in (1, 10, 100)},
        **{name: {"folds": ClusterFolds(n, random_state=seed)} for name, n in N_FOLDS.items()},
    }
    return {name: default | varied.get(name, {}) for name in CHOICES}


def measure(problem, seed, wanted, *, small=False):
    """Rows of some choices, for the sum and the capped sum."""
    settings = SETTINGS[small]
    data, recipe = load(float(problem[3:]), seed, settings), recipe_of(settings, seed)
    remembered, started = Remembered(recipe), time.perf_counter()
    surrogate = remembered([data.train])
    clock = Clock(time.perf_counter() - started, data, settings, problem, seed)
    clock.own_rollout(RolledOut(surrogate, settings.n_test))
    rows = []
    for name, change in choices(surrogate, seed, settings).items():
        if name not in wanted:
            continue
        # The total number of rollouts does not depend on the number of folds.
        n_starts = -(-5 * settings.n_starts // change["folds"].n_folds)
        # Variants with the same folds share their trainings; other folds are trained together.
        train = recipe if name in N_FOLDS else remembered
        sizes = {"n_calibration": settings.n_calibration, "n_starts": n_starts}
        variant = RolloutGeoQ(surrogate, train, **sizes, **change)
        seconds = clock.timed(lambda v=variant: v.fit(data.train, progress=None), remembered)[1]
        answer, asking = clock.timed(lambda v=variant: v.assess(data.x0, settings.n_test))
        for form, bound in (("sum", answer), ("capped sum", capped(answer, variant.fitted_))):
            line = clock.row(name, bound, answer.safe, seconds, asking)
            about = {"problem": problem, "setting": f"{form}, {problem}"}
            rows.append(line | about | {"n_steps": variant.fitted_.bound.n_steps})
    return rows


NAME, SEEDS = "kuramoto_sivashinsky_ablation", (20, 21, 22)
BENCHMARK = Benchmark(NAME, TIME_STEPS, measure, lambda _: CHOICES, SEEDS, TIME_STEPS[:1])
main = script(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
