"""Bounds of the error of a surrogate that predicts binary fields: the simple ones, the paper's rivals, and GeoQ.

A method takes a study (the data of one seed, its networks, and what they predict) and a setting (which error is meant),
and answers with a bound in [0, 1] for each cell of the test cases. Those that calibrate on held-out errors share the
probabilities that the folds' networks gave to the simulations they had not seen (``study.cross_fit``).

For a 0/1 error the bound with the least pinball loss is the indicator of P(error) > 1 - tau, so a quantile in a bin is 0
or 1, and so is the classifier's bound.
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
    binned_verdict,
    by_distance,
    by_distance_and_doubt,
    by_doubt,
    deep_ensemble,
    doubt_times_factor,
    mc_dropout,
    split_conformal,
    static,
    static_column,
    thresholded,
    verdict,
    wrong,
    zero_bound,
)
from benchmarks.richtmyer_meshkov.networks import (
    classifier,
    doubt_times_network,
    logits,
    of_x,
    of_x_and_p,
    quantile_network,
    worth_of_p_verdict,
)
from geoq import (
    FieldIncrement,
    GeoQ,
    IndicatorIncrement,
    SafeRegion,
    View,
    identity,
)
from geoq.fold_surrogates import TrainedFolds
from geoq.increment import pinball_loss
from geoq.shares import CellShares
from geoq.training import train

# Networks whose mean decides a verdict: the default of IndicatorIncrement.
N_NETWORKS = 3


# GeoQ.


def calibrated(study, setting, **form):
    """GeoQ on the study's folds, not fitted yet."""
    return GeoQ(
        study.networks["deployed"],
        TrainedFolds([study.networks[name] for name in study.fold_names]),
        error_functional=setting.error,
        folds=LeaveOneGroupOut(),
        **form,
    )


@dataclass(frozen=True)
class GeoQForm:
    """GeoQ with an increment model made from the settings; ``form`` holds GeoQ's other arguments."""

    increment_model: Callable
    form: dict

    def __call__(self, study, setting):
        increment_model = self.increment_model(study.settings)
        geoq = calibrated(study, setting, increment_model=increment_model, **self.form)
        a = geoq.fit(study.x, study.y, groups=study.fold).assess(study.x_test)
        return Answer(a.error_hat.clamp(max=1), a.prediction, a.safe)


def film_unet(settings):
    """The paper's increment model, with the pinball loss of each time in units of its own size."""
    return FieldIncrement(QUANTILE, widths=settings.widths, training=settings.training)


@dataclass
class BackgroundPenalty:
    """The paper's loss as we read it: the pinball loss, and the increment itself wherever nearly nothing was wrong.

    The penalty moves the level down, so this is no bound of level ``quantile``.
    """

    increment_model: FieldIncrement
    penalty: float = 0.05
    background: float = 0.01

    @property
    def quantile(self):
        return self.increment_model.quantile

    def fit(self, calibration):
        training = self.increment_model.training
        # One step, to set the units; the rest is trained with the loss below.
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

        units = calibration.unit
        train(self.fitted_.module_, loss, training, units, repeatable=True)
        return self

    def __call__(self, features):
        return self.fitted_(features)


# Our own forms, told what the operator says: as logits, for its probabilities are nearly all 0 or 1.


@dataclass(frozen=True)
class Logits:
    """An operator that answers logits."""

    operator: Callable

    def __call__(self, x):
        return logits(self.operator(x))


class FromCells(IndicatorIncrement):
    """Networks that start from the usual share of wrong ones in each cell, and have to learn what p is worth."""

    def _start(self, greater, calibration):
        del calibration
        return CellShares.fit(greater)


def default(
    study, setting, *, view, n_networks=1, used=None, increment=IndicatorIncrement
):
    """GeoQ around the logits; bounds errors of 0 and 1, and what it expects of those is the chance of a wrong cell.

    The chance is the mean of all networks', or of the first ones'.
    """
    increment_model = increment(
        QUANTILE,
        view=view,
        widths=study.settings.widths,
        n_networks=n_networks,
        training=study.settings.training,
    )

    def ask():
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
            with_networks(geoq, [network]).predict_expected(study.x_test)
            for network in geoq.increment_model_.networks_
        ]
        return chances, geoq.assess(study.x_test).safe

    chances, safe = study.remembered(repr(increment_model), ask)
    some = chances[:used]
    return verdict(study, setting, sum(some) / len(some), safe)


def with_networks(geoq, networks):
    """The same GeoQ, but with these networks alone."""
    other = copy.copy(geoq)
    other.increment_model_ = copy.copy(geoq.increment_model_)
    other.increment_model_.networks_ = nn.ModuleList(networks)
    return other


# Beside the support distance, which every view has.
X_AND_P = View(prediction=True)
ANCHORS = View(displacement=True, anchor_error=True)


def penalised_unet(settings):
    return BackgroundPenalty(film_unet(settings))


def paper_form(n_anchors):
    return {
        "representation": identity,
        "n_anchors": n_anchors,
        "safe_region": SafeRegion,
    }


@dataclass(frozen=True)
class Method:
    """A named bound, for the settings it makes sense in; a continuous one of a 0/1 error is scored rounded as well.

    ``networks(study)`` names those it needs beside the deployed one and the folds'.
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
    Method("Static per cell", static),
    Method("Static per column", static_column),
    Method("Distance bins", partial(binned, bins_of=by_distance)),
    Method("p bins", partial(binned, bins_of=by_doubt)),
    Method("Distance x p bins", partial(binned, bins_of=by_distance_and_doubt)),
    Method(
        "Distance x p bins, verdicts",
        partial(binned_verdict, bins_of=by_distance_and_doubt),
    ),
    Method("c p (1 - p)", doubt_times_factor, continuous=True),
    Method("Shares by p and cell", worth_of_p_verdict),
    Method("Classifier of wrong cells (x, p)", partial(classifier, used=1)),
    Method(
        "Classifier of wrong cells (x, p), 3 networks",
        partial(classifier, used=N_NETWORKS),
    ),
    Method("GeoQ (default)", partial(default, view=X_AND_P, n_networks=N_NETWORKS)),
    Method(
        "GeoQ (one network)",
        partial(default, view=X_AND_P, n_networks=N_NETWORKS, used=1),
    ),
    Method(
        "GeoQ (one network, start from cells)",
        partial(default, view=X_AND_P, increment=FromCells),
    ),
    Method("GeoQ (paper, k_a=5)", GeoQForm(film_unet, paper_form(5)), continuous=True),
    Method(
        "Quantile network (x, p)",
        partial(quantile_network, sees=of_x_and_p),
        continuous=True,
    ),
    Method("c p (1 - p) and a network (x, p)", doubt_times_network, continuous=True),
    Method("GeoQ (one network, without p)", partial(default, view=ANCHORS)),
    Method(
        "GeoQ (one network, and anchors)",
        partial(default, view=replace(ANCHORS, prediction=True)),
    ),
    Method(
        "Quantile network (x)", partial(quantile_network, sees=of_x), continuous=True
    ),
    Method("GeoQ (paper, k_a=1)", GeoQForm(film_unet, paper_form(1)), continuous=True),
    Method(
        "GeoQ (paper, k_a=5, background penalty)",
        GeoQForm(penalised_unet, paper_form(5)),
        continuous=True,
    ),
    Method(
        "GeoQ (paper, k_a=1, background penalty)",
        GeoQForm(penalised_unet, paper_form(1)),
        continuous=True,
    ),
]
