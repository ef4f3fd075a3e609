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

from geoq import GeoQ, GroupFolds, RandomFolds, TemporalFolds, norm_error, relative_norm_error
from geoq.parts import TwoLawBound
from geoq.xarray import Labelled

QUICK = {"folds": RandomFolds(3), "bound_model": TwoLawBound()}
FIELDS = ("prediction", "error_hat", "anchor_error", "increment")
NUMBERS = ("safe", "support_score", "support_distance")


class LeastSquares:
    """A linear map of the fields, which records the number of rows of each call."""

    def __init__(self, x, y):
        self.output = y.shape[1:]
        self.weights = np.linalg.lstsq(self.design(x), y.reshape(len(y), -1))[0]
        self.n_rows, self.n_pickled = [], 0

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


def fields():
    """Inputs of two time lags on a grid of 4 x 8 cells, and their squares as outputs at two lead times."""
    rng = np.random.default_rng(0)
    time = pd.date_range("2020-01-01", periods=72, freq="D")
    latitude, longitude = np.linspace(-67.5, 67.5, 4), np.arange(0.0, 360, 45)
    wave = np.cos(np.radians(longitude)) * rng.uniform(0, 1, (72, 2, 4, 1))
    x = xr.DataArray(
        wave + 0.1 * rng.standard_normal((72, 2, 4, 8)),
        {"time": time, "lag": [1, 0], "lat": latitude, "lon": longitude},
        attrs={"units": "K"},
    )
    y = (x**2).rename(lag="lead").assign_coords(lead=[24, 48], height=500)
    y.attrs = {"units": "m", "long_name": "thickness"}
    return x.assign_coords(month=x.time.dt.month, platform="buoy"), y


ALL, TRUTH = fields()
X, Y, QUERIES = ALL[:60], TRUTH[:60], ALL[60:]


def values(array):
    stacked = array.to_dataarray() if isinstance(array, xr.Dataset) else array
    return stacked.transpose("time", ...).values


def plain_of(x, y, **settings):
    surrogate = LeastSquares(values(x), values(y))
    return GeoQ(surrogate, LeastSquares, **QUICK | {"n_anchors": 2} | settings)


def unfitted(x, y, **settings):
    return Labelled(plain_of(x, y, **settings), "time")


@pytest.fixture(scope="module")
def fitted():
    return unfitted(X, Y).fit(X, Y)


@pytest.fixture(scope="module")
def answer(fitted):
    return fitted.assess(QUERIES)


def test_the_answers_are_those_of_geoq_with_the_coordinates_of_y_and_of_the_samples(answer):
    plain = plain_of(X, Y).fit(X.values, Y.values).assess(QUERIES.values)
    for name in (*FIELDS, *NUMBERS, "anchor_distance"):
        assert_array_equal(answer[name], getattr(plain, name))
    assert_array_equal(answer.anchors, X.time.values[plain.anchors])
    assert answer.attrs == {"quantile": 0.95}
    for name in FIELDS:
        assert answer[name].dims == ("time", "lead", "lat", "lon")
        for dim in ("lead", "lat", "lon"):
            xr.testing.assert_identical(answer[name][dim], Y[dim])
    assert answer.height == 500
    for name in NUMBERS:
        assert answer[name].dims == ("time",)
    assert answer.anchors.dims == ("time", "anchor")
    assert_array_equal(answer.time, QUERIES.time)
    assert_array_equal(answer.month, QUERIES.month)
    # Coordinates of x that do not belong to the samples.
    assert not {"lag", "platform"} & {*answer.coords}


def test_errors_are_in_the_units_of_y(answer):
    assert answer.prediction.attrs == {"units": "m", "long_name": "thickness"}
    assert answer.error_hat.attrs == {"units": "m"}
    assert answer.support_score.attrs == {}
    for error, units in ((norm_error, "m"), (relative_norm_error, None)):
        bound = unfitted(X, Y, error_functional=error).fit(X, Y).bound(QUERIES)
        assert bound.dims == ("time",)
        assert bound.attrs.get("units") == units


def test_fit_calibrates_a_copy_and_a_clone_is_not_fitted():
    plain = plain_of(X, Y)
    settings = dict(vars(plain))
    labelled = Labelled(plain, "time").fit(X, Y)
    assert vars(plain) == settings
    copy = clone(labelled)
    assert (repr(copy.estimator), copy.dim) == (repr(plain), "time")
    with pytest.raises(NotFittedError, match="Labelled is not fitted yet"):
        copy.assess(QUERIES)
    with pytest.raises(ValueError, match="'step'; it has estimator, dim, trajectory_dim"):
        copy.set_params(step="day")


@pytest.mark.parametrize("chunks", [None, 5])
def test_bounds_have_a_dimension_of_levels_and_are_lazy_for_chunks(fitted, chunks):
    asked = QUERIES if chunks is None else QUERIES.chunk(time=chunks)
    bounds = fitted.bounds(asked, np.float32([0.5, 0.9]))
    assert (bounds.chunks is None) == (chunks is None)
    assert bounds.dims == ("time", "lead", "lat", "lon", "level")
    xr.testing.assert_identical(bounds.lat, Y.lat)
    expected = fitted.estimator_.bounds(QUERIES.values, (0.5, 0.9))
    for level in (0.5, 0.9):
        assert_allclose(bounds.sel(level=level), expected[level], rtol=1e-9)
    with pytest.raises(ValueError, match="levels"):
        fitted.bounds(asked, (0.5, 1.5))
    with pytest.raises(ValueError, match="dim='lat' is a coordinate of the answer"):
        fitted.bounds(asked, (0.5, 0.9), dim="lat")


def test_dimensions_can_be_in_any_order_and_queries_can_have_others(answer, fitted):
    labelled = unfitted(X, Y)
    labelled.fit(X.transpose("lag", "lat", "lon", "time"), Y.transpose("lead", ..., "time"))
    xr.testing.assert_identical(labelled.assess(QUERIES.transpose("lon", "time", ...)), answer)
    one = fitted.assess(QUERIES.isel(time=3))
    xr.testing.assert_allclose(one, answer.isel(time=3))
    members = fitted.assess(QUERIES.expand_dims(member=[7, 8]))
    xr.testing.assert_allclose(members.sel(member=8, drop=True), answer)


def test_variables_of_a_dataset_are_stacked_and_selected_by_name():
    data, asked = (xr.Dataset({"a": part, "b": -part}) for part in (X, QUERIES))
    plain = plain_of(data, Y).fit(values(data), Y.values)
    labelled = unfitted(data, Y).fit(data, Y)
    assert_array_equal(labelled.bound(asked), plain.bound(values(asked)))
    more = asked[["b", "a"]].assign(c=asked.a)
    xr.testing.assert_identical(labelled.bound(more), labelled.bound(asked))
    with pytest.raises(ValueError, match=r"x has the variables \['b'\].*had \['a'\]"):
        labelled.bound(asked[["b"]])


def test_the_units_of_all_variables_are_kept_and_compared():
    both = xr.Dataset({"depth": Y, "wind": 2 * Y.assign_attrs(units="m/s")})
    both["wind"].attrs["units"] = "m/s"
    labelled = unfitted(X, both).fit(X, both)
    bound = labelled.bound(QUERIES)
    assert_array_equal(bound.units, ["m", "m/s"])
    assert bound.sel(variable="wind").units == "m/s"
    with pytest.raises(ValueError, match="x has the units 'degC', but 'K' in fit"):
        labelled.bound(QUERIES.assign_attrs(units="degC"))
    with pytest.raises(ValueError, match="y has the units 'knots', but 'm/s'"):
        labelled.conformalize(X, both.assign(wind=Y.assign_attrs(units="knots")))
    with pytest.raises(ValueError, match="y has 2 labels from 24 to 72 along 'lead'"):
        labelled.conformalize(X, both.assign_coords(lead=[24, 72]))


def test_random_folds_of_similar_dates_are_warned_of():
    slow = Y.cumsum("time")
    with pytest.warns(UserWarning, match=r"are alike .*=TemporalFolds\(5, gap="):
        unfitted(X, slow).fit(X, slow)
    unfitted(X, slow, folds=TemporalFolds(3)).fit(X, slow)
    groups = X.time.dt.dayofyear % 20
    grouped = unfitted(X, slow, folds=GroupFolds()).fit(X, slow, groups=groups)
    assert len(np.unique(grouped.estimator_.fitted_.tuples.fold)) == 20


def test_chunks_are_assessed_one_by_one_and_calibrated_from(fitted, answer, tmp_path):
    """Dask must not pickle the calibration, which can be large."""
    surrogate = fitted.estimator_.surrogate_
    lazy = fitted.assess(QUERIES.chunk(time=5, lat=2))
    assert lazy.error_hat.chunksizes["time"] == (5, 5, 2)
    surrogate.n_rows.clear()
    surrogate.n_pickled = 0
    lazy.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    assert sorted(surrogate.n_rows) == [2, 5, 5]
    assert surrogate.n_pickled == 0
    with xr.open_dataset(tmp_path / "a.nc", engine="h5netcdf") as read:
        xr.testing.assert_allclose(read, answer)
    labelled = unfitted(X, Y).fit(X.chunk(time=7), Y.chunk(time=7, lat=2))
    xr.testing.assert_allclose(labelled.assess(QUERIES), answer)


DAY = np.timedelta64(1, "D")


@pytest.mark.parametrize(("change", "message"), [
    (lambda y: y.assign_coords(time=y.time + DAY), "60 labels from 2020-01-02"),
    (lambda y: y[::-1], "y has 60 labels from 2020-02-29"),
    (lambda y: y.drop_vars("time"), "60 labels from 0 to 59"),
    (lambda y: y.rename(time="day"), "y has no dimension 'time'"),
    (lambda y: y.where(y.time != y.time[3]), "y is masked"),
    (lambda y: None, "needs a GeoQ with x and y"),
])  # fmt: skip
def test_unusable_pairs_raise(change, message):
    labelled = unfitted(X, Y)
    assert labelled.estimate(X, Y).n_trainings == 3
    with pytest.raises((ValueError, TypeError), match=message):
        labelled.fit(X, change(Y))
    assert not hasattr(labelled, "estimator_")


@pytest.mark.parametrize("lazy", [False, True])
def test_land_is_nan_in_the_data_and_in_the_answers(lazy, tmp_path):
    """The model also returns nan on land."""
    land = ((Y.lon < 90) & (Y.lat > 0)).broadcast_like(Y[0]).transpose(*Y.dims[1:])
    ocean = LeastSquares(X.values, Y.values)
    plain = GeoQ(lambda x: np.where(land, np.nan, ocean(x)), None, **QUICK)
    labelled = Labelled(plain, "time").fit(X, Y.where(~land))
    asked = QUERIES.chunk(time=5) if lazy else QUERIES
    answer, levels = labelled.assess(asked).compute(), labelled.bounds(asked, (0.5, 0.9))
    for part in (*(answer[name] for name in FIELDS), levels.isel(level=0)):
        is_nan = part.isnull().transpose(*Y.dims)
        assert_array_equal(is_nan, np.broadcast_to(land, is_nan.shape))
    pairs = X + 0.01
    labelled.conformalize(pairs, Y.where(~land))
    assert "fitted, conformalized with 60 pairs" in repr(labelled)
    assert "conformal factors" in labelled.describe()
    labelled.save(tmp_path / "a.geoq")
    loaded = Labelled.load(tmp_path / "a.geoq", surrogate=plain.surrogate)
    xr.testing.assert_identical(loaded.assess(QUERIES), labelled.assess(QUERIES))


def test_anchors_without_an_answer_are_missing_and_without_labels_are_positions(answer):
    names, gap = [f"s{i}" for i in range(60)], QUERIES.where(QUERIES.time != QUERIES.time[4])
    for own, missing in ((np.arange(60.0), np.nan), (names, ""), (np.arange(60), -1)):
        named = [
            part.drop_vars("month", errors="ignore").assign_coords(time=own) for part in (X, Y)
        ]
        found = unfitted(*named).fit(*named).assess(gap).anchors
        assert_array_equal(found[4], [missing] * 2)
        assert set(found[3].values) <= set(own)
    bare = [part.drop_vars(("time", "month"), errors="ignore") for part in (X, Y, QUERIES)]
    unnamed = unfitted(X, Y).fit(*bare[:2]).assess(bare[2])
    assert_array_equal(X.time.values[unnamed.anchors], answer.anchors)
    assert "time" not in unnamed.coords


def test_queries_with_other_labels_raise_before_anything_is_computed(fitted, unchecked):
    fitted.estimator_.surrogate_.n_rows.clear()
    shifted = QUERIES.assign_coords(lon=QUERIES.lon + 1)
    message = "x has 8 labels from 1.0 to 316.0 along 'lon', but needs 8 labels from 0"
    for asked in (shifted, shifted.chunk(time=5)):
        with pytest.raises(ValueError, match=message):
            fitted.assess(asked)
    with pytest.raises(ValueError, match=r"from 67.5 to -67.5 along 'lat'"):
        fitted.assess(QUERIES.isel(lat=slice(None, None, -1)))
    with pytest.raises(ValueError, match=r"also had \['lag'\]"):
        fitted.assess(QUERIES.isel(lag=0))
    assert fitted.estimator_.surrogate_.n_rows == []
    with pytest.raises(TypeError, match="x is a ndarray; pass a DataArray or a Dataset"):
        fitted.assess(QUERIES.values)


def test_reasons_name_queries_anchors_inputs_and_outputs_by_their_labels(fitted, answer):
    reason = fitted.reason(QUERIES.sel(time="2020-03-05"))
    row = answer.sel(time="2020-03-05")
    assert reason.startswith("time 2020-03-05 00:00:00: mean error bound ")
    for anchor in row.anchors.values:
        assert f"anchor {pd.Timestamp(anchor)}: observed" in reason
    with pytest.raises(ValueError, match="x has 12 queries; select one"):
        fitted.reason(QUERIES)
    grid = {"time": np.arange(60), "station": ["Jena", "Oslo", "Rome"]}
    x = xr.DataArray(np.random.default_rng(0).normal(size=(60, 3)), grid)
    labelled = Labelled(GeoQ(lambda x: x, None, folds=RandomFolds(5))).fit(x, x + x**2)
    far = x[:1].where(x.station != "Oslo", 9)
    assert "input station Oslo is 9" in labelled.reason(far)
    assert "station Rome: prediction" in labelled.reason(far)


def test_a_loaded_estimator_gives_the_same_answers(fitted, answer, tmp_path):
    fitted.save(tmp_path / "a.geoq")
    surrogate = fitted.estimator_.surrogate_
    loaded = Labelled.load(tmp_path / "a.geoq", surrogate=surrogate)
    xr.testing.assert_identical(loaded.assess(QUERIES), answer)
    one = QUERIES.sel(time="2020-03-05")
    assert loaded.reason(one) == fitted.reason(one)
    with pytest.raises(ValueError, match="x has 2 labels from 2 to 1 along 'lag'"):
        loaded.assess(QUERIES.assign_coords(lag=[2, 1]))
    plain = GeoQ.load(tmp_path / "a.geoq", surrogate=surrogate)
    assert_array_equal(plain.bound(QUERIES.values), answer.error_hat)
    plain.save(tmp_path / "b.geoq")
    with pytest.raises(ValueError, match="not saved by Labelled; load it with GeoQ"):
        Labelled.load(tmp_path / "b.geoq", surrogate=surrogate)


def test_a_file_keeps_the_types_of_labels_and_attributes_as_text(tmp_path):
    y = Y.assign_coords(lead=pd.to_timedelta([1, 2], "D"), lat=Y.lat.astype("float32"))
    both = xr.Dataset({"depth": y, "twice": 2 * y})
    both["depth"].attrs["made"] = datetime.date(2020, 1, 1)
    labelled = unfitted(X, both).fit(X, both)
    labelled.save(tmp_path / "a.geoq")
    surrogate = labelled.estimator_.surrogate_
    loaded = Labelled.load(tmp_path / "a.geoq", surrogate=surrogate)
    ours, theirs = loaded.bound(QUERIES), labelled.bound(QUERIES)
    xr.testing.assert_identical(ours, theirs)
    for name in ("lead", "lat", "variable"):
        assert ours[name].dtype == theirs[name].dtype
    parts = xr.DataArray([{"a"}, {"b"}], dims="lead")
    labelled = unfitted(X, Y).fit(X, Y.assign_coords(part=parts))
    with pytest.raises(ValueError, match="coordinate 'part' has dtype object"):
        labelled.save(tmp_path / "a.geoq")


def test_geoq_can_be_imported_without_xarray():
    code = "import sys; sys.modules['xarray'] = None; import geoq; import geoq.xarray"
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "ImportError: geoq.xarray needs xarray; pip install" in run.stderr
