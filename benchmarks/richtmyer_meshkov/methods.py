"""The methods of the Richtmyer-Meshkov benchmark: simple bounds, baselines, networks and GeoQ.

A method takes a study (data, networks and predictions of one seed) and a setting (which error is bounded) and returns a
bound in [0, 1] for each cell of the test cases. Methods that calibrate on held-out errors use the probabilities
``study.cross_fit``, which the fold networks predict for the simulations that they were not trained on.

The bound of a 0/1 error with the smallest pinball loss is 1 where P(error) > 1 - tau and 0 elsewhere. The quantile of a
bin is therefore 0 or 1, and so is the bound of a classifier.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from sklearn.model_selection import LeaveOneGroupOut
from torch import nn

from benchmarks.record import QUANTILE
from benchmarks.richtmyer_meshkov.bounds import (
    BINARY,
    PROBABILITY,
    Answer,
    Setting,
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
    thresholded,
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
from geoq import FieldIncrement, GeoQ, IndicatorIncrement, SafeRegion, identity
from geoq.increments import anchor_error, displacement, inputs, prediction
from geoq.increments.prior import CellPrior
from geoq.quantiles import pinball_loss
from geoq.training.fold_surrogates import TrainedFolds
from geoq.training.loop import train

# Number of networks whose mean gives the chance of a wrong cell: the default of IndicatorIncrement.
N_NETWORKS = 3


# GeoQ.


def calibrated(study, setting, **form):
    """A GeoQ on the study's folds, before the fit."""
    return GeoQ(
        study.networks["deployed"],
        TrainedFolds([study.networks[name] for name in study.fold_names]),
        error_functional=setting.error,
        folds=LeaveOneGroupOut(),
        **form,
    )


@dataclass(frozen=True)
class GeoQForm:
    """GeoQ with an increment model that is made from the settings; ``form`` are GeoQ's other arguments."""

    increment_model: Callable
    form: dict

    def __call__(self, study, setting):
        increment_model = self.increment_model(study.settings)
        geoq = calibrated(study, setting, increment_model=increment_model, **self.form)
        a = geoq.fit(study.x, study.y, groups=study.fold).assess(study.x_test)
        return Answer(a.error_hat.clamp(max=1), a.prediction, a.safe)


def film_unet(settings):
    """The paper's increment model; the pinball loss of each time is divided by the mean increment of that time."""
    return FieldIncrement(QUANTILE, widths=settings.widths, training=settings.training)


@dataclass
class BackgroundPenalty:
    """The paper's loss as we read it: the pinball loss, plus a penalty on the increment where the error is nearly 0.

    The penalty lowers the increment, so its quantile level is below ``quantile``.
    """

    increment_model: FieldIncrement
    penalty: float = 0.05
    background: float = 0.01

    @property
    def quantile(self):
        return self.increment_model.quantile

    def fit(self, calibration):
        training = self.increment_model.training
        # One step, to set the standardisation; the training below uses the loss with the penalty.
        first = replace(training, n_steps=1)
        self.fitted_ = replace(self.increment_model, training=first).fit(calibration)
        increment = calibration.increment
        typical = increment.mean(dim=(0, 2, 3), keepdim=True)[0]
        weight = torch.where(typical > 0, 1 / typical, 0)

        def loss(net, rows):
            estimate = net(calibration.features[rows])
            calm = calibration.error[rows] <= self.background
            each = pinball_loss(increment[rows], estimate, self.quantile)
            return (weight * (each + self.penalty * calm * estimate)).mean()

        groups = calibration.group
        train(self.fitted_.module_, loss, training, groups, repeatable=True)
        return self

    def __call__(self, features):
        return self.fitted_(features)


# GeoQ with the logits of the operator as predictions: nearly all probabilities are 0 or 1.


@dataclass(frozen=True)
class Logits:
    """The logits of an operator's probabilities."""

    operator: Callable

    def __call__(self, x):
        return logits(self.operator(x))


def default(
    study,
    setting,
    *,
    sees,
    n_networks=1,
    used=None,
    increment=IndicatorIncrement,
    prior=None,
):
    """GeoQ around the logits, with the misclassification error; its expected error is the chance of a wrong cell.

    The chance is the mean over the first ``used`` networks, or over all of them. A ``CellPrior`` makes the networks start
    from the fraction of wrong cases of each cell, without p.
    """
    increment_model = increment(
        QUANTILE,
        sees=sees,
        widths=study.settings.widths,
        n_networks=n_networks,
        training=study.settings.training,
        prior=prior,
    )

    def answer():
        geoq = GeoQ(
            Logits(study.networks["deployed"]),
            TrainedFolds([Logits(study.networks[name]) for name in study.fold_names]),
            error_functional=lambda y, logit: wrong(y, logit.sigmoid()),
            folds=LeaveOneGroupOut(),
            representation=identity,
            n_anchors=5,
            increment_model=increment_model,
        ).fit(study.x, study.y, groups=study.fold)
        chances = [
            with_networks(geoq, [network]).expected_error(study.x_test)
            for network in geoq.increment_model_.networks_
        ]
        return chances, geoq.assess(study.x_test).safe

    chances, safe = study.remembered(repr(increment_model), answer)
    some = chances[:used]
    return two_valued_bound(study, setting, sum(some) / len(some), safe)


def with_networks(geoq, networks):
    """A copy of a fitted GeoQ that uses these networks only."""
    other = copy.copy(geoq)
    other.increment_model_ = copy.copy(geoq.increment_model_)
    other.increment_model_.networks_ = nn.ModuleList(networks)
    return other


# Inputs of the networks besides the support distance.
X_AND_P = (inputs, prediction)
X_AND_ANCHORS = (inputs, displacement, anchor_error)


def penalised_unet(settings):
    return BackgroundPenalty(film_unet(settings))


def paper_form(n_anchors):
    return {
        "representation": identity,
        "n_anchors": n_anchors,
        "safe_region": SafeRegion(),
    }


@dataclass(frozen=True)
class Method:
    """A named bound and the settings in which it is measured.

    A continuous bound of a 0/1 error is also scored after rounding. ``networks(study)`` names the networks that the
    method needs besides the deployed network and the fold networks.
    """

    name: str
    answer: Callable
    settings: tuple[Setting, ...] = (BINARY, PROBABILITY)
    continuous: bool = False
    networks: Callable = lambda study: []  # noqa: ARG005


def members(study):
    return study.members


METHODS = [
    Method("Zero bound", zero_bound),
    Method("Best constant (oracle)", best_constant),
    Method("Split conformal", split_conformal, networks=lambda study: ["split"]),  # noqa: ARG005
    Method("MC dropout", mc_dropout),
    Method("Deep ensemble", deep_ensemble, networks=members),
    Method(
        "Deep ensemble (votes)",
        partial(deep_ensemble, seen=thresholded),
        settings=(BINARY,),
        networks=members,
    ),
    Method("MC dropout, scaled per time", mc_dropout_scaled, continuous=True),
    Method(
        "Deep ensemble, scaled per time",
        deep_ensemble_scaled,
        continuous=True,
        networks=lambda study: study.split_members,
    ),
    Method("Static per cell", static),
    Method("Static per column", static_column),
    Method("Distance bins", partial(binned, bins_of=by_distance)),
    Method("p bins", partial(binned, bins_of=by_doubt)),
    Method("Distance x p bins", partial(binned, bins_of=by_distance_and_doubt)),
    Method(
        "Distance x p bins, two-valued",
        partial(binned_chance, bins_of=by_distance_and_doubt),
    ),
    Method("c p (1 - p)", doubt_times_factor, continuous=True),
    Method("Frequency by p and cell", frequency_by_p_and_cell),
    Method("Classifier of wrong cells (x, p)", partial(classifier, used=1)),
    Method(
        "Classifier of wrong cells (x, p), 3 networks",
        partial(classifier, used=N_NETWORKS),
    ),
    Method("GeoQ (default)", partial(default, sees=X_AND_P, n_networks=N_NETWORKS)),
    Method(
        "GeoQ (one network)",
        partial(default, sees=X_AND_P, n_networks=N_NETWORKS, used=1),
    ),
    Method(
        "GeoQ (one network, start from cells)",
        partial(default, sees=X_AND_P, prior=CellPrior()),
    ),
    Method("GeoQ (paper, k_a=5)", GeoQForm(film_unet, paper_form(5)), continuous=True),
    Method(
        "Quantile network (x, p)",
        partial(quantile_network, sees=of_x_and_p),
        continuous=True,
    ),
    Method("c p (1 - p) and a network (x, p)", doubt_times_network, continuous=True),
    Method("GeoQ (one network, without p)", partial(default, sees=X_AND_ANCHORS)),
    Method(
        "GeoQ (one network, and anchors)",
        partial(default, sees=(*X_AND_P, displacement, anchor_error)),
    ),
    Method(
        "Quantile network (x)", partial(quantile_network, sees=of_x), continuous=True
    ),
    Method("GeoQ (paper, k_a=1)", GeoQForm(film_unet, paper_form(1)), continuous=True),
    Method(
        "GeoQ (paper, k_a=1, background penalty)",
        GeoQForm(penalised_unet, paper_form(1)),
        continuous=True,
    ),
]
