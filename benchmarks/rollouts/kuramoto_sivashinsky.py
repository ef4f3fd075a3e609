"""The paper's second problem: rollouts of a network that steps the Kuramoto-Sivashinsky equation.

    python -m benchmarks.rollouts.kuramoto_sivashinsky --seeds 20 21 22 --jobs 6 --device cuda
    python -m benchmarks.rollouts.kuramoto_sivashinsky --small

The network learns 4000 snapshots (L = 22, 64 points, scaled to [0, 1] by their range) and is rolled out for 600 steps
from 10 initial states after them; calibration rollouts have 300 steps. The paper gives no time step, and the results
depend on it: with dt = 0.25 the training data cover the attractor, with dt = 0.05 they do not. Both are run.

Methods that calibrate on held-out rollouts use the same fold networks. "One number per horizon" and "Horizon x
climatology" are simple rivals; they use the calibration rollouts of the default or, in the rows marked "(clusters)", of
the paper's cluster folds. ", scaled per step" multiplies the bound of a baseline by a factor per step, calibrated on the same held-out
rollouts. The networks are trained on the CPU; ``--device cuda`` moves the Gaussian process to the GPU.
"""

import time
from functools import partial
from pathlib import Path

from benchmarks.rivals import DeepEnsemble, MCDropout
from benchmarks.rollouts import methods
from benchmarks.rollouts.ablation import SETTINGS, TIME_STEPS, training_of
from benchmarks.rollouts.data import load, recipe_of
from benchmarks.rollouts.gaussian_process import NOISE, SampledProcess, StepProcess
from benchmarks.rollouts.scores import Clock
from benchmarks.runs import Benchmark, parser_of, run
from geoq import ClusterFolds, CombinedFolds, RolloutGeoQ, TemporalFolds
from geoq.parts import MemberGrowth, PaperRegion

LITTLE_NOISE = "GP, noise 1e-10"
ON_CLUSTERS = [f"{name} (clusters)" for name in methods.SIMPLE]
CONFORMAL = {"Conformal (per coordinate)": False, "Conformal (per step and coordinate)": True}
# The methods that one fit of GeoQ gives, and the methods with samples of their own.
FITS = {
    "GeoQ": ["GeoQ", "GeoQ (geometry off)", *methods.SIMPLE],
    "GeoQ (clusters)": ["GeoQ (clusters)", *ON_CLUSTERS],
    "GeoQ (blocks and clusters)": ["GeoQ (blocks and clusters)"],
    "GeoQ (paper)": ["GeoQ (paper)", "GeoQ (paper, capped)"],
}
SAMPLED = ("MC dropout", "Deep ensemble", LITTLE_NOISE)
METHODS = [m for of in FITS.values() for m in of] + [*CONFORMAL, "GP"]
METHODS += [name for method in SAMPLED for name in (method, f"{method}, scaled per step")]
# Tolerance of the trusted horizon, in units of the range of the data.
TOLERANCE = 0.5


def measure(problem, seed, wanted, *, small=False, device="cpu", pictures=None):
    """Rows of some methods; draws pictures if a folder is given."""
    settings = SETTINGS[small]
    data, recipe = load(float(problem[3:]), seed, settings), recipe_of(settings, seed)
    remembered, started = methods.Remembered(recipe), time.perf_counter()
    surrogate = recipe([data.train])
    clock = Clock(time.perf_counter() - started, data, settings, problem, seed)
    clock.own_rollout(methods.RolledOut(surrogate, settings.n_test))
    rows, answers = [], {}
    for name, estimator in estimators(surrogate, remembered, settings, seed).items():
        if set(FITS[name]) & set(wanted):
            found, answers[name] = of_fit(clock, name, estimator, remembered)
            rows += found
    for name, per_step in CONFORMAL.items():
        if name in wanted:
            conformal = methods.RolloutConformal(remembered, settings, per_step=per_step)
            rows.append(scored(clock, name, conformal, remembered)[0])
    if "GP" in wanted:
        rows.append(chosen_process(clock, device, remembered))
    for name in SAMPLED:
        if {name, f"{name}, scaled per step"} & set(wanted):
            rows += sampled(clock, name, recipe, device)
    if pictures:
        draw(pictures, problem, data, answers)
    return [row for row in rows if row["method"] in wanted]


def estimators(surrogate, remembered, settings, seed):
    """The default with three kinds of folds, and the paper's form."""
    sizes = {"n_calibration": settings.n_calibration, "n_starts": settings.n_starts}
    calibrate = partial(RolloutGeoQ, surrogate, remembered, **sizes)
    clusters = ClusterFolds(5, random_state=seed)
    parts = {"scheme": methods.RecordedSum(training=training_of(settings)), "n_anchors": 50}
    parts |= {"representation": surrogate.encoder, "safe_region": PaperRegion()}
    paper = calibrate(**parts, folds=clusters)
    both = CombinedFolds(TemporalFolds(5), clusters)
    of_folds = calibrate(), calibrate(folds=clusters), calibrate(folds=both)
    return dict(zip(FITS, (*of_folds, paper), strict=True))


def of_fit(clock, name, estimator, remembered):
    """Rows of an estimator and of what is fitted to the same calibration rollouts, and the answer of the estimator."""
    data, n_steps = clock.data, clock.settings.n_test
    _, seconds = clock.timed(lambda: estimator.fit(data.train, progress=None), remembered)
    fitted, rows = estimator.fitted_, []

    def ask(own):
        return clock.timed(lambda: own.assess(data.x0, n_steps, TOLERANCE, None))

    answer, asking = ask(fitted)
    courses = [vars(course) for course in getattr(estimator.scheme, "courses", [])]
    course = {"trainings": courses} if courses else {}
    rows.append(clock.row(name, answer, answer.safe, seconds, asking) | course)
    if name == "GeoQ (paper)":
        cut = methods.capped(answer, fitted)
        rows.append(clock.row(FITS[name][1], cut, answer.safe, seconds, asking) | course)
        return rows, answer
    others = dict(zip(ON_CLUSTERS, methods.SIMPLE.values(), strict=True))
    if name == "GeoQ":
        others = {"GeoQ (geometry off)": MemberGrowth(n_members=0), **methods.SIMPLE}
    for other in (m for m in FITS[name] if m in others):
        own, asking = ask(methods.with_scheme(fitted, others[other]))
        rows.append(clock.row(other, own, own.safe, seconds, asking))
    return rows, answer


def sampled(clock, name, recipe, device):
    """Rows of a baseline that predicts with the mean of several rollouts, and of the same baseline scaled per step."""
    settings, seed, n_steps = clock.settings, clock.seed, clock.settings.n_test
    if name == LITTLE_NOISE:
        process = StepProcess(settings.n_gp_searched)
        baseline = SampledProcess(process, settings.n_gp_samples, n_steps, device, seed)
        fit_folds = partial(methods.folds_of_pairs, baseline)
    elif name == "MC dropout":
        whole = methods.WholeRollout(recipe_of(settings, seed, dropout=0.1), n_steps)
        baseline = MCDropout(whole, settings.n_passes, seed)
        fit_folds = partial(methods.folds_of_dropout, baseline)
    else:
        whole = methods.WholeRollout(recipe, n_steps)
        baseline = DeepEnsemble(whole, settings.n_members, 1000 * (seed + 1))
        fit_folds = partial(methods.folds_of_ensembles, baseline, settings.n_member_jobs)
    raw, seconds = scored(clock, name, baseline, None)
    scaled = methods.ScaledPerStep(baseline, fit_folds, settings)
    return [raw, scored(clock, f"{name}, scaled per step", scaled, None, seconds)[0]]


def chosen_process(clock, device, remembered):
    """Row of the Gaussian process that held-out rollouts choose."""
    settings = clock.settings
    how = settings.n_gp_samples, settings.n_test, device, clock.seed
    noises = [(noise, every) for every, bounds in NOISE.items() for noise in bounds]
    processes = [StepProcess(settings.n_gp_searched, *noise) for noise in noises]
    candidates = tuple(SampledProcess(process, *how) for process in processes)
    chosen = methods.ChosenProcess(candidates, settings)
    row, _ = scored(clock, "GP", chosen, remembered)
    return row | {"chosen": chosen.chosen_.process.setting, "losses": chosen.losses_}


def scored(clock, name, baseline, remembered, before=0.0):
    """Fit a baseline and score it; return the row and the seconds of the fit, with the seconds before it."""
    x, y = clock.data.train[:-1], clock.data.train[1:]
    seconds = before + clock.timed(lambda: baseline.fit(x, y), remembered)[1]
    bound, asking = clock.timed(lambda: baseline.predict(clock.data.x0))
    return clock.row(name, bound, None, seconds, asking), seconds


def draw(folder, problem, data, answers):
    """Mean error and mean bound over time, and maps of both for the first rollout."""
    from matplotlib.figure import Figure

    from benchmarks import pictures

    a, dt = answers["GeoQ"], problem[3:]
    error = abs(data.truth - a.prediction)
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, *maps = figure.subplots(1, 3, width_ratios=(1.5, 1, 1))
    pictures.error_over_time(left, error, a.error_hat, a.n_calibrated)
    most = float(max(error[0].max(), a.error_hat[0].max()))
    pictures.space_time(maps[0], error[0], most, "true error")
    pictures.space_time(maps[1], a.error_hat[0], most, "bound")
    figure.suptitle(f"Kuramoto-Sivashinsky, dt = {dt}")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"kuramoto-sivashinsky-default-{dt}.png", dpi=110)


BENCHMARK = Benchmark(
    "kuramoto_sivashinsky", TIME_STEPS, measure, lambda _: METHODS, (20, 21, 22), TIME_STEPS[:1]
)


def main(words=None):
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cpu", help="device of the Gaussian process")
    parser.add_argument("--pictures", type=Path, help="a folder to draw into; for one seed")
    asked = parser.parse_args(words)
    return run(BENCHMARK, asked, device=asked.device, pictures=asked.pictures)


if __name__ == "__main__":
    main()
