"""The methods of the comparison: GeoQ with its defaults and some variants, and the rivals.

The rivals measure distances between standardised inputs, as their authors do. All methods that use fold surrogates share
those that are trained on the same rows.
"""

from dataclasses import replace
from functools import partial

from benchmarks.record import QUANTILE
from benchmarks.rivals import (
    BoostedQuantile,
    KNNDistanceConformal,
    KNNResidualConformal,
    MeanErrorPredictor,
    QuantileNetwork,
    SplineScaledConformal,
    of_x,
    of_x_distance_and_prediction,
)
from benchmarks.rivals.constant import Constant
from benchmarks.rivals.gp_scaled import GPScaledConformal
from benchmarks.suite.recipes import Network
from geoq import (
    ClusterFolds,
    CombinedFolds,
    DistanceRegion,
    GeoQ,
    NestedFolds,
    NormScaledIncrement,
    RandomFolds,
    SafeRegion,
    StandardizedMetric,
    Training,
    default_folds,
    identity,
)
from geoq.baselines import DeepEnsemble, SplitConformal

OWN_SURROGATE = ("Split conformal", "Deep ensemble")
ON_RANDOM_FOLDS = " / random folds"
# Uses the spline of GeoQ's default; it is shown, but it is not one of the ten.
SPLINE_SCALED = "Spline-scaled conformal"


def is_ours(method):
    """Whether a method is GeoQ in some form."""
    return method.startswith("GeoQ")


def is_rival(method):
    """Whether a method is one of the ten rivals, with the default folds."""
    own = is_ours(method) or method.startswith(SPLINE_SCALED)
    return not own and not method.endswith(ON_RANDOM_FOLDS)


def is_rival_on_any_folds(method):
    """Whether a method is one of the ten rivals, or one of the eight that are also calibrated on random folds alone."""
    return is_rival(method.removesuffix(ON_RANDOM_FOLDS))


def ten_trainings(interpolating):
    """Folds with ten trainings: five of interpolation, three clusters and two nested stages."""
    return CombinedFolds(interpolating, ClusterFolds(3), NestedFolds(2, smallest=1 / 6))


def eight_trainings(interpolating):
    """Folds with eight trainings: five of interpolation and three nested stages."""
    return CombinedFolds(interpolating, NestedFolds(3, smallest=1 / 6))


def forms_of_geoq(surrogate, train_surrogate, interpolating):
    """GeoQ with its defaults, in the paper's form, with fewer trainings, and with equal weights of the inputs."""
    make = partial(GeoQ, surrogate, train_surrogate)
    families = default_folds(interpolating)
    return {
        "GeoQ": make(folds=families),
        "GeoQ (paper)": make(
            representation=identity,
            folds=ClusterFolds(5),
            increment_model=NormScaledIncrement(QUANTILE),
            safe_region=SafeRegion(),
        ),
        "GeoQ (10 trainings)": make(folds=ten_trainings(interpolating)),
        "GeoQ (8 trainings)": make(folds=eight_trainings(interpolating)),
        "GeoQ (equal weights)": make(
            representation=StandardizedMetric(), folds=families
        ),
    }


def rivals(shared, recipe, n_train, seed):
    """The ten rivals and the spline-scaled conformal bound; ``shared`` is the GeoQ whose surrogate and folds they use."""
    boosted = partial(BoostedQuantile, shared, QUANTILE, random_state=seed)
    return {
        "Constant": Constant(shared, QUANTILE),
        "Split conformal": SplitConformal(
            recipe,
            QUANTILE,
            calibration_fraction=max(0.2, 20 / n_train),
            random_state=seed,
        ),
        "Deep ensemble": DeepEnsemble(recipe, random_state=1000 * (seed + 1)),
        "kNN-distance conformal": KNNDistanceConformal(shared, QUANTILE),
        "kNN-residual conformal": KNNResidualConformal(shared, QUANTILE),
        "GP-scaled conformal": GPScaledConformal(shared, QUANTILE, random_state=seed),
        SPLINE_SCALED: SplineScaledConformal(shared, QUANTILE),
        "Boosted quantile (x)": boosted(inputs=of_x),
        "Boosted quantile (x, distance, prediction)": boosted(
            inputs=of_x_distance_and_prediction
        ),
        "Quantile network": QuantileNetwork(
            shared,
            QUANTILE,
            training=Training(n_steps=5000, batch_size=256, random_state=seed),
        ),
        "Mean-error predictor": MeanErrorPredictor(shared, QUANTILE, random_state=seed),
    }


def methods(problem, surrogate, remembered, n_train, seed):
    """All methods by name.

    Args:
        problem: the problem; its folds replace the random folds for data in the order of time.
        surrogate: the deployed surrogate.
        remembered: the recipe, which remembers its trainings.
        n_train: number of training pairs.
        seed: the seed of the rivals.
    """
    interpolating = problem.folds or RandomFolds(5)
    make = partial(
        GeoQ,
        surrogate,
        remembered,
        representation=StandardizedMetric(),
        safe_region=DistanceRegion(),
    )
    recipe = remembered.train_surrogate
    composed, alone = (
        rivals(make(folds=folds), recipe, n_train, seed)
        for folds in (default_folds(interpolating), interpolating)
    )
    return (
        forms_of_geoq(surrogate, remembered, interpolating)
        | composed
        | {
            f"{name}{ON_RANDOM_FOLDS}": rival
            for name, rival in alone.items()
            if name not in OWN_SURROGATE
        }
    )


def shortened(trained):
    """The same recipe or rival with a short training; other methods are not changed."""
    if isinstance(trained, Network | QuantileNetwork):
        return replace(trained, training=replace(trained.training, n_steps=100))
    if isinstance(trained, BoostedQuantile | MeanErrorPredictor):
        return replace(trained, n_trees=50)
    return trained
