"""Files: every class survives bit for bit, damage and other callables raise, and nothing in a file runs."""

import copy
import json
import os
import pickle
import warnings

import golden
import numpy as np
import pytest
from numpy.testing import assert_array_equal
from safetensors.numpy import save_file
from sklearn.linear_model import Ridge

import geoq
from geoq import (
    CombinedFolds,
    GeoQ,
    Grid,
    GroupFolds,
    Mesh,
    NestedFolds,
    RandomFolds,
    Region,
    Table,
    TemporalFolds,
    WholeField,
)
from geoq.bounds.climatology import Climatology
from geoq.bounds.fields import FieldBound, NoFactor
from geoq.bounds.two_laws import TwoLawBound
from geoq.data.coordinates import Ignored, Log, Number, Periodic
from geoq.data.metric import Columns, StandardizedMetric
from geoq.regions.field_scores import Answers, Moments, Patterns, Windows
from geoq.regions.region import PaperRegion
from geoq.regions.table_scores import (
    EachInput,
    EachPair,
    PrincipalAxes,
    SupportDistance,
    Unexplained,
)
from geoq.state import _digest, all_classes, read
from geoq.surrogate import absolute_error, norm_error, relative_norm_error

# The surrogates are more accurate than a Gaussian process with few data can be.
pytestmark = pytest.mark.filterwarnings("ignore:the median error of the surrogate at the rows")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 3)) * [1, 1, 1e3]
X[:, 1] = np.exp(2 * X[:, 1])
QUERIES = np.insert(1.5 * X[:30], 4, np.nan, axis=0)
FIELDS = RNG.normal(size=(40, 2, 8, 8)).cumsum(axis=3)
NODES = RNG.uniform(size=(64, 2))


def truth(x):
    return np.stack([np.sin(x[:, 0]) + 1e-3 * x[:, 2], np.log(x[:, 1]) ** 2], axis=1)


def model(x):
    return 0.9 * truth(x) + 0.02


def encoder(x):
    return x[:, :1] ** 2


def field_model(x):
    return 0.9 * x**2


Y = truth(X)
FIELD = {"folds": RandomFolds(2), "bound_model": FieldBound(factor=NoFactor())}


def of_rows(y=Y, x=X, surrogate=model, groups=None, **settings):
    settings = {"folds": RandomFolds(3), **settings}
    return GeoQ(surrogate, None, **settings).fit(x, y, groups=groups), QUERIES.astype(x.dtype)


def of_fields(x=FIELDS, **settings):
    estimator = GeoQ(field_model, None, **(FIELD | settings)).fit(x, x**2)
    return estimator, 1.3 * x[:5]


def conformalized():
    estimator, queries = of_fields(FIELDS[:20], quantile=0.6)
    return estimator.conformalize(FIELDS[20:], FIELDS[20:] ** 2, guarantee=WholeField(0.8)), queries


COLUMNS = Columns({0: Periodic(7.0), 1: Log(), 2: Number()})
ALL_SCORES = (EachInput(0.5), PrincipalAxes(), EachPair(2), SupportDistance(), Unexplained())
# What each calibration covers; together they have every class that a table or a field can store.
CASES = {
    "plain": of_rows,
    "all folds": lambda: of_rows(folds=CombinedFolds(RandomFolds(3), NestedFolds(3))),
    "gap, paper": lambda: of_rows(folds=TemporalFolds(3, gap=3), safe_region=PaperRegion(5)),
    "groups": lambda: of_rows(folds=GroupFolds(4), groups=np.arange(120) // 5),
    "encoder": lambda: of_rows(representation=encoder, n_anchors=3, n_support=4),
    "standardised": lambda: of_rows(representation=StandardizedMetric()),
    "columns": lambda: of_rows(representation=COLUMNS),
    "ignored": lambda: of_rows(representation=Columns({0: Ignored()})),
    "climatology": lambda: of_rows(bound_model=TwoLawBound(reference=Climatology())),
    "norm": lambda: of_rows(error_functional=norm_error, quantile=0.8),
    "scores": lambda: of_rows(safe_region=Region(ALL_SCORES, 0.8)),
    "one number": lambda: of_rows(Y[:, 0], surrogate=lambda x: model(x)[:, 0]),
    "table": lambda: of_rows(domain=Table()),
    "single precision": lambda: of_rows(Y.astype("f4"), X.astype("f4")),
    "repeats": lambda: of_rows(Y[:-20], np.concatenate([X[:50], X[:50]])),
    "constant": lambda: of_rows(Y[:, :1] * [1, 0] + 1, surrogate=lambda x: model(x)[:, :1] * [1, 0] + 1),
    "mask": lambda: of_rows(np.ma.array(Y, mask=np.zeros((120, 2), bool) | [True, False])),
    "gaps": lambda: of_rows(np.ma.array(Y, mask=np.arange(240).reshape(120, 2) % 7 == 0)),
    "plane": of_fields,
    "line": lambda: of_fields(FIELDS.reshape(40, 1, 128)),
    "grid": lambda: of_fields(domain=Grid(2, periodic=(False, True))),
    "mesh": lambda: of_fields(FIELDS.reshape(40, 2, 64), domain=Mesh(NODES)),
    "field scores": lambda: of_fields(safe_region=Region((Windows(), Moments(), Patterns(), Answers()))),
    "conformal": conformalized,
}  # fmt: skip


def loaded_from(estimator, path, **callables):
    estimator.save(path)
    if callable(estimator.representation) and not hasattr(estimator.representation, "fit"):
        callables.setdefault("representation", estimator.representation)
    return GeoQ.load(path, surrogate=estimator.surrogate_, **callables)


def assert_same(estimator, loaded, queries):
    one, other = estimator.assess(queries), loaded.assess(queries)
    for name in geoq.Assessment.__dataclass_fields__:
        if name not in ("asked", "fitted"):
            a, b = getattr(one, name), getattr(other, name)
            assert_array_equal(np.ma.getmaskarray(a), np.ma.getmaskarray(b), err_msg=name)
            assert_array_equal(np.ma.getdata(a), np.ma.getdata(b), err_msg=name, strict=True)
    assert [one.reason(i) for i in range(5)] == [other.reason(i) for i in range(5)]


def assert_equal_trees(one, other, path=""):
    """The same classes with the same values, down to the arrays."""
    assert type(one) is type(other), path
    if isinstance(one, np.ndarray):
        assert_array_equal(one, other, err_msg=path, strict=True)
    elif hasattr(one, "__dataclass_fields__"):
        for name in one.__dataclass_fields__:
            assert_equal_trees(getattr(one, name), getattr(other, name), f"{path}.{name}")
    elif isinstance(one, tuple):
        for number, parts in enumerate(zip(one, other, strict=True)):
            assert_equal_trees(*parts, f"{path}.{number}")
    else:
        assert one == other or one != one, path  # noqa: PLR0124


@pytest.mark.filterwarnings("ignore:n=")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_loaded_estimator_answers_bit_for_bit(case, tmp_path):
    estimator, queries = case()
    loaded = loaded_from(estimator, tmp_path / "a.geoq")
    assert_equal_trees(estimator.fitted_, loaded.fitted_)
    assert_same(estimator, loaded, queries)
    assert loaded.describe() == estimator.describe()
    assert repr(loaded) == repr(estimator)
    for level, bound in estimator.bounds(queries, (0.5, 0.9)).items():
        found = loaded.bounds(queries, (level,))[level]
        assert_array_equal(np.ma.getdata(found), np.ma.getdata(bound))
    loaded.save(tmp_path / "b.geoq")
    (tree, arrays), (again, same) = (read(tmp_path / name) for name in ("a.geoq", "b.geoq"))
    assert tree == again
    assert {n: a.tobytes() for n, a in arrays.items()} == {n: a.tobytes() for n, a in same.items()}


def test_each_class_of_a_file_has_a_name_of_its_own():
    names = [kind.__name__ for kind in all_classes(with_torch=True)]
    assert len({*names}) == len(names) > 50


CLOSED = [case for case, kind in golden.CASES.items() if kind != "network"]


@pytest.mark.filterwarnings("ignore:n=15 independent points")
@pytest.mark.parametrize("case", CLOSED, ids=lambda case: case.__name__)
def test_golden_answers_hold_after_save_and_load(case, tmp_path, monkeypatch):
    """Each question goes to an estimator that was loaded from a file."""
    expected = case()

    def through_file(ask, kind):
        def asked(self, *args, **kwargs):
            self.save(tmp_path / "a.geoq")
            callables = {"surrogate": self.surrogate_}
            if callable(self.representation) and not hasattr(self.representation, "fit"):
                callables["representation"] = self.representation
            return ask(kind.load(tmp_path / "a.geoq", **callables), *args, **kwargs)

        return asked

    for kind in (GeoQ, geoq.RolloutGeoQ):
        for name in {"assess", "bound", "bounds"} & {*dir(kind)}:
            monkeypatch.setattr(kind, name, through_file(getattr(kind, name), kind))
    found = case()
    assert (tmp_path / "a.geoq").exists()
    for name, values in expected.items():
        assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])  # fmt: skip
def test_copies_answer_bit_for_bit(make):
    estimator, queries = of_rows()
    assert_same(estimator, make(estimator), queries)


def test_tuples_of_one_point_share_its_arrays_also_in_a_file(tmp_path):
    estimator, _ = of_rows()
    for one in (estimator, loaded_from(estimator, tmp_path / "a.geoq")):
        fitted = one.fitted_
        assert fitted.error is fitted.tuples.points.error
        assert fitted.geometry.points.z is fitted.geometry.points.normalized
        assert fitted.tuples.points.space.z is fitted.geometry.points.z


def test_a_file_without_calibration_tuples_gives_the_same_answers(tmp_path):
    estimator, queries = of_rows()
    estimator.save(tmp_path / "a.geoq")
    size = (tmp_path / "a.geoq").stat().st_size
    estimator.save(tmp_path / "a.geoq", calibration=False)
    assert (tmp_path / "a.geoq").stat().st_size < 0.9 * size
    loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=model)
    assert_same(estimator, loaded, queries)
    assert_array_equal(loaded.bounds(queries, (0.5,))[0.5], estimator.bounds(queries, (0.5,))[0.5])
    assert "saved without the calibration tuples" in loaded.describe()
    new = X[:60] + 0.01
    for one in (estimator, loaded):
        one.conformalize(new, truth(new) + 0.02)
    assert estimator.fitted_.conformal == loaded.fitted_.conformal
    fields, queries = of_fields()
    fields.save(tmp_path / "a.geoq", calibration=False)
    loaded = GeoQ.load(tmp_path / "a.geoq", surrogate=field_model)
    assert_array_equal(loaded.bound(queries), fields.bound(queries))
    with pytest.raises(ValueError, match=r"needs the calibration tuples .* with calibration=F"):
        loaded.bounds(queries, (0.5,))


class Tenth:
    """A bound of the user, which a file cannot contain."""

    def fit(self, tuples, quantile):
        return lambda features: features.anchor_error / 10


def test_objects_of_the_user_are_not_in_a_file(tmp_path):
    with pytest.raises(TypeError, match=r"fitted.bound is a function, an object of the user"):
        of_rows(bound_model=Tenth())[0].save(tmp_path / "a.geoq")
    assert not [*tmp_path.iterdir()]
    estimator, _ = of_rows(folds=Given())
    assert "Given" not in repr(loaded_from(estimator, tmp_path / "a.geoq"))


class Given:
    def split(self, points, y=None, groups=None):
        return RandomFolds(3).split(points)


def test_callables_of_the_user_must_be_passed_again(tmp_path):
    path = tmp_path / "a.geoq"
    for functional, own in ((norm_error, {}), (lambda y, p: norm_error(y, p), {"missing": True})):
        estimator, queries = of_rows(error_functional=functional)
        # What was set after the fit is not what the calibration has used.
        estimator.set_params(error_functional=absolute_error).save(path)
        loaded = GeoQ.load(path, surrogate=model)
        assert_same(estimator, loaded, queries)
        if own:
            with pytest.raises(ValueError, match="as error_functional, which it does not contain"):
                loaded.conformalize(X + 0.01, Y)
            loaded = GeoQ.load(path, surrogate=model, error_functional=functional)
        bounds = [e.conformalize(X + 0.01, Y + 0.02).bound(queries) for e in (estimator, loaded)]
        assert_array_equal(*bounds)
    estimator, _ = of_rows(representation=encoder)
    estimator.save(path)
    for given, message in (
        ({}, "as representation, which it does not contain; pass representation="),
        ({"representation": lambda x: encoder(x) + 1}, "representation differs from the repr"),
        ({"representation": lambda x: x}, r"representation returns shape \(8, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            GeoQ.load(path, surrogate=model, **given)


# Other surrogates. An accurate one: its errors are 3e-4 of its answers.

ACCURATE_X = np.random.default_rng(0).normal(size=(200, 3))
ACCURATE_Y = ACCURATE_X @ [1.0, 2.0, 3.0] + 1e-3 * np.sin(3 * ACCURATE_X[:, 0])


def ridge(x, y):
    return Ridge(1e-6).fit(x, y).predict


ACCURATE = ridge(ACCURATE_X, ACCURATE_Y)


def squared(y, y_hat):
    return (y - y_hat) ** 2


@pytest.mark.parametrize("error", [absolute_error, relative_norm_error, squared])
@pytest.mark.parametrize("calibration", [True, False])
def test_a_surrogate_that_differs_by_a_part_of_the_error_raises(tmp_path, error, calibration):
    path = tmp_path / "a.geoq"
    estimator = GeoQ(ACCURATE, ridge, folds=RandomFolds(5), error_functional=error)
    estimator.fit(ACCURATE_X, ACCURATE_Y).save(path, calibration=calibration)
    own = {"error_functional": squared} if error is squared else {}
    for same in (
        ACCURATE,
        lambda x: np.concatenate([ACCURATE(x[i : i + 1]) for i in range(len(x))]),
        lambda x: ACCURATE(x).astype(np.float32),
        lambda x: ACCURATE(x) * (1 + 1e-7),
    ):
        GeoQ.load(path, surrogate=same, **own)
    half = ridge(ACCURATE_X[:100], ACCURATE_Y[:100])
    for other in (half, lambda x: ACCURATE(x) * (1 + 1e-4), lambda x: ACCURATE(x) * np.nan):
        with pytest.raises(ValueError, match=r"surrogate differs from .* % of the typical error"):
            GeoQ.load(path, surrogate=other, **own)


def test_a_surrogate_without_errors_may_differ_only_by_rounding(tmp_path):
    with warnings.catch_warnings(action="ignore"):
        estimator = GeoQ(ACCURATE, None, folds=RandomFolds(5)).fit(ACCURATE_X, ACCURATE(ACCURATE_X))
    estimator.save(tmp_path / "a.geoq")
    GeoQ.load(tmp_path / "a.geoq", surrogate=lambda x: ACCURATE(x) * (1 + 1e-12))
    with pytest.raises(ValueError, match="inf % of the typical error"):
        GeoQ.load(tmp_path / "a.geoq", surrogate=lambda x: ACCURATE(x) * (1 + 1e-6))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("surrogate", "kind", "message"), [
    (lambda x: model(x) + 0.5, ValueError, "surrogate differs .* by up to 0.5 at the stored"),
    (lambda x: model(x)[:, :1], ValueError, r"surrogate returns shape \(8, 1\)"),
    (Ridge(), TypeError, r"got Ridge; pass .*surrogate=model.predict"),
])  # fmt: skip
def test_what_is_no_surrogate_of_the_file_raises(saved, surrogate, kind, message):
    with pytest.raises(kind, match=message):
        GeoQ.load(saved, surrogate=surrogate)


# Damaged, foreign and forged files.


@pytest.fixture
def saved(tmp_path):
    estimator, _ = of_rows()
    estimator.save(tmp_path / "a.geoq")
    return tmp_path / "a.geoq"


def test_one_changed_byte_raises_wherever_it_is(saved):
    content = saved.read_bytes()
    for place in np.unique(np.geomspace(1, len(content) - 1, 60).astype(int)):
        changed = bytearray(content)
        changed[place] ^= 1
        saved.write_bytes(changed)
        with pytest.raises(ValueError, match=r"damaged|truncated|has the format"):
            GeoQ.load(saved, surrogate=model)
    for n_bytes in (0, 7, 100, len(content) // 2, len(content) - 1):
        saved.write_bytes(content[:n_bytes])
        with pytest.raises(ValueError, match="is no file of geoq, or is truncated"):
            GeoQ.load(saved, surrogate=model)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("code of the file was run",))


HEADERS = [
    {},
    {"__metadata__": {"format": 3}},
    {"a": {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 4]}},
]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 40,
        pickle.dumps(Bomb()),
        b'{"format": "geoq 7"}',
        (10**5).to_bytes(8, "little") + b"[" * 10**5,
        *(len(h := json.dumps(header).encode()).to_bytes(8, "little") + h for header in HEADERS),
    ],
)
def test_foreign_files_raise_and_nothing_in_them_runs(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match=r"is no file of geoq|has the format None"):
        GeoQ.load(tmp_path / "a", surrogate=model)
    save_file({"a": np.zeros(1)}, tmp_path / "b", {"format": "geoq 3"})
    with pytest.raises(ValueError, match="has the format 'geoq 3', but this version of geoq reads"):
        GeoQ.load(tmp_path / "b", surrogate=model)
    for missing in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match="does not exist, or is not a file"):
            GeoQ.load(missing, surrogate=model)


def replaced(*path, value):
    """A change of a tree: the part at this path has another value."""

    def change(tree, arrays):
        for key in path[:-1]:
            tree = tree[key]
        tree[path[-1]] = value

    return change


REGION = ("fitted", "fields", "region")
FORGED = {
    "an unknown class": replaced(*REGION, "class", value="Popen"),
    "another class": replaced(*REGION, "class", value="Grid"),
    "a function as a class": replaced(*REGION, "class", value="absolute_error"),
    "a lacking field": lambda tree, arrays: tree["fitted"]["fields"]["region"]["fields"].popitem(),
    "another field": replaced(*REGION, "fields", "__class__", value=3),
    "a lacking array": lambda tree, arrays: arrays.pop("fitted.error"),
    "a region that is a number": replaced("fitted", value=3),
    "nothing fitted": replaced("fitted", "fields", value={}),
    "an unknown function": replaced("settings", "error_functional", value={"function": "system"}),
    "an unknown setting": replaced("settings", "mode", value=3),
    "an unknown kind": replaced("settings", "quantile", value={"pickle": "x"}),
    "a network": replaced(*REGION, value={"network": "Grid", "settings": {"dict": []}, "weights": {}}),
    "no settings": lambda tree, arrays: tree.pop("settings"),
    "another estimator": replaced("estimator", value="Grid"),
    "no estimator": lambda tree, arrays: tree.clear(),
}  # fmt: skip


def forge(path, change):
    """Change a file and compute its digest again."""
    tree, arrays = read(path)
    change(tree, arrays)
    text = json.dumps(tree, sort_keys=True)
    save_file(arrays, path, {"format": "geoq 7", "tree": text, "digest": _digest(text, arrays)})


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_forged_files_raise(saved, change):
    forge(saved, lambda tree, arrays: None)
    GeoQ.load(saved, surrogate=model)
    forge(saved, change)
    with pytest.raises(ValueError, match=r"cannot be restored \(|holds a (Grid|None); load it"):
        GeoQ.load(saved, surrogate=model)


def test_a_file_has_the_permissions_of_other_files(saved):
    other = saved.with_name("other")
    other.touch()
    assert saved.stat().st_mode == other.stat().st_mode


def test_a_loaded_estimator_does_not_depend_on_its_file(saved):
    loaded, (estimator, queries) = GeoQ.load(saved, surrogate=model), of_rows()
    os.truncate(saved, 10)
    assert_same(estimator, loaded, queries)


@pytest.mark.parametrize("step", ["safetensors.numpy.save_file", "pathlib.Path.replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(saved, step, monkeypatch):
    before = saved.read_bytes()

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        of_rows(n_anchors=2)[0].save(saved)
    assert saved.read_bytes() == before
    assert [*saved.parent.iterdir()] == [saved]
