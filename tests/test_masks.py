"""Cells without errors: land under a mask, land filled with zeros, clouds, fixed boundary values and copied outputs."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from geoq import (
    GeoQ,
    PredictedFolds,
    RandomFolds,
    Region,
    Table,
    TrainedFolds,
    WholeField,
    norm_error,
)
from geoq.bounds.fields import FieldBound, NoFactor
from geoq.bounds.two_laws import TwoLawBound
from geoq.data.masks import Mask, exact_cells, filled_with_means
from geoq.regions.table_scores import SupportDistance

FILL = 9.97e36
FOLDS = RandomFolds(5)
# 40 % of the cells are land.
LAND = np.zeros((1, 10, 10), dtype=bool)
LAND[..., :4] = True
RNG = np.random.default_rng(0)
PATTERNS = RNG.normal(size=(3, 1, 10, 10))


def draw(n):
    """Fields of three patterns, and outputs with noise of a different size in each sample."""
    size = RNG.normal(size=(n, 3))
    x = 0.5 * np.einsum("nk,kcij->ncij", size, PATTERNS)
    noise = RNG.normal(size=x.shape) * abs(size[:, :1, None, None])
    return x, np.sin(2 * x) + 0.3 * x**2 + 0.05 * noise


def masked(y, mask=LAND):
    return np.ma.array(np.where(mask, FILL, y), mask=np.broadcast_to(mask, y.shape))


def filled(y):
    return np.where(LAND, 0.0, y)


def clouded(y):
    """Half of the rows of the grid are absent from each sample, and so is land."""
    start = np.arange(len(y)) * 7 % 10
    return masked(y, ((np.arange(10) - start[:, None]) % 10 < 5)[:, None, :, None] | LAND)


def ocean_model(x):
    return 1.2 * x / (1 + 0.3 * x**2)


FIELD = {"bound_model": FieldBound(factor=NoFactor())}
TABLE = {"bound_model": TwoLawBound(), "domain": Table(), "safe_region": Region((SupportDistance(),))}  # fmt: skip
FIT, PAIRS, TEST = draw(100), draw(150), draw(250)


def calibrated(as_land=masked, settings=FIELD):
    model = (lambda x: filled(ocean_model(x))) if as_land is filled else ocean_model
    return GeoQ(model, None, folds=FOLDS, **settings).fit(FIT[0], as_land(FIT[1]))


ESTIMATOR = calibrated()


@pytest.mark.parametrize(
    ("as_land", "settings"),
    [(masked, FIELD), (filled, FIELD), (filled, TABLE), (clouded, FIELD), (clouded, TABLE)],
    ids=["masked", "zeros", "zeros, table", "clouds", "clouds, table"],
)
def test_ocean_cells_are_covered_at_the_level_whatever_does_not_count(as_land, settings):
    estimator = calibrated(as_land, settings)
    x, y = TEST
    error, safe = abs(y - ocean_model(x)), estimator.assess(x).safe
    counts = ~np.ma.getmaskarray(as_land(y))[safe][..., ~LAND[0]]

    def covered():
        within = (error <= np.ma.getdata(estimator.bound(x)))[safe][..., ~LAND[0]]
        shares = (within & counts).sum(axis=(1, 2)) / counts.sum(axis=(1, 2))
        return within.mean(), (shares >= 0.95).mean()

    assert safe.mean() > 0.9
    if as_land is clouded:
        assert covered()[0] == pytest.approx(0.95, abs=0.025)
    estimator.conformalize(PAIRS[0], as_land(PAIRS[1]))
    assert covered()[0] == pytest.approx(0.95, abs=0.02)
    estimator.conformalize(PAIRS[0], as_land(PAIRS[1]), guarantee=WholeField(0.9))
    # The standard deviation over sets of pairs is 0.03.
    assert 0.82 <= covered()[1] <= 0.98
    assert np.ma.filled(estimator.bound(x[:20]), 0.0)[..., LAND[0]].max() == 0


def test_a_mask_and_zeros_give_the_same_bounds_and_answers_have_the_mask_of_y():
    estimators = ESTIMATOR, calibrated(filled)
    bounds = [e.bound(TEST[0][:20]) for e in estimators]
    assert_array_equal(bounds[0].filled(0), bounds[1])
    # Bounds of the user see nan where the error does not count, also if it is 0 in all the data.
    assert_array_equal(*(e.fitted_.tuples.error for e in estimators))
    x = TEST[0][:5]
    answer, levels = ESTIMATOR.assess(x), ESTIMATOR.bounds(x, (0.5, 0.9))
    parts = (answer.prediction, answer.error_hat, answer.anchor_error, answer.increment)
    for part in (*parts, ESTIMATOR.bound(x), *levels.values()):
        assert_array_equal(part.mask, np.broadcast_to(LAND, x.shape))
        assert np.isfinite(part.compressed()).all()
    mean = answer.error_hat[1].compressed().mean()
    assert f"mean error bound {mean:.3g}" in answer.reason(1)
    assert f"query 1: mean error bound {mean:.3g}" in str(answer)
    assert answer.to_frame()["error_hat mean"][1] == pytest.approx(mean)


# Small vectors: three outputs, of which the second is masked.
X = np.random.default_rng(1).uniform(-1, 1, (100, 2))
Y = np.stack([np.sin(3 * X[:, 0]), X[:, 1], X.prod(axis=1)], axis=1)
COLUMN = np.array([False, True, False])


def least_squares(x, y):
    assert not np.ma.isMaskedArray(y)
    weights = np.linalg.lstsq(x, y)[0]
    return lambda x: np.where(COLUMN, np.nan, x @ weights)


def masked_prediction(x):
    return masked(least_squares(X, np.where(COLUMN, 0, Y))(x), COLUMN)


def fitted(surrogate, recipe, y, x=X, **settings):
    return GeoQ(surrogate, recipe, folds=FOLDS, **settings).fit(x, y)


TRAINED = [least_squares(X[rows], Y[rows]) for rows, _ in FOLDS.split(X)]


@pytest.mark.parametrize(
    ("surrogate", "folds"),
    {
        "a recipe": (None, least_squares),
        "a masked prediction": (masked_prediction, None),
        "nan under the mask": (TRAINED[0], least_squares),
        "trained folds": (TRAINED[0], TrainedFolds(TRAINED)),
        "predicted folds": (TRAINED[0], PredictedFolds([f(X) for f in TRAINED])),
    }.values(),
)
def test_a_surrogate_may_return_anything_under_the_mask(surrogate, folds):
    answer = fitted(surrogate, folds, masked(Y, COLUMN)).assess(X[:4])
    assert_array_equal(answer.error_hat.mask, np.tile(COLUMN, (4, 1)))
    assert answer.error_hat.compressed().max() < 10
    for text in (answer.reason(0), " ".join(answer.to_frame())):
        assert "output 1" not in text
        assert "output 2" in text


def test_an_error_of_another_shape_than_y_has_no_mask():
    settings = {"error_functional": norm_error}
    answer = fitted(None, least_squares, masked(Y, COLUMN), **settings).assess(X[:4])
    assert not np.ma.isMaskedArray(answer.error_hat)
    assert np.ma.isMaskedArray(answer.prediction)
    # The norm of the cells that are present.
    y = some_masked(Y)
    error = fitted(lambda x: np.zeros((len(x), 3)), None, y, **settings).fitted_.error
    assert_allclose(error, np.sqrt((y.filled(0) ** 2).sum(axis=1)))


def test_other_outputs_are_bounded_as_if_a_copied_one_were_absent():
    """A copied input is exact; with it, the bounds of the other output stay the same."""

    def model(x):
        return np.stack([x[:, 0], 2 * x[:, 0]], axis=1)

    y = np.stack([X[:, 0], np.sin(3 * X[:, 0])], axis=1)
    both = fitted(model, None, y)
    one = fitted(lambda x: model(x)[:, 1:], None, y[:, 1:])
    assert both.fitted_.exact.tolist() == [True, False]
    assert not both.bound(X)[:, 0].any()
    tables = [e.fitted_.bound.laws.inside.table for e in (both, one)]
    assert_allclose(*tables, atol=0.05)


def some_masked(y):
    """Another output is masked in each sample; the numbers under the mask are of no use."""
    return masked(y, np.arange(len(y))[:, None] % 3 == np.arange(3))


def no_first_cell(x):
    return np.stack([x[:, 0] * np.nan, 0.9 * x[:, 1], 0.9 * x.prod(axis=1)], axis=1)


@pytest.mark.parametrize(
    ("surrogate", "x", "y", "message"),
    {
        "a sample without any value": (None, X, np.ma.array(Y, mask=np.arange(100)[:, None] == [[3] * 3]), r"y is masked in 3 of 300 values.*leave these rows or columns out"),
        "a prediction that is absent where y is present": (no_first_cell, X, some_masked(Y), r"surrogate\(x\)\[1, 0\] is nan .*mask y there"),
        "everything masked": (None, X, np.ma.array(Y, mask=True), r"y is masked in 300 of 300 values"),
        "masked inputs": (None, masked(X, np.array([True, False])), Y, r"x is masked in 100 of 200 values"),
        "a prediction masked elsewhere": (masked_prediction, X, masked(Y, np.array([True, False, False])), r"surrogate\(x\)\[0, 1\] is nan.*mask y there"),
        "a prediction masked without a mask": (masked_prediction, X, Y, r"surrogate\(x\)\[0, 1\] is nan"),
    }.values(),
)  # fmt: skip
def test_masks_that_raise(surrogate, x, y, message):
    with pytest.raises((ValueError, TypeError), match=message):
        fitted(surrogate, None if surrogate else least_squares, y, x)


def test_pairs_with_errors_in_exact_cells_are_named():
    estimator, y = calibrated(filled), filled(PAIRS[1])
    y[:, 0, 2, 3] = 1
    with pytest.warns(UserWarning, match=r"wrong at output \[0, 2, 3\].*bound is 0"):
        estimator.conformalize(PAIRS[0], y)


@pytest.mark.parametrize("mask", [False, True, np.arange(6).reshape(2, 3) > 2])
def test_only_a_mask_of_some_cells_in_all_samples_is_a_mask(mask):
    assert Mask.of(np.ma.array(np.ones((2, 3)), mask=mask)) is None


def test_absent_cells_of_a_prediction_come_back_masked(tmp_path):
    """Their anchors have the mean error of the cell."""

    def model(x):
        """The second output is absent from every other prediction."""
        answer = np.stack([x[:, 0], x[:, 1], 0 * x[:, 0]], axis=1)
        answer[x[:, 0] > 0.5, 1] = np.nan
        return np.ma.masked_invalid(answer)

    absent = model(X).mask
    estimator = fitted(model, None, np.ma.array(Y, mask=absent))
    estimator.save(tmp_path / "a.geoq")
    answers = [e.assess(X) for e in (estimator, GeoQ.load(tmp_path / "a.geoq", surrogate=model))]
    for answer in answers:
        for part in (answer.prediction, answer.error_hat, answer.increment):
            assert_array_equal(part.mask, absent)
            assert np.isfinite(part.compressed()).all()
    assert_array_equal(*(a.error_hat.filled(0) for a in answers))
    error = abs(Y - model(X).data)[:, 1]
    assert_allclose(estimator.fitted_.error[absent[:, 1], 1], error[~absent[:, 1]].mean())


def test_recipes_receive_absent_cells_as_masked_nan():
    received = []

    def train(x, y):
        received.append(y)
        weights = np.linalg.lstsq(x, y.filled(y.mean()))[0]
        return lambda x: x @ weights

    y = some_masked(Y)
    answer = fitted(None, train, y).assess(X)
    assert len(received) == 6
    assert_array_equal(received[0].mask, y.mask)
    assert all(np.isnan(part.data[part.mask]).all() for part in received)
    # Without nan in a prediction, all of its cells are bounded.
    assert not np.ma.getmaskarray(answer.error_hat).any()
    assert answer.error_hat.max() < 10


def test_errors_of_nan_do_not_count():
    nan = np.nan
    errors = np.array([[0.0, nan, 2.0, nan], [0.0, 0.0, nan, nan], [nan, 0.0, 4.0, nan]])
    assert exact_cells([errors]).tolist() == [True, True, False, True]
    assert exact_cells([errors, errors * 0 + 1]).tolist() == [False, False, False, True]
    assert exact_cells([errors * 0]) is None
    assert filled_with_means(errors)[:, 2].tolist() == [2.0, 3.0, 4.0]
    assert filled_with_means(errors)[:, 3].tolist() == [0.0] * 3
