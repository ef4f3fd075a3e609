"""Wrong kinds of values: each refusal names the argument and the value, and what to pass instead."""

import warnings

import numpy as np
import pytest
import scipy.sparse
import torch
import xarray as xr
from jaxtyping import config
from matplotlib.figure import Figure

from geoq import (
    ClusterFolds,
    DistanceRegion,
    GeoQ,
    NestedFolds,
    PredictedFolds,
    RandomFolds,
    RolloutGeoQ,
    SafeRegion,
    SensitivityMetric,
    SupportRegion,
    TemporalFolds,
    TwoLawIncrement,
    WholeField,
    metrics,
    plots,
)
from geoq.rollout import AdditiveRecursion, Relative, RolloutRegion, SaturatingGrowth
from geoq.xarray import XarrayGeoQ


@pytest.fixture(autouse=True)
def without_checks_of_annotations():
    """These tests pass what annotations forbid; users have no checks of annotations."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


RNG = np.random.default_rng(0)
X = RNG.uniform(-1, 1, (60, 2))
Y = np.sin(3 * X[:, 0]) + X[:, 1]


def model(x):
    return 0.9 * (np.sin(3 * x[:, 0]) + x[:, 1])


def geoq(**settings):
    return GeoQ(model, None, **{"folds": RandomFolds(3), **settings})


FITTED = geoq().fit(X, Y)
TENSOR = torch.from_numpy(X)


def quantised():
    with warnings.catch_warnings(action="ignore"):
        return torch.quantize_per_tensor(TENSOR.float(), 0.1, 0, torch.qint8)


ARRAYS = {
    "generator": ((row for row in X), r"got generator; pass numpy.array\(\[\*x\]\)"),
    "dict": (
        {"u": X[:, 0]},
        r"got dict; pass its values as columns, numpy.column_stack\(\[\*x.values\(\)\]\)",
    ),
    "string": ("data.npy", "got str; read the data first"),
    "scipy sparse": (scipy.sparse.csr_array(X), r"got csr_array; pass x.toarray\(\)"),
    "torch sparse": (TENSOR.to_sparse(), r"x is a sparse tensor.*pass x.to_dense\(\)"),
    "nested": (
        torch.nested.nested_tensor([TENSOR], layout=torch.jagged),
        r"x is a nested tensor.*pass x.to_padded_tensor\(0.0\)",
    ),
    "float8": (
        TENSOR.to(torch.float8_e4m3fn),
        r"x is a float8_e4m3fn tensor.*pass x.float\(\)",
    ),
    "quantised": (
        quantised(),
        r"x is a quantised tensor.*pass x.dequantize\(\)",
    ),
    "longdouble": (
        X.astype(np.longdouble),
        r"x has dtype float128.*pass x.astype\(float\)",
    ),
    "timedelta": (
        X.astype("m8[s]"),
        r"x has dtype timedelta64\[s\].*x / numpy.timedelta64\(1, 's'\)",
    ),
    "datetime": (
        X.astype("M8[s]"),
        r"x has dtype datetime64\[s\].*\(x - x\[0\]\) / numpy.timedelta64",
    ),
    "objects": (X.astype(object), "x has dtype object, but must hold real numbers"),
    "complex": (X + 1j, "x is complex; pass its real and imaginary parts"),
    "masked": (
        np.ma.masked_less(X, -0.9),
        r"x is masked in \d+ of 120 values.*x.filled\(0\)",
    ),
}


@pytest.mark.parametrize(("x", "message"), ARRAYS.values(), ids=ARRAYS)
def test_arrays_of_another_kind(x, message):
    for call in (lambda: geoq().fit(x, Y), lambda: FITTED.assess(x)):
        with pytest.raises((TypeError, ValueError), match=message):
            call()


STATES = np.stack([np.cos(0.1 * np.arange(80)), np.sin(0.1 * np.arange(80))], axis=1)
ROLLOUTS = RolloutGeoQ(lambda x: 0.99 * x, None, n_calibration=5, n_starts=10).fit(
    STATES
)


@pytest.mark.parametrize(
    ("trajectories", "message"),
    [
        ({"run": STATES}, "trajectories must be a NumPy array.*got dict"),
        (
            xr.DataArray(STATES).to_pandas(),
            r"trajectories.*got DataFrame; .*numpy.asarray\(trajectories\)",
        ),
        ("runs.npy", "trajectories must be a NumPy array.*got str"),
        (np.ma.masked_less(STATES, -0.9), "trajectories is masked in"),
        (
            [STATES, "b"],
            r"trajectories\[1\] must be a NumPy array or a torch tensor, got str",
        ),
    ],
)
def test_trajectories_of_another_kind(trajectories, message):
    with pytest.raises((TypeError, ValueError), match=message):
        RolloutGeoQ(lambda x: x, None, n_calibration=5).fit(trajectories)


NOT_NUMBERS = ("0.9", None, [0.9], np.array([0.9, 0.5]), 1j)
QUANTILES = {
    "TwoLawIncrement": lambda q: TwoLawIncrement(quantile=q),
    "SafeRegion": lambda q: SafeRegion(quantile=q),
    "DistanceRegion": lambda q: DistanceRegion(quantile=q),
    "SupportRegion": lambda q: SupportRegion(quantile=q),
    "RolloutRegion": lambda q: RolloutRegion(quantile=q),
    "SaturatingGrowth": lambda q: SaturatingGrowth(quantile=q),
    "AdditiveRecursion": lambda q: AdditiveRecursion(quantile=q),
    "pinball": lambda q: metrics.pinball(Y, Y, q),
}


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=repr)
@pytest.mark.parametrize("make", QUANTILES.values(), ids=QUANTILES)
def test_quantiles_that_are_not_numbers(make, value):
    with pytest.raises(
        ValueError,
        match=r"quantile=.*, but a quantile level lies strictly between 0 and 1",
    ):
        make(value)


SETTINGS = {
    "confidence": (
        lambda: WholeField("0.9"),
        "confidence='0.9', but a quantile level lies",
    ),
    "min_weight": (
        lambda: SensitivityMetric(min_weight="a"),
        "min_weight='a', but it is a fraction",
    ),
    "n_folds": (lambda: geoq(folds=RandomFolds("3")).fit(X, Y), "n_folds='3'.*integer"),
    "n_folds 2.5": (
        lambda: geoq(folds=RandomFolds(2.5)).fit(X, Y),
        "n_folds=2.5.*integer",
    ),
    "seed": (
        lambda: geoq(folds=RandomFolds(3, "a")).fit(X, Y),
        "RandomFolds.random_state='a' must be an integer",
    ),
    "cluster seed": (
        lambda: geoq(folds=ClusterFolds(3, 0.5)).fit(X, Y),
        "ClusterFolds.random_state=0.5 must be an integer",
    ),
    "gap": (
        lambda: geoq(folds=TemporalFolds(3, "2")).fit(X, Y),
        "gap='2'.*integer >= 0",
    ),
    "smallest": (
        lambda: geoq(folds=NestedFolds(3, "0.2")).fit(X, Y),
        "smallest='0.2'.*strictly between 0 and 1",
    ),
    "n_anchors": (
        lambda: geoq(n_anchors="1").fit(X, Y),
        "n_anchors='1': n_anchors must be an integer",
    ),
    "levels": (
        lambda: FITTED.bounds(X, "0.9"),
        r"levels='0.9' must be a sequence of numbers; pass for example \(0.5, 0.9\)",
    ),
    "a level": (
        lambda: FITTED.bounds(X, ("a", 0.9)),
        r"levels='a' is a str.*such as \(0.5, 0.9\)",
    ),
    "query": (
        lambda: FITTED.assess(X).reason("0"),
        "query='0' is a str, but the number of a row is needed; choose 0 to 59",
    ),
    "tolerance": (
        lambda: ROLLOUTS.assess(STATES, 3, "0.1"),
        "tolerance='0.1' is a str, but numbers are needed; pass one number",
    ),
    "tolerance in percent": (
        lambda: ROLLOUTS.assess(STATES, 3, "10%"),
        r"tolerance='10%' is a str.*geoq.rollout.Relative\(0.1\) for 10 %",
    ),
    "relative tolerance": (
        lambda: Relative("10%"),
        r"Relative\(fraction='10%'\), but a fraction.*Relative\(0.1\) for 10 %",
    ),
    "tiny tolerance": (
        lambda: ROLLOUTS.assess(STATES, 3, 1e-300),
        "tolerance=1e-300, but numbers below 1.2e-38 are zero.*smaller unit",
    ),
    "n_steps": (
        lambda: ROLLOUTS.assess(STATES, "3"),
        "n_steps='3': n_steps must be an integer",
    ),
    "axis": (
        lambda: metrics.coverage_by_lead(X, X, axis="lead"),
        "axis='lead' is a str",
    ),
    "n_bins": (
        lambda: metrics.coverage_by_bin(Y, Y, Y, "3"),
        "n_bins='3'.*integer >= 1",
    ),
    "nan error": (
        lambda: metrics.coverage(np.array([1.0, np.nan]), np.ones(2)),
        r"error\[1\] is nan \(1 of 2 values\).*leave these values out",
    ),
    "nan bound": (
        lambda: metrics.pinball(np.ones(2), np.array([np.nan, 1.0]), 0.9),
        r"error_hat\[0\] is nan",
    ),
    "nan score": (
        lambda: metrics.coverage_by_bin(Y, Y, np.r_[np.nan, Y[1:]], 3),
        r"score\[0\] is nan",
    ),
    "nan lead": (
        lambda: metrics.coverage_by_lead(X * np.nan, X),
        r"error\[0, 0\] is nan",
    ),
    "masked error": (
        lambda: metrics.coverage(np.ma.masked_less(Y, 0), Y),
        r"error is masked in \d+ of 60 values",
    ),
    "no figure": (
        lambda: plots.summary(None, FITTED.assess(X)),
        r"figure is a NoneType.*pass figure=matplotlib.figure.Figure\(\)",
    ),
    "axes as figure": (
        lambda: plots.summary(Figure().subplots(), FITTED.assess(X)),
        "figure is a Axes, but an empty figure is needed",
    ),
    "figure as axes": (
        lambda: plots.estimate_against_error(Figure(), Y, Y, Y > 0),
        r"axes is a Figure.*pass axes=figure.subplots\(\)",
    ),
    "masked plot": (
        lambda: plots.summary(
            Figure(), FITTED.assess(X), error=np.ma.masked_less(abs(Y), 1)
        ),
        "error is masked in",
    ),
    "row": (
        lambda: plots.fields(Figure(), FITTED.assess(X), "0"),
        "row='0' is a str, but an integer is needed",
    ),
    "rows": (
        lambda: plots.rollouts(Figure(), ROLLOUTS.assess(STATES[:3], 3), 0),
        r"rows=0 is a single number; pass a list, rows=\[0\]",
    ),
}


@pytest.mark.parametrize(("call", "message"), SETTINGS.values(), ids=SETTINGS)
def test_settings_of_another_kind(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


class Splits:
    """A fold scheme of the user that yields whatever it is given."""

    def __init__(self, *folds):
        self.folds = folds

    def split(self, points, y=None, groups=None):
        return self.folds


ROWS = np.arange(60)
MASK = ROWS < 30
FOLDS = {
    "floats": (
        (ROWS[MASK] * 1.0, ROWS[~MASK]),
        "the training rows of fold 1 .* dtype float64.*pass integers",
    ),
    "masks": (
        (MASK, ~MASK),
        r"the training rows of fold 1 .* are a boolean mask.*numpy.flatnonzero\(mask\)",
    ),
    "held-out mask": (
        (ROWS[MASK], ~MASK),
        "the held-out rows of fold 1 .* boolean mask",
    ),
    "triple": (
        (ROWS[MASK], ROWS[~MASK], ROWS),
        r"is a tuple of 3 parts.*yield \(training rows, held-out rows\)",
    ),
    "one": (ROWS, "is a ndarray, but a fold is a pair"),
    "matrix": (
        (ROWS[MASK][:, None], ROWS[~MASK]),
        r"shape \(30, 1\), but a list of row numbers",
    ),
}


@pytest.mark.parametrize(("fold", "message"), FOLDS.values(), ids=FOLDS)
def test_folds_that_are_not_pairs_of_row_numbers(fold, message):
    with pytest.raises(TypeError, match=message):
        geoq(folds=Splits(fold)).fit(X, Y)


def test_tidy_folds_still_work():
    pairs = [(ROWS[MASK], ROWS[~MASK]), [ROWS[~MASK].tolist(), ROWS[MASK].tolist()]]
    assert len(geoq(folds=Splits(*pairs)).fit(X, Y).calibration_) == 60


def test_predicted_folds_of_lists():
    with pytest.raises(
        TypeError, match=r"PredictedFolds.arrays\[0\] must be a NumPy array.*got list"
    ):
        GeoQ(model, PredictedFolds([Y.tolist()] * 3), folds=RandomFolds(3)).fit(X, Y)


def test_grids_that_differ_by_rounding():
    lon = np.array([0.0, 1.0, 2.0])
    x = xr.DataArray(
        RNG.normal(size=(40, 3)), {"time": np.arange(40), "lon": lon}, ("time", "lon")
    )
    fitted = XarrayGeoQ(
        GeoQ(lambda x: 0.9 * x, None, folds=RandomFolds(3)), "time"
    ).fit(x, x)
    with pytest.raises(
        ValueError,
        match=r"differ by at most 1e-12, probably by rounding; pass x.assign_coords\(lon=",
    ):
        fitted.assess(x.assign_coords(lon=lon + 1e-12))
    with pytest.raises(
        ValueError,
        match=r"3 labels from 1.0 to 3.0 along 'lon', but x had 3 labels from 0.0 to 2.0",
    ):
        fitted.assess(x.assign_coords(lon=lon + 1))


def test_more_bins_than_scores():
    bins = metrics.coverage_by_bin(Y, Y, np.arange(60.0), n_bins=10**9)
    assert [b.count for b in bins] == [1] * 60


def test_tidy_values_are_accepted():
    masked = np.ma.masked_array(X, mask=False)
    np.testing.assert_array_equal(geoq().fit(masked, Y).bound(masked), FITTED.bound(X))
    for levels in ((0.5, 0.9), [0.5], np.array([0.5, 0.9]), torch.tensor([0.5])):
        assert len(FITTED.bounds(X, levels)) == len(levels)
    assert TwoLawIncrement(quantile=np.float32(0.5)).quantile == 0.5
    assert (
        metrics.coverage(
            np.array([1.0, np.nan]), np.ones(2), where=np.array([True, False])
        )
        == 1.0
    )
    gaps = FITTED.assess(np.array([[0.0, 0.0], [np.nan, 0.0]]))
    plots.summary(Figure(), gaps, error=np.array([0.1, np.nan]))
    for tolerance in (
        0.1,
        1,
        np.float32(0.1),
        np.array([0.1, 0.2]),
        [0.1, 0.2],
        torch.tensor(0.1),
    ):
        assert ROLLOUTS.assess(STATES[:2], 2, tolerance).trusted_horizon is not None
