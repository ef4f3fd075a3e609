import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.exceptions import NotFittedError

from geoq import (
    GeoQ,
    GroupFolds,
    IndicatorIncrement,
    NormScaledIncrement,
    RandomFolds,
    Training,
    norm_error,
    relative_norm_error,
)
from geoq.conformal import ConformalFactors
from geoq.increments import View
from geoq.xarray import XarrayGeoQ

QUICK = NormScaledIncrement(training=Training(n_steps=50, check_every=25, patience=1))
N_FIT, N_QUERIES = 60, 12
FIELDS = ("prediction", "error_hat", "anchor_error", "increment")
NUMBERS = ("safe", "support_score", "support_distance")


class LeastSquares:
    """A linear map of the fields, which remembers how many rows it was given each time."""

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
    """Two past states of 4 x 8 cells, and the square of what they were one and two days later."""
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


def geoq(x, y, **settings):
    return GeoQ(
        LeastSquares(x, y),
        LeastSquares,
        folds=RandomFolds(3),
        increment_model=QUICK,
        n_anchors=2,
        **settings,
    )


@pytest.fixture(scope="module")
def fitted(x, y):
    return XarrayGeoQ(geoq(x.values, y.values), "time").fit(x, y)


@pytest.fixture(scope="module")
def answer(fitted, queries):
    return fitted.assess(queries)


def test_it_answers_as_geoq_does_on_the_plain_arrays(answer, x, y, queries):
    plain = geoq(x.values, y.values).fit(x.values, y.values).assess(queries.values)
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


def test_coordinates_of_the_samples_come_along_and_those_of_the_input_grid_do_not(
    answer, queries
):
    assert_array_equal(answer.month, queries.month)
    assert "lag" not in answer.coords


def test_errors_are_in_the_units_of_y(answer):
    assert answer.prediction.attrs == {"units": "m", "long_name": "height"}
    assert answer.error_hat.attrs == {"units": "m", "long_name": "error bound"}
    assert "units" not in answer.support_score.attrs


def test_a_relative_error_is_one_number_without_units(x, y, queries):
    plain = geoq(x.values, y.values, error_functional=relative_norm_error)
    bound = XarrayGeoQ(plain, "time").fit(x, y).predict(queries)
    assert bound.dims == ("time",)
    assert "units" not in bound.attrs


def test_predict_is_the_error_bound(fitted, answer, queries):
    xr.testing.assert_identical(fitted.predict(queries), answer.error_hat)


@pytest.mark.parametrize("chunks", [None, 5])
def test_expected_errors_are_labelled_and_lazy_too(x, y, queries, chunks):
    def wrong(y, prediction):
        return (abs(y - prediction) > 0.1).astype(float)

    model = IndicatorIncrement(
        view=View(), widths=(4,), n_networks=1, training=Training(n_steps=20)
    )
    plain = replace(
        geoq(x.values, y.values), error_functional=wrong, increment_model=model
    )
    labelled = XarrayGeoQ(plain, "time").fit(x, y)
    asked = queries if chunks is None else queries.chunk(time=chunks)
    expected = labelled.expected_error(asked)
    assert (expected.chunks is None) == (chunks is None)
    assert expected.dims == ("time", "lead", "lat", "lon")
    xr.testing.assert_identical(expected.lat, y.lat)
    assert_allclose(expected, labelled.geoq.expected_error(queries.values), rtol=1e-5)


def test_a_model_that_knows_no_mean_is_refused_before_anything_lazy(fitted, queries):
    with pytest.raises(TypeError, match="knows an upper quantile of the error"):
        fitted.expected_error(queries.chunk(time=5))


@pytest.mark.parametrize(
    "dims", [("lon", "time", "lag", "lat"), ("lag", "lat", "lon", "time")]
)
def test_queries_may_have_their_dimensions_in_any_order(fitted, answer, queries, dims):
    xr.testing.assert_identical(fitted.assess(queries.transpose(*dims)), answer)


def test_samples_may_lie_along_any_dimension_of_the_data(answer, x, y, queries):
    last = ("lag", "lat", "lon", "time")
    estimator = XarrayGeoQ(geoq(x.values, y.values), "time")
    estimator.fit(x.transpose(*last), y.transpose("lead", "lat", "lon", "time"))
    xr.testing.assert_identical(estimator.assess(queries.transpose(*last)), answer)


def test_the_input_may_lie_on_another_grid_than_the_output(x, y, queries):
    coarse = y.isel(lon=slice(None, None, 2))
    bound = (
        XarrayGeoQ(geoq(x.values, coarse.values), "time")
        .fit(x, coarse)
        .predict(queries)
    )
    xr.testing.assert_identical(bound.lon, coarse.lon)


def test_variables_of_a_dataset_are_stacked(x, y, queries):
    stacked = np.stack([x.values, -x.values], axis=1)
    plain = geoq(stacked, y.values).fit(stacked, y.values)
    estimator = XarrayGeoQ(geoq(stacked, y.values), "time")
    estimator.fit(xr.Dataset({"a": x, "b": -x}), y)
    bound = estimator.predict(xr.Dataset({"a": queries, "b": -queries}))
    both = np.stack([queries.values, -queries.values], axis=1)
    assert_array_equal(bound, plain.predict(both))
    with pytest.raises(ValueError, match="another grid along 'variable'"):
        estimator.predict(xr.Dataset({"b": -queries, "a": queries}))


def test_variables_of_the_output_come_back_by_name(x, y, queries):
    both = xr.Dataset({"height": y, "twice": 2 * y})
    stacked = both.to_dataarray().transpose("time", ...).values
    estimator = XarrayGeoQ(geoq(x.values, stacked), "time").fit(x, both)
    bound = estimator.predict(queries).to_dataset("variable")
    assert bound.twice.dims == ("time", "lead", "lat", "lon")
    assert bound.twice.mean() > bound.height.mean()


def test_a_chunked_array_is_assessed_chunk_by_chunk_when_asked_for(
    fitted, answer, queries
):
    surrogate = fitted.geoq.surrogate_
    surrogate.n_rows.clear()
    lazy = fitted.assess(queries.chunk(time=5, lat=2))
    assert lazy.error_hat.chunksizes["time"] == (5, 5, 2)
    assert surrogate.n_rows == []
    # Not to the last bit: networks round differently in batches of another size.
    xr.testing.assert_allclose(lazy.compute(), answer)
    assert sorted(surrogate.n_rows) == [2, 5, 5]


def test_a_chunked_array_does_not_make_dask_pickle_the_calibration(fitted, queries):
    surrogate = fitted.geoq.surrogate_
    surrogate.n_pickled = 0
    fitted.predict(queries.chunk(time=5)).compute()
    assert surrogate.n_pickled == 0


def test_a_chunked_answer_streams_into_a_file(fitted, answer, queries, tmp_path):
    surrogate = fitted.geoq.surrogate_
    surrogate.n_rows.clear()
    fitted.assess(queries.chunk(time=4)).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    assert surrogate.n_rows == [4, 4, 4]
    with xr.open_dataset(tmp_path / "a.nc", engine="h5netcdf") as read:
        xr.testing.assert_allclose(read, answer)


def test_pairs_set_aside_finish_the_bound_as_they_do_for_plain_arrays(x, y):
    """Dimensions in any order; a later grid is refused."""
    fit, aside = slice(30), slice(30, None)
    x1, x2, y1, y2 = (part.isel(time=s) for part in (x, y) for s in (fit, aside))
    estimator = XarrayGeoQ(geoq(x1.values, y1.values), "time").fit(x1, y1)
    estimator.conformalize(x2, y2.transpose("lat", ...))
    plain = geoq(x1.values, y1.values).fit(x1.values, y1.values)
    plain.conformalize(x2.values, y2.values)
    assert estimator.geoq.conformal_factors_ == plain.conformal_factors_
    assert plain.conformal_factors_ != ConformalFactors()
    with pytest.raises(ValueError, match="y has another grid along 'lead'"):
        estimator.conformalize(x2, y2.assign_coords(lead=[24, 72]))


def test_chunked_data_to_fit_are_refused(x, y):
    estimator = XarrayGeoQ(geoq(x.values, y.values), "time")
    with pytest.raises(ValueError, match=r"y is chunked, .* pass y.compute\(\)"):
        estimator.fit(x, y.chunk(time=10))


def test_misaligned_samples_are_refused(x, y):
    estimator = XarrayGeoQ(geoq(x.values, y.values), "time")
    later = y.assign_coords(time=y.time + np.timedelta64(1, "D"))
    with pytest.raises(
        ValueError, match=r"differ along 'time': 60 labels from 2020-01-01"
    ):
        estimator.fit(x, later)
    with pytest.raises(ValueError, match=r"y.sel\(time=x.time\)"):
        estimator.fit(x, y[::-1])
    with pytest.raises(ValueError, match="60 places from 0 to 59"):
        estimator.fit(x, y.drop_vars("time"))
    assert not hasattr(estimator, "x_")


def test_samples_without_labels_are_known_by_their_place(answer, x, y, queries):
    estimator = XarrayGeoQ(geoq(x.values, y.values), "time")
    bare = [
        array.drop_vars(("time", "month"), errors="ignore") for array in (x, y, queries)
    ]
    unnamed = estimator.fit(*bare[:2]).assess(bare[2])
    assert_array_equal(
        x.time[unnamed.anchors.values.ravel()], answer.anchors.values.ravel()
    )
    assert "time" not in unnamed.coords


@pytest.mark.parametrize("chunks", [None, {"time": 5}])
def test_queries_on_another_grid_are_refused_before_anything_is_computed(
    fitted, queries, chunks
):
    fitted.geoq.surrogate_.n_rows.clear()
    shifted = queries.assign_coords(lon=queries.lon + 1)
    shifted = shifted if chunks is None else shifted.chunk(chunks)
    message = (
        "grid along 'lon' .* 8 labels from 1.0 to 316.0 instead of 8 labels from 0.0"
    )
    with pytest.raises(ValueError, match=message):
        fitted.assess(shifted)
    with pytest.raises(ValueError, match="another grid along 'lat'"):
        fitted.assess(queries.isel(lat=slice(None, None, -1)))
    with pytest.raises(
        ValueError, match=r"those of fit were \('time', 'lag', 'lat', 'lon'\)"
    ):
        fitted.assess(queries.isel(lag=0))
    assert fitted.geoq.surrogate_.n_rows == []


def test_a_sample_without_its_dimension_is_refused(fitted, queries):
    with pytest.raises(ValueError, match=r"x.expand_dims\('time'\)"):
        fitted.assess(queries.isel(time=0))
    one = fitted.assess(queries.isel(time=0).expand_dims("time"))
    assert one.sizes["time"] == 1


def test_plain_arrays_are_refused(fitted, queries):
    with pytest.raises(TypeError, match="got ndarray; for plain arrays use GeoQ"):
        fitted.assess(queries.values)


def test_missing_values_are_refused(x, y):
    estimator = XarrayGeoQ(geoq(x.values, y.values), "time")
    with pytest.raises(ValueError, match=r"x\[3, 0, 0, 0\] is nan"):
        estimator.fit(x.where(x.time != x.time[3]), y)


def test_asking_before_fitting_is_refused(x, y):
    with pytest.raises(NotFittedError, match="XarrayGeoQ is not fitted yet"):
        XarrayGeoQ(geoq(x.values, y.values), "time").predict(x)


def test_the_reason_names_the_query_and_its_anchors_by_their_labels(
    fitted, answer, queries
):
    told = fitted.reason(queries, "2020-03-05")
    row = answer.sel(time="2020-03-05")
    assert told.startswith(
        f"time 2020-03-05: mean error bound {row.error_hat.mean():.3g}"
    )
    for anchor in row.anchors.values:
        assert f"anchor {pd.Timestamp(anchor)}: observed" in told


def test_the_reason_is_that_of_one_sample(fitted, queries):
    with pytest.raises(ValueError, match="time='2020-03' is the label of 12 samples"):
        fitted.reason(queries, "2020-03")
    with pytest.raises(KeyError, match="not all values found"):
        fitted.reason(queries, "2021-03-05")


@pytest.mark.filterwarnings("ignore:n=")  # few independent points on purpose
def test_groups_are_held_out_together(x, y):
    plain = GeoQ(LeastSquares(x.values, y.values), LeastSquares, folds=GroupFolds())
    calibration = XarrayGeoQ(plain, "time").fit(x, y, groups=x.month).geoq.calibration_
    assert len(calibration.fold.unique()) == 2


def test_a_file_holds_the_coordinates_and_answers_alike(
    fitted, answer, queries, tmp_path
):
    fitted.save(tmp_path / "model.geoq")
    surrogate = fitted.geoq.surrogate_
    loaded = XarrayGeoQ.load(tmp_path / "model.geoq", surrogate=surrogate)
    xr.testing.assert_identical(loaded.assess(queries), answer)
    assert loaded.reason(queries, "2020-03-05") == fitted.reason(queries, "2020-03-05")
    with pytest.raises(ValueError, match="another grid along 'lag'"):
        loaded.assess(queries.assign_coords(lag=[2, 1]))
    plain = GeoQ.load(tmp_path / "model.geoq", surrogate=surrogate)
    assert_array_equal(plain.predict(queries.values), answer.error_hat)


def test_a_file_keeps_names_of_variables_and_types_of_coordinates(
    x, y, queries, tmp_path
):
    y = y.assign_coords(lead=pd.to_timedelta([1, 2], "D"), lat=y.lat.astype("float32"))
    both = xr.Dataset({"height": y, "twice": 2 * y})
    stacked = both.to_dataarray().transpose("time", ...).values
    estimator = XarrayGeoQ(geoq(x.values, stacked), "time").fit(x, both)
    estimator.save(tmp_path / "model.geoq")
    surrogate = estimator.geoq.surrogate_
    loaded = XarrayGeoQ.load(tmp_path / "model.geoq", surrogate=surrogate)
    ours, theirs = loaded.predict(queries), estimator.predict(queries)
    xr.testing.assert_identical(ours, theirs)
    for name in ("lead", "lat", "variable"):
        assert ours[name].dtype == theirs[name].dtype


def test_a_file_of_plain_geoq_is_refused(fitted, tmp_path):
    fitted.geoq.save(tmp_path / "plain.geoq")
    with pytest.raises(ValueError, match="holds no coordinates"):
        XarrayGeoQ.load(tmp_path / "plain.geoq", surrogate=fitted.geoq.surrogate_)


def test_coordinates_that_no_file_holds_are_refused(x, y, tmp_path):
    parts = xr.DataArray([{"a"}, {"b"}], dims="lead")
    estimator = XarrayGeoQ(geoq(x.values, y.values), "time")
    estimator.fit(x, y.assign_coords(part=parts))
    with pytest.raises(ValueError, match="coordinate 'part' holds object"):
        estimator.save(tmp_path / "model.geoq")


def test_one_number_for_the_whole_field_keeps_the_units(x, y, queries):
    plain = geoq(x.values, y.values, error_functional=norm_error)
    assert XarrayGeoQ(plain, "time").fit(x, y).predict(queries).attrs["units"] == "m"


def test_geoq_itself_does_without_xarray():
    code = "import sys; sys.modules['xarray'] = None; import geoq; import geoq.xarray"
    run = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert "ImportError: geoq.xarray needs xarray; install it with" in run.stderr
