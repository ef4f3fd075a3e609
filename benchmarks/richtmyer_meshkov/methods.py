"""The methods of the Richtmyer-Meshkov benchmark: simple bounds, baselines, networks and GeoQ.

Methods that calibrate on held-out errors use the probabilities ``study.cross_fit``, which the fold networks predict for the
simulations that they were not trained on.

The bound of a 0/1 error with the smallest pinball loss is 1 where P(error) > 1 - tau and 0 elsewhere. The quantile of a
bin is therefore 0 or 1, and so is the bound of a classifier.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from sklearn.model_selection import LeaveOneGroupOut

from benchmarks.richtmyer_meshkov import bounds, networks
from geoq import GeoQ, Grid, TrainedFolds, parts
from geoq.bounds.network import pinball
from geoq.training.loop import train

# Number of networks whose mean gives the chance of a wrong cell: the default of IndicatorBound.
N_NETWORKS = 3


@dataclass(frozen=True)
class BackgroundPenalty(parts.NormScaledFieldBound):
    """The paper's loss as we read it: the pinball loss, plus a penalty on the increment where the error is nearly 0.

    The penalty lowers the increment, so its quantile level is below ``quantile``.
    """

    penalty: float = 0.05
    background: float = 0.01

    def fit(self, tuples, quantile):
        settings = {"widths": self.widths, "weights": self.weights}
        # One step, to set the standardisation; the training below uses the loss with the penalty.
        first = parts.NormScaledFieldBound(training=replace(self.training, n_steps=1), **settings)
        fitted = first.fit(tuples, quantile)
        increment, error = torch.from_numpy(tuples.increment), torch.from_numpy(tuples.error)
        typical = increment.nan_to_num().mean(dim=(0, 2, 3), keepdim=True)[0]  # nan: exact cells
        weight = torch.where(typical > 0, 1 / typical, 0)

        def loss(net, rows):
            estimate = net(tuples[rows.numpy()].features)
            calm = error[rows] <= self.background
            each = pinball(increment[rows].to(estimate), estimate, quantile)
            return (weight * (each + self.penalty * calm * estimate)).mean()

        rows = self.training.hold_out(torch.from_numpy(tuples.group))
        result = train(fitted.rate, loss, self.training, *rows)
        return replace(fitted, training=result)


def estimator(study, of_network, error, **settings):
    """GeoQ with the folds of the study; ``of_network`` maps an operator to a surrogate."""
    return GeoQ(
        of_network(study.networks["deployed"]),
        TrainedFolds([of_network(study.networks[name]) for name in study.fold_names]),
        error_functional=error,
        folds=LeaveOneGroupOut(),
        domain=Grid(2),
        representation=parts.identity,
        **settings,
    )


def paper(study, setting, *, n_anchors, make=parts.NormScaledFieldBound):
    """GeoQ in the paper's form; the pinball loss of each time is divided by the mean increment of that time."""
    bound_model = make(widths=study.settings.widths, training=study.settings.training)
    how = {"n_anchors": n_anchors, "bound_model": bound_model, "safe_region": parts.PaperRegion()}
    geoq = estimator(study, lambda network: network, setting.error, **how)
    a = geoq.fit(study.x, study.y, groups=study.fold, progress=None).assess(study.x_test)
    return bounds.Answer(a.error_hat.clamp(max=1), a.prediction, a.safe)


@dataclass(frozen=True)
class Logits:
    """The logits of an operator's probabilities: nearly all probabilities are 0 or 1."""

    operator: Callable

    def __call__(self, x):
        return networks.logits(self.operator(x))


def default(study, setting, *, sees, n_networks=1, used=None):
    """GeoQ around the logits, with the misclassification error; its expected error is the chance of a wrong cell.

    The chance is the mean over the first ``used`` networks, or over all of them.
    """
    sizes = {"widths": study.settings.widths, "training": study.settings.training}
    model = parts.IndicatorBound(sees=sees, n_networks=n_networks, **sizes)

    def error(y, logit):
        return bounds.wrong(y, logit.sigmoid())

    def answer():
        geoq = estimator(study, Logits, error, n_anchors=5, bound_model=model)
        fitted = geoq.fit(study.x, study.y, groups=study.fold, progress=None).fitted_
        alone = (replace(fitted.bound, networks=(one,)) for one in fitted.bound.networks)
        chances = [replace(fitted, bound=one).expected_error(study.x_test) for one in alone]
        return chances, geoq.assess(study.x_test).safe

    chances, safe = study.remembered(repr(model), answer)
    some = chances[:used]
    return bounds.two_valued_bound(study, setting, sum(some) / len(some), safe)


# Inputs of the networks besides the support distance.
ANCHORS = parts.displacement, parts.anchor_error
X_AND_P, X_AND_ANCHORS = (parts.inputs, parts.prediction), (parts.inputs, *ANCHORS)


@dataclass(frozen=True)
class Method:
    """A bound, and whether it is continuous: then the bound of a 0/1 error is also scored after rounding."""

    answer: Callable
    continuous: bool = False


BY_BOTH = {"bins_of": bounds.by_distance_and_doubt}
CLASSIFIER, QUANTILES = networks.classifier, networks.quantile_network
OF_X, OF_BOTH = networks.of_x, networks.of_x_and_p
PENALIZED = partial(paper, n_anchors=1, make=BackgroundPenalty)
DEFAULT = partial(default, sees=X_AND_P, n_networks=N_NETWORKS)
METHODS = {
    "Zero bound": Method(bounds.zero_bound),
    "Best constant (oracle)": Method(bounds.best_constant),
    "Split conformal": Method(bounds.split_conformal),
    "MC dropout": Method(bounds.mc_dropout),
    "Deep ensemble": Method(bounds.deep_ensemble),
    "MC dropout, scaled per time": Method(bounds.mc_dropout_scaled, continuous=True),
    "Deep ensemble, scaled per time": Method(bounds.deep_ensemble_scaled, continuous=True),
    "Static per cell": Method(bounds.static),
    "Static per column": Method(bounds.static_column),
    "Distance bins": Method(partial(bounds.binned, bins_of=bounds.by_distance)),
    "p bins": Method(partial(bounds.binned, bins_of=bounds.by_doubt)),
    "Distance x p bins": Method(partial(bounds.binned, **BY_BOTH)),
    "Distance x p bins, two-valued": Method(partial(bounds.binned_chance, **BY_BOTH)),
    "c p (1 - p)": Method(bounds.doubt_times_factor, continuous=True),
    "Frequency by p and cell": Method(networks.frequency_by_p_and_cell),
    "Classifier of wrong cells (x, p)": Method(partial(CLASSIFIER, used=1)),
    "Classifier of wrong cells (x, p), 3 networks": Method(partial(CLASSIFIER, used=N_NETWORKS)),
    "GeoQ (default)": Method(DEFAULT),
    "GeoQ (one network)": Method(partial(DEFAULT, used=1)),
    "GeoQ (paper, k_a=5)": Method(partial(paper, n_anchors=5), continuous=True),
    "Quantile network (x, p)": Method(partial(QUANTILES, sees=OF_BOTH), continuous=True),
    "c p (1 - p) and a network (x, p)": Method(networks.doubt_times_network, continuous=True),
    "GeoQ (one network, without p)": Method(partial(default, sees=X_AND_ANCHORS)),
    "GeoQ (one network, and anchors)": Method(partial(default, sees=(*X_AND_P, *ANCHORS))),
    "Quantile network (x)": Method(partial(QUANTILES, sees=OF_X), continuous=True),
    "GeoQ (paper, k_a=1)": Method(partial(paper, n_anchors=1), continuous=True),
    "GeoQ (paper, k_a=1, background penalty)": Method(PENALIZED, continuous=True),
}
SETTINGS = {setting.name: setting for setting in (bounds.BINARY, bounds.PROBABILITY)}
NAMES = [f"{setting}: {name}" for setting in SETTINGS for name in METHODS]
