"""The paper's second problem: rollouts of a network that steps the Kuramoto-Sivashinsky equation.

    python -m benchmarks.rollouts.kuramoto_sivashinsky --jobs 16 --device cuda  # both time steps, 3 seeds, all methods
    python -m benchmarks.rollouts.kuramoto_sivashinsky --ablation --jobs 16     # the paper's ablation, 3 seeds
    python -m benchmarks.rollouts.kuramoto_sivashinsky --small                  # short data and trainings: within a minute

The network learns 4000 snapshots (L = 22, 64 points, scaled to [0, 1] by their range) and is rolled out for 600 steps
from 10 initial states after them; calibration rollouts have 300 steps. The paper gives no time step, and the results
depend on it: with dt = 0.25 the training data cover the attractor, with dt = 0.05 they do not. Both are run.

Methods that calibrate on held-out rollouts use the same fold networks. "One number per horizon" and "Horizon x
climatology" are simple rivals; they use the calibration rollouts of the default or, in the rows marked "(clusters)", of
the paper's cluster folds.

", scaled per step" multiplies the bound of a baseline by a factor per step, calibrated on the same held-out rollouts.

The results file is written after each task (part, time step and seed); a rerun with the same code measures the missing
tasks. The networks are trained on the CPU, one process per task; ``--device cuda`` moves the Gaussian process to the GPU.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from joblib import Parallel, delayed
from threadpoolctl import threadpool_limits

from benchmarks import record
from benchmarks.record import QUANTILE
from benchmarks.rollouts import ablation
from benchmarks.rollouts.data import SMALL, Settings, load, recipe_of
from benchmarks.rollouts.gaussian_process import NOISE, SampledProcess, StepProcess
from benchmarks.rollouts.methods import (
    ChosenProcess,
    HorizonTimesClimatology,
    OneNumberPerHorizon,
    Remembered,
    RolledOut,
    RolloutConformal,
    ScaledPerStep,
    WholeRollout,
    capped,
    folds_of_dropout,
    folds_of_ensembles,
    folds_of_pairs,
    with_scheme,
)
from benchmarks.rollouts.scores import Clock
from geoq import ClusterFolds, CombinedFolds, RolloutGeoQ, SafeRegion, TemporalFolds
from geoq.baselines import DeepEnsemble, MCDropout
from geoq.rollout import AdditiveRecursion, SaturatingGrowth

TIME_STEPS = (0.25, 0.05)
SEEDS = 3
# The parts of the methods; the longest one runs first.
CALIBRATED = "calibrated on rollouts"
LITTLE_NOISE = "GP, noise 1e-10"
PARTS = ("Deep ensemble", CALIBRATED, "MC dropout", LITTLE_NOISE, "GP")
ORDER = (CALIBRATED, "GP", LITTLE_NOISE, "MC dropout", "Deep ensemble")
# Tolerance of the trusted horizon, in units of the range of the data.
TOLERANCE = 0.5


# One part of the methods, for one time step and one seed.


def run(dt, seed, part, settings, device, pictures):
    """Rows of the methods of one part; draws pictures if a folder is given."""
    torch.set_num_threads(1)
    with threadpool_limits(1):
        data = load(dt, seed, settings)
        remembered = Remembered(recipe_of(settings, seed))
        started = time.perf_counter()
        surrogate = remembered.recipe([data.train])
        clock = Clock(time.perf_counter() - started, data, settings, dt, seed)
        clock.own_rollout(RolledOut(surrogate, settings.n_test))
        if part == CALIBRATED:
            rows = calibrated(clock, surrogate, remembered, pictures)
        else:
            rows = sampled(clock, part, remembered.recipe, device)
        return [row | {"part": part} for row in rows]


def calibrated(clock, surrogate, remembered, pictures):
    """Rows of the bounds that are calibrated on rollouts of one network."""
    data, settings, seed = clock.data, clock.settings, clock.seed
    calibrate = partial(
        RolloutGeoQ,
        surrogate,
        remembered,
        n_calibration=settings.n_calibration,
        n_starts=settings.n_starts,
    )
    clusters = ClusterFolds(5, random_state=seed)
    paper = calibrate(
        scheme=AdditiveRecursion(QUANTILE, training=settings.increment_training),
        representation=surrogate.encoder,
        folds=clusters,
        n_anchors=50,
        safe_region=SafeRegion(),
    )
    rows, assessments = [], {}

    def answer(name, fitted, seconds):
        started = time.perf_counter()
        assessments[name] = fitted.assess(data.x0, settings.n_test, TOLERANCE)
        asking = time.perf_counter() - started
        safe, course = assessments[name].safe, record.trainings(fitted)
        line = clock.row(name, assessments[name], safe, seconds, asking)
        rows.append(line | course)
        if name == "GeoQ (paper)":
            cut = capped(assessments[name], fitted)
            line = clock.row("GeoQ (paper, capped)", cut, safe, seconds, asking)
            rows.append(line | course)

    rivals = {
        "One number per horizon": OneNumberPerHorizon(),
        "Horizon x climatology": HorizonTimesClimatology(),
    }
    for name, variant, others in (
        (
            "GeoQ",
            calibrate(),
            {
                "GeoQ (geometry off)": SaturatingGrowth(QUANTILE, exponents=(0.0,)),
                **rivals,
            },
        ),
        (
            "GeoQ (clusters)",
            calibrate(folds=clusters),
            {f"{rival} (clusters)": scheme for rival, scheme in rivals.items()},
        ),
        (
            "GeoQ (blocks and clusters)",
            calibrate(folds=CombinedFolds(TemporalFolds(5), clusters)),
            {},
        ),
        ("GeoQ (paper)", paper, {}),
    ):
        seconds = clock.of(lambda v=variant: v.fit(data.train), remembered)
        answer(name, variant, seconds)
        for other, scheme in others.items():
            answer(other, with_scheme(variant, scheme), seconds)
    for name, per_step in (
        ("Conformal (per coordinate)", False),
        ("Conformal (per step and coordinate)", True),
    ):
        conformal = RolloutConformal(remembered, settings, per_step=per_step)
        rows.append(scored(clock, name, conformal, remembered)[0])
    if pictures:
        ours, theirs = assessments["GeoQ"], assessments["GeoQ (paper)"]
        draw(pictures, clock.dt, data, ours, theirs)
    return rows


def sampled(clock, part, recipe, device):
    """Rows of a baseline that predicts with the mean of several rollouts, and of the same baseline scaled per step."""
    settings, seed, n_steps = clock.settings, clock.seed, clock.settings.n_test
    if part == "GP":
        return [chosen_process(clock, device, Remembered(recipe))]
    if part == LITTLE_NOISE:
        process = StepProcess(settings.n_gp_searched)
        baseline = SampledProcess(process, settings.n_gp_samples, n_steps, device, seed)
        fit_folds = partial(folds_of_pairs, baseline)
    elif part == "MC dropout":
        whole = WholeRollout(recipe_of(settings, seed, dropout=0.1), n_steps)
        passes = settings.n_passes
        baseline = MCDropout(whole, n_passes=passes, random_state=seed)
        fit_folds = partial(folds_of_dropout, baseline)
    else:
        whole = WholeRollout(recipe, n_steps)
        members = settings.n_members
        baseline = DeepEnsemble(whole, members, random_state=1000 * (seed + 1))
        fit_folds = partial(folds_of_ensembles, baseline, settings.n_member_jobs)
    raw, seconds = scored(clock, part, baseline, Remembered(recipe))
    scaled = ScaledPerStep(baseline, fit_folds, settings)
    name = f"{part}, scaled per step"
    return [raw, scored(clock, name, scaled, Remembered(recipe), seconds)[0]]


def chosen_process(clock, device, remembered):
    """Row of the Gaussian process that held-out rollouts choose."""
    settings = clock.settings
    how = settings.n_gp_samples, settings.n_test, device, clock.seed
    candidates = tuple(
        SampledProcess(StepProcess(settings.n_gp_searched, noise, every), *how)
        for every, bounds in NOISE.items()
        for noise in bounds
    )
    chosen = ChosenProcess(candidates, settings)
    row, _ = scored(clock, "GP", chosen, remembered)
    return row | {"chosen": chosen.chosen_.process.setting, "losses": chosen.losses_}


def scored(clock, name, baseline, remembered, before=0.0):
    """Fit a baseline and score it; return the row and the seconds of the fit, with the seconds before it."""
    x, y = clock.data.train[:-1], clock.data.train[1:]
    seconds = before + clock.of(lambda: baseline.fit(x, y), remembered)
    started = time.perf_counter()
    bound = baseline.predict(clock.data.x0)
    asking = time.perf_counter() - started
    return clock.row(name, bound, None, seconds, asking), seconds


# Pictures.


def draw(folder, dt, data, ours, theirs):
    """Draw the paper's figure for the default and for the paper's form, and the trusted horizons."""
    from matplotlib.figure import Figure

    from benchmarks import pictures

    folder.mkdir(parents=True, exist_ok=True)

    def save(figure, name):
        figure.savefig(folder / f"kuramoto-sivashinsky-{name}-{dt:g}.png", dpi=110)

    for name, a in (("default", ours), ("paper", theirs)):
        error = abs(data.truth - a.prediction)
        figure = Figure(figsize=(13, 4), layout="constrained")
        left, *maps = figure.subplots(1, 4, width_ratios=(1.5, 1, 1, 1))
        pictures.error_over_time(left, error, a.error_hat, a.n_calibrated)
        most = float(max(error[0].max(), ours.error_hat[0].max()))
        pictures.space_time(maps[0], error[0], most, "true error")
        pictures.space_time(maps[1], a.error_hat[0], most, "estimate")
        flag = np.broadcast_to(a.safe[0][:, None], error[0].shape).astype(float)
        pictures.space_time(maps[2], flag, 1.0, "safe (light)")
        figure.suptitle(
            f"Kuramoto-Sivashinsky, dt = {dt:g}: "
            + ("our default" if name == "default" else "the paper's sum")
        )
        save(figure, name)
    figure = Figure(figsize=(7, 4), layout="constrained")
    exceeds = (abs(data.truth - ours.prediction) > TOLERANCE).any(axis=2)
    held = np.where(exceeds.any(axis=1), exceeds.argmax(axis=1), exceeds.shape[1])
    axes = pictures.trusted_horizons(figure.subplots(), ours.trusted_horizon, held)
    axes.set_title(f"bounds and errors within {TOLERANCE:g}, dt = {dt:g}", fontsize=10)
    save(figure, "horizons")


def place_in_file(row):
    """Time steps in their order, the sum before the capped sum, then the order of the parts, then seeds."""
    setting, part = row["setting"], row["part"]
    place = ORDER.index(part) if part in ORDER else 0
    is_capped = setting.startswith("capped")
    return -float(setting.split("dt=")[1]), is_capped, place, row["seed"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="one seed, short data and trainings"
    )
    parser.add_argument(
        "--ablation", action="store_true", help="run the paper's ablation instead"
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0, help="first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--device", default="cpu", help="device of the Gaussian process"
    )
    parser.add_argument("--part", choices=PARTS, help="measure these methods only")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    parser.add_argument("--out", type=Path, help="where to write the results")
    parser.add_argument("--pictures", type=Path, help="a folder to draw into")
    arguments = parser.parse_args()
    settings = SMALL if arguments.small else Settings()
    problem = "kuramoto_sivashinsky" + ("_ablation" if arguments.ablation else "")
    file = f"{problem}-small.json" if arguments.small else f"{problem}.json"
    path = arguments.out or record.RESULTS / file
    first = arguments.first_seed
    seeds = range(first, first + (1 if arguments.small else arguments.seeds))

    def pictures_of(seed):
        return arguments.pictures if seed == first else None

    conditions = {
        "source": record.source("benchmarks.rollouts.kuramoto_sivashinsky"),
        "small": arguments.small,
    }
    rows = [] if arguments.fresh else record.measured(path, **conditions)
    done = {(r["part"], r["setting"].split("dt=")[1], r["seed"]) for r in rows}
    if arguments.ablation:
        tasks = [
            delayed(ablation.ablate)(dt, seed, settings, part)
            for part in ablation.PARTS
            for seed in seeds
            for dt in TIME_STEPS
            if (part, str(dt), seed) not in done
        ]
    else:
        tasks = [
            delayed(run)(dt, seed, part, settings, arguments.device, pictures_of(seed))
            for part in ([arguments.part] if arguments.part else PARTS)
            for seed in seeds
            for dt in TIME_STEPS
            if (part, str(dt), seed) not in done
        ]
    started = time.perf_counter()
    parallel = Parallel(n_jobs=arguments.jobs, return_as="generator_unordered")
    for new in parallel(tasks):
        rows += new
        rows.sort(key=place_in_file)
        record.write(problem, rows, path, **conditions)
        print(f"{len(rows)} rows, {time.perf_counter() - started:.0f} s", flush=True)
    print(path)


if __name__ == "__main__":
    main()
