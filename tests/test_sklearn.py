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

from geoq import ClusterFolds, GeoQ, GroupFolds, RandomFolds, Table
from geoq.parts import Climatology, PaperRegion, TwoLawBound
from geoq.sklearn import GeoQRegressor

FOLDS = RandomFolds(3)


def train_ridge(x, y):
    return Ridge().fit(x, y).predict


def squared(y, prediction):
    return (y - prediction) ** 2


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
    return GeoQRegressor(Ridge(), folds=FOLDS).fit(*data[:2])


# Some checks have few points, targets that a regressor fits exactly, or targets 0 and 1.
@pytest.mark.filterwarnings("ignore:n=", "ignore:the mean errors of", "ignore:all outputs are 0")
@pytest.mark.usefixtures("unchecked")
@parametrize_with_checks([GeoQRegressor(Ridge()), GeoQRegressor(SVR(), folds=FOLDS)])
def test_it_passes_the_checks_of_scikit_learn(estimator, check):
    state = np.random.get_state()  # noqa: NPY002 (one of the checks draws from the global generator)
    check(estimator)
    np.random.set_state(state)  # noqa: NPY002


SETTINGS = {
    "quantile": 0.8,
    "domain": Table(),
    "representation": first_column,
    "error_functional": squared,
    "folds": ClusterFolds(3),
    "bound_model": TwoLawBound(reference=Climatology()),
    "n_anchors": 2,
    "n_support": 5,
    "safe_region": PaperRegion(n_neighbors=7, quantile=0.8),
}


@pytest.mark.parametrize("settings", [{}, SETTINGS])
def test_the_settings_and_their_defaults_are_those_of_geoq(data, settings):
    X, y, queries, _ = data
    geoq = GeoQ(None, train_ridge, **settings).fit(X, y)
    ours = GeoQRegressor(Ridge(), **settings).fit(X, y)
    assert_array_equal(ours.bound(queries), geoq.bound(queries))
    assert_array_equal(ours.assess(queries).safe, geoq.assess(queries).safe)


@pytest.mark.parametrize("plain", [Ridge(), RandomForestRegressor(random_state=0)])
def test_the_predictions_are_the_predictions_of_a_clone_of_the_regressor(plain, data):
    X, y, queries, _ = data
    given = None if isinstance(plain, RandomForestRegressor) else plain
    ours = GeoQRegressor(given, folds=RandomFolds(2)).fit(X, y)
    assert not hasattr(plain, "n_features_in_")
    assert_array_equal(ours.predict(queries), clone(plain).fit(X, y).predict(queries))


def test_assessments_and_intervals_contain_the_prediction_and_its_bound(fitted, data):
    assessment = fitted.assess(data[2])
    assert_array_equal(assessment.prediction, fitted.predict(data[2]))
    assert_array_equal(assessment.error_hat, fitted.bound(data[2]))
    assert fitted.assess([[0.0, 0.0], [9.0, 9.0]]).safe.tolist() == [True, False]
    _, _, queries, truth = data
    lower, upper = fitted.predict_interval(queries)
    assert_array_equal(lower, fitted.predict(queries) - fitted.bound(queries))
    assert_array_equal(upper, fitted.predict(queries) + fitted.bound(queries))
    assert ((lower <= truth) & (truth <= upper)).mean() > 0.9
    narrow = fitted.predict_interval(queries, 0.5)
    assert_allclose(narrow[1] - narrow[0], 2 * fitted.geoq_.bounds(queries, (0.5,))[0.5])
    assert (narrow[1] < upper).all()


class NotToBeCloned(Ridge):
    def __init__(self, alpha=1.0):
        super().__init__(alpha=2 * alpha)


def test_the_time_is_estimated_and_refusals_have_a_way_out(data):
    X, y = data[:2]
    ours = GeoQRegressor(Ridge(), n_jobs=2)
    assert ours.estimate(X, y).n_trainings == 16
    assert not [name for name in vars(ours) if name.endswith("_")]
    for wrong in (Ridge().predict, "ridge", GeoQ(None, train_ridge)):
        with pytest.raises(TypeError, match="has no predict, but it must be a regressor; pass for"):
            GeoQRegressor(wrong).fit(X, y)
    with pytest.raises(RuntimeError, match="Cannot clone") as raised:
        GeoQRegressor(NotToBeCloned()).fit(X, y)
    assert "GeoQ(None, lambda x, y: Regressor(...).fit(x, y).predict)" in raised.value.__notes__[0]


def test_guarantees_and_files_are_those_of_geoq(data, tmp_path):
    """Also for a column of targets, although the regressor predicts rows of one dimension."""
    X, y, queries, truth = data
    table = pd.DataFrame(queries, columns=["a", "b"])
    ours = GeoQRegressor(DecisionTreeRegressor(max_depth=3, random_state=0), folds=FOLDS)
    ours.fit(pd.DataFrame(X, columns=["a", "b"]), y[:, None])
    assert ours.conformalize(table, truth[:, None]) is ours
    assert repr(ours).endswith(", conformalized with 180 pairs")
    ours.geoq_.save(tmp_path / "a.geoq")
    loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=ours.geoq_.surrogate_)
    assert_array_equal(loaded.bound(table), ours.bound(table))
    assert_array_equal(ours.predict(table), ours.estimator_.predict(table)[:, None])
    with pytest.raises(ValueError, match="feature names"):
        ours.bound(table[["b", "a"]])


@pytest.mark.parametrize("method", ["predict", "bound", "assess", "predict_interval"])
def test_unfitted_regressors_and_other_columns_raise(method, fitted):
    with pytest.raises(NotFittedError, match="not fitted yet"):
        getattr(GeoQRegressor(), method)(np.zeros((1, 2)))
    with pytest.raises(ValueError, match="expecting 2 features"):
        getattr(fitted, method)(np.zeros((1, 1)))


def test_cross_validation_scores_the_predictions_and_passes_the_groups(data):
    X, y, _, _ = data
    groups = {"groups": np.arange(len(X)) % 20}
    ours = GeoQRegressor(Ridge(), folds=GroupFolds())
    found = cross_validate(ours, X, y, cv=KFold(3), params=groups, return_estimator=True)
    plain = cross_validate(Ridge(), X, y, cv=KFold(3))
    assert_array_equal(found["test_score"], plain["test_score"])
    folds = [np.unique(fit.geoq_.fitted_.tuples.fold) for fit in found["estimator"]]
    assert [len(own) for own in folds] == [20] * 3


def test_a_search_finds_the_setting_of_a_pipeline_inside_a_pipeline(data):
    X, _, queries, _ = data
    inside = GeoQRegressor(make_pipeline(PolynomialFeatures(), Ridge(alpha=1e-6)), folds=FOLDS)
    around = make_pipeline(StandardScaler(), inside)
    grid = {"geoqregressor__estimator__polynomialfeatures__degree": [1, 3]}
    with pytest.warns(UserWarning, match=r"put the search inside, GeoQRegressor\(GridSearchCV"):
        best = GridSearchCV(around, grid, cv=2).fit(X, X[:, 0] ** 3).best_estimator_
    assert best[-1].estimator_["polynomialfeatures"].degree == 3
    assert_allclose(best.predict(queries), queries[:, 0] ** 3, atol=1e-4)
