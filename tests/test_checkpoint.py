"""An interrupted calibration continues from its checkpoint, and a recipe that has changed never reuses old folds."""

import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from sklearn.base import clone
from sklearn.linear_model import Ridge

from geoq import GeoQ, RandomFolds, Region
from geoq.regions.table_scores import SupportDistance
from geoq.training.checkpoint import Checkpoint, identity
from geoq.training.sources import progress_bar

# The recipes here make nearly the same model of all rows.
pytestmark = pytest.mark.filterwarnings("ignore:the surrogates of folds", "ignore:the mean error")

X = np.random.default_rng(0).uniform(-1, 1, (60, 2))
FACTOR = 0.9


def truth(x):
    return np.sin(3 * x[:, 0]) + x[:, 1] ** 2


Y = truth(X)


def times(factor):
    return lambda x, y: lambda q: factor * y.std() * truth(q)


class Constant:
    """The quickest bound."""

    def fit(self, tuples, quantile):
        return lambda features: features.anchor_error + 0.1


REGION = Region((SupportDistance(),))


def fit(recipe, place, y=Y, **settings):
    known = {"folds": RandomFolds(4), "bound_model": Constant(), "safe_region": REGION}
    estimator = GeoQ(lambda q: 0.85 * truth(q), recipe, **(known | settings))
    return estimator.fit(X, y, checkpoint=place)


def errors(recipe, place, y=Y, **settings):
    return fit(recipe, place, y, **settings).fitted_.tuples.error


def interrupted_at(number, train):
    """A recipe that is interrupted once, in the training of this number, and the list of its trainings."""
    calls = []

    def recipe(x, y):
        calls.append(len(x))
        if len(calls) == number:
            raise KeyboardInterrupt
        return train(x, y)

    return recipe, calls


def test_only_unfinished_folds_are_trained_after_an_interruption(tmp_path):
    recipe, calls = interrupted_at(3, times(0.9))
    place = Checkpoint(tmp_path, key="times")
    with pytest.raises(KeyboardInterrupt):
        fit(recipe, place)
    resumed = fit(recipe, place)
    assert len(calls) == 3 + 2
    assert_array_equal(resumed.bound(X), fit(times(0.9), None).bound(X))
    again = fit(recipe, place)
    assert len(calls) == 3 + 2
    assert_array_equal(again.bound(X), resumed.bound(X))


def test_another_bound_error_or_level_uses_the_same_checkpoint(tmp_path):
    recipe, calls = interrupted_at(0, times(0.9))
    place = Checkpoint(tmp_path, key="times")
    fit(recipe, place)
    settings = {"n_support": 3, "quantile": 0.8, "error_functional": lambda y, p: (y - p) ** 2}
    fit(recipe, place, **settings)
    assert len(calls) == 4


def test_a_calibration_without_trainings_writes_nothing(tmp_path):
    assert_array_equal(errors(None, tmp_path / "a"), errors(None, None))
    assert not (tmp_path / "a").exists()


# What a recipe is: its code and its values.


class Scaled:
    """A recipe with an attribute."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x, y):
        return lambda q: self.factor * truth(q)


@dataclass(frozen=True)
class Described:
    factors: np.ndarray

    def __call__(self, x, y):
        return lambda q: self.factors.mean() * truth(q)


def with_class_attribute(factor):
    class Recipe:
        power = factor

        def __call__(self, x, y):
            return lambda q: self.power * truth(q)

    return Recipe()


def with_module_variable(factor):
    globals()["FACTOR"] = factor
    return lambda x, y: lambda q: FACTOR * truth(q)


def with_base_class(factor):
    base = type("Base", (), {"factor": factor})
    return type("Recipe", (base,), {"__call__": Scaled.__call__})()


def with_method(factor):
    helper = (lambda self: lambda q: truth(q) + 1) if factor > 1 else (lambda self: truth)
    methods = {"helper": helper, "__call__": lambda self, x, y: self.helper()}
    return type("Recipe", (), methods)()


def with_helper(factor):
    """The function that a recipe calls has another constant."""
    helper = (lambda q: 2 * q) if factor > 1 else (lambda q: 3 * q)
    return lambda x, y: lambda q: helper(truth(q))


LOOK_ALIKE = {
    "closure": times,
    "default": lambda factor: lambda x, y, by=factor: lambda q: by * truth(q),
    "code": lambda factor: (lambda x, y: abs) if factor > 1 else (lambda x, y: np.tanh),
    "array": lambda factor: partial(lambda w, x, y: w, np.r_[np.zeros(2000), factor]),
    "attribute": Scaled,
    "method": lambda factor: Scaled(factor).__call__,
    "dataclass": lambda factor: Described(np.r_[np.zeros(5000), factor]),
    "class attribute": with_class_attribute,
    "base class": with_base_class,
    "code of a method": with_method,
    "function that is called": with_helper,
    "module variable": with_module_variable,
    "base model": lambda factor: partial(lambda m, x, y: clone(m).fit, Ridge(alpha=factor)),
}


@pytest.mark.parametrize("make", LOOK_ALIKE.values(), ids=LOOK_ALIKE)
def test_a_recipe_is_recognised_by_its_code_and_values(make):
    assert identity(make(0.5)) == identity(make(0.5))
    assert identity(make(0.5)) != identity(make(2.0))


@pytest.mark.parametrize("make", [times, Scaled, with_class_attribute, with_module_variable])
def test_a_recipe_that_has_changed_never_reuses_old_folds(tmp_path, make):
    first = errors(make(0.9), tmp_path)
    assert_array_equal(first, errors(make(0.9), tmp_path))
    with pytest.raises(ValueError, match=r"train_surrogate was .* with Checkpoint\(folder, key="):
        errors(make(0.1), tmp_path)


def test_a_recipe_without_a_seed_resumes(tmp_path):
    """Its surrogates differ from run to run, and its code does not; nor does use change it."""

    class Cached(Scaled):
        def __call__(self, x, y):
            self.n_calls = getattr(self, "n_calls", 0)
            noise = np.random.default_rng().normal()
            return lambda q: self.factor * truth(q) + 0.01 * noise

    recipe = Cached(0.9)
    assert_array_equal(errors(recipe, tmp_path), errors(Cached(0.9), tmp_path))
    assert_array_equal(errors(Cached(0.9), tmp_path), errors(Cached(0.9), tmp_path))


def test_a_deployed_surrogate_that_is_trained_again_keeps_the_metric_of_the_first_run(tmp_path):
    """Otherwise other points would be the anchors of the finished folds."""
    slopes = np.random.default_rng(0).uniform(1, 9, (20, 2)).tolist()
    place = Checkpoint(tmp_path, key="one")

    def weight():
        estimator = GeoQ(
            None, lambda x, y: partial(np.dot, b=np.array(slopes.pop())), folds=RandomFolds(4)
        )
        return estimator.fit(X, Y, checkpoint=place).fitted_.metric.weight

    assert_array_equal(weight(), weight())


MODULE = """
import helpers
from helpers import Base, LOCK
{code}
class Recipe(Base):
    options = {options}
    def __call__(self, x, y):
        return lambda q: helpers.scale(q) * self.power * FACTOR
"""
HELPERS = """
import threading
LOCK = {lock}
class Base:
    power = {power}
def scale(q):
    return {scale} * q[:, 0]
"""
PLAIN = {"code": "FACTOR = 1", "options": "{'b', 'a', 'c'}", "power": 1, "scale": 3, "lock": 0}
CHANGES = (
    {},
    {"code": "FACTOR = 2"},
    {"power": 2},
    {"scale": 4},
    {"options": "{'b', 'a', 'd'}"},
    # A module can contain what cannot be pickled.
    {"lock": "threading.Lock()"},
    {"lock": "threading.Lock()", "scale": 4},
)
IDENTITIES = """
import sys
from geoq.training.checkpoint import identity
sys.dont_write_bytecode = True
for folder in sys.argv[1:]:
    sys.path.insert(0, folder)
    import recipe
    print(identity(recipe.Recipe()))
    del sys.modules["recipe"], sys.modules["helpers"]
"""


def test_the_identity_is_the_same_in_two_processes_and_another_one_for_other_modules(tmp_path):
    """The processes have another order of sets, and the modules are in another folder."""
    found = []
    for seed in ("1", "2"):
        folders = [tmp_path / seed / str(number) for number in range(len(CHANGES))]
        for folder, change in zip(folders, CHANGES, strict=True):
            folder.mkdir(parents=True)
            (folder / "recipe.py").write_text(MODULE.format_map(PLAIN | change))
            (folder / "helpers.py").write_text(HELPERS.format_map(PLAIN | change))
        command = [sys.executable, "-c", IDENTITIES, *folders]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.append(done.stdout.splitlines())
    assert found[0] == found[1]
    assert len({*found[0]}) == len(CHANGES)


def test_lines_and_comments_do_not_count():
    def recipe(code):
        names = {"truth": truth}
        exec(code, names)  # noqa: S102
        return names["train"]

    plain = "def train(x, y):\n    return lambda q: 0.9 * truth(q)\n"
    moved = "\n# A comment.\n" + plain.replace(":\n", ":\n    # Another one.\n")
    assert identity(recipe(plain)) == identity(recipe(moved))
    assert identity(recipe(plain)) != identity(recipe(moved.replace("0.9", "0.8")))


@pytest.mark.parametrize("thing", [threading.Lock(), (i for i in range(3))], ids=["lock", "generator"])  # fmt: skip
def test_a_recipe_that_cannot_be_recognised_needs_a_key(tmp_path, thing):
    def train(x, y):
        return lambda q: (thing and 1) * truth(q)

    with pytest.raises(ValueError, match=r"cannot be pickled .*key='name'"):
        fit(train, tmp_path / "a")
    for _ in range(2):
        fit(train, Checkpoint(tmp_path / "a", key="one"))
    with pytest.raises(ValueError, match="train_surrogate was key 'one', now key 'two'"):
        fit(train, Checkpoint(tmp_path / "a", key="two"))


# Other calibrations and damaged folders.


@pytest.mark.parametrize(("change", "difference"), [
    ({"folds": RandomFolds(5)}, r"folds was RandomFolds\(n_folds=4.*now RandomFolds"),
    ({"folds": RandomFolds(4, random_state=1)}, "folds was"),
    ({"n_anchors": 3}, "n_anchors was 1, now 3"),
    ({"representation": lambda x: x**3}, "representation was"),
    ({"y": Y + 1}, r"y was ndarray of shape \(60,\) with hash .* now ndarray"),
], ids=lambda value: value if isinstance(value, str) else next(iter(value)))  # fmt: skip
def test_a_checkpoint_of_another_calibration_raises(tmp_path, change, difference):
    fit(times(0.9), tmp_path)
    with pytest.raises(ValueError, match=difference) as raised:
        fit(times(0.9), tmp_path, **change)
    assert "use another folder, or delete this folder" in str(raised.value)


@pytest.mark.parametrize("name", ["fold-0001", "metric"])
def test_a_file_of_another_calibration_raises(tmp_path, name):
    one, other = tmp_path / "one", tmp_path / "other"
    fit(times(0.9), one)
    fit(times(0.9), other, 5 * Y)
    shutil.copy(other / f"{name}.npz", one)
    with pytest.raises(ValueError, match=rf"{name}.npz belongs to another calibration"):
        fit(times(0.9), one)


@pytest.mark.parametrize("name", ["fold-0002", "calibration", "metric", "jobs"])
@pytest.mark.parametrize("damage", ["byte", "short", "empty"])
def test_a_damaged_file_raises_and_names_the_way_out(tmp_path, name, damage):
    fit(times(0.9), tmp_path)
    file = tmp_path / f"{name}.npz"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes({"byte": content, "short": content[:-9], "empty": b""}[damage])
    with pytest.raises(ValueError, match="is damaged or not complete") as raised:
        fit(times(0.9), tmp_path)
    assert "Delete" in raised.value.__notes__[0]
    assert ("to compute its content again" in raised.value.__notes__[0]) == (name != "calibration")


def test_a_file_under_the_name_of_another_fold_raises(tmp_path):
    folds = RandomFolds(7)  # of different sizes
    fit(times(0.9), tmp_path, folds=folds)
    shutil.copy(tmp_path / "fold-0001.npz", tmp_path / "fold-0007.npz")
    with pytest.raises(ValueError, match=r"does not contain the .* of fold 7; delete it"):
        fit(times(0.9), tmp_path, folds=folds)


def test_folders_that_cannot_be_used_raise(tmp_path):
    fit(times(0.9), tmp_path / "a")
    (tmp_path / "a" / "calibration.npz").unlink()
    for place, message in (
        (tmp_path / "a", "contains fold-000.* but not calibration.npz.*use an empty folder"),
        (__file__, "is a file; pass the path of a folder"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(times(0.9), place)


def test_a_deleted_folder_costs_the_checkpoint_and_not_the_calibration(tmp_path):
    def train(x, y):
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        return lambda q: 0.9 * truth(q)

    with pytest.warns(UserWarning, match="cannot be written .*; fit continues"):
        survived = errors(train, Checkpoint(tmp_path / "a", key="one"))
    assert_array_equal(survived, errors(lambda x, y: lambda q: 0.9 * truth(q), None))


def test_the_folder_contains_no_code_and_no_leftovers(tmp_path):
    fit(times(0.9), tmp_path)
    names = {"calibration", "jobs", "metric", *(f"fold-000{i}" for i in range(1, 5))}
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.npz" for name in names}
    assert not any(b"pickle" in path.read_bytes() for path in tmp_path.iterdir())


# A calibration of about a second in the folder sys.argv[1].
def test_a_resumed_run_reports_only_its_own_trainings(tmp_path):
    recipe, _ = interrupted_at(3, times(0.9))
    place, received = Checkpoint(tmp_path, key="times"), []
    with pytest.raises(KeyboardInterrupt):
        fit(recipe, place)
    estimator = GeoQ(lambda q: 0.85 * truth(q), recipe, folds=RandomFolds(4))
    estimator.fit(X, Y, checkpoint=place, progress=received.append)
    assert (received[-1].n_done, received[-1].n_trainings) == (2, 2)
    estimator.fit(X, Y, checkpoint=place, progress=progress_bar)
