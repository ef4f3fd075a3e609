"""The methods of the Richtmyer-Meshkov benchmark: simple bounds, baselines, networks and GeoQ.

A method takes a study (data, networks and predictions of one seed) and a setting (which error is bounded) and returns a
bound in [0, 1] for each cell of the test cases. Methods that calibrate on held-out errors use the probabilities
``study.cross_fit``, which the fold networks predict for the simulations that they were not trained on.

The bound of a 0/1 error with the smallest pinball loss is 1 where P(error) > 1 - tau and 0 elsewhere. The quantile of a
bin is therefore 0 or 1, and so is the bound of a classifier.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from sklearn.model_selection import LeaveOneGroupOut

from benchmarks.richtmyer_meshkov.bounds import (
    BINARY,
    PROBABILITY,
    Answer,
    best_constant,
    binned,
    binned_chance,
    by_distance,
    by_distance_and_doubt,
    by_doubt,
    deep_ensemble,
    deep_ensemble_scaled,
    doubt_times_factor,
    mc_dropout,
    mc_dropout_scaled,
    split_conformal,
    static,
    static_column,
    two_valued_bound,
    wrong,
    zero_bound,
)
from benchmarks.richtmyer_meshkov.networks import (
    classifier,
    doubt_times_network,
    frequency_by_p_and_cell,
    logits,
    of_x,
    of_x_and_p,
    quantile_network,
)
from geoq import GeoQ, Grid, TrainedFolds
from geoq.bounds.network import pinball
from geoq.parts import (
    IndicatorBound,
    NormScaledFieldBound,
    PaperRegion,
    anchor_error,
    displacement,
    identity,
    inputs,
    prediction,
)
from geoq.training.loop import train

# Number of networks whose mean gives the chance of a wrong cell: the default of IndicatorBound.
N_NETWORKS = 3


@dataclass(frozen=True)
class BackgroundPenalty(NormScaledFieldBound):
    """The paper's loss as we read it: the pinball loss, plus a penalty on the increment where the error is nearly 0.

    The penalty lowers the increment, so its quantile level is below ``quantile``.
    """

    penalty: float = 0.05
    background: float = 0.01

    def fit(self, tuples, quantile):
        settings = {"widths": self.widths, "weights": self.weights}
        # One step, to set the standardisation; the training below uses the loss with the penalty.
        first = NormScaledFieldBound(training=replace(self.training, n_steps=1), **settings)
        fitted = first.fit(tuples, quantile)
        increment, error = torch.from_numpy(tuples.increment), torch.from_numpy(tuples.error)
        typical = increment.mean(dim=(0, 2, 3), keepdim=True)[0]
        weight = torch.where(typical > 0, 1 / typical, 0)

        def loss(net, rows):
            features = tuples[rows.numpy()].features
            estimate = net(torch.from_numpy(features.flat), torch.from_numpy(features.norm))
            calm = error[rows] <= self.background
            each = pinball(increment[rows].to(estimate), estimate, quantile)
            return (weight * (each + self.penalty * calm * estimate)).mean()

        result = train(fitted.rate, loss, self.training, torch.from_numpy(tuples.group))
        return replace(fitted, training=result)


def paper(study, setting, *, n_anchors, make=NormScaledFieldBound):
    """GeoQ in the paper's form; the pinball loss of each time is divided by the mean increment of that time."""
    bound_model = make(widths=study.settings.widths, training=study.settings.training)
    geoq = GeoQ(
        study.networks["deployed"],
        TrainedFolds([study.networks[name] for name in study.fold_names]),
        error_functional=setting.error,
        folds=LeaveOneGroupOut(),
        domain=Grid(2),
        representation=identity,
        n_anchors=n_anchors,
        bound_model=bound_model,
        safe_region=PaperRegion(),
    )
    a = geoq.fit(study.x, study.y, groups=study.fold, progress=None).assess(study.x_test)
    return Answer(a.error_hat.clamp(max=1), a.prediction, a.safe)


@dataclass(frozen=True)
class Logits:
    """The logits of an operator's probabilities: nearly all probabilities are 0 or 1."""

    operator: Callable

    def __call__(self, x):
        return logits(self.operator(x))


def default(study, setting, *, sees, n_networks=1, used=None):
    """GeoQ around the logits, with the misclassification error; its expected error is the chance of a wrong cell.

    The chance is the mean over the first ``used`` networks, or over all of them.
    """
    model = IndicatorBound(
        sees=sees,
        widths=study.settings.widths,
        n_networks=n_networks,
        training=study.settings.training,
    )

    def answer():
        geoq = GeoQ(
            Logits(study.networks["deployed"]),
            TrainedFolds([Logits(study.networks[name]) for name in study.fold_names]),
            error_functional=lambda y, logit: wrong(y, logit.sigmoid()),
            folds=LeaveOneGroupOut(),
            domain=Grid(2),
            representation=identity,
            n_anchors=5,
            bound_model=model,
        )
        fitted = geoq.fit(study.x, study.y, groups=study.fold, progress=None).fitted_
        alone = (replace(fitted.bound, networks=(one,)) for one in fitted.bound.networks)
        chances = [replace(fitted, bound=one).expected_error(study.x_test) for one in alone]
        return chances, geoq.assess(study.x_test).safe

    chances, safe = study.remembered(repr(model), answer)
    some = chances[:used]
    return two_valued_bound(study, setting, sum(some) / len(some), safe)


# Inputs of the networks besides the support distance.
X_AND_P, X_AND_ANCHORS = (inputs, prediction), (inputs, displacement, anchor_error)


@dataclass(frozen=True)
class Method:
    """A bound, and whether it is continuous: then the bound of a 0/1 error is also scored after rounding."""

    answer: Callable
    continuous: bool = False


BY_BOTH = {"bins_of": by_distance_and_doubt}
DEFAULT = partial(default, sees=X_AND_P, n_networks=N_NETWORKS)
METHODS = {
    "Zero bound": Method(zero_bound),
    "Best constant (oracle)": Method(best_constant),
    "Split conformal": Method(split_conformal),
    "MC dropout": Method(mc_dropout),
    "Deep ensemble": Method(deep_ensemble),
    "MC dropout, scaled per time": Method(mc_dropout_scaled, continuous=True),
    "Deep ensemble, scaled per time": Method(deep_ensemble_scaled, continuous=True),
    "Static per cell": Method(static),
    "Static per column": Method(static_column),
    "Distance bins": Method(partial(binned, bins_of=by_distance)),
    "p bins": Method(partial(binned, bins_of=by_doubt)),
    "Distance x p bins": Method(partial(binned, **BY_BOTH)),
    "Distance x p bins, two-valued": Method(partial(binned_chance, **BY_BOTH)),
    "c p (1 - p)": Method(doubt_times_factor, continuous=True),
    "Frequency by p and cell": Method(frequency_by_p_and_cell),
    "Classifier of wrong cells (x, p)": Method(partial(classifier, used=1)),
    "Classifier of wrong cells (x, p), 3 networks": Method(partial(classifier, used=N_NETWORKS)),
    "GeoQ (default)": Method(DEFAULT),
    "GeoQ (one network)": Method(partial(DEFAULT, used=1)),
    "GeoQ (paper, k_a=5)": Method(partial(paper, n_anchors=5), continuous=True),
    "Quantile network (x, p)": Method(partial(quantile_network, sees=of_x_and_p), continuous=True),
    "c p (1 - p) and a network (x, p)": Method(doubt_times_network, continuous=True),
    "GeoQ (one network, without p)": Method(partial(default, sees=X_AND_ANCHORS)),
    "GeoQ (one network, and anchors)": Method(
        partial(default, sees=(*X_AND_P, displacement, anchor_error))
    ),
    "Quantile network (x)": Method(partial(quantile_network, sees=of_x), continuous=True),
    "GeoQ (paper, k_a=1)": Method(partial(paper, n_anchors=1), continuous=True),
    "GeoQ (paper, k_a=1, background penalty)": Method(
        partial(paper, n_anchors=1, make=BackgroundPenalty), continuous=True
    ),
}
SETTINGS = {setting.name: setting for setting in (BINARY, PROBABILITY)}
NAMES = [f"{setting}: {name}" for setting in SETTINGS for name in METHODS]
