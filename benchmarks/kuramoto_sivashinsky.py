"""The paper's second problem: rollouts of a network that steps the Kuramoto-Sivashinsky equation.

    python benchmarks/kuramoto_sivashinsky.py --jobs 6              # both time steps, 3 seeds, all methods
    python benchmarks/kuramoto_sivashinsky.py --ablation --jobs 6   # the paper's ablation table, 3 seeds
    python benchmarks/kuramoto_sivashinsky.py --small               # short data and trainings: within a minute

The network learns 4000 snapshots (L = 22, 64 points, scaled to [0, 1] by their range) and is rolled out for 600 steps
from 10 initial states after them; calibration rollouts have 300 steps. The paper gives no time step, and the answer
depends on it: with dt = 0.25 the training data cover the attractor, with dt = 0.05 they do not. Both are run.

Methods that calibrate on held-out rollouts share their fold networks. "One number per horizon" and "Horizon x
climatology" are the two simple rivals that every bound of a rollout has to beat; they get the default's own calibration
rollouts and its finish, and those of the paper's clusters in the rows marked so.

Rows are kept in the results file task by task (time step and seed); a rerun measures only those that are missing, as
long as the code is the same. The networks train on CPU, one process each; ``--device cuda`` is where the Gaussian
process lives.
"""

import argparse
import copy
import hashlib
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import record
import torch
from defaults import measured
from joblib import Parallel, delayed
from problems import etdrk4
from record import QUANTILE
from threadpoolctl import threadpool_limits

import geoq
from geoq import (
    AdditiveRecursion,
    ClusterFolds,
    CombinedFolds,
    RolloutGeoQ,
    SafeRegion,
    SaturatingGrowth,
    TemporalFolds,
    Training,
    TrainRollout,
    identity,
)
from geoq.baselines import DeepEnsemble, GaussianProcess, MCDropout
from geoq.baselines.bound import GAUSSIAN_95, Bound, spread
from geoq.baselines.conformal import conformal_quantile
from geoq.metrics import coverage, pinball
from geoq.nets.mlp import MLP
from geoq.rollout.saturating import horizon_levels

LENGTH, N_POINTS, INNER_STEP, TRANSIENT = 22.0, 64, 0.05, 200.0
HIDDEN, N_ENCODER_LAYERS = (128, 128, 16, 128, 128), 3
TIME_STEPS = (0.25, 0.05)
SEEDS = 3
# Bounds that the trusted horizon is shown for, in units of the data's range.
TOLERANCE = 0.5


@dataclass(frozen=True)
class Settings:
    """How much of everything: the paper's numbers, or few for a small run."""

    n_train: int = 4000
    n_calibration: int = 300
    n_test: int = 600
    n_starts: int = 40
    initial_states: tuple[int, ...] = tuple(range(0, 800, 80))
    n_gp: int = 1500
    n_gp_samples: int = 20
    n_passes: int = 20
    training: Training = field(
        default_factory=lambda: Training(n_steps=5000, patience=30)
    )
    fine_tuning: Training = field(
        default_factory=lambda: Training(
            n_steps=500, learning_rate=3e-4, check_every=50
        )
    )
    increment_training: Training = field(
        default_factory=lambda: Training(n_steps=1500, batch_size=16, check_every=50)
    )


SMALL = Settings(
    n_train=400,
    n_calibration=30,
    n_test=60,
    n_starts=5,
    initial_states=(0, 10, 20),
    n_gp=60,
    n_gp_samples=4,
    n_passes=4,
    training=Training(n_steps=60, check_every=30),
    fine_tuning=Training(n_steps=10, check_every=10),
    increment_training=Training(n_steps=20, batch_size=16, check_every=20),
)


def later(u, time, step=INNER_STEP, length=LENGTH):
    """States some time later, by steps of at most the inner step."""
    n_steps = max(1, round(time / step))

    def linear(wave):
        return wave**2 - wave**4

    return etdrk4(u, length=length, linear=linear, dt=time / n_steps, n_steps=n_steps)


def snapshots(dt, seed, n_snapshots):
    """A trajectory on the attractor from random long waves, after the transient."""
    rng = np.random.default_rng([seed, 1])
    place = 2 * np.pi * np.arange(N_POINTS) / N_POINTS
    state = sum(
        rng.standard_normal() * np.cos(mode * place + rng.uniform(0, 2 * np.pi))
        for mode in range(1, 5)
    )
    states = [later(state, TRANSIENT)]
    for _ in range(n_snapshots - 1):
        states.append(later(states[-1], dt))
    return np.array(states)


@dataclass(frozen=True)
class Data:
    """Training snapshots, initial states after them, and what became of these."""

    train: np.ndarray
    x0: np.ndarray
    truth: np.ndarray


def load(dt, seed, settings):
    n_needed = settings.n_train + settings.initial_states[-1] + settings.n_test + 1
    u = snapshots(dt, seed, n_needed)
    train = u[: settings.n_train]
    u = (u - train.min()) / (train.max() - train.min())
    first = settings.n_train + np.array(settings.initial_states)
    ahead = first[:, None] + np.arange(1, settings.n_test + 1)
    return Data(u[: settings.n_train], u[first], u[ahead])


@dataclass
class Remembered:
    """A recipe that trains once on the same segments; trainings not repeated are charged as if they had been done."""

    recipe: TrainRollout
    seconds_saved: float = 0.0
    known: dict = field(default_factory=dict)

    def __call__(self, segments):
        joined = b"|".join(np.ascontiguousarray(s).tobytes() for s in segments)
        key = hashlib.sha256(joined).hexdigest()
        if key in self.known:
            self.seconds_saved += self.known[key][1]
        else:
            started = time.perf_counter()
            surrogate = self.recipe(segments)
            self.known[key] = surrogate, time.perf_counter() - started
        return self.known[key][0]


def network(dropout=0.0):
    return MLP(
        N_POINTS,
        N_POINTS,
        hidden=HIDDEN,
        n_encoder_layers=N_ENCODER_LAYERS,
        dropout=dropout,
    )


def recipe_of(settings, seed, dropout=0.0):
    training, fine_tuning = settings.training, settings.fine_tuning
    recipe = TrainRollout(
        partial(network, dropout), training=training, fine_tuning=fine_tuning
    )
    return recipe.with_seed(seed)


# The baselines, rolled out.


@dataclass(frozen=True)
class RolledOut:
    """A surrogate that answers an initial state with the whole rollout, steps 1 to n_steps."""

    surrogate: object
    n_steps: int

    @property
    def network(self):
        return self.surrogate.network

    def __call__(self, x0):
        states = [self.surrogate(x0)]
        while len(states) < self.n_steps:
            states.append(self.surrogate(states[-1]))
        return np.stack(states, axis=1)


@dataclass(frozen=True)
class WholeRollout:
    """The recipe as the one-shot baselines take it: pairs in, a surrogate of whole rollouts out."""

    recipe: TrainRollout
    n_steps: int

    def __call__(self, x, y):
        return RolledOut(self.recipe([np.concatenate([x, y[-1:]])]), self.n_steps)

    def with_seed(self, random_state):
        return replace(self, recipe=self.recipe.with_seed(random_state))


@dataclass
class SampledProcess:
    """A Gaussian process of one step, propagated by Monte Carlo: mean of the samples, and their spread as a bound.

    Samples stay within the range of the data: outside, the process is so uncertain that the next ones would run off.
    """

    n_points: int
    n_samples: int
    n_steps: int
    device: str
    random_state: int

    def fit(self, x, y):
        rows = np.linspace(0, len(x) - 1, min(self.n_points, len(x))).astype(int)
        pairs = (torch.from_numpy(part[rows]).to(self.device) for part in (x, y))
        self.process_ = GaussianProcess().fit(*pairs)
        self.range_ = [
            torch.from_numpy(limit).to(self.device)
            for limit in (x.min(axis=0), x.max(axis=0))
        ]
        return self

    def predict(self, x0):
        generator = torch.Generator(self.device).manual_seed(self.random_state)
        state = torch.from_numpy(x0).to(self.device).repeat(self.n_samples, 1)
        states = []
        for _ in range(self.n_steps):
            answer = self.process_.predict(state)
            noise = torch.randn(
                state.shape, generator=generator, dtype=state.dtype, device=self.device
            )
            state = answer.prediction + answer.error_hat / GAUSSIAN_95 * noise
            state = state.clamp(*self.range_)
            states.append(state.cpu())
        sampled = torch.stack(states, dim=1).unflatten(0, (self.n_samples, len(x0)))
        mean, deviation = spread(iter(sampled))
        return Bound(mean.numpy(), GAUSSIAN_95 * deviation.numpy())


@dataclass
class RolloutConformal:
    """Split conformal on rollouts: one bound per coordinate, or one per step and coordinate, from the last fifth."""

    recipe: TrainRollout
    settings: Settings
    per_step: bool

    def fit(self, x, y):
        states, n_steps = np.concatenate([x, y[-1:]]), self.settings.n_calibration
        n_proper = round(0.8 * len(states))
        self.surrogate_ = self.recipe([states[:n_proper]])
        n_starts = 5 * self.settings.n_starts
        last = len(states) - 1 - n_steps
        starts = np.unique(np.linspace(n_proper, last, n_starts).astype(int))
        truth = states[starts[:, None] + np.arange(1, n_steps + 1)]
        prediction = RolledOut(self.surrogate_, n_steps)(states[starts])
        error = torch.from_numpy(abs(truth - prediction))
        scores = error if self.per_step else error.flatten(0, 1)[:, None]
        self.bound_ = conformal_quantile(scores, QUANTILE).numpy()
        return self

    def predict(self, x0):
        n_steps = self.settings.n_test
        step = np.arange(n_steps).clip(max=len(self.bound_) - 1)
        prediction = RolledOut(self.surrogate_, n_steps)(x0)
        return Bound(prediction, np.broadcast_to(self.bound_[step], prediction.shape))


# The two simple rivals: schemes like ours, fitted on the same calibration rollouts.


@dataclass
class OneNumberPerHorizon:
    """The level of the held-out errors at each step, the same for all states and coordinates."""

    quantile: float = QUANTILE

    def fit(self, calibration):
        error = calibration.error
        self.level_ = horizon_levels(error, torch.ones_like(error), self.quantile)
        return self

    def __call__(self, features):
        step = torch.arange(features.n_steps).clamp(max=len(self.level_) - 1)
        return self.level_[step][:, None].expand_as(features.climatology).clone()


@dataclass
class HorizonTimesClimatology:
    """A level per step times the distance of the predicted value to the states of the data."""

    quantile: float = QUANTILE

    def fit(self, calibration):
        self.level_ = horizon_levels(
            calibration.error, calibration.features.climatology, self.quantile
        )
        return self

    def __call__(self, features):
        step = torch.arange(features.n_steps).clamp(max=len(self.level_) - 1)
        return self.level_[step][:, None] * features.climatology


def under(fitted, scheme):
    """The same surrogate and calibration rollouts under another scheme."""
    other = copy.copy(fitted)
    other.scheme_ = scheme.fit(fitted.calibration_)
    return other


def capped(assessment, fitted):
    """The sum of increments, but no more than the climatology of the predicted state: what the paper must have done."""
    states = torch.from_numpy(assessment.prediction)
    most = fitted.surroundings_.climatology(states).numpy()
    return Bound(assessment.prediction, np.minimum(assessment.error_hat, most))


# One time step and seed.


def run(dt, seed, settings, device, pictures):
    """All methods: rows of the table; draws where a folder is given."""
    torch.set_num_threads(1)
    with threadpool_limits(1):
        return _run(dt, seed, settings, device, pictures)


def _run(dt, seed, settings, device, pictures):
    data = load(dt, seed, settings)
    recipe = recipe_of(settings, seed)
    remembered = Remembered(recipe)
    started = time.perf_counter()
    surrogate = recipe([data.train])
    clock = Clock(time.perf_counter() - started, data, settings, dt, seed)
    clock.own_rollout(RolledOut(surrogate, settings.n_test))
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
        safe_region=SafeRegion,
    )
    rows, assessments = [], {}

    def answer(name, fitted, seconds):
        started = time.perf_counter()
        assessments[name] = fitted.assess(data.x0, settings.n_test, TOLERANCE)
        asking = time.perf_counter() - started
        safe = assessments[name].safe
        rows.append(clock.row(name, assessments[name], safe, seconds, asking))
        if name == "GeoQ (paper)":
            cut = capped(assessments[name], fitted)
            rows.append(clock.row("GeoQ (paper, capped)", cut, safe, seconds, asking))

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
            answer(other, under(variant, scheme), seconds)
    # The baselines' safe columns: the same steps as in the paper's form.
    safe = assessments["GeoQ (paper)"].safe
    x, y = data.train[:-1], data.train[1:]
    whole = partial(WholeRollout, n_steps=settings.n_test)
    baselines = {
        "GP": SampledProcess(
            settings.n_gp, settings.n_gp_samples, settings.n_test, device, seed
        ),
        "MC dropout": MCDropout(
            whole(recipe_of(settings, seed, dropout=0.1)),
            n_passes=settings.n_passes,
            random_state=seed,
        ),
        "Deep ensemble": DeepEnsemble(whole(recipe), random_state=1000 * (seed + 1)),
        "Conformal (per coordinate)": RolloutConformal(
            remembered, settings, per_step=False
        ),
        "Conformal (per step and coordinate)": RolloutConformal(
            remembered, settings, per_step=True
        ),
    }
    for name, baseline in baselines.items():
        seconds = clock.of(lambda b=baseline: b.fit(x, y), remembered)
        started = time.perf_counter()
        bound = baseline.predict(data.x0)
        asking = time.perf_counter() - started
        rows.append(clock.row(name, bound, safe, seconds, asking))
    if pictures:
        draw(pictures, dt, data, assessments["GeoQ"], assessments["GeoQ (paper)"])
    return rows


@dataclass
class Clock:
    """Scores a bound and puts its costs beside those of the surrogate: its training and its own rollout."""

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
        truth, n_steps = self.data.truth, self.settings.n_test
        line = record.row(
            method,
            setting=f"dt={self.dt}",
            seed=self.seed,
            y=truth,
            prediction=bound.prediction,
            error_hat=bound.error_hat,
            safe=safe,
            train_seconds=fit_seconds,
            inference_seconds=inference_seconds,
        )
        error = abs(truth - bound.prediction)
        quarters = np.array_split(np.arange(n_steps), 4)
        for number, steps in enumerate(quarters, start=1):
            line[f"coverage_q{number}"] = coverage(
                error[:, steps], bound.error_hat[:, steps]
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
            f"({by_quarter})  safe {line['safe_fraction']:.3f}  {fit_seconds:.0f} s, {inference_seconds:.1f} s",
            flush=True,
        )
        return line


# The paper's ablation.


def absolute_displacement(features):
    displacement = features.displacement.flatten(start_dim=2).abs()
    return torch.cat([displacement, features.support_distance[..., None]], dim=2)


def length_of_displacement(features):
    length = features.displacement.flatten(start_dim=2).norm(dim=2, keepdim=True)
    return torch.cat([length, features.support_distance[..., None]], dim=2)


def displacement_alone(features):
    return features.displacement.flatten(start_dim=2)


def choices(surrogate, seed, settings):
    """The paper's table: one choice varied at a time; None stands for the default configuration."""
    form = partial(AdditiveRecursion, QUANTILE, training=settings.increment_training)
    default = {
        "representation": surrogate.encoder,
        "scheme": form(),
        "n_anchors": 50,
        "folds": ClusterFolds(5, random_state=seed),
    }
    varied = {
        "phi = encoder, psi = (dz, dd), k_a = 50, K_f = 5": {},
        "phi = identity": {"representation": identity},
        "psi = (abs dz, dd)": {"scheme": form(psi=absolute_displacement)},
        "psi = (length of dz, dd)": {"scheme": form(psi=length_of_displacement)},
        "psi = dz": {"scheme": form(psi=displacement_alone)},
        "k_a = 1": {"n_anchors": 1},
        "k_a = 10": {"n_anchors": 10},
        "k_a = 100": {"n_anchors": 100},
        **{
            f"K_f = {n_folds}": {"folds": ClusterFolds(n_folds, random_state=seed)}
            for n_folds in (2, 10, 20)
        },
    }
    return {name: default | change for name, change in varied.items()}


def ablate(dt, seed, settings, part):
    """Rows of the ablation, with the sum as it is and capped; parts share no fold networks."""
    torch.set_num_threads(1)
    with threadpool_limits(1):
        data = load(dt, seed, settings)
        remembered = Remembered(recipe_of(settings, seed))
        started = time.perf_counter()
        surrogate = remembered([data.train])
        clock = Clock(time.perf_counter() - started, data, settings, dt, seed)
        clock.own_rollout(RolledOut(surrogate, settings.n_test))
        rows = []
        for name, change in choices(surrogate, seed, settings).items():
            if (name if name.startswith("K_f") else "K_f = 5") != part:
                continue
            # As many rollouts in all, however many folds they come from.
            n_starts = -(-5 * settings.n_starts // change["folds"].n_folds)
            variant = RolloutGeoQ(
                surrogate,
                remembered,
                n_calibration=settings.n_calibration,
                n_starts=n_starts,
                **change,
            )
            seconds = clock.of(lambda v=variant: v.fit(data.train), remembered)
            started = time.perf_counter()
            a = variant.assess(data.x0, settings.n_test)
            asking = time.perf_counter() - started
            for setting, bound in (
                (f"sum, dt={dt}", a),
                (f"capped sum, dt={dt}", capped(a, variant)),
            ):
                line = clock.row(name, bound, a.safe, seconds, asking)
                rows.append(line | {"setting": setting, "part": part})
        return rows


# Pictures.


def draw(folder, dt, data, ours, theirs):
    """The paper's figure for our default and for its own form, and the trusted horizons."""
    from matplotlib.figure import Figure

    from geoq import plots

    folder.mkdir(parents=True, exist_ok=True)

    def save(figure, name):
        figure.savefig(folder / f"kuramoto-sivashinsky-{name}-{dt:g}.png", dpi=110)

    for name, a in (("default", ours), ("paper", theirs)):
        error = abs(data.truth - a.prediction)
        figure = Figure(figsize=(13, 4), layout="constrained")
        left, *maps = figure.subplots(1, 4, width_ratios=(1.5, 1, 1, 1))
        plots.error_over_time(left, error, a.error_hat, a.n_calibrated)
        most = float(max(error[0].max(), ours.error_hat[0].max()))
        plots.space_time(maps[0], error[0], most, "true error")
        plots.space_time(maps[1], a.error_hat[0], most, "estimate")
        flag = np.broadcast_to(a.safe[0][:, None], error[0].shape).astype(float)
        plots.space_time(maps[2], flag, 1.0, "safe (light)")
        figure.suptitle(
            f"Kuramoto-Sivashinsky, dt = {dt:g}: "
            + ("our default" if name == "default" else "the paper's sum")
        )
        save(figure, name)
    figure = Figure(figsize=(7, 4), layout="constrained")
    exceeds = (abs(data.truth - ours.prediction) > TOLERANCE).any(axis=2)
    held = np.where(exceeds.any(axis=1), exceeds.argmax(axis=1), exceeds.shape[1])
    axes = plots.trusted_horizons(figure.subplots(), ours.trusted_horizon, held)
    axes.set_title(f"bounds and errors within {TOLERANCE:g}, dt = {dt:g}", fontsize=10)
    save(figure, "horizons")


def source():
    """Fingerprint of the code that the rows depend on."""
    here = Path(__file__).parent
    files = sorted(Path(geoq.__file__).parent.rglob("*.py"))
    files += [
        here / f"{name}.py" for name in (Path(__file__).stem, "problems", "record")
    ]
    return hashlib.sha256(b"".join(map(Path.read_bytes, files))).hexdigest()[:16]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="one seed, short data and trainings"
    )
    parser.add_argument("--ablation", action="store_true", help="the ablation instead")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0, help="where they start")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--device", default="cpu", help="where the GP lives")
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

    conditions = {"source": source(), "small": arguments.small}
    rows = [] if arguments.fresh else measured(path, **conditions)
    if arguments.ablation:
        # The longest tasks first.
        parts = [f"K_f = {n_folds}" for n_folds in (20, 5, 10, 2)]
        done = {(r["part"], r["seed"]) for r in rows}
        tasks = [
            delayed(ablate)(TIME_STEPS[0], seed, settings, part)
            for part in parts
            for seed in seeds
            if (part, seed) not in done
        ]
    else:
        done = {(r["setting"], r["seed"]) for r in rows}
        tasks = [
            delayed(run)(dt, seed, settings, arguments.device, pictures_of(seed))
            for seed in seeds
            for dt in TIME_STEPS
            if (f"dt={dt}", seed) not in done
        ]
    started = time.perf_counter()
    parallel = Parallel(n_jobs=arguments.jobs, return_as="generator_unordered")
    for new in parallel(tasks):
        rows += new
        rows.sort(key=lambda r: (-float(r["setting"].split("=")[1]), r["seed"]))
        record.write(problem, rows, path, **conditions)
        print(f"{len(rows)} rows, {time.perf_counter() - started:.0f} s", flush=True)
    print(path)


if __name__ == "__main__":
    main()
