"""Everything but networks works where PyTorch is not installed."""

import subprocess
import sys

PROGRAM = '''
import sys, warnings
from pathlib import Path


class NoTorch:
    """A finder that makes torch unimportable, as where it is not installed."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")


sys.meta_path.insert(0, NoTorch)
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "A Gaussian process through the same data|A regression on the same fields")

import numpy as np
from sklearn.linear_model import Ridge

import geoq
from geoq import *
from geoq.parts import *
from geoq.planning import smooth
from geoq.sklearn import GeoQRegressor

# A table: fit, assess, save, load.
folder = Path(sys.argv[1])
rng = np.random.default_rng(0)
x = rng.uniform(-1, 1, (80, 2))
y = np.sin(3 * x[:, 0])
train = lambda x, y: Ridge().fit(x, y).predict
estimator = GeoQ(None, train, folds=RandomFolds(5)).fit(x, y)
estimator.save(folder / "table.geoq")
loaded = GeoQ.load(folder / "table.geoq", surrogate=estimator.surrogate_)
np.testing.assert_array_equal(loaded.bound(x), estimator.bound(x))
assert "safe" in loaded.assess(x).reason(0)

# The face of scikit-learn gives the same bounds.
model = GeoQRegressor(Ridge(), folds=RandomFolds(5)).fit(x, y)
np.testing.assert_array_equal(model.bound(x), estimator.bound(x))

# A field: the per-cell scale, and one warning.
waves = np.sin(np.linspace(0, 6, 16)) * rng.uniform(0.2, 1, (80, 1, 1)) * np.ones((80, 12, 1))
field = GeoQ(np.sqrt, None, folds=RandomFolds(5), domain=Grid(2))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    field.fit(abs(waves), abs(waves))
    bound = field.bound(abs(waves[:2]))
    assert bound.shape == (2, 12, 16)
plain = GeoQ(np.sqrt, None, folds=RandomFolds(5), domain=Grid(2), bound_model=FieldBound(factor=NoFactor()))
np.testing.assert_array_equal(plain.fit(abs(waves), abs(waves)).bound(abs(waves[:2])), bound)
told = [str(w.message) for w in caught if "geoq[torch]" in str(w.message)]
assert len(told) == 1, [str(w.message) for w in caught]
field.save(folder / "field.geoq")
GeoQ.load(folder / "field.geoq", surrogate=np.sqrt)

# Cells that are 0 or 1: a law without any loss does not overflow its weight.
cells = rng.uniform(size=(30, 4, 4))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    labels = GeoQ(lambda x: (x > 0.5) * 1.0, None, folds=RandomFolds(5), domain=Grid(2))
    assert labels.fit(cells, (cells > 0.45) * 1.0).bound(cells).shape == cells.shape

# A rollout.
angle = 0.1 * np.arange(400)
states = np.stack([np.cos(angle), np.sin(angle)], axis=1)
step = lambda x: x @ np.array([[0.99, 0.1], [-0.1, 0.99]])
rollout = RolloutGeoQ(step, None, n_calibration=20).fit(states[:300])
answer = rollout.assess(states[300:302], 10, tolerance=0.5)
rollout.save(folder / "rollout.geoq")
loaded = RolloutGeoQ.load(folder / "rollout.geoq", surrogate=step)
np.testing.assert_array_equal(loaded.bound(states[:2], 5), rollout.bound(states[:2], 5))

# What needs PyTorch says how to install it.
for use in (
    lambda: geoq.TrainNetwork,
    lambda: geoq.parts.FieldFactor,
    lambda: GeoQ.paper(np.sqrt, None),
    lambda: smooth(estimator),
    AdditiveRecursion,
):
    try:
        use()
    except ImportError as exc:
        assert 'pip install "geoq[torch]"' in str(exc)
    else:
        raise AssertionError(use)
assert "torch" not in sys.modules
'''


def test_tables_files_regressors_fields_and_rollouts_need_no_torch(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_the_import_is_quick_because_it_loads_nothing_that_is_optional():
    code = "import sys, geoq, geoq.parts; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = set(run.stdout.split())
    heavy = {"torch", "matplotlib", "pandas", "polars", "xarray", "dask", "sklearn", "joblib"}
    assert not (heavy | {"scipy.stats"}) & loaded
