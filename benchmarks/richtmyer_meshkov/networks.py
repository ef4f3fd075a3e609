"""Bounds by U-Nets of the input and the predicted probability."""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from benchmarks.record import QUANTILE
from benchmarks.richtmyer_meshkov import bounds
from geoq import Grid
from geoq.bounds.indicator import Prior
from geoq.bounds.network import FieldNetwork, normalization, pinball
from geoq.data.domain import Layout
from geoq.training.loop import seeded, train


def logits(p):
    """Logits of probabilities, clipped to the precision of the operator."""
    return p.logit(eps=1e-4)


def of_x(x, p):
    del p
    return x[:, None]


def of_x_and_p(x, p):
    return torch.cat([x[:, None], logits(p)], dim=1)


def fit_unet(study, setting, loss, sees=of_x_and_p, number=0):
    """Outputs of a U-Net at the test cases, trained on the held-out errors.

    As in GeoQ's own network, the inputs are standardised and the output starts at 0. Every time has the same weight in
    ``loss(error, output, p)``, although the first times have a hundred times fewer wrong cells.
    """
    x, y, p = study.x, study.y, study.cross_fit
    training = study.settings.training
    training = replace(training, random_state=training.random_state + number)
    typical = torch.stack([setting.error(a, b).mean() for a, b in study.held_out_by_time()])
    weight = (1 / typical.clamp(min=1e-6))[:, None, None]

    def output_of(net, x, p):
        return net((sees(x, p), x.new_ones(len(x)))).view_as(p)

    def mean_loss(net, rows):
        error = setting.error(y[rows], p[rows])
        return (weight * loss(error, output_of(net, x[rows], p[rows]), p[rows])).mean()

    some = sees(x[: bounds.CHUNK], p[: bounds.CHUNK])
    layout = Layout(Grid(2), tuple(some.shape[2:]), on_cells=True)
    sizes = {"layout": layout, "widths": study.settings.widths, "dropout": 0.0}
    with seeded(training.random_state):
        network = FieldNetwork(some.shape[1], p.shape[1], **sizes)
        scales = normalization(some.cpu(), 1, torch.ones(len(some)))
        network.load_state_dict(scales, strict=False)
        network = network.to(x.device)
        rows = training.hold_out(torch.arange(len(x), device=x.device))
        train(network, mean_loss, training, *rows)
    with torch.no_grad():
        parts = zip(study.x_test.split(bounds.CHUNK), study.p.split(bounds.CHUNK), strict=True)
        return torch.cat([output_of(network, *part) for part in parts])


def fit_quantile(study, setting, start, sees=of_x_and_p):
    """A bound in (0, 1) by the pinball loss: sigmoid(logit(start(p)) + network)."""

    def bound(output, p):
        return (output + start(p).clamp(bounds.LEAST_START, bounds.MOST_START).logit()).sigmoid()

    def loss(error, output, p):
        return pinball(error, bound(output, p), QUANTILE)

    return bounds.Answer(bound(fit_unet(study, setting, loss, sees), study.p), study.p)


def quantile_network(study, setting, *, sees):
    """Quantile regression of the error by a network, as in uncertainty-quantifying neural operators."""
    errors = [setting.error(y, p) for y, p in study.held_out_by_time()]
    # Where most errors are 0 their quantile is 0 too, and the gradient would vanish.
    quantiles = torch.stack(
        [torch.maximum(bounds.quantile_of_cells(error), error.mean(dim=0)) for error in errors]
    )
    return fit_quantile(study, setting, lambda p: quantiles.expand_as(p), sees)


def doubt_times_network(study, setting):
    """c_t p (1 - p), corrected by a network of x and p."""
    per_time = bounds.best_factors(study, setting)
    return fit_quantile(study, setting, lambda p: per_time * p * (1 - p))


def chance_by_p_and_cell(study):
    """Logit of the chance of a wrong cell given p, time and cell, as a function of the logit of p."""

    def fit():
        is_wrong = bounds.wrong(study.y, study.cross_fit).bool().flatten(2).cpu().numpy()
        logit = logits(study.cross_fit).flatten(2).cpu().numpy()
        groups = torch.arange(len(logit)).numpy()
        return Prior.fit(is_wrong, is_wrong | True, logit, groups)

    prior = study.remembered("chance by p and cell", fit)
    return lambda logit: torch.from_numpy(prior(logit.cpu().numpy())).to(logit).view_as(logit)


def frequency_by_p_and_cell(study, setting):
    """The chance that GeoQ's networks start from."""
    logit = chance_by_p_and_cell(study)(logits(study.p))
    return bounds.two_valued_bound(study, setting, logit.sigmoid())


def classifier(study, setting, *, used):
    """P(wrong) by cross-entropy, the mean of ``used`` networks; they start from the same chance as GeoQ's networks."""
    start = chance_by_p_and_cell(study)

    def logit_of(output, p):
        return output + start(logits(p))

    def loss(error, output, p):
        entropy = nn.functional.binary_cross_entropy_with_logits
        return entropy(logit_of(output, p), error, reduction="none")

    def chance(number):
        output = fit_unet(study, bounds.BINARY, loss, number=number)
        return logit_of(output, study.p).sigmoid()

    chances = [
        study.remembered(("classifier", number), partial(chance, number)) for number in range(used)
    ]
    return bounds.two_valued_bound(study, setting, sum(chances) / used)
