"""The methods of the comparison: GeoQ with its defaults and some variants, and the rivals.

The rivals measure distances between standardised inputs, as their authors do. All methods that use fold surrogates share
those that are trained on the same rows.
"""

from dataclasses import replace
from functools import partial

from benchmarks.record import QUANTILE
from benchmarks.rivals import (
    BoostedQuantile,
    CalibratedSpread,
    CVPlus,
    KNNDistanceConformal,
    KNNResidualConformal,
    MeanErrorPredictor,
    QuantileNetwork,
    SplineScaledConformal,
    equal_families,
    equal_tuples,
    of_x,
    of_x_distance_and_prediction,
)
from benchmarks.rivals.constant import Constant
from benchmarks.rivals.gp_scaled import GPScaledConformal
from benchmarks.suite.recipes import Increment, Network
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
from geoq.baselines import DeepEnsemble, MCDropout, SplitConformal

# The paper's baselines, which train surrogates of their own.
OWN_SURROGATE = (
    "Split conformal",
    "Deep ensemble",
    "Deep ensemble (15 members)",
    "Deep ensemble (calibrated)",
    "MC dropout",
    "MC dropout (calibrated)",
)
# Versions of a cross-fitted rival: tuples of the random folds alone, and tuples of all folds with GeoQ's weights.
ON_RANDOM_FOLDS = " / random folds"
WITH_FAMILY_WEIGHTS = " / family weights"


def is_ours(method):
    """Whether a method is GeoQ in some form."""
    return method.startswith("GeoQ")


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


def rivals(shared, weights, seed):
    """The rivals that are calibrated on held-out errors.

    Args:
        shared: the GeoQ whose surrogate and folds they use.
        weights: the weights of the calibration tuples.
        seed: the seed of the rivals.
    """
    boosted = partial(
        BoostedQuantile, shared, QUANTILE, random_state=seed, weights=weights
    )
    return {
        "Constant": Constant(shared, QUANTILE, weights),
        "kNN-distance conformal": KNNDistanceConformal(shared, QUANTILE, weights),
        "kNN-residual conformal": KNNResidualConformal(
            shared, QUANTILE, weights=weights
        ),
        "GP-scaled conformal": GPScaledConformal(
            shared, QUANTILE, random_state=seed, weights=weights
        ),
        "Spline-scaled conformal": SplineScaledConformal(shared, QUANTILE, weights),
        "Boosted quantile (x)": boosted(inputs=of_x),
        "Boosted quantile (x, distance, prediction)": boosted(
            inputs=of_x_distance_and_prediction
        ),
        "Quantile network": QuantileNetwork(
            shared,
            QUANTILE,
            training=Training(n_steps=5000, batch_size=256, random_state=seed),
            weights=weights,
        ),
        "Mean-error predictor": MeanErrorPredictor(
            shared, QUANTILE, random_state=seed, weights=weights
        ),
    }


def baselines(recipe, n_train, folds, seed):
    """The paper's baselines, the spread of ensembles and dropout both raw and calibrated; dropout for networks only.

    Args:
        recipe: the recipe of the surrogate.
        n_train: number of training pairs.
        folds: the folds on whose held-out errors a spread is calibrated.
        seed: the seed of the baselines.
    """
    ensemble = DeepEnsemble(recipe, random_state=1000 * (seed + 1))
    found = {
        "Split conformal": SplitConformal(
            recipe,
            QUANTILE,
            calibration_fraction=max(0.2, 20 / n_train),
            random_state=seed,
        ),
        "Deep ensemble": ensemble,
        # As many trainings as GeoQ's default has.
        "Deep ensemble (15 members)": replace(ensemble, n_members=15),
        "Deep ensemble (calibrated)": CalibratedSpread(ensemble, QUANTILE, folds),
    }
    if isinstance(recipe, Network | Increment):
        dropout = MCDropout(recipe.with_dropout(0.1), random_state=seed)
        found["MC dropout"] = dropout
        found["MC dropout (calibrated)"] = CalibratedSpread(dropout, QUANTILE, folds)
    return found


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
    families = default_folds(interpolating)
    versions = {
        "": (families, equal_tuples),
        WITH_FAMILY_WEIGHTS: (families, equal_families),
        ON_RANDOM_FOLDS: (interpolating, equal_tuples),
    }
    found = forms_of_geoq(surrogate, remembered, interpolating)
    found |= baselines(remembered.train_surrogate, n_train, interpolating, seed)
    found["CV+"] = CVPlus(surrogate, remembered, QUANTILE, interpolating)
    for ending, (folds, weights) in versions.items():
        shared = GeoQ(
            surrogate,
            remembered,
            representation=StandardizedMetric(),
            safe_region=DistanceRegion(),
            folds=folds,
        )
        found |= {
            f"{name}{ending}": rival
            for name, rival in rivals(shared, weights, seed).items()
        }
    return found


def shortened(trained):
    """The same recipe or rival with a short training; other methods are not changed."""
    if isinstance(trained, Network | QuantileNetwork | NormScaledIncrement):
        return replace(trained, training=replace(trained.training, n_steps=100))
    if isinstance(trained, Increment):
        return replace(trained, recipe=shortened(trained.recipe))
    if isinstance(trained, GeoQ):
        increment_model = shortened(trained.increment_model)
        return replace(trained, increment_model=increment_model)
    if isinstance(trained, BoostedQuantile | MeanErrorPredictor):
        return replace(trained, n_trees=10)
    return trained
