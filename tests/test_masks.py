"""Cells without errors: land under a mask, land filled with zeros, fixed boundary values and copied lags."""

import numpy as np
import pytest

from geoq import (
    DistanceRegion,
    FieldScaleIncrement,
    GeoQ,
    IndicatorIncrement,
    RandomFolds,
    TrainedFolds,
    TwoLawIncrement,
    WholeField,
)
from geoq.increments import FieldFactor
from geoq.masks import Mask
from geoq.surrogate import norm_error
from geoq.training import PredictedFolds, SharedTraining
from geoq.training.loop import Training

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
    values = np.where(mask, FILL, y)
    return np.ma.array(values, mask=np.broadcast_to(mask, y.shape))


def filled(y):
    return np.where(LAND, 0.0, y)


def ocean_model(x):
    return 1.2 * x / (1 + 0.3 * x**2)


def land_model(x):
    return filled(ocean_model(x))


FIELD = FieldScaleIncrement(
    factor=FieldFactor(n_splits=2, training=Training(n_steps=40, check_every=20))
)
FIT, PAIRS, TEST = draw(120), draw(300), draw(600)


def calibrated(increment=FIELD, *, mask=True):
    as_land = masked if mask else filled
    model = ocean_model if mask else land_model
    geoq = GeoQ(
        model,
        None,
        increment_model=increment,
        folds=FOLDS,
        safe_region=DistanceRegion(),
    )
    return geoq.fit(FIT[0], as_land(FIT[1]))


GEOQ = calibrated()


@pytest.mark.filterwarnings("ignore:an error has shape")
@pytest.mark.parametrize(
    ("increment", "mask"),
    [(FIELD, True), (FIELD, False), (TwoLawIncrement(), False)],
    ids=["masked", "zeros", "zeros, default"],
)
def test_ocean_cells_are_covered_at_the_level_whatever_the_land(increment, mask):
    geoq = calibrated(increment, mask=mask)
    x, y = TEST
    pairs = PAIRS[0], (masked if mask else filled)(PAIRS[1])
    answer = geoq.assess(x)
    ratio = abs(y - ocean_model(x))[..., ~LAND[0]] / answer.error_hat[..., ~LAND[0]]

    def covered():
        return (ratio[answer.safe] <= geoq.conformal_factors_.safe)[:, 0]

    geoq.conformalize(*pairs)
    assert covered().mean() == pytest.approx(0.95, abs=0.02)
    geoq.conformalize(*pairs, guarantee=WholeField(0.9))
    # The standard deviation over sets of 300 pairs is 0.017.
    assert 0.86 <= (covered().mean(axis=1) >= 0.95).mean() <= 0.95
    assert np.ma.getdata(geoq.bound(x[:20]))[..., LAND[0]].max() == 0


def test_a_mask_and_zeros_give_the_same_bounds():
    bound = calibrated(mask=False).bound(TEST[0][:20])
    np.testing.assert_array_equal(GEOQ.bound(TEST[0][:20]).filled(0), bound)


def test_answers_have_the_mask_of_y_and_finite_values_elsewhere():
    x = TEST[0][:5]
    answer = GEOQ.assess(x)
    levels = GEOQ.bounds(x, (0.5, 0.9))
    parts = (answer.prediction, answer.error_hat, answer.anchor_error, answer.increment)
    for part in (*parts, GEOQ.bound(x), *levels.values()):
        np.testing.assert_array_equal(part.mask, np.broadcast_to(LAND, x.shape))
        assert np.isfinite(part.compressed()).all()
    mean = answer.error_hat[0].compressed().mean()
    assert f"mean error bound {mean:.3g}" in answer.reason(0)


def test_a_file_keeps_the_mask(tmp_path):
    GEOQ.save(tmp_path / "a.geoq", calibration=False)
    loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=ocean_model)
    before, after = GEOQ.assess(TEST[0][:5]), loaded.assess(TEST[0][:5])
    np.testing.assert_array_equal(before.error_hat.mask, after.error_hat.mask)
    np.testing.assert_array_equal(before.error_hat.data, after.error_hat.data)
    np.testing.assert_array_equal(before.observed_error, after.observed_error)
    factors = [g.conformalize(*PAIRS).conformal_factors_ for g in (GEOQ, loaded)]
    assert factors[0] == factors[1]


# Small vectors: three outputs, of which the second is masked.
X = np.random.default_rng(1).uniform(-1, 1, (100, 2))
Y = np.stack([np.sin(3 * X[:, 0]), X[:, 1], X.prod(axis=1)], axis=1)
COLUMN = np.array([False, True, False])


def least_squares(x, y):
    assert not np.ma.isMaskedArray(y)
    weights = np.linalg.lstsq(x, y)[0]

    def predict(x):
        answer = x @ weights
        answer[:, 1] = np.nan
        return answer

    return predict


def masked_prediction(x):
    return masked(least_squares(X, np.where(COLUMN, 0, Y))(x), COLUMN)


SPLITS = [rows for rows, _ in FOLDS.split(X)]
TRAINED = [least_squares(X[rows], Y[rows]) for rows in SPLITS]


@pytest.mark.parametrize(
    ("surrogate", "folds"),
    {
        "a recipe": (None, least_squares),
        "a masked prediction": (masked_prediction, None),
        "nan under the mask": (TRAINED[0], least_squares),
        "a shared recipe": (None, SharedTraining(least_squares)),
        "trained folds": (TRAINED[0], TrainedFolds(TRAINED)),
        "predicted folds": (TRAINED[0], PredictedFolds([f(X) for f in TRAINED])),
    }.values(),
)
def test_a_surrogate_may_return_anything_under_the_mask(surrogate, folds):
    geoq = GeoQ(surrogate, folds, folds=FOLDS).fit(X, masked(Y, COLUMN))
    answer = geoq.assess(X[:4])
    np.testing.assert_array_equal(answer.error_hat.mask, np.tile(COLUMN, (4, 1)))
    assert answer.error_hat.compressed().max() < 10
    assert "output 1" not in answer.reason(0)
    assert "output 2" in answer.reason(0)


def test_an_error_of_another_shape_than_y_has_no_mask():
    geoq = GeoQ(None, least_squares, folds=FOLDS, error_functional=norm_error)
    answer = geoq.fit(X, masked(Y, COLUMN)).assess(X[:4])
    assert not np.ma.isMaskedArray(answer.error_hat)
    assert np.ma.isMaskedArray(answer.prediction)


def test_other_outputs_are_bounded_as_if_a_copied_one_were_absent():
    """A copied input is exact; with it, the bounds of the other output stay the same."""

    def model(x):
        return np.stack([x[:, 0], 2 * x[:, 0]], axis=1)

    y = np.stack([X[:, 0], np.sin(3 * X[:, 0])], axis=1)
    both = GeoQ(model, None, folds=FOLDS).fit(X, y)
    one = GeoQ(lambda x: model(x)[:, 1:], None, folds=FOLDS).fit(X, y[:, 1:])
    assert both.exact_.tolist() == [True, False]
    np.testing.assert_array_equal(both.bound(X)[:, 0], 0)
    table = [g.increment_model_.inside_.table for g in (both, one)]
    np.testing.assert_allclose(*table, atol=0.05)


def some_masked(y):
    """Another output is masked in each sample; the numbers under the mask are of no use."""
    mask = np.arange(len(y))[:, None] % 3 == np.arange(3)
    return np.ma.array(np.where(mask, FILL, y), mask=mask)


def no_first_cell(x):
    answer = 0.9 * Y[: len(x)]
    answer[:, 0] = np.nan
    return answer


@pytest.mark.parametrize(
    ("call", "message"),
    {
        "a sample without any value": (
            lambda: GeoQ(None, least_squares, folds=FOLDS).fit(
                X, np.ma.array(Y, mask=np.arange(100)[:, None] == [[3] * 3])
            ),
            r"y is masked in 3 of 300 values.*leave these rows out",
        ),
        "a prediction that is absent where y is present": (
            lambda: GeoQ(no_first_cell, None, folds=FOLDS).fit(X, some_masked(Y)),
            r"surrogate\(x\)\[1, 0\] is nan .*mask y there",
        ),
        "an increment that needs one mask": (
            lambda: GeoQ(
                np.zeros_like, None, folds=FOLDS, increment_model=IndicatorIncrement()
            ).fit(FIT[0], clouded(1.0 * (FIT[1] > 0))),
            r"masked in some samples only, in 3600 of 12000.*IndicatorIncrement",
        ),
        "everything masked": (
            lambda: GeoQ(None, least_squares, folds=FOLDS).fit(
                X, np.ma.array(Y, mask=True)
            ),
            r"y is masked in 300 of 300 values",
        ),
        "masked inputs": (
            lambda: GeoQ(None, least_squares, folds=FOLDS).fit(
                masked(X, np.array([True, False])), Y
            ),
            r"x is masked in 100 of 200 values",
        ),
        "a prediction masked elsewhere": (
            lambda: GeoQ(masked_prediction, None, folds=FOLDS).fit(
                X, masked(Y, np.array([True, False, False]))
            ),
            r"the output of surrogate is masked in 100 of 300",
        ),
    }.values(),
)
def test_masks_that_are_refused(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_pairs_with_errors_in_exact_cells_are_named():
    geoq = calibrated(mask=False)
    y = filled(PAIRS[1])
    y[:, 0, 2, 3] = 1
    with pytest.warns(UserWarning, match=r"wrong at output \[0, 2, 3\].*bound is 0"):
        geoq.conformalize(PAIRS[0], y)


@pytest.mark.parametrize("mask", [False, True, np.arange(6).reshape(2, 3) > 2])
def test_only_a_mask_of_some_cells_in_all_samples_is_a_mask(mask):
    assert Mask.of(np.ma.array(np.ones((2, 3)), mask=mask)) is None


def test_tables_of_answers_leave_masked_cells_out():
    answer = GEOQ.assess(TEST[0][:3])
    mean = answer.error_hat[1].compressed().mean()
    assert answer.to_frame()["error_hat mean"][1] == pytest.approx(mean)
    assert f"query 1: mean error bound {mean:.3g}" in str(answer)
    vectors = GeoQ(None, least_squares, folds=FOLDS).fit(X, masked(Y, COLUMN))
    columns = [*vectors.assess(X[:3]).to_frame()]
    assert "error_hat output 1" not in columns
    assert "error_hat output 2" in columns


def clouded(y):
    """Half of the rows of the grid are absent from each sample, and so is land."""
    start = np.arange(len(y)) * 7 % 10
    mask = (np.arange(10) - start[:, None]) % 10 < 5
    mask = mask[:, None, :, None] | LAND
    return np.ma.array(np.where(mask, FILL, y), mask=mask)


@pytest.mark.filterwarnings("ignore:an error has shape")
@pytest.mark.parametrize("increment", [FIELD, TwoLawIncrement()])
def test_cells_that_are_absent_from_some_samples_do_not_count(increment):
    geoq = GeoQ(
        ocean_model,
        None,
        increment_model=increment,
        folds=FOLDS,
        safe_region=DistanceRegion(),
    )
    geoq.fit(FIT[0], clouded(FIT[1]))
    x, y = TEST
    error, safe = abs(y - ocean_model(x)), geoq.assess(x).safe

    def covered():
        return (error <= geoq.bound(x).data)[safe][..., ~LAND[0]]

    # With half of the errors, the level of the bound is less certain.
    assert covered().mean() == pytest.approx(0.95, abs=0.025)
    geoq.conformalize(PAIRS[0], clouded(PAIRS[1]))
    assert covered().mean() == pytest.approx(0.95, abs=0.02)
    geoq.conformalize(PAIRS[0], clouded(PAIRS[1]), guarantee=WholeField(0.9))
    present = ~clouded(y).mask[safe][..., ~LAND[0]]
    shares = (covered() & present).sum(axis=(1, 2)) / present.sum(axis=(1, 2))
    assert 0.86 <= (shares >= 0.95).mean() <= 0.95


def test_absent_cells_give_the_answers_of_their_mean_error_and_come_back_masked(
    tmp_path,
):
    def model(x):
        """The second output is absent from every other prediction."""
        answer = np.stack([x[:, 0], x[:, 1], 0 * x[:, 0]], axis=1)
        answer[x[:, 0] > 0.5, 1] = np.nan
        return np.ma.masked_invalid(answer)

    absent = model(X).mask
    geoq = GeoQ(model, None, folds=FOLDS).fit(X, np.ma.array(Y, mask=absent))
    path = tmp_path / "a.geoq"
    geoq.save(path)
    answers = [g.assess(X) for g in (geoq, GeoQ.load(path, surrogate=model))]
    for answer in answers:
        for part in (answer.prediction, answer.error_hat, answer.increment):
            np.testing.assert_array_equal(part.mask, absent)
            assert np.isfinite(part.compressed()).all()
    np.testing.assert_array_equal(*(a.error_hat.filled(0) for a in answers))
    error = abs(Y - model(X).data)[:, 1]
    np.testing.assert_allclose(
        geoq.error_[absent[:, 1], 1], error[~absent[:, 1]].mean()
    )


def test_recipes_receive_absent_cells_as_masked_nan():
    received = []

    def train(x, y):
        received.append(y)
        weights = np.linalg.lstsq(x, y.filled(y.mean()))[0]
        return lambda x: x @ weights

    y = some_masked(Y)
    answer = GeoQ(None, train, folds=FOLDS).fit(X, y).assess(X)
    assert len(received) == 6
    np.testing.assert_array_equal(received[0].mask, y.mask)
    assert all(np.isnan(part.data[part.mask]).all() for part in received)
    # Without nan in a prediction, all of its cells are bounded.
    assert not np.ma.getmaskarray(answer.error_hat).any()
    assert answer.error_hat.max() < 10


def test_a_norm_is_the_norm_of_the_cells_that_are_present():
    zero = GeoQ(
        lambda x: np.zeros((len(x), 3)), None, folds=FOLDS, error_functional=norm_error
    )
    y = some_masked(Y)
    error = zero.fit(X, y).error_.numpy()
    np.testing.assert_allclose(error, np.sqrt((y.filled(0) ** 2).sum(axis=1)))
