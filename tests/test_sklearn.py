import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from sklearn.ensemble import RandomForestRegressor
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV, KFold, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler
from sklearn.svm import SVR
from sklearn.tree import DecisionTreeRegressor
from sklearn.utils.estimator_checks import parametrize_with_checks

from geoq import (
    ClusterFolds,
    GeoQ,
    GroupFolds,
    NormScaledIncrement,
    RandomFolds,
    SafeRegion,
    Training,
    WholeField,
    norm_error,
)
from geoq.sklearn import GeoQRegressor
from geoq.training import Checkpoint

QUICK = NormScaledIncrement(training=Training(n_steps=50, check_every=25, patience=1))
FOLDS = RandomFolds(3)


def regressor(estimator=Ridge(), **settings):  # noqa: B008 (cloned, never fitted)
    return GeoQRegressor(
        estimator, **{"folds": FOLDS, "increment_model": QUICK} | settings
    )


def train_ridge(x, y):
    return Ridge().fit(x, y).predict


def is_large(y, prediction):
    return (abs(y - prediction) > 0.1).astype(float)


def first_column(x):
    return np.asarray(x)[:, :1]


@pytest.fixture(scope="module")
def data():
    """A linear map with noise of standard deviation 0.1: pairs for the fit, and other pairs."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, size=(300, 2))
    y = X @ [1.0, -2.0] + 0.1 * rng.standard_normal(300)
    return X[:120], y[:120], X[120:], y[120:]


@pytest.fixture(scope="module")
def fitted(data):
    return regressor().fit(*data[:2])


# Some checks have few points, or targets that a regressor fits exactly.
@pytest.mark.filterwarnings("ignore:n=", "ignore:mean errors out of family")
@parametrize_with_checks([regressor(folds=None), regressor(SVR())])
def test_it_passes_the_checks_of_scikit_learn(estimator, check):
    state = np.random.get_state()  # noqa: NPY002 (one of the checks draws from the global generator)
    check(estimator)
    np.random.set_state(state)  # noqa: NPY002


def test_the_defaults_are_the_defaults_of_geoq(data):
    X, y, queries, _ = data
    geoq, ours = GeoQ(None, train_ridge).fit(X, y), GeoQRegressor(Ridge()).fit(X, y)
    assert_array_equal(ours.bound(queries), geoq.bound(queries))
    assert_array_equal(ours.assess(queries).safe, geoq.assess(queries).safe)
    assert len(ours.geoq_.calibration_.fold.unique()) == 15


def test_all_settings_reach_geoq(data):
    X, y, queries, _ = data
    settings = {
        "representation": first_column,
        "error_functional": is_large,
        "folds": ClusterFolds(3),
        "increment_model": QUICK,
        "n_anchors": 2,
        "n_support": 5,
        "safe_region": SafeRegion(n_neighbors=7, quantile=0.8),
    }
    geoq = GeoQ(None, train_ridge, **settings).fit(X, y)
    ours = GeoQRegressor(Ridge(), **settings).fit(X, y)
    assert_array_equal(ours.bound(queries), geoq.bound(queries))
    assert_array_equal(ours.assess(queries).safe, geoq.assess(queries).safe)


@pytest.mark.parametrize("n", [3, 5])
def test_the_default_folds_refuse_few_points_with_a_way_out(n, data):
    X, y, _, _ = data
    with pytest.raises(ValueError, match=r"\(n_folds=5\), but .* between 2 and [34]"):
        GeoQRegressor(Ridge()).fit(X[:n], y[:n])


@pytest.mark.parametrize("plain", [Ridge(), RandomForestRegressor(random_state=0)])
def test_the_predictions_are_the_predictions_of_a_clone_of_the_regressor(plain, data):
    X, y, queries, _ = data
    given = None if isinstance(plain, RandomForestRegressor) else plain
    ours = regressor(given, folds=RandomFolds(2)).fit(X, y)
    assert not hasattr(plain, "n_features_in_")
    assert_array_equal(ours.predict(queries), clone(plain).fit(X, y).predict(queries))


def test_the_assessment_contains_the_prediction_and_the_bound(fitted, data):
    assessment = fitted.assess(data[2])
    assert_array_equal(assessment.prediction, fitted.predict(data[2]))
    assert_array_equal(assessment.error_hat, fitted.bound(data[2]))
    assert fitted.assess([[0.0, 0.0], [9.0, 9.0]]).safe.tolist() == [True, False]


def test_bounds_at_several_levels_are_the_bounds_of_geoq(fitted, data):
    bounds = fitted.bounds(data[2], (0.5, 0.9))
    expected = fitted.geoq_.bounds(data[2], (0.5, 0.9))
    assert (bounds[0.5] < bounds[0.9]).all()
    for level in (0.5, 0.9):
        assert_array_equal(bounds[level], expected[level])


class MeanAnchorError:
    """An increment model that estimates the expected error, and no increment."""

    quantile = 0.95

    def fit(self, calibration):
        return self

    def __call__(self, features):
        return 0 * features.anchor_error

    def expected_error(self, features):
        return features.anchor_error


def test_the_expected_error_needs_a_model_that_estimates_it(fitted, data):
    ours = regressor(increment_model=MeanAnchorError()).fit(*data[:2])
    expected = ours.assess(data[2]).anchor_error
    assert_array_equal(ours.expected_error(data[2]), expected)
    with pytest.raises(TypeError, match="NormScaledIncrement estimates an upper"):
        fitted.expected_error(data[2])


def test_conformalize_covers_pairs_as_geoq_does(data):
    X, y, queries, truth = data
    ours = regressor().fit(X, y)
    geoq = GeoQ(None, train_ridge, folds=FOLDS, increment_model=QUICK).fit(X, y)
    for guarantee in ({}, {"guarantee": WholeField(0.8)}):
        ours.conformalize(queries.tolist(), truth.tolist(), **guarantee)
        geoq.conformalize(queries, truth, **guarantee)
        assert ours.geoq_.conformal_factors_ == geoq.conformal_factors_
        assert_array_equal(ours.bound(queries), geoq.bound(queries))


def test_a_loaded_regressor_gives_the_same_answers(data, tmp_path):
    """Also for a column of targets, although the regressor predicts rows of one dimension."""
    X, y, queries, truth = data
    settings = {"representation": first_column, "error_functional": is_large}
    saved = regressor(DecisionTreeRegressor(max_depth=3, random_state=0), **settings)
    saved.fit(pd.DataFrame(X, columns=["a", "b"]), y[:, None])
    saved.save(tmp_path / "model.geoq")
    loaded = GeoQRegressor.load(
        tmp_path / "model.geoq", estimator=saved.estimator_, **settings
    )
    table = pd.DataFrame(queries, columns=["a", "b"])
    expected = saved.estimator_.predict(table)[:, None]
    for each in (loaded, saved):
        assert_array_equal(each.predict(table), expected)
        each.conformalize(table, truth[:, None])
    assert_array_equal(loaded.bound(table), saved.bound(table))
    with pytest.raises(ValueError, match="feature names"):
        loaded.bound(table[["b", "a"]])


def test_a_loaded_regressor_has_the_settings_but_not_the_folds(fitted, data, tmp_path):
    fitted.save(tmp_path / "model.geoq")
    loaded = GeoQRegressor.load(tmp_path / "model.geoq", estimator=fitted.estimator_)
    assert (loaded.n_features_in_, loaded.n_support) == (2, 20)
    with pytest.raises(ValueError, match="stores only the name of the fold scheme"):
        clone(loaded).fit(*data[:2])


def test_files_for_another_regressor_or_class_are_refused(fitted, data, tmp_path):
    fitted.save(tmp_path / "model.geoq")
    other = Ridge(alpha=100).fit(*data[:2])
    with pytest.raises(ValueError, match="surrogate is not the one that the file was"):
        GeoQRegressor.load(tmp_path / "model.geoq", estimator=other)
    fitted.geoq_.save(tmp_path / "plain.geoq")
    with pytest.raises(ValueError, match="not saved by a GeoQRegressor"):
        GeoQRegressor.load(tmp_path / "plain.geoq", estimator=fitted.estimator_)


class Interrupted(Ridge):
    """Counts the fits of all its clones, and is interrupted at the fourth."""

    n_fits = 0

    def fit(self, X, y):
        Interrupted.n_fits += 1
        if Interrupted.n_fits == 4:
            raise KeyboardInterrupt
        return super().fit(X, y)


def test_an_interrupted_fit_continues_from_its_checkpoint(data, tmp_path):
    X, y, queries, _ = data
    ours = regressor(Interrupted(), folds=RandomFolds(4))
    # A name, because the counter is a value of the recipe and changes.
    checkpoint = Checkpoint(tmp_path, key="ridge")
    with pytest.raises(KeyboardInterrupt):
        ours.fit(X, y, checkpoint=checkpoint)
    ours.fit(X, y, checkpoint=checkpoint)
    # The deployed regressor and the last two of the four folds.
    assert Interrupted.n_fits == 4 + 3
    undisturbed = regressor(folds=RandomFolds(4)).fit(X, y)
    assert_array_equal(ours.bound(queries), undisturbed.bound(queries))


def test_the_bound_has_the_shape_of_the_error(data):
    X, y, queries, _ = data
    Y = np.stack([y, 100 * X[:, 0] ** 2], axis=1)
    bound = regressor().fit(X, Y).bound(queries)
    assert bound[:, 1].mean() > 10 * bound[:, 0].mean()
    ours = regressor(error_functional=norm_error).fit(X, Y)
    assert ours.bound(queries).shape == (len(queries),)


@pytest.mark.parametrize(("plain", "several"), [(Ridge(), True), (SVR(), False)])
def test_several_outputs_are_supported_where_the_regressor_supports_them(
    plain, several
):
    assert regressor(plain).__sklearn_tags__().target_tags.multi_output is several


def test_a_data_frame_and_its_array_give_the_same_bound(fitted, data):
    X, y, queries, _ = data
    named = regressor().fit(pd.DataFrame(X, columns=["a", "b"]), pd.Series(y))
    table = pd.DataFrame(queries, columns=["a", "b"])
    # Not to the last bit: the memory layout of the arrays differs.
    assert_allclose(named.bound(table), fitted.bound(queries), rtol=1e-6)


@pytest.mark.parametrize(
    "method", ["predict", "bound", "bounds", "expected_error", "assess", "conformalize"]
)
def test_unfitted_regressors_and_other_columns_are_refused(method, fitted):
    others = [[0.5]] if method in ("bounds", "conformalize") else []
    with pytest.raises(NotFittedError, match="not fitted yet"):
        getattr(regressor(), method)(np.zeros((1, 2)), *others)
    with pytest.raises(ValueError, match="expecting 2 features"):
        getattr(fitted, method)(np.zeros((1, 1)), *others)


def test_cross_validation_scores_the_predictions_and_passes_the_groups(data):
    X, y, _, _ = data
    ours = cross_validate(
        regressor(folds=GroupFolds()),
        X,
        y,
        cv=KFold(3),
        params={"groups": np.arange(len(X)) % 20},
        return_estimator=True,
    )
    plain = cross_validate(Ridge(), X, y, cv=KFold(3))
    assert_array_equal(ours["test_score"], plain["test_score"])
    n_folds = [len(fit.geoq_.calibration_.fold.unique()) for fit in ours["estimator"]]
    assert n_folds == [20] * 3


def test_a_search_finds_the_setting_of_a_pipeline_inside_a_pipeline(data):
    X, _, queries, _ = data
    inside = regressor(make_pipeline(PolynomialFeatures(), Ridge(alpha=1e-6)))
    around = make_pipeline(StandardScaler(), inside)
    grid = {"geoqregressor__estimator__polynomialfeatures__degree": [1, 3]}
    best = GridSearchCV(around, grid, cv=2).fit(X, X[:, 0] ** 3).best_estimator_
    assert best[-1].estimator_["polynomialfeatures"].degree == 3
    assert_allclose(best.predict(queries), queries[:, 0] ** 3, atol=1e-4)
