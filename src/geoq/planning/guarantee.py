r"""Guarantees for planned queries, which have another distribution than the pairs set aside.

.. math:: \lambda(x) = \min \Bigl\{\lambda : \sum_i w(x_i) \, m_i(\lambda) \ge \tau \, \bigl(\textstyle\sum_i w(x_i) + w(x)\bigr)\Bigr\}

:math:`w = q / p` is the density of the planned queries divided by the density of the pairs, and :math:`m_i(\lambda)` is the fraction of the
values of pair i whose errors are at most :math:`\lambda` times their bounds. With one value per pair this is weighted split conformal
prediction (Tibshirani et al. 2019), with several it is conformal risk control under covariate shift (Angelopoulos et al. 2024).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool, Float

from geoq.arrays import chunks, flat, native, per_row, restore, take, to_numbers
from geoq.checks import check_object, check_quantile, core_of, is_number, shortened, warn
from geoq.core.agreement import mean_of_each
from geoq.core.assessment import Assessment, numbers_of
from geoq.core.conformal import ConformalFactors, WholeField, pairs_aside
from geoq.core.fitted import Fitted
from geoq.quantiles import error_ratios, inverse_cdf_quantile, n_required

# The logarithm of w at rows of the user, up to a constant.
LogRatio: TypeAlias = Callable[[Any], Float[np.ndarray, " n"]]
# Ratios of errors to bounds in ascending order, and the weight of all ratios up to each.
Curve: TypeAlias = tuple[np.ndarray, np.ndarray]
# A classifier for the ratio receives at most this many principal axes, and the pairs are divided into this many parts.
N_AXES, N_PARTS = 8, 5
# At most this many places of a curve are kept.
MOST_PLACES = 2**20
PAIRS: Any = [("weight", float), ("error", float), ("bound", float), ("safe", bool)]


@dataclass(frozen=True)
class KnownRatio:
    """The ratio of two known densities, for example of a design on a box and of the distribution of a study.

    Attributes:
        log_design: a function that returns the logarithm of the density of the pairs set aside at each row of inputs.
        log_plan: the same for the planned queries. Both may lack a constant. Where it is ``-inf``, nothing is guaranteed.
    """

    log_design: Callable[[Any], Any]
    log_plan: Callable[[Any], Any]

    def fit(self, fitted: Fitted, rows: Any) -> tuple[Float[np.ndarray, " n"], LogRatio]:
        """The logarithm at the pairs, and the function for queries."""
        del fitted
        excluded = np.isneginf(_log_density(self.log_design, "log_design", rows))
        if excluded.any():
            raise ValueError(
                f"log_design is -inf at pair {int(excluded.argmax())} ({int(excluded.sum())} of {len(rows)} pairs set aside), so the "
                "density is zero where data are; pass the density from which the pairs were drawn."
            )
        return self._log_ratio(rows), self._log_ratio

    def _log_ratio(self, rows: Any) -> Float[np.ndarray, " n"]:
        plan = _log_density(self.log_plan, "log_plan", rows)
        with np.errstate(invalid="ignore"):
            ratio = plan - _log_density(self.log_design, "log_design", rows)
        # A plan that excludes a row has the weight 0 there, whatever the design.
        return np.where(np.isneginf(plan), -np.inf, ratio)


@dataclass(frozen=True)
class EstimatedRatio:
    """An estimate of the ratio: a classifier that separates the planned queries from the pairs set aside.

    It is a logistic regression on the first principal axes of the coordinates, their squares and their products. Pairs receive ratios of
    classifiers that were fitted without them. No coverage is proved with an estimate.

    Attributes:
        planned: planned queries.
    """

    planned: Any

    def fit(self, fitted: Fitted, rows: Any) -> tuple[Float[np.ndarray, " n"], LogRatio]:
        """The logarithm at the pairs, and the function for queries."""
        from sklearn.decomposition import PCA  # here: slow imports
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import StratifiedKFold, cross_val_predict
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import PolynomialFeatures, StandardScaler

        def seen(part: Any) -> Float[np.ndarray, " n k"]:
            return flat(fitted.coordinates(to_numbers(part, "x"))).astype(float)

        own, plan = seen(rows), seen(fitted.rows_of(self.planned))
        x, label = np.concatenate([own, plan]), np.arange(len(own) + len(plan)) >= len(own)
        axes = PCA(min(N_AXES, x.shape[1]), random_state=0)
        squares = PolynomialFeatures(2, include_bias=False)
        steps = StandardScaler(), axes, squares, StandardScaler(), LogisticRegression(max_iter=1000)
        model, cv = make_pipeline(*steps), StratifiedKFold(N_PARTS, shuffle=True, random_state=0)
        at_pairs = cross_val_predict(model, x, label, cv=cv, method="decision_function")
        model.fit(x, label)
        return at_pairs[: len(own)], lambda asked: model.decision_function(seen(asked))


def _log_density(density: Callable[[Any], Any], name: str, rows: Any) -> Float[np.ndarray, " n"]:
    """The logarithm of a density at rows as numbers; raises unless there is one for each row."""
    found = numbers_of(density(native(rows)))
    if found.shape != (len(rows),):
        raise ValueError(
            f"{name}(x) has shape {found.shape} for {len(rows)} rows; return one logarithm of a density per row."
        )
    bad = ~(found < np.inf)  # also nan
    if bad.any():
        raise ValueError(
            f"{name}(x)[{bad.argmax()}] is {found[bad.argmax()]}, but the logarithm of a density is a number or -inf; correct it there."
        )
    return found.astype(float)


def curve_of(ratio: Float[np.ndarray, " n m"], weight: Float[np.ndarray, " n"]) -> Curve:
    """The curve of some pairs. The weight of a pair is divided among its values; nan does not count."""
    present = ~np.isnan(ratio)
    each = weight / np.maximum(present.sum(axis=1), 1)
    values = ratio[present]
    order = values.argsort(kind="stable")
    passed = np.broadcast_to(each[:, None], ratio.shape)[present][order].cumsum()
    # The last value of each step, so that factors are rounded up.
    step = 1 + len(values) // MOST_PLACES
    kept = slice((len(values) - 1) % step, None, step)
    return values[order][kept], passed[kept]


def factors_of(curve: Curve, weight: Float[np.ndarray, " k"], level: float) -> np.ndarray:
    """The factor of queries with these weights; infinite where the weight of the pairs does not suffice."""
    ratio, passed = curve
    wanted = level * (passed.max(initial=0) + weight) * (1 - 1e-12)
    return np.append(ratio, np.inf)[np.searchsorted(passed, wanted)]


@dataclass(frozen=True)
class PlannedBound:
    """Bounds with a factor for each query, from pairs set aside; ``conformalize`` makes it.

    Attributes:
        fitted: the calibration, without conformal factors.
        log_ratio: the logarithm of the ratio at rows, and its largest value at the pairs.
        level: the probability of the statement.
        curves: the curve of the pairs that are not safe, and of the safe pairs.
        pairs: the weight, the mean error, the mean bound and the safe flag of each pair.
        is_estimate: whether the ratio was estimated, so that no coverage is proved.
    """

    fitted: Fitted = field(repr=False)
    log_ratio: tuple[LogRatio, float] = field(repr=False)
    level: float
    curves: tuple[Curve, Curve] = field(repr=False)
    pairs: Any = field(repr=False)
    is_estimate: bool

    @property
    def n_effective(self) -> float:
        r"""The effective number of safe pairs, :math:`(\sum w)^2 / \sum w^2`."""
        weight = self.pairs.weight[self.pairs.safe]
        return float(weight.sum() ** 2 / (weight**2).sum()) if weight.any() else 0.0

    def weight(self, rows: Any) -> Float[np.ndarray, " n"]:
        """The weight of each query; infinite where the plan excludes it, so that nothing is guaranteed."""
        log_ratio, largest = self.log_ratio
        found = log_ratio(rows) - largest
        with np.errstate(over="ignore"):
            return np.where(np.isneginf(found), np.inf, np.exp(found))

    def assess(self, x: Any) -> Assessment:
        """The answer of the estimator with these bounds; a bound is infinite where nothing is guaranteed."""
        rows = self.fitted.rows_of(x)
        answer = self.fitted.assess(rows)
        bound, safe, known = numbers_of(answer.error_hat), answer.safe, np.flatnonzero(~answer.lost)
        factor, flags = np.ones(len(answer)), numbers_of(safe)[known]
        if len(known):
            weight = self.weight(take(rows, known))
            each = [factors_of(curve, weight, self.level) for curve in self.curves]
            factor[known] = np.where(flags, each[1], each[0])
        of_each = per_row(factor.astype(bound.dtype), bound)
        with np.errstate(invalid="ignore"):
            scaled = np.where((bound == 0) & np.isinf(of_each), np.inf, bound * of_each)
        if self.fitted.exact is not None:
            scaled = np.where(self.fitted.exact, 0, scaled).astype(bound.dtype)
        hidden = restore(scaled, answer.error_hat)
        if self.fitted.mask is not None:
            hidden = self.fitted.mask.hidden(hidden)
        return replace(answer, error_hat=hidden, increment=hidden - answer.anchor_error)

    def describe(self) -> str:
        """The statement, whether it is proved, and the pairs that it rests on."""
        how = "are expected, not proved," if self.is_estimate else "are guaranteed"
        n, n_safe = len(self.pairs), int(self.pairs.safe.sum())
        return (
            f"Errors of safe planned queries {how} to be within their bounds with a probability of at least {self.level:g}. {n} pairs were "
            f"set aside, {n_safe} of them safe, with the effective number {self.n_effective:.3g}; a bound is infinite where these do "
            "not suffice."
        )


def _even(x: Any) -> Float[np.ndarray, " n"]:
    """The logarithm of a constant density."""
    return np.zeros(len(x))


def conformalize(
    estimator: Any,
    x: Any,
    y: Any,
    *,
    weights: KnownRatio | EstimatedRatio | None = None,
    guarantee: WholeField | None = None,
) -> PlannedBound:
    """Returns bounds that hold for queries of another distribution than the pairs set aside.

    Args:
        estimator: a fitted ``GeoQ`` or ``GeoQRegressor``, which stays as it is.
        x: inputs of pairs that neither the surrogate nor ``fit`` has seen.
        y: their reference outputs.
        weights: ``KnownRatio`` or ``EstimatedRatio``; None if the pairs are drawn like the planned queries.
        guarantee: ``WholeField(0.9)`` makes a statement about whole fields, as in ``GeoQ.conformalize``.
    """
    if guarantee is not None:
        check_object(guarantee, WholeField, "guarantee", "WholeField(0.9)")
    if not isinstance(weights, KnownRatio | EstimatedRatio | None):
        raise TypeError(
            f"weights={shortened(weights)}, but a ratio of densities is needed; pass KnownRatio(log_design, log_plan) or "
            "EstimatedRatio(planned)."
        )
    fitted = replace(core_of(estimator).fitted_, conformal=ConformalFactors(), tails=None)
    aside = pairs_aside(fitted, x, y)
    error, bound, safe = aside.error, aside.answer["error_hat"], aside.answer["safe"]
    law = KnownRatio(_even, _even) if weights is None else weights
    log, log_ratio = law.fit(fitted, aside.queries)
    if np.isneginf(log).all():
        raise ValueError(
            f"log_plan is -inf at all {len(log)} pairs set aside, so they contain nothing about the planned queries; set pairs aside "
            "where the plan has queries."
        )
    weight = np.exp(log - log.max())
    ratio, level = error_ratios(error, bound), fitted.quantile
    if guarantee is not None:
        ratio, level = inverse_cdf_quantile(ratio.T, level)[:, None], guarantee.confidence
    curves = curve_of(ratio[~safe], weight[~safe]), curve_of(ratio[safe], weight[safe])
    pairs = np.rec.fromarrays([weight, mean_of_each(error), mean_of_each(bound), safe], dtype=PAIRS)
    is_estimate = isinstance(weights, EstimatedRatio)
    found = PlannedBound(fitted, (log_ratio, log.max()), level, curves, pairs, is_estimate)
    if found.n_effective < n_required(level):
        warn(
            f"the effective number of safe pairs is {found.n_effective:.3g}, but {n_required(level)} are needed at the level {level:g}, "
            "so the bounds of many planned queries are infinite; simulate planned queries drawn at random, and set these aside."
        )
    return found


def accept(
    estimator: PlannedBound, x: Any, tolerance: float, false_share: float = 0.1
) -> Bool[np.ndarray, " n"]:
    """Which queries of a batch the surrogate may answer; the others go to the simulator.

    Of the accepted queries at most the fraction ``false_share`` is expected to have an error above the tolerance. A vector or a field has its
    mean error. This is conformal selection (Jin and Candès 2023), with weights where the pairs have another distribution. It is
    proved if pairs and queries are independent, and the ratio of the densities is known. Queries that are not safe are never accepted.

    Args:
        estimator: what ``conformalize`` of this module returns.
        x: the batch of queries; another batch can change the decision about one of them.
        tolerance: the largest acceptable error.
        false_share: the accepted fraction of wrong decisions.

    Returns:
        True for each query that the surrogate may answer.
    """
    check_object(estimator, PlannedBound, "estimator", "conformalize(estimator, x_aside, y_aside)")
    check_quantile(false_share, "false_share")
    if not is_number(tolerance) or tolerance <= 0:
        raise ValueError(
            f"tolerance={shortened(tolerance)}, but one positive number is needed; for tolerances per output divide each output by its "
            "tolerance before fit, and pass tolerance=1."
        )
    fitted, pairs = estimator.fitted, estimator.pairs[estimator.pairs.safe]
    rows = fitted.rows_of(x)
    score, weight = np.full((2, len(rows)), np.inf)
    for part in chunks(len(rows), max(fitted.error[:1].size, fitted.coordinates.mean.size)):
        answer = fitted.assess(rows[part])
        means = mean_of_each(numbers_of(answer.error_hat))
        score[part] = np.where(numbers_of(answer.safe), means, np.inf)
    asked = np.flatnonzero(np.isfinite(score))
    if len(asked):
        weight[asked] = estimator.weight(take(rows, asked))
    asked = asked[np.isfinite(weight[asked])]
    bad = pairs[pairs.error > tolerance]
    total = float(pairs.weight.sum())
    of_queries = score[asked], weight[asked]
    chosen = selected(bad.bound, bad.weight, total, *of_queries, false_share)
    accepted = np.zeros(len(rows), dtype=bool)
    accepted[asked[chosen]] = True
    return accepted


def selected(
    bad: Float[np.ndarray, " n"],
    bad_weight: Float[np.ndarray, " n"],
    total: float,
    bound: Float[np.ndarray, " m"],
    weight: Float[np.ndarray, " m"],
    false_share: float,
) -> Bool[np.ndarray, " m"]:
    r"""Weighted conformal selection with deterministic pruning (Jin and Candès 2023, "Model-free selective inference under covariate shift").

    .. math:: p_j = \frac{w_j + \sum_{i : e_i > t, \, b_i \le b_j} w_i}{w_j + \sum_i w_i}

    ``bad`` are the bounds of the pairs with an error above the tolerance t, ``total`` is the weight of all pairs, and ``bound`` and ``weight``
    belong to the queries. A query is a candidate if :math:`p_j \le q R_j / m`, where :math:`R_j` is the number of rejections of Benjamini and
    Hochberg's procedure with 0 in place of :math:`p_j` and :math:`w_j` in place of the weights of the other queries. Without weights
    this is their procedure alone.
    """
    m, order = len(bound), bad.argsort(kind="stable")
    if not m:
        return np.zeros(0, dtype=bool)
    passed = np.append(0.0, bad_weight[order].cumsum())
    below = passed[np.searchsorted(bad[order], bound, side="right")]
    # In the order of the bounds the weight below is a step function, and only the ends of its steps can be the last rejection. If a query
    # is a candidate, this is the end of its own step or a later one, whose p-values contain the weight of the query.
    steps = np.sort(below)
    ends = np.append(np.flatnonzero(np.diff(steps)) + 1, m)
    n_rejected = np.ones(m)
    for part in chunks(m, len(ends)):
        own = weight[part, None]
        enough = steps[ends - 1] + own <= false_share / m * ends * (total + own)
        n_rejected[part] = np.where(enough, ends, 1).max(axis=1)
    candidate = below + weight <= false_share / m * n_rejected * (total + weight)
    sizes = np.sort(n_rejected[candidate])
    at_least = np.arange(1, len(sizes) + 1)
    kept = at_least[np.searchsorted(sizes, at_least, side="right") >= at_least]
    return candidate & (n_rejected <= kept.max(initial=0))
