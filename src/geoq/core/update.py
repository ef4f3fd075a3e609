r"""``GeoQ.update``: verified queries become data of the bound and of the safe region at once, and the factors follow their errors.

Nothing is trained. Geometry, Gaussian process and the scores of the safe region receive the new points, whose errors are observed; the
laws of the bound and the thresholds stay. Two factors correct the level, and the larger one is used. The first one is tracked, for safe
and for other queries apart:

.. math:: \log \lambda_{t+1} = \log \lambda_t + \eta_t \bigl(m_t - (1 - \tau)\bigr), \qquad \eta_t = t^{-0.6} / 5

Here m_t is 1 if the error of verified query t is beyond its bound, or the fraction of a field that is. The steps decrease, and their sum
does not converge, so the mean of m_t tends to 1 - tau for every sequence of verified queries (Angelopoulos, Barber and Bates 2024). The
second one, the lift, is the conformal factor of the verified queries, each in a part that the other parts and the data bound: the laws
have never seen points that are data of the bound but not of the surrogate, and the bound would be too small near them.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from geoq.arrays import flat, take, to_numbers
from geoq.checks import warn
from geoq.core.conformal import CheckedPairs, ConformalFactors, check_new, checked_pairs
from geoq.core.fitted import Fitted, embed
from geoq.core.geometry import Space
from geoq.core.tuples import Points, Repeats
from geoq.data.masks import filled_with_means
from geoq.data.process import Process
from geoq.quantiles import conformal_factor, error_ratios, inverse_cdf_quantile

# The step is FIRST_STEP * t ** -DECAY; logarithms of ratios count up to LARGEST.
FIRST_STEP, DECAY, LARGEST = 0.2, 0.6, math.log(100)
# The verified queries are held out in this many parts.
N_PARTS = 5
# A new fit is due if more than this fraction of the points were verified after ``fit``, or if a factor is farther from 1.
MANY, FAR = 0.2, 2.0


def updated(fitted: Fitted, x: Any, y: Any) -> Fitted:
    """The same calibration with verified queries; rows that were verified before change nothing."""
    if fitted.tuples is None:
        raise ValueError(
            "update needs the data of fit, but the file was saved with calibration=False; save it with them."
        )
    if not getattr(fitted.bound, "scalable", True):
        raise TypeError(
            f"{type(fitted.bound).__name__} cannot be updated: its bound is one of two values, which no factor corrects; call fit "
            "with all pairs."
        )
    pairs = checked_pairs(fitted, x, y)
    pairs = pairs.of_rows(np.flatnonzero(~_verified_before(fitted, pairs)))
    if not len(pairs.error):
        return fitted
    check_new(fitted, pairs, most=1.0)  # an optimum can be very near a point of fit
    ratio = error_ratios(pairs.error, pairs.answer["error_hat"])
    if fitted.exact is not None:
        ratio[:, fitted.exact.reshape(-1)] = np.nan
    factors = tracked(fitted.conformal, ratio, pairs.answer["safe"], fitted.quantile)
    found = extended(fitted, pairs.queries, pairs.outputs, pairs.error)
    found = replace(found, conformal=replace(factors, lift=_lift(found)))
    due = refit_due(found)
    if due and not refit_due(fitted):
        warn(f"{due}; call fit again with all pairs, and train the surrogate with them.")
    return found


def refit_due(fitted: Fitted) -> str:
    """Why a new fit is due; empty if none is."""
    n, of_fit = fitted.n_verified, len(fitted.error) - fitted.n_verified
    if n > MANY * of_fit:
        return f"{n} verified queries are more than {MANY:.0%} of the {of_fit} points of fit"
    safe = fitted.conformal.safe, fitted.conformal.lift
    if n and not 1 / FAR <= max(safe) <= FAR:
        return (
            f"the errors of {n} verified queries changed the bounds by a factor of {max(safe):.2g}"
        )
    return ""


def _verified_before(fitted: Fitted, pairs: CheckedPairs) -> Bool[np.ndarray, " n"]:
    """Which pairs are verified pairs, or repeat an earlier row."""
    assert fitted.tuples is not None
    points, repeated = fitted.tuples.points, np.zeros(len(pairs.error), dtype=bool)
    first = len(points.outputs) - fitted.n_verified
    t = fitted.coordinates(to_numbers(pairs.queries, "x"))
    columns = (points.inputs, t), (points.outputs, pairs.outputs)
    both = [[*known[first:], *new.astype(known.dtype)] for known, new in columns]
    seen = [(a.tobytes(), b.tobytes()) for a, b in zip(*both, strict=True)]
    earlier = {*seen[: fitted.n_verified]}
    for i, pair in enumerate(seen[fitted.n_verified :]):
        repeated[i] = pair in earlier
        earlier.add(pair)
    return repeated


def tracked(
    factors: ConformalFactors,
    ratio: Float[np.ndarray, " n n_values"],
    safe: Bool[np.ndarray, " n"],
    quantile: float,
) -> ConformalFactors:
    """The tracked factors after these queries, one after the other; ``ratio`` has their errors divided by their bounds."""
    q, t = np.log([factors.unsafe, factors.safe]), [factors.n_unsafe, factors.n_safe]
    used = np.log(factors.used)
    with np.errstate(divide="ignore"):
        scores = np.log(ratio)
    for score, group in zip(scores, safe.astype(int), strict=True):
        # The error divided by the bound without a factor.
        present = (score[~np.isnan(score)] + used[group]).clip(-LARGEST, LARGEST)
        if len(present):
            t[group] += 1
            missed = float((present > q[group]).mean())
            q[group] += FIRST_STEP * t[group] ** -DECAY * (missed - (1 - quantile))
    unsafe, own = np.exp(q).tolist()
    return replace(factors, safe=own, unsafe=unsafe, n_safe=t[1], n_unsafe=t[0])


def extended(fitted: Fitted, queries: Any, outputs: np.ndarray, error: np.ndarray) -> Fitted:
    """The same calibration, with the same factors, and with further points."""
    assert fitted.tuples is not None
    old = fitted.tuples.points
    spaces, predictions = [old.space], [] if fitted.verified is None else [fitted.verified]
    users: list[Any] = [] if fitted.verified_user is None else [fitted.verified_user]
    for part, features, *_ in fitted.views(queries):
        rows = take(queries, np.arange(part.start, part.start + len(features)))
        spaces.append(embed(fitted.representation, fitted.metric, rows, features.inputs))
        predictions.append(features.prediction)
        users.append(features.user)
    normalized, inputs = (
        np.concatenate([getattr(space, name) for space in spaces])
        for name in ("normalized", "inputs")
    )
    z = normalized if old.space.shared else np.concatenate([space.z for space in spaces])
    points = replace(
        old,
        space=Space(z, normalized, inputs),
        outputs=np.concatenate([old.outputs, outputs.astype(old.outputs.dtype)]),
        error=filled_with_means(np.concatenate([old.error, error.astype(old.error.dtype)])),
    )
    user = None if fitted.user is None else np.concatenate(users)
    found = _over(replace(fitted, verified_user=None), points, np.concatenate(predictions))
    return replace(found, verified_user=user)


def _over(fitted: Fitted, points: Points, verified: np.ndarray) -> Fitted:
    """The calibration over these points, of which the last ones were verified."""
    process, region, bound = points.process, fitted.region, fitted.bound
    if isinstance(process, Process):
        z, outputs = flat(points.space.normalized).astype(float), points.outputs.astype(float)
        process = Process.fit(z, flat(filled_with_means(outputs)), process.smoothness)
        points = replace(points, process=process)
    if hasattr(region, "with_points"):
        region = region.with_points(points)
    if hasattr(bound, "with_points"):
        bound = bound.with_points(points, points.error[len(points.error) - len(verified) :])
    assert fitted.tuples is not None
    return replace(
        fitted,
        geometry=replace(fitted.geometry, points=points.space),
        error=points.error,
        error_size=flat(points.error).mean(axis=1),
        process=process,
        bound=bound,
        region=region,
        repeats=Repeats.of(points.inputs, points.outputs),
        tuples=replace(fitted.tuples, points=points),
        verified=verified,
    )


def _lift(fitted: Fitted) -> float:
    """The conformal factor of the verified queries in parts; the largest ratio if there are too few of them."""
    assert fitted.tuples is not None
    assert fitted.verified is not None
    points, n = fitted.tuples.points, fitted.n_verified
    first, part = len(points.outputs) - n, np.arange(n) % N_PARTS
    bare, ratios = replace(fitted, conformal=ConformalFactors(), verified_user=None), []
    for number in range(min(N_PARTS, n)):
        kept, out = np.flatnonzero(part != number), first + np.flatnonzero(part == number)
        rows = np.append(np.arange(first), first + kept)
        own = {name: getattr(points, name)[rows] for name in ("space", "outputs", "error")}
        others = _over(bare, replace(points, **own), fitted.verified[kept])
        own_user = None if fitted.verified_user is None else fitted.verified_user[part == number]
        features = others.features_of(points.space[out], fitted.verified[part == number], own_user)
        bound = others.scaled_bound(features, None, np.ones(len(out), dtype=bool))
        error, absent = points.error[out], np.isnan(points.outputs[out])
        if fitted.exact is not None:
            absent = absent | fitted.exact
        counted = np.where(absent, np.nan, error) if absent.shape == error.shape else error
        ratios.append(error_ratios(counted, bound))
    ratio = np.concatenate(ratios)
    factor = conformal_factor(ratio, fitted.quantile)
    if math.isfinite(factor):
        return factor
    largest = float(np.nanmax(inverse_cdf_quantile(ratio.T, fitted.quantile)))
    return largest if math.isfinite(largest) else math.exp(LARGEST)
