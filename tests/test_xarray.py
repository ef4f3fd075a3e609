import datetime
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from geoq import (
    GeoQ,
    GroupFolds,
    IndicatorIncrement,
    NormScaledIncrement,
    RandomFolds,
    TemporalFolds,
    Training,
    norm_error,
    relative_norm_error,
)
from geoq.conformal import ConformalFactors
from geoq.increments import inputs
from geoq.xarray import XarrayGeoQ

QUICK = NormScaledIncrement(training=Training(n_steps=50, check_every=25, patience=1))
N_FIT, N_QUERIES = 60, 12
FIELDS = ("prediction", "error_hat", "anchor_error", "increment")
NUMBERS = ("safe", "support_score", "support_distance")


class LeastSquares:
    """A linear map of the fields, which records the number of rows of each call."""

    def __init__(self, x, y):
        self.output = y.shape[1:]
        self.weights = np.linalg.lstsq(self.design(x), y.reshape(len(y), -1))[0]
        self.n_rows = []
        self.n_pickled = 0

    def __getstate__(self):
        self.n_pickled += 1
        return self.__dict__

    @staticmethod
    def design(x):
        means = x.reshape(len(x), x.shape[1], -1)
        return np.concatenate([means.mean(-1), np.ones((len(x), 1))], axis=1)

    def __call__(self, x):
        assert isinstance(x, np.ndarray)
        self.n_rows.append(len(x))
        return (self.design(x) @ self.weights).reshape(len(x), *self.output)


@pytest.fixture(scope="module")
def fields():
    """Inputs of two time lags on a grid of 4 x 8 cells, and their squares as outputs at two lead times."""
    rng = np.random.default_rng(0)
    time = pd.date_range("2020-01-01", periods=N_FIT + N_QUERIES, freq="D")
    latitude, longitude = np.linspace(-67.5, 67.5, 4), np.arange(0.0, 360, 45)
    wave = np.cos(np.radians(longitude))
    strength = rng.uniform(0, 1, (len(time), 2, 4, 1))
    x = xr.DataArray(
        strength * wave + 0.1 * rng.standard_normal((len(time), 2, 4, 8)),
        {"time": time, "lag": [1, 0], "lat": latitude, "lon": longitude},
        ("time", "lag", "lat", "lon"),
        attrs={"units": "K"},
    )
    y = (x**2).rename(lag="lead").assign_coords(lead=[24, 48], level=500)
    y.attrs = {"units": "m", "long_name": "height"}
    return x.assign_coords(month=x.time.dt.month), y


@pytest.fixture(scope="module")
def x(fields):
    return fields[0].isel(time=slice(N_FIT))


@pytest.fixture(scope="module")
def y(fields):
    return fields[1].isel(time=slice(N_FIT))


@pytest.fixture(scope="module")
def queries(fields):
    return fields[0].isel(time=slice(N_FIT, None))


def values(array):
    stacked = array.to_dataarray() if isinstance(array, xr.Dataset) else array
    return stacked.transpose("time", ...).values


def geoq(x, y, **settings):
    usual = {"folds": RandomFolds(3), "increment_model": QUICK, "n_anchors": 2}
    return GeoQ(LeastSquares(values(x), values(y)), LeastSquares, **usual | settings)


def unfitted(x, y, **settings):
    return XarrayGeoQ(geoq(x, y, **settings), "time")


@pytest.fixture(scope="module")
def fitted(x, y):
    return unfitted(x, y).fit(x, y)


@pytest.fixture(scope="module")
def answer(fitted, queries):
    return fitted.assess(queries)


def test_the_answers_are_the_answers_of_geoq_to_plain_arrays(answer, x, y, queries):
    plain = geoq(x, y).fit(x.values, y.values).assess(queries.values)
    for name in (*FIELDS, "safe", "support_score", "anchor_distance", "observed_error"):
        assert_array_equal(answer[name], getattr(plain, name))
    assert_array_equal(answer.support_distance, plain.features.support_distance)
    assert_array_equal(answer.anchors, x.time.values[plain.anchors])
    assert answer.attrs["threshold"] == plain.threshold
    assert (answer.attrs["safe"], answer.attrs["not_safe"]) == plain.meaning


def test_fields_have_the_dimensions_and_coordinates_of_y(answer, y, queries):
    for name in FIELDS:
        assert answer[name].dims == ("time", "lead", "lat", "lon")
        for dim in ("lead", "lat", "lon"):
            xr.testing.assert_identical(answer[name][dim], y[dim])
        assert_array_equal(answer[name].time, queries.time)
        assert answer[name].level == 500
    for name in NUMBERS:
        assert answer[name].dims == ("time",)
    assert answer.anchors.dims == ("time", "anchor")


def test_coordinates_of_the_samples_are_kept_and_other_coordinates_of_x_are_not(
    answer, queries
):
    assert_array_equal(answer.month, queries.month)
    assert "lag" not in answer.coords


def test_errors_are_in_the_units_of_y(answer):
    assert answer.prediction.attrs == {"units": "m", "long_name": "height"}
    assert answer.error_hat.attrs == {"units": "m", "long_name": "error bound"}
    assert "units" not in answer.support_score.attrs


@pytest.mark.parametrize(
    ("error", "units"), [(norm_error, "m"), (relative_norm_error, None)]
)
def test_an_error_per_field_has_the_units_of_y_unless_it_is_relative(
    x, y, queries, error, units
):
    bound = unfitted(x, y, error_functional=error).fit(x, y).bound(queries)
    assert bound.dims == ("time",)
    assert bound.attrs.get("units") == units


def test_fit_calibrates_a_copy_of_geoq(x, y, queries):
    plain = geoq(x, y)
    settings = dict(vars(plain))
    estimator = XarrayGeoQ(plain, "time").fit(x, y)
    assert vars(plain) == settings
    before = estimator.bound(queries)
    plain.set_params(error_functional=norm_error)
    xr.testing.assert_identical(estimator.bound(queries), before)


def test_a_clone_has_the_parameters_and_is_not_fitted(fitted):
    copy = clone(fitted)
    assert (repr(copy.geoq), copy.sample_dim) == (repr(fitted.geoq), "time")
    assert not hasattr(copy, "geoq_")
    assert copy.set_params(sample_dim="day").get_params()["sample_dim"] == "day"
    with pytest.raises(ValueError, match="'dim'; it has geoq, sample_dim"):
        copy.set_params(dim="day")


@pytest.mark.parametrize("chunks", [None, 5])
def test_bounds_have_a_dimension_of_levels_and_are_lazy_for_chunks(
    fitted, y, queries, chunks
):
    asked = queries if chunks is None else queries.chunk(time=chunks)
    surrogate = fitted.geoq_.surrogate_
    surrogate.n_pickled = 0
    bounds = fitted.bounds(asked, np.float32([0.5, 0.9]), dim="quantile_level")
    assert (bounds.chunks is None) == (chunks is None)
    assert bounds.dims == ("time", "lead", "lat", "lon", "quantile_level")
    xr.testing.assert_identical(bounds.lat, y.lat)
    expected = fitted.geoq_.bounds(queries.values, (0.5, 0.9))
    for level in (0.5, 0.9):
        assert_allclose(bounds.sel(quantile_level=level), expected[level], rtol=1e-5)
    assert surrogate.n_pickled == 0


def test_unusable_requests_are_refused_before_anything_lazy(fitted, queries):
    lazy = queries.chunk(time=5)
    with pytest.raises(TypeError, match="NormScaledIncrement estimates an upper"):
        fitted.expected_error(lazy)
    with pytest.raises(ValueError, match=r"levels"):
        fitted.bounds(lazy, (0.5, 1.5))
    for name in ("level", "lat", "month"):
        with pytest.raises(ValueError, match=f"dim='{name}', but the answer already"):
            fitted.bounds(lazy, (0.5, 0.9), dim=name)


def test_the_dimension_of_levels_is_named_level(x, y, queries):
    y = y.drop_vars("level")
    estimator = unfitted(x, y).fit(x, y)
    assert_array_equal(estimator.bounds(queries, (0.5, 0.9)).level, [0.5, 0.9])


@pytest.mark.parametrize("chunks", [None, 5])
def test_expected_errors_are_labelled_and_lazy_for_chunks(x, y, queries, chunks):
    def is_large(y, prediction):
        return (abs(y - prediction) > 0.1).astype(float)

    model = IndicatorIncrement(
        sees=(inputs,), widths=(4,), n_networks=1, training=Training(n_steps=20)
    )
    estimator = unfitted(x, y, error_functional=is_large, increment_model=model)
    estimator.fit(x, y)
    asked = queries if chunks is None else queries.chunk(time=chunks)
    expected = estimator.expected_error(asked)
    assert (expected.chunks is None) == (chunks is None)
    assert expected.dims == ("time", "lead", "lat", "lon")
    xr.testing.assert_identical(expected.lat, y.lat)
    assert_allclose(expected, estimator.geoq_.expected_error(queries.values), rtol=1e-5)


def test_the_dimensions_can_be_in_any_order(answer, x, y, queries):
    last = ("lag", "lat", "lon", "time")
    estimator = unfitted(x, y)
    estimator.fit(x.transpose(*last), y.transpose("lead", "lat", "lon", "time"))
    asked = queries.transpose("lon", "time", "lag", "lat")
    xr.testing.assert_identical(estimator.assess(asked), answer)


def test_inputs_and_outputs_can_have_different_grids(x, y, queries):
    coarse = y.isel(lon=slice(None, None, 2))
    estimator = unfitted(x, coarse).fit(x, coarse)
    xr.testing.assert_identical(estimator.bound(queries).lon, coarse.lon)


def test_variables_of_a_dataset_are_stacked(x, y, queries):
    data, asked = (xr.Dataset({"a": part, "b": -part}) for part in (x, queries))
    plain = geoq(data, y).fit(values(data), y.values)
    estimator = unfitted(data, y).fit(data, y)
    assert_array_equal(estimator.bound(asked), plain.bound(values(asked)))
    more = asked[["b", "a"]].assign(c=asked.a)
    xr.testing.assert_identical(estimator.bound(more), estimator.bound(asked))
    with pytest.raises(ValueError, match=r"x has the variables \['b'\].*had \['a'\]"):
        estimator.bound(asked[["b"]])


def test_the_bounds_of_the_variables_of_y_are_selected_by_name(x, y, queries):
    both = xr.Dataset({"height": y, "twice": 2 * y})
    bound = unfitted(x, both).fit(x, both).bound(queries).to_dataset("variable")
    assert bound.twice.dims == ("time", "lead", "lat", "lon")
    assert bound.twice.mean() > bound.height.mean()


def test_the_units_of_all_variables_are_kept_and_compared(x, y, queries):
    both = xr.Dataset({"height": y, "wind": 2 * y.assign_attrs(units="m/s")})
    both["wind"].attrs["units"] = "m/s"
    estimator = unfitted(x, both).fit(x, both)
    bound = estimator.bound(queries)
    assert_array_equal(bound.units, ["m", "m/s"])
    assert bound.sel(variable="wind").units == "m/s"
    with pytest.raises(ValueError, match="x has the units 'degC', but 'K' in fit"):
        estimator.bound(queries.assign_attrs(units="degC"))
    with pytest.raises(ValueError, match=r"y\['wind'\] has the units 'knots'"):
        estimator.conformalize(x, both.assign(wind=y.assign_attrs(units="knots")))


def test_random_folds_of_similar_dates_are_warned_of(x, y):
    slow = y.cumsum("time")
    with pytest.warns(UserWarning, match=r"'time' are alike .*=TemporalFolds\(5, gap="):
        unfitted(x, slow).fit(x, slow)
    for folds in (TemporalFolds(3), GroupFolds()):
        groups = x.time.dt.dayofyear % 20 if isinstance(folds, GroupFolds) else None
        unfitted(x, slow, folds=folds).fit(x, slow, groups=groups)


def test_chunked_queries_are_assessed_chunk_by_chunk(fitted, answer, queries):
    """Dask must not pickle the calibration, which can be large."""
    surrogate = fitted.geoq_.surrogate_
    surrogate.n_rows.clear()
    surrogate.n_pickled = 0
    lazy = fitted.assess(queries.chunk(time=5, lat=2))
    assert lazy.error_hat.chunksizes["time"] == (5, 5, 2)
    assert surrogate.n_rows == []
    # Not to the last bit: networks round differently in batches of another size.
    xr.testing.assert_allclose(lazy.compute(), answer)
    assert sorted(surrogate.n_rows) == [2, 5, 5]
    assert surrogate.n_pickled == 0


def test_a_lazy_answer_is_written_to_a_file_chunk_by_chunk(
    fitted, answer, queries, tmp_path
):
    surrogate = fitted.geoq_.surrogate_
    surrogate.n_rows.clear()
    fitted.assess(queries.chunk(time=4)).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    assert surrogate.n_rows == [4, 4, 4]
    with xr.open_dataset(tmp_path / "a.nc", engine="h5netcdf") as read:
        xr.testing.assert_allclose(read, answer)


def test_conformal_factors_are_the_factors_for_plain_arrays(x, y):
    fit, aside = slice(30), slice(30, None)
    x1, x2, y1, y2 = (part.isel(time=s) for part in (x, y) for s in (fit, aside))
    estimator = unfitted(x1, y1).fit(x1, y1)
    estimator.conformalize(x2, y2.transpose("lat", ...))
    plain = geoq(x1, y1).fit(x1.values, y1.values)
    plain.conformalize(x2.values, y2.values)
    assert estimator.geoq_.conformal_factors_ == plain.conformal_factors_
    assert plain.conformal_factors_ != ConformalFactors()
    with pytest.raises(ValueError, match="y has 2 labels from 24 to 72 along 'lead'"):
        estimator.conformalize(x2, y2.assign_coords(lead=[24, 72]))


DAY = np.timedelta64(1, "D")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: y.assign_coords(time=y.time + DAY), "60 labels from 2020-01-01"),
        (lambda y: y[::-1], r"y.sel\(time=x.time\)"),
        (lambda y: y.drop_vars("time"), "60 positions from 0 to 59"),
        (
            lambda y: y.where(y.time != y.time[3]),
            r"y is nan at time 2020-01-04 00:00:00, lead 24, lat -67.5, lon 0.0 \(1 of 60 samples.*y.dropna\('time'\)",
        ),
        (lambda y: y.values, "got ndarray; for plain arrays use GeoQ"),
    ],
)
def test_unusable_pairs_are_refused(x, y, change, message):
    estimator = unfitted(x, y)
    with pytest.raises((ValueError, TypeError), match=message):
        estimator.fit(x, change(y))
    assert not hasattr(estimator, "geoq_")


@pytest.mark.parametrize("lazy", [False, True])
def test_land_is_nan_in_the_data_and_in_the_answers(x, y, queries, lazy, tmp_path):
    """The model also returns nan on land; all other cells have the answers of a model without land."""
    land = ((y.lon < 90) & (y.lat > 0)).broadcast_like(y[0]).transpose(*y.dims[1:])
    ocean = LeastSquares(x.values, y.values)
    geoq = GeoQ(lambda x: np.where(land, np.nan, ocean(x)), None, folds=RandomFolds(5))
    estimator = XarrayGeoQ(geoq, "time").fit(x, y.where(~land))
    asked = queries.chunk(time=5) if lazy else queries
    levels = estimator.bounds(asked, (0.5, 0.9), dim="quantile")
    answer = estimator.assess(asked).compute()
    for part in (*(answer[name] for name in FIELDS), levels.isel(quantile=0)):
        is_nan = part.isnull().transpose(*y.dims)
        assert_array_equal(is_nan, np.broadcast_to(land, is_nan.shape))
    estimator.save(tmp_path / "a.geoq")
    loaded = XarrayGeoQ.load(tmp_path / "a.geoq", surrogate=geoq.surrogate)
    xr.testing.assert_identical(loaded.assess(queries), estimator.assess(queries))


def test_cells_that_are_nan_in_some_samples_are_nan_where_the_prediction_is(x, y):
    model = LeastSquares(x.values, y.values)

    def clouded(x):
        return np.where(x[:, :1] > 1, np.nan, model(x))

    absent = clouded(x.values)
    geoq = XarrayGeoQ(GeoQ(clouded, None, folds=RandomFolds(5)), "time")
    geoq.fit(x, y.where(np.isfinite(absent)))
    pairs = x + 0.01
    geoq.conformalize(pairs, y.where(np.isfinite(clouded(pairs.values))))
    for queries in (x, x.chunk(time=7)):
        bound = geoq.bound(queries).transpose(*y.dims)
        assert_array_equal(bound.isnull(), np.isnan(absent))


def test_pairs_of_conformalize_may_be_nan_on_land_but_not_everywhere(x, y):
    land = y.lon < 90
    estimator = XarrayGeoQ(
        GeoQ(LeastSquares(x.values, y.values), None, folds=RandomFolds(5)), "time"
    ).fit(x, y.where(~land))
    pairs = x + 0.01
    assert estimator.conformalize(pairs, y.where(~land)).geoq_.conformal_factors_
    with pytest.raises(ValueError, match=r"y is nan at time 2020-01-03.*1 of 60"):
        estimator.conformalize(pairs, y.where(~land & (y.time != y.time[2])))
    with pytest.raises(ValueError, match=r"x is nan at time 2020.*x.fillna\(0\)"):
        unfitted(x, y).fit(x.where(x.lon > 0), y)


def test_samples_without_labels_are_identified_by_their_position(answer, x, y, queries):
    bare = [
        array.drop_vars(("time", "month"), errors="ignore") for array in (x, y, queries)
    ]
    unnamed = unfitted(x, y).fit(*bare[:2]).assess(bare[2])
    assert_array_equal(x.time.values[unnamed.anchors], answer.anchors)
    assert "time" not in unnamed.coords


def test_queries_with_other_coordinates_are_refused_before_anything_is_computed(
    fitted, queries
):
    fitted.geoq_.surrogate_.n_rows.clear()
    shifted = queries.assign_coords(lon=queries.lon + 1)
    message = "x has 8 labels from 1.0 to 316.0 along 'lon', but x had 8 labels from 0"
    for asked in (shifted, shifted.chunk(time=5)):
        with pytest.raises(ValueError, match=message):
            fitted.assess(asked)
    with pytest.raises(ValueError, match=r"from 67.5 to -67.5 along 'lat'"):
        fitted.assess(queries.isel(lat=slice(None, None, -1)))
    with pytest.raises(ValueError, match=r"\('time', 'lag', 'lat', 'lon'\) in fit"):
        fitted.assess(queries.isel(lag=0))
    assert fitted.geoq_.surrogate_.n_rows == []


def test_a_sample_without_its_dimension_is_refused(fitted, queries):
    with pytest.raises(ValueError, match=r"x.expand_dims\('time'\)"):
        fitted.assess(queries.isel(time=0))
    one = fitted.assess(queries.isel(time=0).expand_dims("time"))
    assert one.sizes["time"] == 1


@pytest.mark.parametrize("method", ["assess", "bound", "expected_error", "save"])
def test_answers_before_fit_are_refused(x, y, method):
    with pytest.raises(NotFittedError, match="XarrayGeoQ is not fitted yet"):
        getattr(unfitted(x, y), method)(x)


def test_the_reason_names_the_query_and_its_anchors_by_their_labels(
    fitted, answer, queries
):
    reason = fitted.reason(queries, "2020-03-05")
    row = answer.sel(time="2020-03-05")
    assert reason.startswith(
        f"time 2020-03-05: mean error bound {row.error_hat.mean():.3g}"
    )
    for anchor in row.anchors.values:
        assert f"anchor {pd.Timestamp(anchor)}: observed" in reason
    with pytest.raises(ValueError, match="time='2020-03' selects 12 samples"):
        fitted.reason(queries, "2020-03")


def test_groups_are_held_out_together(x, y):
    groups = x.time.dt.dayofyear % 20
    estimator = unfitted(x, y, folds=GroupFolds()).fit(x, y, groups=groups)
    assert len(estimator.geoq_.calibration_.fold.unique()) == 20


def test_a_loaded_estimator_gives_the_same_answers(fitted, answer, queries, tmp_path):
    fitted.save(tmp_path / "model.geoq")
    surrogate = fitted.geoq_.surrogate_
    loaded = XarrayGeoQ.load(tmp_path / "model.geoq", surrogate=surrogate)
    xr.testing.assert_identical(loaded.assess(queries), answer)
    assert loaded.reason(queries, "2020-03-05") == fitted.reason(queries, "2020-03-05")
    with pytest.raises(ValueError, match="x has 2 labels from 2 to 1 along 'lag'"):
        loaded.assess(queries.assign_coords(lag=[2, 1]))
    plain = GeoQ.load(tmp_path / "model.geoq", surrogate=surrogate)
    assert_array_equal(plain.bound(queries.values), answer.error_hat)


def test_a_file_keeps_names_of_variables_and_types_of_coordinates(
    x, y, queries, tmp_path
):
    y = y.assign_coords(lead=pd.to_timedelta([1, 2], "D"), lat=y.lat.astype("float32"))
    both = xr.Dataset({"height": y, "twice": 2 * y})
    estimator = unfitted(x, both).fit(x, both)
    estimator.save(tmp_path / "model.geoq")
    surrogate = estimator.geoq_.surrogate_
    loaded = XarrayGeoQ.load(tmp_path / "model.geoq", surrogate=surrogate)
    ours, theirs = loaded.bound(queries), estimator.bound(queries)
    xr.testing.assert_identical(ours, theirs)
    for name in ("lead", "lat", "variable"):
        assert ours[name].dtype == theirs[name].dtype


def test_files_of_another_class_or_for_another_surrogate_are_refused(
    fitted, x, y, tmp_path
):
    fitted.geoq_.save(tmp_path / "plain.geoq")
    with pytest.raises(ValueError, match="not saved by an XarrayGeoQ"):
        XarrayGeoQ.load(tmp_path / "plain.geoq", surrogate=fitted.geoq_.surrogate_)
    fitted.save(tmp_path / "model.geoq")
    other = LeastSquares(x.values, 2 * y.values)
    with pytest.raises(ValueError, match="surrogate is not the one that the file was"):
        XarrayGeoQ.load(tmp_path / "model.geoq", surrogate=other)


def test_coordinates_that_a_file_cannot_store_are_refused(x, y, tmp_path):
    parts = xr.DataArray([{"a"}, {"b"}], dims="lead")
    with pytest.warns(UserWarning, match="save will refuse this estimator"):
        estimator = unfitted(x, y).fit(x, y.assign_coords(part=parts))
    with pytest.raises(ValueError, match="coordinate 'part' has dtype object"):
        estimator.save(tmp_path / "model.geoq")


def test_attributes_that_a_file_cannot_store_are_refused_before_training(x, y):
    def train(x, y):
        pytest.fail("a surrogate was trained")

    estimator = XarrayGeoQ(GeoQ(None, train), unfitted(x, y).sample_dim)
    dated = y.assign_attrs(made=datetime.date(2020, 1, 1))
    with pytest.raises(TypeError, match=r"y.attrs\['made'\] is a date.* with str"):
        estimator.fit(x, dated)


def test_geoq_can_be_imported_without_xarray():
    code = "import sys; sys.modules['xarray'] = None; import geoq; import geoq.xarray"
    run = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert "ImportError: geoq.xarray needs xarray; install it with" in run.stderr
