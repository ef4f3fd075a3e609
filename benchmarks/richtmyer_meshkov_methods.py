"""Bounds of the error of a surrogate that predicts binary fields: the simple ones, the paper's rivals, and GeoQ.

A method takes a study (the data of one seed, its networks, and what they predict) and a setting (which error is meant),
and answers with a bound in [0, 1] for each cell of the test cases. Those that calibrate on held-out errors share the
probabilities that the folds' networks gave to the simulations they had not seen (``study.cross_fit``).

For a 0/1 error the bound with the least pinball loss is the indicator of P(error) > 1 - tau, so a quantile in a bin is 0
or 1, and so is the classifier's bound.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from record import QUANTILE
from sklearn.model_selection import LeaveOneGroupOut
from torch import Tensor, nn

from geoq import (
    FieldIncrement,
    GeoQ,
    IndicatorIncrement,
    SafeRegion,
    View,
    identity,
)
from geoq.baselines import MCDropout
from geoq.baselines.bound import GAUSSIAN_95, spread
from geoq.baselines.conformal import conformal_quantile
from geoq.coverage import n_needed
from geoq.field_factor import FieldNetwork
from geoq.fold_surrogates import TrainedFolds
from geoq.increment import inverse_cdf_quantile, pinball_loss
from geoq.indicator import TwoValues, of_probability, zero_or_one
from geoq.nets.unet import UNet
from geoq.shares import CellShares, PredictedShares
from geoq.surrogate import evaluate
from geoq.training import seeded, train

# Distances to the predicted interface are counted up to this many cells.
FARTHEST = 16
# Edges of the bins of min(p, 1 - p): how unsure the surrogate itself is.
DOUBT_EDGES = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4)
# A bin with fewer held-out errors takes the level of all cells at that time.
FEWEST = 100
# What p (1 - p) may be multiplied by.
FACTORS = (0.0, *(2 ** (power / 4) for power in range(-8, 57)))
# Where a bound in (0, 1) that is learned may start.
LEAST_START, MOST_START = 1e-5, 0.98
# Networks whose mean decides a verdict: the default of IndicatorIncrement.
N_NETWORKS = 3
# Rows per chunk where fields are worked on in full precision.
CHUNK = 32


class Setting(NamedTuple):
    """Which error is bounded; ``error(y, p)`` takes the truth and the predicted probability, ``values(p)`` are the two it can be."""

    name: str
    error: Callable[[Tensor, Tensor], Tensor]
    prediction: Callable[[Tensor], Tensor]
    values: TwoValues


def thresholded(p):
    return (p > 0.5).to(p.dtype)


def wrong(y, p):
    """1 where the thresholded prediction is not the truth."""
    return ((p > 0.5) != (y > 0.5)).float()


def gap(y, p):
    return (y - p).abs()


BINARY = Setting("binary", wrong, thresholded, zero_or_one)
PROBABILITY = Setting("probability", gap, identity, of_probability)


class Answer(NamedTuple):
    """A bound per cell, the probabilities whose error it bounds, and GeoQ's flag and expected error where it has them."""

    bound: Tensor
    p: Tensor
    safe: Tensor | None = None
    expected: Tensor | None = None


def in_chunks(function, fields):
    """A function of fields, applied to a few rows at a time."""
    return torch.cat([function(part) for part in fields.split(CHUNK)])


def interface_distance(p):
    """Steps of a king to the nearest cell of the other gas as predicted, at most ``FARTHEST``; y is periodic."""

    def spread_out(field):
        wrapped = torch.cat([field[..., -1:, :], field, field[..., :1, :]], dim=-2)
        return nn.functional.max_pool2d(wrapped, 3, stride=1, padding=(0, 1))

    def of_few(p):
        heavy = thresholded(p).float()
        light = 1 - heavy
        distance = torch.ones_like(heavy, dtype=torch.uint8)
        for _ in range(FARTHEST - 1):
            heavy, light = spread_out(heavy), spread_out(light)
            distance += heavy != light
        return distance

    return in_chunks(of_few, p)


def level_of_all(error, quantile=QUANTILE):
    """The inverse-CDF quantile of all values together; sorting is quicker than selecting where there is one slice."""
    rank = max(1, math.ceil(error.numel() * quantile - 1e-9))
    return error.flatten().sort().values[rank - 1]


def quantile_by_bin(error, bins, n_bins, quantile=QUANTILE, fewest=FEWEST):
    """The inverse-CDF quantile of the errors in each bin; errors lie in [0, 1]."""
    # Bins and errors in one key: half the error, so that an error of 1 stays below the next bin.
    key = (bins.double() + error.double() / 2).flatten().sort().values
    count = torch.bincount(bins.flatten(), minlength=n_bins)
    rank = (count.double() * quantile - 1e-9).ceil().long().clamp(min=1)
    first = count.cumsum(0) - count
    number = torch.arange(n_bins, device=error.device)
    level = 2 * (key[(first + rank - 1).clamp(max=len(key) - 1)] - number)
    pooled = level_of_all(error, quantile).double()
    return torch.where(count < fewest, pooled, level).to(error.dtype)


def best_factor(error, scale, quantile=QUANTILE):
    """The factor c, 0 or a quarter power of 2, with the least pinball loss of c times the scale, cut at 1."""

    def loss(factor):
        bound = (factor * scale).clamp(max=1)
        return pinball_loss(error, bound, quantile).mean(dtype=torch.float64)

    losses = torch.stack([loss(factor) for factor in FACTORS])
    return torch.tensor(FACTORS, device=error.device)[losses.argmin()]


# Bounds that need no training.


def zero_bound(study, setting):
    del setting
    return Answer(torch.zeros_like(study.p), study.p)


def best_constant(study, setting):
    """The best one there could be: chosen by the test errors themselves."""
    error = setting.error(study.y_test, study.p)
    level = level_of_all(error)
    return Answer(level.expand_as(study.p).clone(), study.p)


def split_conformal(study, setting):
    """A level per cell and time, from the simulations that the network of the 80 % has not seen."""
    network, kept = study.networks["split"], study.kept_apart
    p = evaluate(network, study.x[kept], "surrogate")
    level = conformal_quantile(setting.error(study.y[kept], p), QUANTILE)
    test = evaluate(network, study.x_test, "surrogate")
    return Answer(level.expand_as(test).clone(), test)


def n_kept_apart(n_rows, fraction=0.2):
    return max(round(fraction * n_rows), n_needed(QUANTILE))


def mc_dropout(study, setting):
    del setting
    baseline = MCDropout(
        lambda x, y: study.networks["deployed"],  # noqa: ARG005
        n_passes=study.settings.n_passes,
        random_state=study.seed,
    )
    mean, bound = baseline.fit(study.x[:2], study.y[:2]).predict(study.x_test)
    return Answer(bound, mean)


def deep_ensemble(study, setting, *, seen=identity):
    """1.96 standard deviations of the members' answers, or of what ``seen`` makes of them."""
    del setting
    answers = [
        evaluate(study.networks[name], study.x_test, "member") for name in study.members
    ]
    mean = sum(answers) / len(answers)
    _, deviation = spread(seen(p) for p in answers)
    return Answer(GAUSSIAN_95 * deviation, mean)


def static(study, setting):
    """A level per cell and time, from the held-out errors of the folds."""
    levels = [
        inverse_cdf_quantile(setting.error(y, p), QUANTILE)
        for y, p in study.held_out_by_time()
    ]
    return Answer(torch.stack(levels).expand_as(study.p).clone(), study.p)


def static_column(study, setting):
    """A level per column and time: y is a direction of symmetry."""
    levels = [
        inverse_cdf_quantile(setting.error(y, p).flatten(0, 1), QUANTILE)
        for y, p in study.held_out_by_time()
    ]
    return Answer(torch.stack(levels)[:, None].expand_as(study.p).clone(), study.p)


def by_distance(p, distance):
    del p
    return distance.int() - 1, FARTHEST


def by_doubt(p, distance):
    del distance
    edges = torch.tensor(DOUBT_EDGES, device=p.device, dtype=p.dtype)
    doubt = torch.minimum(p, 1 - p)
    return torch.bucketize(doubt, edges, out_int32=True), len(DOUBT_EDGES) + 1


def by_distance_and_doubt(p, distance):
    (near, n_near), (doubt, n_doubt) = by_distance(p, distance), by_doubt(p, distance)
    return near * n_doubt + doubt, n_near * n_doubt


def binned(study, setting, *, bins_of):
    """The level of the held-out errors in each bin, time by time."""
    bound = torch.empty_like(study.p)
    for time, (y, p) in enumerate(study.held_out_by_time()):
        bins, n_bins = bins_of(p, study.cross_fit_distance[:, time])
        level = quantile_by_bin(setting.error(y, p), bins, n_bins)
        asked, _ = bins_of(study.p[:, time], study.distance[:, time])
        bound[:, time] = level[asked.long()]
    return Answer(bound, study.p)


def best_factors(study, setting):
    """One for each time."""
    factors = [
        best_factor(setting.error(y, p), p * (1 - p))
        for y, p in study.held_out_by_time()
    ]
    return torch.stack(factors)[:, None, None]


def doubt_times_factor(study, setting):
    """c_t p (1 - p), with the best factor for each time."""
    per_time = best_factors(study, setting)
    return Answer((per_time * study.p * (1 - study.p)).clamp(max=1), study.p)


# Verdicts: an error of a probability takes the greater of its two values exactly where the thresholded prediction is
# wrong, so that how likely a cell is wrong decides the bounds of both errors.


def verdict(study, setting, chance, safe=None):
    """The greater value where the cell is wrong with more than the probability 1 - tau, and the expected error."""
    less, greater = setting.values(study.p)
    bound = torch.where(chance > 1 - QUANTILE, greater, less)
    return Answer(bound, study.p, safe, less + chance * (greater - less))


def binned_verdict(study, setting, *, bins_of):
    """The share of wrong cells among the held-out ones in each bin, time by time, as their chance."""

    def chance():
        result = torch.empty_like(study.p)
        for time, (y, p) in enumerate(study.held_out_by_time()):
            bins, n_bins = bins_of(p, study.cross_fit_distance[:, time])
            asked, _ = bins_of(study.p[:, time], study.distance[:, time])
            result[:, time] = share_by_bin(wrong(y, p), bins, n_bins)[asked.long()]
        return result

    return verdict(study, setting, study.remembered(bins_of, chance))


def share_by_bin(is_wrong, bins, n_bins, fewest=FEWEST):
    """The mean in each bin; of all cells where a bin has few."""
    bins = bins.flatten()
    count = torch.bincount(bins, minlength=n_bins)
    total = torch.bincount(bins, is_wrong.flatten().double(), minlength=n_bins)
    share = torch.where(
        count < fewest, is_wrong.mean(dtype=torch.float64), total / count
    )
    return share.to(is_wrong.dtype)


# Networks of the input and of what the surrogate says.


def compile_unets():
    """Steps of all U-Nets by torch.compile: a compilation takes as long as it saves in one training, but 20 share it.

    The quickest kernel of each convolution is found by trying, which makes a step a fifth shorter.
    """
    torch.backends.cudnn.benchmark = True
    plain = UNet._forward
    compiled = torch.compile(plain, dynamic=False)

    def forward(self, field, number):
        # Answers come in batches of many sizes, each of which would be compiled anew.
        steps = torch.is_grad_enabled()
        return (compiled if steps else plain)(self, field, number)

    UNet._forward = forward


def logits(p):
    """Cut where the operator's numbers are no longer precise."""
    return p.logit(eps=1e-4)


def of_x(x, p):
    del p
    return x[:, None]


def of_x_and_p(x, p):
    return torch.cat([x[:, None], logits(p)], dim=1)


def fit_unet(study, setting, loss, sees=of_x_and_p, number=0):
    """A U-Net, the first or another, trained on the held-out errors until their loss stops falling; answers the test cases.

    Its inputs are in their units and it starts at 0, as GeoQ's own network does. ``loss(error, output, p)`` weighs all
    times alike: the wrong cells of the first are a hundred times rarer.
    """
    x, y, p = study.x, study.y, study.cross_fit
    training, n_times = study.settings.training.numbered(number), p.shape[1]
    typical = torch.stack(
        [setting.error(a, b).mean() for a, b in study.held_out_by_time()]
    )
    weight = (1 / typical.clamp(min=1e-6))[:, None, None]

    def asked(net, x, p):
        return net((sees(x, p), x.new_ones(len(x)))).view_as(p)

    def mean_loss(net, rows):
        error = setting.error(y[rows], p[rows])
        return (weight * loss(error, asked(net, x[rows], p[rows]), p[rows])).mean()

    some = sees(x[:CHUNK], p[:CHUNK])
    with seeded(training.random_state):
        network = FieldNetwork(
            some.shape[1],
            n_times,
            n_spatial=2,
            widths=study.settings.widths,
            dropout=0.0,
        ).to(x.device)
        network.set_units(some, 1, x.new_ones(len(some)))
        units = torch.arange(len(x), device=x.device)
        train(network, mean_loss, training, units, repeatable=True)
    with torch.no_grad():
        parts = zip(study.x_test.split(CHUNK), study.p.split(CHUNK), strict=True)
        return torch.cat([asked(network, *part) for part in parts])


def fit_quantile(study, setting, start, sees=of_x_and_p):
    """A bound in (0, 1) by the pinball loss: sigmoid(logit(start) + network), where ``start(p)`` is a bound already."""

    def bound(output, p):
        return (output + start(p).clamp(LEAST_START, MOST_START).logit()).sigmoid()

    def loss(error, output, p):
        return pinball_loss(error, bound(output, p), QUANTILE)

    return Answer(bound(fit_unet(study, setting, loss, sees), study.p), study.p)


def quantile_network(study, setting, *, sees):
    """The network that uncertainty-quantifying operators train: the error's quantile, as a function of what it sees."""
    errors = [setting.error(y, p) for y, p in study.held_out_by_time()]
    # Where most errors are 0 so is their quantile, and nothing could be learned from there.
    level = torch.stack(
        [
            torch.maximum(inverse_cdf_quantile(one, QUANTILE), one.mean(dim=0))
            for one in errors
        ]
    )
    return fit_quantile(study, setting, lambda p: level.expand_as(p), sees)


def doubt_times_network(study, setting):
    """c_t p (1 - p), moved by a network of x and p."""
    per_time = best_factors(study, setting)
    return fit_quantile(study, setting, lambda p: per_time * p * (1 - p))


def worth_of_p(study):
    """The chance of a wrong cell that p, time and cell tell, as a function of logits of p that answers logits."""

    def fit():
        is_wrong = wrong(study.y, study.cross_fit).bool()
        logit = logits(study.cross_fit)
        unit = torch.arange(len(logit), device=logit.device)
        return PredictedShares.fit(is_wrong.flatten(2), logit.flatten(2), unit)

    return study.remembered("worth of p", fit)


def worth_of_p_verdict(study, setting):
    """All that GeoQ's networks start from."""
    logit = worth_of_p(study)(logits(study.p))
    return verdict(study, setting, logit.view_as(study.p).sigmoid())


def classifier(study, setting, *, used):
    """P(wrong) by cross-entropy, the mean of so many networks'; starts from what p is worth, as GeoQ's."""
    shares = worth_of_p(study)

    def logit_of(output, p):
        return output + shares(logits(p)).view_as(output)

    def loss(error, output, p):
        return nn.functional.binary_cross_entropy_with_logits(
            logit_of(output, p), error, reduction="none"
        )

    def chance(number):
        output = fit_unet(study, BINARY, loss, number=number)
        return logit_of(output, study.p).sigmoid()

    chances = [
        study.remembered(("classifier", number), partial(chance, number))
        for number in range(used)
    ]
    return verdict(study, setting, sum(chances) / used)


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
