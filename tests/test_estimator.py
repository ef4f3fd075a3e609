"""GeoQ from fit to assess: properties of the answers, guarantees, settings, what the user passes and what comes back."""

import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.tree import DecisionTreeRegressor

from geoq import GeoQ, RandomFolds, arrays, norm_error
from geoq.data.metric import SensitivityMetric, StandardizedMetric
from geoq.regions.region import Region
from geoq.regions.table_scores import EachPair


class Norm:
    """The anchor error + ||psi||."""

    def fit(self, tuples, quantile):
        return lambda features: features.anchor_error + features.norm[:, None]


def calibrate(problem, **settings):
    settings = {"folds": RandomFolds(3), **settings}
    return GeoQ(None, problem.train, **settings).fit(problem.x, problem.y)


@pytest.mark.parametrize("representation", [StandardizedMetric(), lambda x: x, lambda x: x[:, :1] ** 3])  # fmt: skip
def test_a_calibration_point_keeps_its_observed_error(problem, representation):
    """With one anchor and one support point psi is zero there."""
    settings = {"representation": representation, "n_support": 1, "bound_model": Norm()}
    estimator = calibrate(problem, **settings)
    assert_allclose(estimator.bound(problem.x), estimator.fitted_.error, atol=1e-9)


def first(x):
    return x[:, 0]


def test_safe_coverage_meets_its_level_without_retraining():
    """Each point is held out by three families of folds; a bound is validated only by points that it was not learned from."""
    rng = np.random.default_rng(3)
    x, new = rng.normal(size=(200, 3)), rng.normal(size=(4000, 3))

    def truth(x):
        return x[:, 0] + 0.3 * np.sin(3 * x[:, 1]) + 0.3 * rng.normal(size=len(x))

    answer = GeoQ(first, None).fit(x, truth(x)).assess(new)
    covered = abs(truth(new) - new[:, 0]) <= answer.error_hat
    assert covered[answer.safe].mean() > 0.93


def test_answers_come_in_the_kind_and_precision_of_the_user(problem):
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(part) for part in (problem.x, problem.y, problem.queries)]

    def train(x, y):
        assert type(x) is type(y) is torch.Tensor
        surrogate = problem.train(x.numpy(), y.numpy())
        return lambda x: torch.from_numpy(surrogate(x.numpy()))

    estimators = calibrate(problem), GeoQ(None, train, folds=RandomFolds(3)).fit(*tensors[:2])
    mine, theirs = estimators[0].assess(problem.queries), estimators[1].assess(tensors[2])
    for name in ("prediction", "error_hat", "safe", "support_score", "anchors", "displacement"):
        assert isinstance(getattr(theirs, name), torch.Tensor)
        assert type(getattr(mine, name)) is np.ndarray
        assert_array_equal(getattr(mine, name), getattr(theirs, name).numpy())
    assert isinstance(estimators[1].bound(tensors[2]), torch.Tensor)
    assert isinstance(estimators[1].bounds(tensors[2], (0.5,))[0.5], torch.Tensor)
    assert estimators[0].bound(tensors[2].requires_grad_()).tolist() == mine.error_hat.tolist()
    assert mine.reason(3) == theirs.reason(3)
    x, y, queries = (part.astype("f4") for part in (problem.x, problem.y, problem.queries))
    estimator = GeoQ(None, problem.train, folds=RandomFolds(3)).fit(x, y)
    found = estimator.bound(queries).dtype, estimator.assess(queries).prediction.dtype
    assert found == (np.float32, np.float32)


def test_by_default_the_units_of_the_inputs_do_not_matter(problem):
    """Another unit for one input changes nothing; under the identity it would."""

    def anchors(representation, scale):
        settings = {"representation": representation, "folds": RandomFolds(3)}
        estimator = GeoQ(lambda x: problem.truth(x / scale) + 0.1, None, **settings)
        return estimator.fit(problem.x * scale, problem.y).assess(problem.queries * scale).anchors

    unit = np.array([1000.0, 1.0])
    assert_array_equal(anchors(SensitivityMetric(), 1), anchors(SensitivityMetric(), unit))
    assert (anchors(lambda x: x, 1) != anchors(lambda x: x, unit)).any()


@pytest.mark.parametrize("representation", [SensitivityMetric(), lambda x: x])
def test_answers_do_not_depend_on_the_chunks(problem, monkeypatch, representation):
    estimator = calibrate(problem, representation=representation)
    queries = np.insert(problem.queries, [3, 20, 20], np.nan, axis=0)
    whole, levels = estimator.assess(queries), estimator.bounds(queries, (0.5, 0.9))
    monkeypatch.setattr(arrays, "CHUNK_NUMBERS", 6)
    parts, again = estimator.assess(queries), estimator.bounds(queries, (0.5, 0.9))
    assert_array_equal(parts.anchors, whole.anchors)
    assert_array_equal(parts.lost, np.isnan(queries[:, 0]))
    assert_allclose(parts.error_hat, whole.error_hat, rtol=1e-9)
    for level in levels:
        assert_allclose(again[level], levels[level], rtol=1e-9)


@pytest.mark.filterwarnings("ignore:y ranges over")
@pytest.mark.parametrize("low", [0.0, 1e-4])
def test_scalar_inputs_and_outputs_need_no_second_dimension(low):
    """Positive inputs over three decades are logarithms, also without a second dimension."""
    x = np.geomspace(low, 1, 50) if low else np.linspace(0, 1, 50)
    estimator = GeoQ(lambda x: x, None, folds=RandomFolds(3)).fit(x, x**2)
    assert estimator.fitted_.coordinates.log.item() == bool(low)
    answer = estimator.assess(np.array([0.5, 20.0]))
    assert answer.error_hat.shape == (2,)
    assert answer.safe.tolist() == [True, False]
    assert "20" in answer.reason(1)


def test_the_reason_names_anchors_with_distances_and_errors(problem):
    estimator = calibrate(problem, n_anchors=2)
    answer = estimator.assess(problem.queries)
    reason, fitted = answer.reason(3), estimator.fitted_
    z = fitted.metric(fitted.coordinates(problem.queries[3:4])) - fitted.geometry.points.z
    for row, distance in zip(answer.anchors[3], answer.anchor_distance[3], strict=True):
        assert_allclose(distance, np.linalg.norm(z[row]))
        text = f"anchor row {row}: observed error {fitted.error[row, 0]:.3g}, distance "
        assert f"{text}{distance:.3g}" in reason
    assert ("NOT safe" in reason) == (not answer.safe[3])
    assert "anchor run 7" in answer.reason(3, labels=[f"run {7}"] * 120)
    many = calibrate(problem, n_anchors=12).assess(problem.queries)
    assert "and 7 more anchors" in many.reason(0)


def test_an_interrupted_fit_leaves_the_estimator_as_it_was(problem):
    estimator = calibrate(problem)
    before = estimator.bound(problem.queries)

    def interrupted(x, y):
        raise KeyboardInterrupt

    estimator.set_params(train_surrogate=interrupted)
    with pytest.raises(KeyboardInterrupt):
        estimator.fit(2 * problem.x + 1, problem.y)
    assert_array_equal(estimator.bound(problem.queries), before)


def test_clone_keeps_the_trained_surrogate():
    tree = DecisionTreeRegressor(random_state=0).fit([[0.0], [1.0]], [0.0, 1.0])
    copied = clone(GeoQ(tree.predict, None, n_anchors=3))
    assert copied.n_anchors == 3
    assert copied.surrogate([[1.0]]) == 1.0


# Refusals of data, settings and models are in hostile/test_refusals.py.


def test_settings_changed_after_the_fit_do_not_reach_the_answers(problem):
    estimator = calibrate(problem, n_anchors=2)
    before = estimator.assess(problem.queries)
    estimator.set_params(n_anchors=7, n_support=3, quantile=0.5)
    after = estimator.assess(problem.queries)
    assert_array_equal(after.error_hat, before.error_hat)
    assert after.quantile == before.quantile == 0.95


def noisy(n, seed):
    """Inputs and outputs whose errors under the surrogate x_0 are all noise."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    return x, x[:, 0] + abs(rng.normal(size=n))


def test_pairs_set_aside_make_the_bound_hold_at_its_level(tmp_path):
    """The errors of the calibration are half as large as the errors of the queries."""
    x, y = noisy(200, 0)
    estimator = GeoQ(first, None, folds=RandomFolds(5)).fit(x, (first(x) + y) / 2)
    before = estimator.bound(x)
    estimator.conformalize(*noisy(400, 1))
    new, truth = noisy(4000, 2)
    after = estimator.assess(new)
    covered = abs(truth - first(new)) <= after.error_hat
    assert abs(covered[after.safe].mean() - 0.95) < 0.02
    assert_allclose(after.error_hat, after.anchor_error + after.increment)
    estimator.save(tmp_path / "scaled.geoq")
    loaded = GeoQ.load(tmp_path / "scaled.geoq", surrogate=first)
    assert_array_equal(loaded.bound(new), after.error_hat)
    assert "conformal factors" in loaded.describe()
    estimator.conformalize(*noisy(400, 1))  # from the plain bound, not from itself
    assert_array_equal(estimator.bound(new), after.error_hat)
    assert_array_equal(estimator.bounds(new, (0.95,))[0.95], after.error_hat)
    assert_array_equal(estimator.fit(x, (first(x) + y) / 2).bound(x), before)


def test_bounds_at_several_levels_cover_at_their_level_and_do_not_cross():
    """Also for a bound that has no levels, whose factors come from the calibration."""
    x, y = noisy(500, 0)
    new, truth = noisy(4000, 1)
    for settings in ({}, {"bound_model": Plain()}):
        estimator = GeoQ(first, None, folds=RandomFolds(5), **settings).fit(x, y)
        bounds, safe = estimator.bounds(new, (0.5, 0.95, 0.9)), estimator.assess(new).safe
        assert (bounds[0.5] <= bounds[0.9]).all()
        assert (bounds[0.9] <= bounds[0.95]).all()
        assert_allclose(bounds[0.95], estimator.bound(new))
        for level, bound in bounds.items():
            assert abs((abs(truth - first(new)) <= bound)[safe].mean() - level) < 0.06


class Plain:
    """The quantile of the held-out errors, without levels."""

    def fit(self, tuples, quantile):
        value = np.quantile(tuples.error, quantile)
        return lambda features: np.full(features.anchor_error.shape, value)


@pytest.mark.parametrize("quantile", [0.9, 0.95])
@pytest.mark.parametrize("settings", [{}, {"bound_model": Plain()}], ids=["levels", "plain"])
def test_the_bound_alone_is_that_of_the_assessment(problem, quantile, settings, tmp_path):
    """Also in a file that was saved without the calibration tuples."""
    if settings:
        settings = {"bound_model": Plain(), "error_functional": norm_error}
    estimator = calibrate(problem, quantile=quantile, **settings)
    answer = estimator.assess(problem.queries)
    assert_array_equal(estimator.bound(problem.queries), answer.error_hat)
    assert answer.quantile == quantile
    bare = replace(estimator.fitted_, tuples=None)
    estimator.fitted_ = bare
    assert_array_equal(estimator.bound(problem.queries), answer.error_hat)


def test_an_unfitted_estimator_says_so(problem, tmp_path):
    estimator = GeoQ(None, problem.train)
    for ask in (
        lambda: estimator.assess(problem.x),
        lambda: estimator.bound(problem.x),
        lambda: estimator.conformalize(problem.x, problem.y),
        lambda: estimator.save(tmp_path / "never"),
        estimator.describe,
        lambda: estimator.surrogate_,
    ):
        with pytest.raises(NotFittedError, match="GeoQ is not fitted yet; call fit first"):
            ask()


@pytest.mark.parametrize(("n", "quantile", "few"), [(18, 0.95, True), (19, 0.95, False), (18, 0.9, False)])  # fmt: skip
def test_fewer_points_than_the_level_needs_are_warned_of(problem, n, quantile, few):
    estimator = GeoQ(None, problem.train, folds=RandomFolds(3), quantile=quantile)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        estimator.fit(problem.x[:n], problem.y[:n])
    messages = [w for w in caught if "n=18 independent points" in str(w.message)]
    assert len(messages) == few
    assert all("quantile=0.95 needs at least 19" in str(w.message) for w in messages)


def test_the_repr_is_short_and_names_what_was_chosen(problem):
    surrogate = partial(DecisionTreeRegressor.predict, DecisionTreeRegressor())
    estimator = GeoQ(surrogate, problem.train, folds=RandomFolds(3), n_anchors=2)
    assert repr(estimator) == (
        "GeoQ(surrogate=partial, train_surrogate=Problem.train, "
        "folds=RandomFolds(n_folds=3, random_state=0), n_anchors=2), not fitted"
    )
    scores = tuple(EachPair(k) for k in range(2, 10))
    long = GeoQ(None, problem.train, safe_region=Region(scores))
    assert "safe_region=Region(...)" in repr(long)
    assert repr(calibrate(problem)).endswith("), fitted")


def test_intervals_are_prediction_plus_and_minus_bound(problem):
    answer = calibrate(problem).assess(problem.queries)
    assert_array_equal(answer.bound, answer.error_hat)
    assert_array_equal(answer.lower, answer.prediction - answer.error_hat)
    assert_array_equal(answer.upper, answer.prediction + answer.error_hat)
    field = calibrate(problem, error_functional=lambda f, y: abs(f - y).sum(axis=1))
    with pytest.raises(TypeError, match="use error_functional=absolute_error"):
        _ = field.assess(problem.queries).upper
