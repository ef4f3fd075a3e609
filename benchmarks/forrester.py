"""The paper's first problem: a network trained on the middle half of the interval of the Forrester function.

    python -m benchmarks.forrester --jobs 2   # 5 seeds, all methods: about 15 minutes on two cores
    python -m benchmarks.forrester --small    # one seed, short trainings

The paper prints u(x) = (6x - 1)^2 sin(12x - 4); the usual function has (6x - 2)^2. This benchmark uses the printed one.
Outputs are divided by their range on the training data; the size of the paper's relative errors agrees with this. The safe columns of
the rivals have the flags of the paper's form, if it is measured in the same run.
"""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import record, rivals
from benchmarks.record import QUANTILE
from benchmarks.runs import Benchmark, parser_of, run
from benchmarks.scores import row
from benchmarks.suite.methods import shortened
from benchmarks.timing import Stopwatch
from geoq import MLP, CombinedFolds, GeoQ, NestedFolds, RandomFolds, Training, TrainNetwork
from geoq.data.metric import identity
from geoq.parts import NormScaledBound

INTERVAL = (0.25, 0.75)
HIDDEN, N_ENCODER_LAYERS = (64, 64, 16, 32), 3
N_STAGES = 10
OWN_SURROGATE = ("GP", "MC dropout", "Deep ensemble", "Split conformal")


def load(n_train, n_test):
    """Inputs as columns, outputs scaled to [0, 1] over the training points."""

    def u(x):
        return (6 * x - 1) ** 2 * np.sin(12 * x - 4)

    x, x_test = (np.linspace(*INTERVAL, n_train)[:, None], np.linspace(0, 1, n_test)[:, None])
    low, high = u(x).min(), u(x).max()
    return x, (u(x) - low) / (high - low), x_test, (u(x_test) - low) / (high - low)


def forms(surrogate, remembered, seed, n_steps):
    """GeoQ in the paper's form, with its defaults, and between them."""
    # The paper: h has an architecture similar to the surrogate's.
    training = Training(n_steps=n_steps, batch_size=256, random_state=seed)
    model = NormScaledBound(HIDDEN, training)
    nested = NestedFolds(N_STAGES)
    both = {"folds": CombinedFolds(RandomFolds(5, random_state=seed), nested)}
    calibrate = partial(GeoQ.paper, surrogate, remembered, bound_model=model, folds=nested)
    of_encoder = {"representation": surrogate.encoder}
    # The quantile 0.999 makes the region contain the whole training interval.
    whole = rivals.DistanceRegion(quantile=0.999)
    small_h = replace(model, hidden=(64, 64))
    return {
        "GeoQ (paper)": calibrate(**of_encoder),
        "GeoQ (paper, h of width 64-64)": calibrate(**of_encoder, bound_model=small_h),
        "GeoQ": GeoQ(surrogate, remembered),
        "GeoQ (identity, nested)": calibrate(representation=identity),
        "GeoQ (encoder, nested and random)": calibrate(**of_encoder, **both),
        "GeoQ (identity, nested and random)": calibrate(representation=identity, **both),
        "GeoQ (identity, nested and random, distance region)": calibrate(
            representation=identity, **both, safe_region=whole
        ),
    }


def baselines(surrogate, remembered, recipe, seed):
    """The baselines of the paper, and the rivals that are calibrated on the held-out errors of both kinds of folds."""
    random = RandomFolds(5, random_state=seed)
    make = partial(MLP, 1, 1, hidden=HIDDEN, n_encoder_layers=N_ENCODER_LAYERS, dropout=0.1)
    dropout = rivals.MCDropout(replace(recipe, make_network=make), random_state=seed)
    found = {
        "GP": rivals.GaussianProcess(),
        "GP (noise bound 1e-8)": rivals.GaussianProcess(noise_lower_bound=1e-8),
        "MC dropout": dropout,
        "MC dropout (calibrated)": rivals.CalibratedSpread(dropout, QUANTILE, random),
        "Deep ensemble": rivals.DeepEnsemble(recipe, N_STAGES, 1000 * (seed + 1)),
        "Split conformal": rivals.SplitConformal(recipe, QUANTILE, random_state=seed),
    }
    both = CombinedFolds(random, NestedFolds(N_STAGES))
    for ending, folds in (("", both), (" / random folds", random)):
        shared = GeoQ(surrogate, remembered, folds=folds)
        boosted = partial(rivals.BoostedQuantile, shared, random_state=seed)
        of_folds = {
            "kNN-distance conformal": rivals.KNNDistanceConformal(shared),
            "kNN-residual conformal": rivals.KNNResidualConformal(shared),
            "Boosted quantile (x)": boosted(),
            "Boosted quantile (x, distance, prediction)": boosted(
                inputs=rivals.of_x_distance_and_prediction
            ),
            "Quantile network": rivals.QuantileNetwork(shared),
            "Mean-error predictor": rivals.MeanErrorPredictor(shared, random_state=seed),
        }
        found |= {f"{name}{ending}": rival for name, rival in of_folds.items()}
    return found


def recipe_of(seed, *, small=False):
    """The paper's network and training."""
    make = partial(MLP, 1, 1, hidden=HIDDEN, n_encoder_layers=N_ENCODER_LAYERS)
    training = Training(n_steps=8440, batch_size=32, check_every=100, patience=30)
    recipe = TrainNetwork(make, training=training).with_seed(seed)
    return shortened(recipe) if small else recipe


def names(_problem):
    """The names of all methods."""
    recipe = recipe_of(0)
    stub = partial(abs)
    stub.encoder = identity
    return [*forms(stub, recipe, 0, 1), *baselines(stub, recipe, recipe, 0)]


def measure(problem, seed, wanted, *, small=False, pictures=None):
    """Rows of some methods on one seed; pictures are drawn into a folder if it is given."""
    n_train, n_test = (240, 100) if small else (1200, 4000)
    x, y, x_test, y_test = load(n_train, n_test)
    recipe = recipe_of(seed, small=small)
    remembered, deployed = rivals.RememberedTraining(recipe), Stopwatch()
    with deployed.running():
        surrogate = remembered(x, y)

    every = forms(surrogate, remembered, seed, 100 if small else 3000)
    every |= baselines(surrogate, remembered, recipe, seed)
    rows, shown, safe = [], None, None
    for name, estimator in every.items():
        if name not in wanted:
            continue
        estimator = shortened(estimator) if small else estimator
        own = name.startswith(OWN_SURROGATE)
        watch = Stopwatch(remembered, 0.0 if own else deployed.seconds)
        with watch.running():
            estimator.fit(x, y)
        started, ours = time.perf_counter(), isinstance(estimator, GeoQ)
        answer = estimator.assess(x_test) if ours else estimator.predict(x_test)
        shown = answer if name == "GeoQ" else shown
        safe = answer.safe if name == "GeoQ (paper)" else safe  # also for the rivals
        seconds = watch.seconds, time.perf_counter() - started
        about = {"problem": problem, "method": name, "setting": "", "seed": seed}
        line = row(about, y_test, answer, answer.safe if ours else safe, seconds)
        rows.append(line | record.trainings(estimator))
    if pictures and shown is not None:
        draw(pictures, x_test, y_test, shown)
    return rows


def draw(folder, x_test, y_test, a):
    """Error and bound over the input, and bound against error, of one seed."""
    from matplotlib.figure import Figure

    from geoq import plots

    error = abs(y_test - a.prediction)
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    plots.error_over_input(left, x_test[:, 0], error[:, 0], a.error_hat[:, 0], a.safe, INTERVAL)
    plots.estimate_against_error(right, error[:, 0], a.error_hat[:, 0], a.safe)
    left.set(yscale="log", ylim=(1e-5, 10), xlabel="input")
    left.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.suptitle("The Forrester function: error of a network and bound of the default")
    figure.savefig(folder / "forrester-default.png", dpi=110)


BENCHMARK = Benchmark("forrester", ("forrester",), measure, names, range(20, 25))


def main(words=None):
    parser = parser_of(__doc__)
    parser.add_argument("--pictures", type=Path, help="a folder to draw into; for one seed")
    asked = parser.parse_args(words)
    return run(BENCHMARK, asked, pictures=asked.pictures)


if __name__ == "__main__":
    main()
