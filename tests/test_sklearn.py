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
    TemporalFolds,
    Training,
    identity,
    norm_error,
)
from geoq.sklearn import GeoQRegressor

QUICK = NormScaledIncrement(training=Training(n_steps=50, check_every=25, patience=1))
FOREST = RandomForestRegressor(n_estimators=3, random_state=0)


def regressor(estimator=Ridge(), **settings):  # noqa: B008 (cloned, never fitted)
    return GeoQRegressor(estimator, increment_model=QUICK, **settings)


@pytest.fixture(scope="module")
def data():
    """A straight line with noise of deviation 0.1, rows to fit and rows to ask."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, size=(400, 2))
    y = X @ [1.0, -2.0] + 0.1 * rng.standard_normal(400)
    return X[:120], y[:120], X[120:], y[120:]


@pytest.fixture(scope="module")
def usual(data):
    """All settings at their defaults but for the regressor."""
    return GeoQRegressor(Ridge()).fit(*data[:2])


# Ten points with targets 0, 1 and 2: three trees are exact on most folds, and the other folds look like failures.
@pytest.mark.filterwarnings("ignore:mean errors out of family")
@pytest.mark.filterwarnings("ignore:n=")  # few independent points on purpose
@parametrize_with_checks([regressor(FOREST), regressor(SVR())])
def test_it_passes_the_checks_of_scikit_learn(estimator, check):
    state = np.random.get_state()  # noqa: NPY002 (one of the checks draws from the global generator)
    check(estimator)
    np.random.set_state(state)  # noqa: NPY002


def test_it_predicts_what_the_plain_regressor_predicts(data):
    X, y, queries, _ = data
    plain = DecisionTreeRegressor(max_depth=3, random_state=0)
    assert_array_equal(
        regressor(plain).fit(X, y).predict(queries), plain.fit(X, y).predict(queries)
    )


def test_without_a_regressor_it_is_a_random_forest(data):
    X, y, queries, _ = data
    forest = RandomForestRegressor(random_state=0).fit(X, y)
    fitted = GeoQRegressor(increment_model=QUICK).fit(X, y)
    assert_array_equal(fitted.predict(queries), forest.predict(queries))


def test_its_bound_is_that_of_geoq_with_one_fresh_clone_per_fold(data):
    X, y, queries, _ = data
    ridge = Ridge(alpha=3)
    geoq = GeoQ(
        None,
        lambda x, y: clone(ridge).fit(x, y).predict,
        representation=identity,
        folds=ClusterFolds(3),
        increment_model=QUICK,
        n_anchors=2,
        n_support=5,
        n_safe=7,
        safe_quantile=0.8,
    ).fit(X, y)
    fitted = regressor(
        ridge,
        representation=identity,
        folds=ClusterFolds(3),
        n_anchors=2,
        n_support=5,
        n_safe=7,
        safe_quantile=0.8,
    ).fit(X, y)
    assert_allclose(fitted.bound(queries), geoq.predict(queries), rtol=1e-6)
    assert_array_equal(fitted.assess(queries).safe, geoq.assess(queries).safe)
    assert fitted.geoq_.safe_region_.threshold == geoq.safe_region_.threshold


def test_unless_told_it_uses_random_folds_and_the_increment_and_counts_of_geoq(
    usual, data
):
    X, y, queries, _ = data
    geoq = GeoQ(None, lambda x, y: Ridge().fit(x, y).predict, folds=RandomFolds())
    assert_allclose(usual.bound(queries), geoq.fit(X, y).predict(queries), rtol=1e-6)


def test_fitting_leaves_the_given_regressor_unfitted(data):
    X, y, _, _ = data
    ridge = Ridge()
    fitted = regressor(ridge).fit(X, y)
    assert not hasattr(ridge, "coef_")
    assert hasattr(fitted.estimator_, "coef_")


def test_the_bound_covers_most_held_out_errors_without_being_vast(usual, data):
    _, _, queries, truth = data
    error = abs(truth - usual.predict(queries))
    bound = usual.bound(queries)
    assert (error <= bound).mean() >= 0.85
    assert bound.mean() < 4 * error.mean()


def test_an_assessment_holds_the_prediction_and_the_bound(data):
    X, y, queries, _ = data
    fitted = regressor().fit(X, y)
    assessment = fitted.assess(queries)
    assert_array_equal(assessment.prediction, fitted.predict(queries))
    assert_array_equal(assessment.error_hat, fitted.bound(queries))


def test_a_query_far_from_the_data_is_not_safe(data):
    X, y, _, _ = data
    assert regressor().fit(X, y).assess([[0.0, 0.0], [9.0, 9.0]]).safe.tolist() == [
        True,
        False,
    ]


def test_several_outputs_have_a_bound_each(data):
    X, y, queries, _ = data
    Y = np.stack([y, 100 * X[:, 0] ** 2], axis=1)
    bound = regressor().fit(X, Y).bound(queries)
    assert bound.shape == (len(queries), 2)
    assert bound[:, 1].mean() > 10 * bound[:, 0].mean()


def test_another_error_functional_gives_several_outputs_one_bound(data):
    X, y, queries, _ = data
    fitted = regressor(error_functional=norm_error).fit(X, np.stack([y, y], axis=1))
    assert fitted.bound(queries).shape == (len(queries),)


def test_a_column_of_targets_gives_columns_even_if_the_regressor_drops_them(data):
    X, y, queries, _ = data
    tree = DecisionTreeRegressor(max_depth=3, random_state=0)
    column, row = regressor(tree).fit(X, y[:, None]), regressor(tree).fit(X, y)
    assert column.estimator_.predict(queries).ndim == 1
    assert_array_equal(column.predict(queries), row.predict(queries)[:, None])
    assert_allclose(column.bound(queries), row.bound(queries)[:, None], rtol=1e-6)


@pytest.mark.parametrize("several", [True, False])
def test_it_is_tagged_for_several_outputs_where_its_regressor_is(several):
    tags = regressor(Ridge() if several else SVR()).__sklearn_tags__()
    assert tags.target_tags.multi_output is several


def test_a_table_and_its_array_give_the_same_and_names_are_kept(data):
    X, y, queries, _ = data
    table = pd.DataFrame(X, columns=["a", "b"])
    named = regressor().fit(table, pd.Series(y))
    assert named.feature_names_in_.tolist() == ["a", "b"]
    assert_allclose(
        named.bound(pd.DataFrame(queries, columns=["a", "b"])),
        regressor().fit(X, y).bound(queries),
        rtol=1e-6,
    )


def test_columns_in_another_order_are_refused(data):
    X, y, _, _ = data
    fitted = regressor().fit(pd.DataFrame(X, columns=["a", "b"]), y)
    with pytest.raises(ValueError, match="feature names"):
        fitted.bound(pd.DataFrame(X, columns=["b", "a"]))


@pytest.mark.parametrize("method", ["predict", "bound", "assess"])
def test_asking_before_fitting_is_refused(method, data):
    with pytest.raises(NotFittedError, match="not fitted yet"):
        getattr(regressor(), method)(data[2])


@pytest.mark.parametrize("method", ["predict", "bound", "assess"])
def test_queries_with_another_number_of_columns_are_refused(method, data):
    X, y, queries, _ = data
    with pytest.raises(ValueError, match="expecting 2 features"):
        getattr(regressor().fit(X, y), method)(queries[:, :1])


def test_a_clone_is_unfitted_and_fits_to_the_same_bound(data):
    X, y, queries, _ = data
    fitted = regressor(Ridge(alpha=2), n_anchors=3).fit(X, y)
    copy = clone(fitted)
    assert not hasattr(copy, "geoq_")
    assert_array_equal(copy.fit(X, y).bound(queries), fitted.bound(queries))


def test_a_pipeline_serves_inside_and_around_it(data):
    X, y, queries, _ = data
    scaler = StandardScaler().fit(X)
    around = make_pipeline(StandardScaler(), regressor()).fit(X, y)
    inside = regressor(make_pipeline(StandardScaler(), Ridge())).fit(X, y)
    plain = Ridge().fit(scaler.transform(X), y).predict(scaler.transform(queries))
    assert_array_equal(around.predict(queries), plain)
    assert_array_equal(inside.predict(queries), plain)


def test_cross_validation_scores_the_predictions(data):
    X, y, _, _ = data
    ours, plain = (
        cross_validate(model, X, y, cv=3)["test_score"]
        for model in (regressor(), Ridge())
    )
    assert_array_equal(ours, plain)


@pytest.mark.filterwarnings("ignore:n=")  # few independent points on purpose
def test_cross_validation_gives_each_fit_the_groups_of_its_rows(data):
    X, y, _, _ = data
    groups = np.arange(len(X)) % 10
    fits = cross_validate(
        regressor(folds=GroupFolds()),
        X,
        y,
        cv=KFold(3),
        params={"groups": groups},
        return_estimator=True,
    )["estimator"]
    assert [len(fit.geoq_.calibration_.fold.unique()) for fit in fits] == [10] * 3


def test_a_grid_search_finds_the_setting_of_the_regressor(data):
    X, _, _, _ = data
    model = regressor(make_pipeline(PolynomialFeatures(), Ridge(alpha=1e-6)))
    grid = {"estimator__polynomialfeatures__degree": [1, 3]}
    search = GridSearchCV(model, grid, cv=2).fit(X, X[:, 0] ** 3)
    assert search.best_params_ == {"estimator__polynomialfeatures__degree": 3}
    assert search.best_estimator_.estimator_["polynomialfeatures"].degree == 3


@pytest.mark.filterwarnings("ignore:n=")  # few independent points on purpose
def test_groups_are_held_out_together(data):
    X, y, _, _ = data
    groups = np.repeat(["a", "b", "c"], 40)
    calibration = regressor(folds=GroupFolds()).fit(X, y, groups).geoq_.calibration_
    held_out = groups[calibration.point.numpy()]
    assert [set(held_out[calibration.fold.numpy() == f]) for f in range(3)] == [
        {"a"},
        {"b"},
        {"c"},
    ]


def test_group_folds_without_groups_are_refused(data):
    X, y, _, _ = data
    with pytest.raises(ValueError, match="GroupFolds needs each point's group"):
        regressor(folds=GroupFolds()).fit(X, y)


GROUPS = [0] * 5 + [1] * 4 + [2] * 3
SMALL = [
    (RandomFolds(4), None, 9, 11),
    (KFold(6), None, 10, 11),
    (TemporalFolds(3, gap=1), None, 6, 9),
    (GroupFolds(), GROUPS, 7, 7),
]


@pytest.mark.filterwarnings("ignore:n=")  # few independent points on purpose
@pytest.mark.parametrize(("folds", "groups", "n_support", "n_safe"), SMALL)
def test_on_few_points_the_counts_are_the_largest_that_the_folds_allow(
    folds, groups, n_support, n_safe, data
):
    X, y = data[0][:12], data[1][:12]
    geoq = regressor(folds=folds).fit(X, y, groups).geoq_
    assert (geoq.geometry_.n_support, geoq.n_safe_) == (n_support, n_safe)
    with pytest.raises(ValueError, match=f"n_support={n_support + 1}, but fold"):
        regressor(folds=folds, n_support=n_support + 1).fit(X, y, groups)
    with pytest.raises(ValueError, match=f"n_safe={n_safe + 1}, but a calibration"):
        regressor(folds=folds, n_safe=n_safe + 1, safe_region=SafeRegion).fit(
            X, y, groups
        )


def test_the_folds_are_drawn_once(data):
    """A scheme that shuffles anew at each call must not give the counts of other folds."""

    class Shuffled:
        n_draws = 0

        def split(self, points, y=None, groups=None):
            Shuffled.n_draws += 1
            return RandomFolds(5, random_state=Shuffled.n_draws).split(points)

    regressor(folds=Shuffled()).fit(*data[:2])
    assert Shuffled.n_draws == 1


def test_the_folds_see_standardised_inputs(data):
    """Otherwise a column in small units would have no say in the clusters."""
    X, y, _, _ = data
    units = [1.0, 1e-6]
    fits = [regressor(folds=ClusterFolds(3)).fit(x, y) for x in (X, X * units)]
    points = [fit.geoq_.calibration_.point for fit in fits]
    assert_array_equal(points[0], points[1])


def test_a_scheme_that_holds_out_nothing_is_refused(data):
    class Nothing:
        def split(self, points, y=None, groups=None):
            return []

    with pytest.raises(ValueError, match="yielded no fold"):
        regressor(folds=Nothing()).fit(*data[:2])


def test_a_number_of_folds_instead_of_a_scheme_is_refused(data):
    with pytest.raises(TypeError, match=r"folds=5, but .* pass RandomFolds\(5\)"):
        regressor(folds=5).fit(*data[:2])


def test_a_scheme_that_holds_out_a_single_point_is_refused(data):
    class Single:
        def split(self, points, y=None, groups=None):
            return [(np.arange(1, len(points)), np.array([0]))]

    with pytest.raises(ValueError, match=r"n_safe=1, but a .* has only 0 others"):
        regressor(folds=Single(), safe_region=SafeRegion).fit(*data[:2])


def test_it_keeps_the_name_of_the_fold_scheme_for_files(data):
    fitted = regressor(folds=RandomFolds(4)).fit(*data[:2])
    assert repr(fitted.geoq_.folds) == "RandomFolds(n_folds=4, random_state=0)"
