"""The mechanisms of docs/reliability.md: each attack ends in a refusal, in a warning with its cause, or in a right answer; honest code is silent."""

import copy
import re
import warnings
from functools import cache

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
import xarray as xr
from numpy.testing import assert_array_equal
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF
from sklearn.linear_model import Ridge
from sklearn.model_selection import KFold
from sklearn.neighbors import KNeighborsRegressor
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeRegressor

from geoq import (
    ClusterFolds,
    GeoQ,
    GroupFolds,
    PredictedFolds,
    RandomFolds,
    RolloutGeoQ,
    TemporalFolds,
    TrainedFolds,
    default_folds,
)
from geoq.core.folds import NestedFolds
from geoq.core.plan import FoldPlan
from geoq.neighbors import copied_runs, near_copies
from geoq.sklearn import GeoQRegressor
from geoq.xarray import Labelled

RNG = np.random.default_rng(5)
N = 150
X, NEW = RNG.uniform(-1, 1, (N, 3)), RNG.uniform(-1, 1, (40, 3))
POORER = "A Gaussian process through the same data has"


def truth(x):
    return np.cos(2.5 * x[:, 0]) + x[:, 1] * x[:, 2]


Y = truth(X)
NOISY = Y + 0.2 * RNG.normal(size=N)
FOLDS = RandomFolds(5)


def fits(model):
    return lambda x, y: copy.deepcopy(model).fit(x, y).predict


near, knn = fits(KNeighborsRegressor(1)), fits(KNeighborsRegressor(4, weights="distance"))
ridge, tree = fits(Ridge()), fits(DecisionTreeRegressor(random_state=0))


def process(length):
    return fits(GaussianProcessRegressor(RBF(length), optimizer=None, alpha=1e-10))


def fit(surrogate, recipe, y=Y, x=X, *, folds=FOLDS, **more):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", POORER)
        return GeoQ(surrogate, recipe, folds=folds).fit(x, y, **more)


def trained(recipe, y=NOISY, order=slice(None)):
    return [recipe(X[rows], y[rows]) for rows, _ in FOLDS.split(X)][order]


def cached(recipe):
    models = {}
    return lambda x, y: models.setdefault(len(x), recipe(x, y))


def every_third_fails():
    count = []

    def train(x, y):
        count.append(None)
        return (lambda q: 0 * q[:, 0]) if len(count) == 3 else process(0.7)(x, y)

    return train


# Rollouts of the Henon map with its nearest states.

STATES = np.full((500, 2), 0.1)
for i in range(499):
    STATES[i + 1] = 1 - 1.35 * STATES[i, 0] ** 2 + STATES[i, 1], 0.3 * STATES[i, 0]
RUNS = [STATES[100:300], STATES[300:]]


def analogue(runs):
    return knn(np.concatenate([r[:-1] for r in runs]), np.concatenate([r[1:] for r in runs]))


def rollouts(step, recipe, runs=RUNS, **settings):
    return RolloutGeoQ(step, recipe, n_calibration=10, n_starts=20, **settings).fit(runs)


@cache
def step():
    return analogue(RUNS)


def of_folds(order=slice(None)):
    """The steps of the five blocks of time, each trained without its block."""
    rows, models = np.arange(400), []
    for kept, _ in TemporalFolds(5).split(rows):
        ends = np.flatnonzero((np.diff(kept) > 1) | (kept[:-1] == 199)) + 1
        models.append(analogue([STATES[100 + run] for run in np.split(kept, ends)]))
    return TrainedFolds(models[order])


SEEN, ALIKE = "trained on its held-out rows", "give the same answers"
WARNED = {
    "the deployed model is a poorer one": (lambda: fit(ridge(X, Y), process(0.7)), "0.* So it is not what train_surrogate makes"),
    "the deployed model has other units": (lambda: fit(lambda x: 1.8 * truth(x) + 32, knn), "So it is not what train_surrogate makes"),
    "one model for all folds": (lambda: fit(tree(X, NOISY), lambda x, y: tree(X, NOISY), NOISY), ALIKE),
    "a model for each number of rows": (lambda: fit(None, cached(near), NOISY), ALIKE),
    "predictions of the deployed model": (lambda: fit(near(X, NOISY), PredictedFolds([near(X, NOISY)(X)] * 5), NOISY), ALIKE),
    "models in reverse order": (lambda: fit(near(X, NOISY), TrainedFolds(trained(near, order=slice(None, None, -1))), NOISY), SEEN),
    "one training failed": (lambda: fit(None, every_third_fails()), "fold 2 .* training of such a fold probably failed"),
    "own training rows": (lambda: fit(near(X, NOISY), None, NOISY), "must never have seen x and y"),
    "a splitter that separates copies": (lambda: fit(None, knn, np.tile(NOISY, 2), np.tile(X, (2, 1)), folds=KFold(5, shuffle=True, random_state=0)), "trains on copies of 8.* of its held-out rows"),
    "pairs of fit, coarsely rounded": (lambda: fit(None, knn, NOISY).conformalize(X.round(2), NOISY.round(2)), "the conformal factor is 0.* trained on these pairs"),
    "rollouts: the deployed step is a poorer one": (lambda: rollouts(lambda s: step()(s) + 0.05, analogue), "So it is not what train_surrogate makes"),
    "rollouts: one step for all folds": (lambda: rollouts(step(), lambda runs: step()), ALIKE),
    "rollouts: steps in reverse order": (lambda: rollouts(step(), of_folds(slice(None, None, -1))), SEEN),
    "rollouts: own training states": (lambda: rollouts(step(), None), "must never have seen the trajectories"),
}  # fmt: skip


@pytest.mark.parametrize(("attack", "words"), WARNED.values(), ids=WARNED)
def test_an_attack_is_warned_of_with_its_cause(attack, words):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        attack()
    messages = [str(w.message) for w in found if POORER not in str(w.message)]
    assert len(messages) == 1, messages
    assert re.search(words, messages[0]), messages[0]


FRAME, SERIES = pd.DataFrame(X, columns=list("abc")), pd.Series(Y)
GRID = xr.DataArray(
    X.reshape(N, 1, 3), {"time": np.arange(N), "level": 500}, ("time", "y", "x"), "u"
)
GRID = GRID.assign_coords(lat=(("y", "x"), [[1.0, 2.0, np.nan]]))


@cache
def labelled():
    model = Labelled(GeoQ(lambda u: 0.9 * u, None, folds=FOLDS), "time")
    return model.fit(GRID, np.tanh(GRID))


def shifted_times():
    order = np.roll(np.arange(N), 7)
    Labelled(GeoQ(None, knn, folds=default_folds(TemporalFolds(5))), "time").fit(
        GRID[order], GRID[order]
    )


DRAWN = KFold(5, shuffle=True, random_state=np.random.RandomState(0))  # other splits at each call
REFUSED = {
    "y of the next row": (lambda: fit(None, knn, SERIES[1:], FRAME[:-1]), "the index of y has 148 of the 149 labels"),
    "groups in another order": (lambda: fit(None, knn, SERIES, FRAME, groups=pd.Series(np.arange(N) // 5)[::-1]), "the index of groups has 150 of the 150 labels"),
    "folds that differ at each call": (lambda: fit(near(X, Y), TrainedFolds(trained(near)), folds=DRAWN), "yields other rows at each call"),
    "rollouts: folds that differ at each call": (lambda: rollouts(step(), TrainedFolds([step()] * 5), folds=DRAWN), "yields other rows at each call"),
    "rounded pairs of fit": (lambda: fit(None, knn, NOISY).conformalize(X.round(4), NOISY.round(4)), "150 of 150 pairs equal pairs of fit"),
    "other outputs": (lambda: fit(None, knn, pd.DataFrame({"u": Y, "v": Y}), FRAME).conformalize(FRAME, pd.DataFrame({"u": Y, "w": Y})), "y has the outputs 'u', 'w'"),
    "answers by the shape of the batch": (lambda: fit(lambda x, known={}: known.setdefault(x.shape, truth(x)), None), "in another batch"),
    "xarray: another name": (lambda: labelled().assess(GRID.rename("v")), "x has the name 'v', but 'u' in fit"),
    "xarray: another level": (lambda: labelled().assess(GRID.assign_coords(level=850)), r"x has the level array\(850\)"),
    "xarray: a grid without an index": (lambda: labelled().assess(GRID[:, :, ::-1]), "x has the lat array"),
    "xarray: rows out of order": (shifted_times, "TemporalFolds needs time order"),
    "a transformer": (lambda: GeoQRegressor(StandardScaler()).fit(X, Y), "has no predict, but it must be a regressor"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The groups parameter")
@pytest.mark.parametrize(("attack", "words"), REFUSED.values(), ids=REFUSED)
def test_an_attack_is_refused(attack, words):
    with pytest.raises((ValueError, TypeError), match=words):
        attack()


def test_a_file_of_an_interpolating_model_refuses_another_one(tmp_path):
    """Both return y at all rows of the data."""
    model = process(0.7)(X, Y)
    fit(model, process(0.7)).save(tmp_path / "a")
    assert GeoQ.load(tmp_path / "a", surrogate=model)
    with pytest.raises(ValueError, match="surrogate differs from the surrogate of the file"):
        GeoQ.load(tmp_path / "a", surrogate=process(0.5)(X, Y))


# What the model receives in a query is what it received in fit.

SITES, START = np.array(["c", "a", "b"]), np.datetime64("2021-03-01T05", "ns")


def table(n, library=pd, seed=0):
    rng = np.random.default_rng(seed)
    columns = {"a": rng.uniform(size=n), "site": SITES[rng.integers(0, 3, n)].tolist()}
    columns["at"] = (START + rng.integers(0, 9000, n) * np.timedelta64(10**12)).tolist()
    frame = library.DataFrame(columns)
    if library is pl:
        whole = [
            pl.col("a").cast(pl.Float32),
            pl.col("site").cast(pl.Enum(SITES)),
            pl.col("at").cast(pl.Datetime("ns")),
        ]
        return frame.with_columns(whole)
    kinds = pd.CategoricalDtype(["unused", *SITES], ordered=True)
    at = pd.to_datetime(frame["at"]).astype("datetime64[ns]").dt.tz_localize("Asia/Tokyo")
    return (
        frame.assign(site=frame["site"].astype(kinds), at=at)
        .astype({"a": "f4"})
        .rename(columns={"a": 7})
    )


def answers(d):
    """A model that reads codes, a rank, nanoseconds, and single precision."""
    if isinstance(d, pl.DataFrame):
        assert d.schema == table(1, pl).schema
        return d["a"].to_numpy() + d["site"].to_physical().to_numpy()
    assert d["site"].dtype.ordered
    assert str(d["at"].dtype) == "datetime64[ns, Asia/Tokyo]"
    return d[7].to_numpy() + d["site"].cat.codes.to_numpy() + d["at"].dt.hour.to_numpy() / 24


CAST = {
    "tidy": (pd, lambda d: d),
    "levels in another order": (pd, lambda d: d.assign(site=d["site"].cat.set_categories(SITES[::-1]))),
    "levels as strings": (pd, lambda d: d.astype({"site": str})),
    "levels as objects": (pd, lambda d: d.assign(site=d["site"].to_numpy().astype(object))),
    "names as text, in another order": (pd, lambda d: d.rename(columns=str)[["at", "site", "7"]]),
    "another time zone and unit": (pd, lambda d: d.assign(at=d["at"].dt.tz_convert("UTC").dt.as_unit("s"))),
    "double precision": (pd, lambda d: d.astype({7: float})),
    "another library": (pd, lambda d: pl.DataFrame({str(n): d[n].to_list() for n in d.columns})),
    "polars: tidy": (pl, lambda d: d),
    "polars: levels in another order": (pl, lambda d: d.with_columns(pl.col("site").cast(pl.Enum(SITES[::-1])))),
    "polars: levels as strings": (pl, lambda d: d.with_columns(pl.col("site").cast(pl.String))),
    "polars: another unit": (pl, lambda d: d.with_columns(pl.col("at").cast(pl.Datetime("ms")))),
}  # fmt: skip


@cache
def of_table(library, folder):
    """A calibration and its file, loaded again."""
    x = table(80, library)
    y = answers(x) * 1.05 + 0.1 * np.sin(9 * np.arange(80))
    estimator = fit(answers, None, y, x)
    estimator.save(folder / library.__name__)
    return estimator, GeoQ.load(folder / library.__name__, surrogate=answers)


@pytest.mark.parametrize(("library", "change"), CAST.values(), ids=CAST)
@pytest.mark.filterwarnings("ignore:the median error of the surrogate")
def test_a_query_of_another_type_has_the_answer_of_the_tidy_query(
    library, change, tmp_path_factory
):
    estimator, loaded = of_table(library, tmp_path_factory.getbasetemp())
    queries = table(30, library, seed=1)
    tidy, found = estimator.assess(queries), estimator.assess(change(queries))
    for part in ("prediction", "error_hat", "safe"):
        assert_array_equal(getattr(found, part), getattr(tidy, part))
    assert_array_equal(loaded.bound(change(queries)), tidy.error_hat)


@pytest.mark.parametrize("make", [np.float32, lambda x: torch.tensor(x, dtype=torch.float32)])
def test_arrays_and_tensors_of_any_dtype_are_those_of_fit(make):
    x, new = make(X), NEW.astype("f4")

    def surrogate(q):
        assert (type(q), q.dtype) == (type(x), x.dtype)
        return 0.9 * q[:, 0]

    estimator = fit(surrogate, None, 1 * x[:, 0], x)
    expected = np.asarray(estimator.bound(make(new)))
    plain = new, new.astype(float), np.ma.masked_array(new)
    for queries in (*plain, torch.from_numpy(new), torch.from_numpy(new).double()):
        assert_array_equal(np.asarray(estimator.bound(queries)), expected)


# Near copies are one group.


@pytest.mark.parametrize("folds", [FOLDS, ClusterFolds(5), NestedFolds(5)], ids=repr)
@pytest.mark.parametrize("decimals", [15, 6, 4])
def test_copies_up_to_rounding_are_held_out_together_and_new_measurements_are_no_copies(
    folds, decimals
):
    x, y = np.r_[X, X.round(decimals)], np.r_[NOISY, NOISY.round(decimals)]
    copies = near_copies(x, y)
    assert_array_equal(copies, np.tile(np.arange(N), 2))
    plan = FoldPlan.draw(folds, x[copies], None)
    for train, held_out in plan.splits:
        assert not np.intersect1d(train % N, held_out % N).size
    again = np.r_[NOISY, Y + 0.2 * np.random.default_rng(1).normal(size=N)]
    assert len(np.unique(near_copies(np.r_[X, X], again))) > 1.9 * N


def test_copied_stretches_of_runs_are_found_and_other_runs_are_no_copies():
    run = STATES[100:300]
    for copied, start in ((run, 0), (run.round(4), 0), (STATES[200:400], 100)):
        number = np.repeat([0, 1], 200)
        found = copied_runs(np.r_[run, copied], number)
        n = 200 - start
        # A few rows are also near to another row of the first run.
        assert (found[200 : 200 + n] == np.arange(start, 200)).mean() > 0.9
        assert (found[200 : 200 + n] < 200).all()
        assert_array_equal(found[200 + n :], np.arange(200 + n, 400))
    assert_array_equal(copied_runs(np.concatenate(RUNS), number), np.arange(400))


# The estimator owns its numbers.


def test_nothing_that_the_user_changes_later_changes_an_answer(tmp_path):
    x, y, queries = X.copy(), NOISY.copy(), NEW.copy()
    estimator = fit(lambda x: 0.9 * truth(x), None, y, x)
    answer = estimator.assess(queries)
    reason, opinion = answer.reason(0), answer.second_opinion.prediction
    for array in (x, y, queries):
        array[:] = 9
    assert answer.reason(0) == reason
    assert_array_equal(answer.second_opinion.prediction, opinion)
    estimator.set_params(quantile=0.5, surrogate=None)
    assert_array_equal(estimator.bound(NEW), answer.error_hat)
    estimator.save(tmp_path / "a")
    loaded = GeoQ.load(tmp_path / "a", surrogate=lambda x: 0.9 * truth(x))
    assert_array_equal(loaded.bound(NEW), answer.error_hat)
    assert_array_equal(loaded.fitted_.tuples.points.outputs, NOISY)


def on_features(x, y):
    weights = np.random.default_rng(0).normal(size=(3, 40))
    model = ridge(np.tanh(x @ weights), y)
    return lambda q: model(np.tanh(q @ weights))


# Honest code, of the kinds that look like the attacks.

TIDY = {
    "noise": lambda: fit(None, knn, NOISY),
    "an interpolating model": lambda: fit(None, process(0.7)),
    "an interpolating model of noise": lambda: fit(None, near, NOISY),
    "a model that hardly learns": lambda: fit(None, ridge),
    "trees of other seeds": lambda: fit(None, lambda x, y: fits(DecisionTreeRegressor(max_features=1, random_state=int(1e6 * y[0] ** 2)))(x, y), NOISY),
    "few rows": lambda: fit(None, ridge, NOISY[:24], X[:24]),
    "many folds": lambda: fit(None, knn, NOISY, folds=KFold(20)),
    "groups": lambda: fit(None, knn, NOISY, groups=np.arange(N) // 4),
    "whole groups": lambda: fit(None, knn, NOISY, folds=GroupFolds(5), groups=np.arange(N) // 4),
    "clusters": lambda: fit(None, knn, NOISY, folds=ClusterFolds(5)),
    "blocks of time": lambda: fit(None, tree, NOISY, X.cumsum(0), folds=TemporalFolds(5, 2)),
    "all families": lambda: fit(None, knn, NOISY, folds=default_folds()),
    "repeated measurements": lambda: fit(None, knn, NOISY, np.repeat(X[:50], 3, axis=0)),
    "several outputs": lambda: fit(None, knn, np.c_[NOISY, 10 * Y]),
    "rounded outputs": lambda: fit(None, fits(DecisionTreeRegressor(max_depth=4, random_state=0)), np.round(2 * NOISY)),
    "frozen features": lambda: fit(None, on_features),
    "a given model": lambda: fit(knn(X, NOISY), knn, NOISY),
    "given fold surrogates": lambda: fit(knn(X, NOISY), TrainedFolds(trained(knn)), NOISY),
    "given predictions": lambda: fit(knn(X, NOISY), PredictedFolds([model(X) for model in trained(knn)]), NOISY),
    "new data": lambda: fit(knn(X, NOISY), None, truth(NEW), NEW),
    "new pairs": lambda: fit(None, knn, NOISY).conformalize(NEW, truth(NEW)),
    "new measurements at the inputs of fit": lambda: fit(None, knn, NOISY).conformalize(X, NOISY[::-1] * 0 + Y + 0.2 * np.random.default_rng(2).normal(size=N)),
    "other indices": lambda: fit(None, knn, SERIES.set_axis(range(1000, 1000 + N)), FRAME),
    "xarray without a name": lambda: labelled().assess(GRID.rename(None).astype("f4")),
    "rollouts": lambda: rollouts(None, analogue),
    "rollouts: given fold surrogates": lambda: rollouts(step(), of_folds()),
    "rollouts: new trajectories": lambda: rollouts(analogue([STATES[:100]]), None),
    "rollouts: whole trajectories": lambda: rollouts(None, analogue, [STATES[a : a + 100] for a in (100, 200, 300, 400)], folds=GroupFolds()),
}  # fmt: skip


@pytest.mark.parametrize("tidy", TIDY.values(), ids=TIDY)
def test_honest_code_gives_no_warning(tidy):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", POORER)
        warnings.filterwarnings("ignore", "n=24 independent points")
        tidy()
