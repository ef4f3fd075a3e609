"""Missing, infinite and overflowing numbers, and inputs that never varied."""

import re

import numpy as np
import pytest
import torch
import xarray as xr

from geoq import (
    DistanceRegion,
    GeoQ,
    NormScaledIncrement,
    RandomFolds,
    RolloutGeoQ,
    SafeRegion,
    identity,
)
from geoq.sklearn import GeoQRegressor
from geoq.xarray import XarrayGeoQ

RNG = np.random.default_rng(0)
X, GOOD = RNG.uniform(-1, 1, (120, 2)), RNG.uniform(-1, 1, (7, 2))
FOLDS = RandomFolds(3)


def truth(x):
    return np.sin(3 * x[:, 0]) + x[:, 1] ** 2


def surrogate(x):
    """A model that refuses inputs that are not finite, as scikit-learn's do, and that is nan in a corner."""
    assert np.isfinite(x).all()
    assert abs(x).max() < 1e100
    return np.where(x[:, 0] > 2, np.nan, 0.9 * truth(x))


FITTED = GeoQ(surrogate, None, folds=FOLDS).fit(X, truth(X))
# An unusable query, and the reason for its missing bound.
UNUSABLE = {
    "nan": ([np.nan, 0.0], "input u is nan; replace it by a number"),
    "inf": ([0.0, np.inf], "input v is inf; replace it by a number"),
    "-inf": ([-np.inf, 0.0], "input u is -inf; replace it by a number"),
    "overflow": ([0.0, 1e200], r"input v is 1e\+200, which is too far from the data"),
    "answer": ([3.0, 0.0], "did not return finite numbers here; check their output"),
}


def mixed(bad):
    return np.insert(GOOD, 3, bad, axis=0)


@pytest.mark.parametrize(("bad", "reason"), UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_query_has_no_bound_and_the_others_have_theirs(bad, reason):
    whole, without = FITTED.assess(mixed(bad)), FITTED.assess(GOOD)
    for part in ("error_hat", "support_score", "anchor_distance", "prediction"):
        assert np.isnan(getattr(whole, part)[3]).all(), part
    assert not whole.safe[3]
    assert whole.anchors[3] == -1
    for part in ("error_hat", "safe", "support_score", "prediction", "anchors"):
        others = np.delete(getattr(whole, part), 3, axis=0)
        # Matrix products round differently in batches of different sizes.
        np.testing.assert_allclose(others, getattr(without, part), rtol=1e-9)
    explained = whole.reason(3, names=["u", "v"])
    assert explained.startswith("query 3: no error bound, NOT safe, ")
    assert re.search(reason, explained)
    assert whole.reason(-5) == whole.reason(3).replace("query 3", "query -5")
    assert "1 without an answer" in repr(whole)
    assert "without" not in repr(without)


@pytest.mark.parametrize(("bad", "_"), UNUSABLE.values(), ids=UNUSABLE)
def test_bound_bounds_and_a_batch_of_unusable_queries(bad, _):
    np.testing.assert_array_equal(
        FITTED.bound(mixed(bad)), FITTED.assess(mixed(bad)).error_hat
    )
    for bounds in FITTED.bounds(mixed(bad), (0.5, 0.9)).values():
        assert np.isnan(bounds).tolist() == [i == 3 for i in range(8)]
    assert np.isnan(FITTED.bound(np.array([bad, bad]))).all()


def test_the_prediction_stays_as_it_is():
    geoq = GeoQ(lambda x: np.where(x[:, 0] > 2, np.inf, x[:, 0]), None, folds=FOLDS)
    assessment = geoq.fit(X, truth(X)).assess(np.array([[3.0, 0.0], [0.5, 0.0]]))
    assert assessment.prediction.tolist() == [np.inf, 0.5]
    assert assessment.safe.tolist() == [False, True]


def test_tensors_and_a_representation_that_is_not_finite():
    points = torch.from_numpy(X)
    geoq = GeoQ(
        lambda x: x[:, 0],
        None,
        representation=lambda x: 1 / (x - 5),
        folds=FOLDS,
        safe_region=SafeRegion(),
    ).fit(points, points[:, 1])
    queries = torch.tensor([[0.1, 0.2], [torch.nan, 0.0], [5.0, 0.0]]).double()
    assessment = geoq.assess(queries)
    assert assessment.error_hat.isnan().tolist() == [False, True, True]
    assert not assessment.safe[1:].any()


class MeanError:
    """An increment model of the user that estimates the mean of the error as well."""

    quantile = 0.9

    def fit(self, calibration):
        self.largest = calibration.error.amax(dim=0)
        return self

    def __call__(self, features):
        return self.largest.expand_as(features.anchor_error)

    def expected_error(self, features):
        return 0.5 * self(features)


def test_expected_error_of_a_field_with_a_missing_pixel():
    x = RNG.normal(size=(60, 1, 8, 8))
    geoq = GeoQ(lambda x: 0.9 * x, None, folds=FOLDS, increment_model=MeanError())
    geoq.fit(x, x)
    queries = x[:3].copy()
    queries[1, 0, 2, 5] = np.nan
    expected = geoq.expected_error(queries)
    assert np.isnan(expected).all(axis=(1, 2, 3)).tolist() == [False, True, False]
    assert "input 0, 2, 5 is nan" in geoq.assess(queries).reason(1)


def test_labelled_queries():
    labels = [f"run {i}" for i in range(120)]
    coords = {"run": labels, "name": ["u", "v"]}
    x = xr.DataArray(X, coords, ("run", "name"))
    y = xr.DataArray(truth(X), {"run": labels}, "run")
    geoq = XarrayGeoQ(GeoQ(surrogate, None, folds=FOLDS), "run").fit(x, y)
    queries = x[:3].copy()
    queries[1, 1] = np.nan
    answer = geoq.assess(queries)
    assert np.isnan(answer.error_hat).values.tolist() == [False, True, False]
    assert answer.safe.values.tolist() == [True, False, True]
    assert answer.anchors.values[:, 0].tolist() == ["run 0", "", "run 2"]
    assert "input name v is nan" in geoq.reason(queries, "run 1")


def test_scikit_learn_refuses_the_batch():
    regressor = GeoQRegressor(folds=FOLDS).fit(X, truth(X))
    with pytest.raises(ValueError, match="contains NaN"):
        regressor.bound(mixed([np.nan, 0.0]))


def turn(x):
    """One step of a slowly growing rotation; the third coordinate is a parameter."""
    cos, sin = 1.001 * np.cos(0.1), 1.001 * np.sin(0.1)
    first, second = x[:, 0] * cos - x[:, 1] * sin, x[:, 0] * sin + x[:, 1] * cos
    return np.stack([first, second, x[:, 2]], axis=1)


ANGLE = 0.1 * np.arange(300)
STATES = np.stack([np.cos(ANGLE), np.sin(ANGLE), np.full(300, 1e-12)], axis=1)
ROLLOUTS = RolloutGeoQ(turn, None, n_calibration=10, n_starts=10).fit(STATES)


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (0, np.nan, "initial state: coordinate 0 is nan; replace it"),
        (1, -np.inf, "initial state: coordinate 1 is -inf; replace it"),
        (0, 1e200, r"coordinate 0 is 1e\+200, which is too far from the data"),
    ],
)
def test_an_unusable_initial_state(place, value, reason):
    x0 = STATES[:3].copy()
    x0[1, place] = value
    whole, without = (ROLLOUTS.assess(x, 5, tolerance=0.5) for x in (x0, STATES[:3]))
    assert np.isnan(whole.error_hat[1]).all()
    assert np.isnan(whole.prediction[1]).all()
    assert not whole.safe[1].any()
    assert whole.supported_horizon[1] == whole.trusted_horizon[1] == 0
    assert re.search(reason, whole.reason(1))
    np.testing.assert_array_equal(whole.error_hat[::2], without.error_hat[::2])
    np.testing.assert_array_equal(
        whole.trusted_horizon[::2], without.trusted_horizon[::2]
    )
    assert np.isnan(ROLLOUTS.bound(x0, 5)[1]).all()


def test_a_rollout_that_overflows_is_not_safe():
    geoq = RolloutGeoQ(
        lambda x: np.where(x[:, :1] > 1.5, np.inf, turn(x)),
        None,
        n_calibration=10,
        n_starts=10,
    ).fit(STATES)
    x0 = STATES[:2].copy()
    x0[1] = [2.0, 0.0, 1e-12]
    assessment = geoq.assess(x0, 5)
    assert assessment.diverged_at.tolist() == [0, 1]
    assert np.isposinf(assessment.error_hat[1]).all()
    assert not assessment.safe[1].any()
    assert "the surrogate diverged" in assessment.reason(1)


def test_a_constant_coordinate_of_a_rollout():
    x0 = STATES[:3].copy()
    x0[1, 2] = 3e-12
    assessment = ROLLOUTS.assess(x0, 5)
    assert assessment.supported_horizon.tolist() == [5, 0, 5]
    assert "coordinate 2 of the initial state is 3e-12" in assessment.reason(1)


@pytest.mark.parametrize("constant", [0.0, 1e-12, 1e-5, 300.0, 1e10])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"safe_region": DistanceRegion()},
        {"safe_region": SafeRegion(), "representation": identity},
    ],
    ids=["default", "distance", "paper"],
)
def test_a_constant_input_that_changes_is_not_safe(constant, settings):
    x = np.column_stack([X, np.full(len(X), constant)])
    geoq = GeoQ(surrogate, None, folds=FOLDS, **settings).fit(x, truth(X))
    queries = np.insert(
        X[:3], 2, [constant, 1.001 * constant + 1e-15, constant], axis=1
    )
    queries[2, 2] *= 1 + 1e-12
    assessment = geoq.assess(queries)
    assert assessment.safe.tolist() == [True, False, True]
    assert np.isposinf(assessment.support_score[1])
    assert f"but it is {constant:.4g} in all the data" in assessment.reason(1)
    assert "in all the data" not in assessment.reason(0)


def test_the_row_that_is_named_is_the_row_of_the_user():
    # Rows of this size are evaluated in chunks of 512.
    x = np.arange(600.0)[:, None] * np.ones(8192)
    broken = lambda x: np.where(x[:, 0] == 560, np.nan, x[:, 0])
    with pytest.raises(ValueError, match=r"surrogate\(x\)\[560\] is nan"):
        GeoQ(broken, None, folds=FOLDS).fit(x, x[:, 0])


def test_pairs_without_a_bound_are_not_conformalized():
    far = X.copy()
    far[5, 0] = 1e100
    with pytest.raises(
        ValueError, match=r"pair 5 of 120 has no bound: input 0 is 1e\+100"
    ):
        FITTED.conformalize(far, truth(X))


@pytest.mark.parametrize("unit", [1e-100, 1e-30, 1e30, 1e100])
@pytest.mark.parametrize("which", ["x", "y"])
@pytest.mark.parametrize("settings", [{}, {"safe_region": DistanceRegion()}], ids=str)
def test_bounds_and_flags_do_not_depend_on_the_unit(unit, which, settings):
    x_unit, y_unit = (unit, 1.0) if which == "x" else (1.0, unit)
    queries = np.array([[0.1, 0.2], [1.9, 0.0]])

    def assessed(x_unit, y_unit):
        scaled = lambda x: y_unit * surrogate(x / x_unit)
        geoq = GeoQ(scaled, None, folds=FOLDS, **settings)
        geoq.fit(x_unit * X, y_unit * truth(X))
        return geoq.assess(x_unit * queries)

    expected, found = assessed(1.0, 1.0), assessed(x_unit, y_unit)
    assert found.safe.tolist() == expected.safe.tolist() == [True, False]
    np.testing.assert_allclose(found.error_hat / y_unit, expected.error_hat, 1e-6)


@pytest.mark.parametrize("unit", [1e-300, 1e-200, 1e200, 1e300])
@pytest.mark.parametrize("which", ["x", "y"])
def test_extreme_units_are_refused_before_training(unit, which):
    x, y = (unit * X, truth(X)) if which == "x" else (X, unit * truth(X))
    trained = []
    geoq = GeoQ(None, lambda x, y: trained.append(x))
    with pytest.raises(
        ValueError, match=rf"{which}.* ranges .*pass it in another unit"
    ):
        geoq.fit(x, y)
    assert not trained


@pytest.mark.parametrize(
    ("x", "y", "settings", "message"),
    [
        (X * [1, 1e-170], truth(X), {}, r"x\[:, 1\] ranges from -.*e-171 to"),
        (X.astype("f4"), truth(X).astype("f4") * 1e25, {}, "y ranges .* in float32"),
        (
            X,
            truth(X) * 1e60,
            {"increment_model": NormScaledIncrement()},
            "y ranges from .* in float32; squares of such numbers overflow",
        ),
        (
            X * 1e60,
            truth(X),
            {"increment_model": NormScaledIncrement(), "representation": identity},
            "x ranges from .* in float32; squares of such numbers overflow",
        ),
    ],
)
def test_units_that_are_too_large_or_too_small(x, y, settings, message):
    with pytest.raises(ValueError, match=message):
        GeoQ(surrogate, None, folds=FOLDS, **settings).fit(x, y)


def test_trajectories_in_an_extreme_unit():
    geoq = RolloutGeoQ(turn, None, n_calibration=10, n_starts=10)
    with pytest.raises(ValueError, match=r"trajectories.* ranges .*another unit"):
        geoq.fit(STATES * 1e200)


def test_masks_that_differ_between_samples_are_refused_with_the_way_out():
    few = np.ma.masked_array(truth(X), mask=np.arange(120) == 5)
    with pytest.raises(ValueError, match=r"y is masked in 1 of 120 .*leave these rows"):
        GeoQ(surrogate, None, folds=FOLDS).fit(X, few)
