"""The paper's first problem: a network trained on the middle half of the interval of the Forrester function.

    python -m benchmarks.forrester --jobs 2   # 5 seeds, all methods: about 15 minutes on two cores
    python -m benchmarks.forrester --small    # one seed, short trainings: within a minute

The paper prints u(x) = (6x - 1)^2 sin(12x - 4); the usual function has (6x - 2)^2. This benchmark uses the printed one.
Outputs are divided by their range on the training data; the size of the paper's relative errors agrees with this.
"""

import argparse
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from joblib import Parallel, delayed
from torch import nn

from benchmarks import record
from benchmarks.record import QUANTILE, Stopwatch
from benchmarks.rivals import (
    BoostedQuantile,
    CalibratedSpread,
    KNNDistanceConformal,
    KNNResidualConformal,
    MeanErrorPredictor,
    QuantileNetwork,
    RememberedTraining,
    of_x,
    of_x_distance_and_prediction,
)
from geoq import (
    CombinedFolds,
    DistanceRegion,
    GeoQ,
    NestedFolds,
    NormScaledIncrement,
    RandomFolds,
    SafeRegion,
    Training,
    TrainNetwork,
    identity,
)
from geoq.baselines import DeepEnsemble, GaussianProcess, MCDropout, SplitConformal
from geoq.geometry import GeometricFeatures
from geoq.nets.mlp import MLP

INTERVAL = (0.25, 0.75)
HIDDEN, N_ENCODER_LAYERS = (64, 64, 16, 32), 3
N_STAGES = 10
FIRST_SEED, N_SEEDS = 20, 5


def load(n_train, n_test):
    """Inputs as columns, outputs scaled to [0, 1] over the training points."""

    def u(x):
        return (6 * x - 1) ** 2 * np.sin(12 * x - 4)

    x, x_test = (
        np.linspace(*INTERVAL, n_train)[:, None],
        np.linspace(0, 1, n_test)[:, None],
    )
    low, high = u(x).min(), u(x).max()
    return x, (u(x) - low) / (high - low), x_test, (u(x_test) - low) / (high - low)


class LinearLatent(MLP):
    """The surrogate without a ReLU after its latent layer, as in a text of the paper's source that is commented out."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        linear, _, *dropout = self.encoder[-1]
        self.encoder[-1] = nn.Sequential(linear, *dropout)


@dataclass
class ScaledNorm:
    """The paper's increment of psi divided by its standard deviations: ||psi|| is the norm after the feature scaling.

    The network h reads standardised features in both cases, so only the norm differs.
    """

    model: NormScaledIncrement

    @property
    def quantile(self):
        return self.model.quantile

    def fit(self, calibration):
        self.scale_ = calibration.standardization.scale
        scaled = replace(calibration, features=self._scaled(calibration.features))
        self.model_ = replace(self.model).fit(scaled)
        self.trainings_ = self.model_.trainings_
        return self

    def __call__(self, features):
        return self.model_(self._scaled(features))

    def _scaled(self, features):
        of_displacement = self.scale_[:-1].reshape(features.displacement.shape[1:])
        return GeometricFeatures(
            features.displacement / of_displacement,
            features.support_distance / self.scale_[-1],
            features.anchor_error,
            features.prediction,
            features.inputs,
        )


def cross_fitted(shared, seed):
    """The rivals that are calibrated on the held-out errors of a GeoQ."""
    boosted = partial(BoostedQuantile, shared, QUANTILE, random_state=seed)
    return {
        "kNN-distance conformal": KNNDistanceConformal(shared, QUANTILE),
        "kNN-residual conformal": KNNResidualConformal(shared, QUANTILE),
        "Boosted quantile (x)": boosted(inputs=of_x),
        "Boosted quantile (x, distance, prediction)": boosted(
            inputs=of_x_distance_and_prediction
        ),
        "Quantile network": QuantileNetwork(shared, QUANTILE),
        "Mean-error predictor": MeanErrorPredictor(shared, QUANTILE, random_state=seed),
    }


def run(seed, pictures, *, n_train, n_test, training, n_increment_steps):
    """Rows of all methods on one seed; pictures are drawn into a folder if it is given."""
    torch.set_num_threads(1)
    x, y, x_test, y_test = load(n_train, n_test)
    network = partial(MLP, 1, 1, hidden=HIDDEN, n_encoder_layers=N_ENCODER_LAYERS)
    recipe = TrainNetwork(network, training=training).with_seed(seed)
    remembered = RememberedTraining(recipe)
    deployed = Stopwatch()
    with deployed.running():
        surrogate = recipe(x, y)

    def encoder_and_input(points):
        """Encoder outputs and inputs, each divided by its mean distance from the training mean."""
        parts = [(surrogate.encoder(p), p) for p in (x, points)]
        scale = [
            np.linalg.norm(part - part.mean(axis=0), axis=1).mean() for part in parts[0]
        ]
        return np.concatenate(
            [part / s for part, s in zip(parts[1], scale, strict=True)], axis=1
        )

    nested, random = NestedFolds(N_STAGES), RandomFolds(5, random_state=seed)
    both = CombinedFolds(random, nested)
    # The paper: h has an architecture similar to the surrogate's.
    increment = NormScaledIncrement(
        QUANTILE,
        hidden=HIDDEN,
        training=Training(n_steps=n_increment_steps, batch_size=256, random_state=seed),
    )
    calibrate = partial(
        GeoQ, surrogate, remembered, increment_model=increment, safe_region=SafeRegion()
    )
    linear = replace(
        recipe,
        make_network=partial(
            LinearLatent, 1, 1, hidden=HIDDEN, n_encoder_layers=N_ENCODER_LAYERS
        ),
    )
    linear_surrogate = linear(x, y)
    variants = {
        "GeoQ (paper)": calibrate(representation=surrogate.encoder, folds=nested),
        "GeoQ (paper, h of width 64-64)": calibrate(
            representation=surrogate.encoder,
            folds=nested,
            increment_model=replace(increment, hidden=(64, 64)),
        ),
        "GeoQ (paper, scaled norm)": calibrate(
            representation=surrogate.encoder,
            folds=nested,
            increment_model=ScaledNorm(increment),
        ),
        "GeoQ (paper, linear latent)": GeoQ(
            linear_surrogate,
            linear,
            representation=linear_surrogate.encoder,
            folds=nested,
            increment_model=increment,
            safe_region=SafeRegion(),
        ),
        "GeoQ": GeoQ(surrogate, remembered),
        "GeoQ (identity, nested)": calibrate(representation=identity, folds=nested),
        "GeoQ (encoder and input, nested)": calibrate(
            representation=encoder_and_input, folds=nested
        ),
        "GeoQ (encoder, nested and random)": calibrate(
            representation=surrogate.encoder, folds=both
        ),
        "GeoQ (identity, nested and random)": calibrate(
            representation=identity, folds=both
        ),
        # The quantile 0.999 makes the region contain the whole training interval.
        "GeoQ (identity, nested and random, distance region)": calibrate(
            representation=identity,
            folds=both,
            safe_region=DistanceRegion(quantile=0.999),
        ),
        "GeoQ (encoder and input, nested and random)": calibrate(
            representation=encoder_and_input, folds=both
        ),
    }
    dropout = TrainNetwork(partial(network, dropout=0.1), training=training).with_seed(
        seed
    )
    rivals = {
        "GP": GaussianProcess(),
        "GP (noise bound 1e-8)": GaussianProcess(noise_lower_bound=1e-8),
        "MC dropout": MCDropout(dropout, random_state=seed),
        "MC dropout (calibrated)": CalibratedSpread(
            MCDropout(dropout, random_state=seed), QUANTILE, random
        ),
        "Deep ensemble": DeepEnsemble(
            recipe, n_members=N_STAGES, random_state=1000 * (seed + 1)
        ),
        "Split conformal": SplitConformal(recipe, QUANTILE, random_state=seed),
    }
    rivals |= cross_fitted(GeoQ(surrogate, remembered, folds=both), seed)
    alone = cross_fitted(GeoQ(surrogate, remembered, folds=random), seed)
    rivals |= {f"{name} / random folds": rival for name, rival in alone.items()}
    rows, assessments = [], {}
    for name, geoq in variants.items():
        watch = Stopwatch(remembered, deployed.seconds)
        with watch.running():
            geoq.fit(x, y)
        started = time.perf_counter()
        assessments[name] = geoq.assess(x_test)
        rows.append(
            scored(
                name,
                seed,
                y_test,
                assessments[name],
                assessments[name].safe,
                watch,
                started,
            )
            | record.trainings(geoq)
        )
    # The safe columns of the rivals use the safe queries of the paper's form.
    safe = assessments["GeoQ (paper)"].safe
    for name, rival in rivals.items():
        own_surrogate = name.startswith("GP") or name in (
            "MC dropout",
            "MC dropout (calibrated)",
            "Deep ensemble",
            "Split conformal",
        )
        watch = Stopwatch(remembered, 0.0 if own_surrogate else deployed.seconds)
        with watch.running():
            rival.fit(x, y)
        started = time.perf_counter()
        rows.append(
            scored(name, seed, y_test, rival.predict(x_test), safe, watch, started)
            | record.trainings(rival)
        )
    if pictures:
        draw(pictures, x, y, x_test, y_test, assessments, variants)
    return rows


def scored(name, seed, y_test, bound, safe, watch, started):
    line = record.row(
        name,
        seed=seed,
        y=y_test,
        prediction=bound.prediction,
        error_hat=bound.error_hat,
        safe=safe,
        train_seconds=watch.seconds,
        inference_seconds=time.perf_counter() - started,
    )
    print(
        f"seed {seed}  {name:45s} pinball {line['pinball']:.4f}  correlation {line['correlation']:.3f}  "
        f"coverage {line['coverage']:.3f}  safe {line['safe_fraction']:.3f} / {line['safe_coverage']:.3f}",
        flush=True,
    )
    return line


def draw(folder, x, y, x_test, y_test, assessments, variants):
    """Draw the paper's figure and the calibration diagnostics of one seed."""
    from matplotlib.figure import Figure

    from benchmarks import pictures as paper_pictures
    from geoq import plots
    from geoq.metrics import coverage, coverage_by_bin

    for name, file in (
        ("GeoQ (paper)", "paper"),
        ("GeoQ", "default"),
    ):
        a = assessments[name]
        error = abs(y_test - a.prediction)
        figure = Figure(figsize=(13, 7.5), layout="constrained")
        (top, upper), (left, right) = figure.subplots(2, 2)
        plots.error_over_input(
            top, x_test[:, 0], error[:, 0], a.error_hat[:, 0], a.safe, INTERVAL
        )
        plots.estimate_against_error(upper, error[:, 0], a.error_hat[:, 0], a.safe)
        paper_pictures.support_scores(left, a.support_score, a.threshold)
        paper_pictures.coverage_by_score(
            right, coverage_by_bin(error, a.error_hat, a.support_score, 10), QUANTILE
        )
        figure.suptitle(f"Forrester, {name}")
        figure.savefig(folder / f"forrester-{file}.png", dpi=110)
    levels, observed, inside = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99), [], []
    paper, assessment = variants["GeoQ (paper)"], assessments["GeoQ (paper)"]
    error = abs(y_test - assessment.prediction)
    for level in levels:
        increment_model = replace(paper.increment_model, quantile=level)
        bound = replace(paper, increment_model=increment_model).fit(x, y).bound(x_test)
        observed.append(coverage(error, bound))
        inside.append(coverage(error, bound, assessment.safe))
    figure = Figure(figsize=(5, 4.5), layout="constrained")
    paper_pictures.calibration_curve(
        figure.subplots(), np.array(levels), np.array(observed), np.array(inside)
    )
    figure.savefig(folder / "forrester-levels.png", dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="one seed, short trainings"
    )
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, help="first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes, one seed each")
    parser.add_argument("--out", type=Path, help="where to write the results")
    parser.add_argument("--pictures", type=Path, help="a folder to draw into")
    arguments = parser.parse_args()
    if arguments.small:
        settings = {
            "n_train": 300,
            "n_test": 200,
            "training": Training(n_steps=150, check_every=50),
            "n_increment_steps": 300,
        }
    else:
        training = Training(n_steps=8440, batch_size=32, check_every=100, patience=30)
        settings = {"n_train": 1200, "n_test": 4000, "training": training}
        settings["n_increment_steps"] = 3000
    first = arguments.first_seed
    seeds = [0] if arguments.small else range(first, first + N_SEEDS)
    runs = Parallel(n_jobs=arguments.jobs, return_as="generator")(
        delayed(run)(seed, arguments.pictures if seed == seeds[0] else None, **settings)
        for seed in seeds
    )
    rows = []
    for new in runs:  # an interrupted run keeps the rows of the finished seeds
        rows += new
        path = record.write("forrester", rows, arguments.out, small=arguments.small)
    print(path)


if __name__ == "__main__":
    main()
