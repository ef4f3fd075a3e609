"""An interrupted calibration continues from its checkpoint, and its result does not change."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from geoq import GeoQ, NormScaledIncrement, RandomFolds, Training

QUICK = NormScaledIncrement(training=Training(n_steps=40, check_every=20))
# A calibration of about a second in the folder sys.argv[1]; two fold surrogates are trained together.
CALIBRATE = """
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
import numpy as np, torch
from geoq import GeoQ, NormScaledIncrement, RandomFolds, Training, TrainNetwork
from geoq.nets.mlp import MLP

@dataclass(frozen=True)
class InPairs:
    recipe: TrainNetwork
    def __call__(self, x, y):
        return self.recipe(x, y)
    def n_together(self, x, y):
        return 2
    def train_many(self, x, y, subsets, seeds=None):
        return self.recipe.train_many(x, y, subsets, seeds)

torch.set_num_threads(1)
folder, rng = Path(sys.argv[1]), np.random.default_rng(0)
x = rng.uniform(-1, 1, size=(300, 2))
y = np.sin(3 * x[:, :1]) + x[:, 1:] ** 2
training = Training(n_steps=400, check_every=25)
recipe = TrainNetwork(partial(MLP, 2, 1, hidden=(32, 32)), training=training)
increment = NormScaledIncrement(training=Training(n_steps=50, check_every=25))
geoq = GeoQ(recipe(x, y), InPairs(recipe), folds=RandomFolds(8), increment_model=increment)
geoq.fit(x, y, checkpoint=folder)
np.save(folder / "answer.npy", geoq.bound(rng.uniform(-2, 2, size=(500, 2))))
"""


class Counting:
    """A recipe that counts its trainings, and is interrupted in the training number ``interrupted_at``."""

    def __init__(self, train, interrupted_at=None):
        self.train, self.interrupted_at, self.n_calls = train, interrupted_at, 0

    def __repr__(self):
        return "Counting()"

    def __call__(self, x, y):
        self.n_calls += 1
        if self.n_calls == self.interrupted_at:
            raise KeyboardInterrupt
        return self.train(x, y)


def fit(problem, train, folder, **settings):
    settings = {"folds": RandomFolds(4), "increment_model": QUICK, **settings}
    geoq = GeoQ(problem.train(problem.x, problem.y), train, **settings)
    return geoq.fit(problem.x, problem.y, checkpoint=folder)


def test_only_unfinished_folds_are_trained_after_an_interruption(problem, tmp_path):
    train = Counting(problem.train, interrupted_at=3)
    with pytest.raises(KeyboardInterrupt):
        fit(problem, train, tmp_path)
    resumed = fit(problem, train, tmp_path)
    assert train.n_calls == 3 + 2
    undisturbed = fit(problem, problem.train, tmp_path / "other")
    expected = undisturbed.bound(problem.queries)
    assert_close(resumed.bound(problem.queries), expected)


def test_a_calibration_without_trainings_stores_no_predictions(problem, tmp_path):
    def calibrated(offset, folder):
        geoq = GeoQ(lambda x: problem.truth(x) + offset, None, folds=RandomFolds(4))
        return geoq.fit(problem.x, problem.y, checkpoint=folder).calibration_.error

    calibrated(1.0, tmp_path)
    assert_close(calibrated(5.0, tmp_path), calibrated(5.0, tmp_path / "other"))


def test_a_finished_calibration_is_repeated_without_trainings(problem, tmp_path):
    train = Counting(problem.train)
    first = fit(problem, train, tmp_path)
    second = fit(problem, train, tmp_path)
    assert train.n_calls == 4
    assert torch.equal(first.calibration_.error, second.calibration_.error)


def test_other_increments_and_error_functionals_use_the_same_checkpoint(
    problem, tmp_path
):
    train = Counting(problem.train)
    fit(problem, train, tmp_path)
    fit(
        problem,
        train,
        tmp_path,
        n_support=3,
        error_functional=lambda y, p: (y - p) ** 2,
    )
    assert train.n_calls == 4


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (
            {"folds": RandomFolds(5)},
            r"folds was RandomFolds\(n_folds=4.*now RandomFolds",
        ),
        ({"folds": RandomFolds(4, random_state=1)}, "folds was"),
        ({"n_anchors": 3}, "n_anchors was 1, now 3"),
        ({"representation": lambda x: x**3}, "representation was"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(
    problem, tmp_path, change, difference
):
    fit(problem, problem.train, tmp_path)
    with pytest.raises(ValueError, match=difference) as refused:
        fit(problem, problem.train, tmp_path, **change)
    assert "use another folder, or delete this folder" in str(refused.value)


def test_a_checkpoint_of_other_data_or_of_another_recipe_is_refused(problem, tmp_path):
    fit(problem, problem.train, tmp_path)
    geoq = GeoQ(
        problem.train(problem.x, problem.y),
        problem.train,
        folds=RandomFolds(4),
        increment_model=QUICK,
    )
    with pytest.raises(ValueError, match=r"y was float.* now float"):
        geoq.fit(problem.x, problem.y + 1, checkpoint=tmp_path)
    with pytest.raises(ValueError, match=r"train_surrogate was .* now Counting\(\)"):
        fit(problem, Counting(problem.train), tmp_path)


def test_the_folder_contains_no_code(problem, tmp_path):
    fit(problem, problem.train, tmp_path)
    for file in tmp_path.iterdir():
        assert file.suffix == ".geoq"
        assert b"torch" not in file.read_bytes()


def test_an_altered_file_of_a_fold_is_refused(problem, tmp_path):
    fit(problem, problem.train, tmp_path)
    file = tmp_path / "fold-0002.geoq"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="was altered") as refused:
        fit(problem, problem.train, tmp_path)
    assert "fold-0002.geoq to compute its content again" in refused.value.__notes__[0]


def test_a_folder_without_the_description_of_its_calibration_is_refused(
    problem, tmp_path
):
    fit(problem, problem.train, tmp_path)
    (tmp_path / "calibration.geoq").unlink()
    with pytest.raises(ValueError, match="use an empty folder"):
        fit(problem, problem.train, tmp_path)


def run(folder):
    return subprocess.Popen(
        [sys.executable, "-c", CALIBRATE, folder],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )


def test_a_run_killed_in_the_middle_ends_with_the_same_bits(tmp_path):
    """The first kill comes after one fold, the second after five of the eight folds."""
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    undisturbed.mkdir()
    killed.mkdir()
    other = run(undisturbed)
    for n_folds in (1, 5):
        process = run(killed)
        while process.poll() is None and len([*killed.glob("fold-*")]) < n_folds:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    assert not (killed / "answer.npy").exists()
    assert run(killed).wait(timeout=120) == other.wait(timeout=120) == 0
    answers = [np.load(folder / "answer.npy") for folder in (undisturbed, killed)]
    np.testing.assert_array_equal(*answers)
