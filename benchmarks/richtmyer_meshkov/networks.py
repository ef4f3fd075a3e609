"""Bounds by U-Nets that see the input and the prediction."""

from functools import partial

import torch
from torch import nn

from benchmarks.record import QUANTILE
from benchmarks.richtmyer_meshkov.bounds import (
    BINARY,
    CHUNK,
    LEAST_START,
    MOST_START,
    Answer,
    best_factors,
    verdict,
    wrong,
)
from geoq.field_factor import FieldNetwork
from geoq.increment import inverse_cdf_quantile, pinball_loss
from geoq.nets.unet import UNet
from geoq.shares import PredictedShares
from geoq.training import seeded, train

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
