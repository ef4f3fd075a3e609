"""The methods of the comparison: GeoQ with its defaults and some variants, and the rivals.

The rivals measure distances between standardised inputs, as their authors do. All methods that use fold surrogates share
those that are trained on the same rows.
"""

from dataclasses import fields, is_dataclass, replace
from functools import partial

from benchmarks import rivals
from benchmarks.record import QUANTILE
from benchmarks.suite.recipes import Increment, Network
from geoq import (
    ClusterFolds,
    CombinedFolds,
    GeoQ,
    NestedFolds,
    RandomFolds,
    Training,
    default_folds,
)
from geoq.parts import StandardizedMetric

# Baselines that train surrogates of their own.
OWN_SURROGATE = ("GP", "Split conformal", "Deep ensemble", "Deep ensemble (15 members)")
OWN_SURROGATE += ("Deep ensemble (calibrated)", "MC dropout", "MC dropout (calibrated)")
# Versions of a cross-fitted rival: tuples of the random folds alone, and tuples of all folds with GeoQ's weights.
ON_RANDOM_FOLDS = " / random folds"
WITH_FAMILY_WEIGHTS = " / family weights"


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
        "GeoQ (paper)": GeoQ.paper(surrogate, train_surrogate),
        "GeoQ (10 trainings)": make(folds=ten_trainings(interpolating)),
        "GeoQ (8 trainings)": make(folds=eight_trainings(interpolating)),
        "GeoQ (equal weights)": make(representation=StandardizedMetric(), folds=families),
    }


def on_held_out_errors(shared, weights, seed):
    """The rivals that are calibrated on the held-out errors of a GeoQ, with some weights of the tuples."""
    boosted = partial(rivals.BoostedQuantile, shared, QUANTILE, weights, random_state=seed)
    training = Training(n_steps=5000, batch_size=256, random_state=seed)
    return {
        "Constant": rivals.Constant(shared, QUANTILE, weights),
        "kNN-distance conformal": rivals.KNNDistanceConformal(shared, QUANTILE, weights),
        "kNN-residual conformal": rivals.KNNResidualConformal(shared, QUANTILE, weights),
        "GP-scaled conformal": rivals.GPScaledConformal(
            shared, QUANTILE, weights, random_state=seed
        ),
        "Spline-scaled conformal": rivals.SplineScaledConformal(shared, QUANTILE, weights),
        "Opinion-scaled conformal": rivals.OpinionScaledConformal(shared, QUANTILE, weights),
        "Opinion-gap conformal": rivals.OpinionScaledConformal(
            shared, QUANTILE, weights, gap_alone=True
        ),
        "Boosted quantile (x)": boosted(),
        "Boosted quantile (x, distance, prediction)": boosted(
            inputs=rivals.of_x_distance_and_prediction
        ),
        "Quantile network": rivals.QuantileNetwork(shared, QUANTILE, weights, training=training),
        "Mean-error predictor": rivals.MeanErrorPredictor(
            shared, QUANTILE, weights, random_state=seed
        ),
    }


def baselines(recipe, n_train, folds, seed):
    """The paper's baselines, the spread of ensembles and dropout both raw and calibrated; dropout for networks only."""
    ensemble = rivals.DeepEnsemble(recipe, random_state=1000 * (seed + 1))
    found = {
        "GP": rivals.GaussianProcess(),
        "Split conformal": rivals.SplitConformal(recipe, QUANTILE, max(0.2, 20 / n_train), seed),
        "Deep ensemble": ensemble,
        # As many trainings as GeoQ's default has.
        "Deep ensemble (15 members)": replace(ensemble, n_members=15),
        "Deep ensemble (calibrated)": rivals.CalibratedSpread(ensemble, QUANTILE, folds),
    }
    if isinstance(recipe, Network | Increment):
        dropout = rivals.MCDropout(recipe.with_dropout(0.1), random_state=seed)
        found["MC dropout"] = dropout
        found["MC dropout (calibrated)"] = rivals.CalibratedSpread(dropout, QUANTILE, folds)
    return found


def methods(problem, surrogate, remembered, n_train, seed):
    """All methods by name; the folds of a problem replace the random folds for data in the order of time."""
    interpolating = problem.folds or RandomFolds(5)
    families = default_folds(interpolating)
    versions = {
        "": (families, rivals.equal_tuples),
        WITH_FAMILY_WEIGHTS: (families, rivals.equal_families),
        ON_RANDOM_FOLDS: (interpolating, rivals.equal_tuples),
    }
    found = forms_of_geoq(surrogate, remembered, interpolating)
    found |= baselines(remembered.train_surrogate, n_train, interpolating, seed)
    found["CV+"] = rivals.CVPlus(surrogate, remembered, QUANTILE, interpolating)
    for ending, (folds, weights) in versions.items():
        metric = StandardizedMetric()
        shared = GeoQ(
            surrogate,
            remembered,
            representation=metric,
            folds=folds,
            safe_region=rivals.DistanceRegion(),
        )
        found |= {
            f"{name}{ending}": rival
            for name, rival in on_held_out_errors(shared, weights, seed).items()
        }
    return found


# The largest numbers of a small run, and the settings that contain others.
SMALL = {"n_steps": 60, "n_trees": 5, "n_passes": 5, "n_members": 3}
INSIDE = ("training", "recipe", "bound_model", "baseline", "train_surrogate")


def shortened(method):
    """The same recipe or method with short trainings, for small runs."""
    if not is_dataclass(method):
        return method
    known = {f.name: getattr(method, f.name) for f in fields(method) if f.init}
    sizes = {name: min(known[name], most) for name, most in SMALL.items() if name in known}
    inside = {name: shortened(known[name]) for name in INSIDE if name in known}
    return replace(method, **sizes, **inside)
