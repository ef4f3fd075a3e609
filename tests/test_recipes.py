"""The recipes of docs/recipes.md run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import PACKAGE

from geoq import GeoQ, RandomFolds

PAGE = PACKAGE.parents[1] / "docs" / "recipes.md"
# The process of the first task ends during its third training, as a batch system ends it.
MODEL = """
import os, pathlib
import numpy as np
def train(x, y):
    log = pathlib.Path("trainings.txt")
    n = len(log.read_text()) if log.exists() else 0
    log.write_text("." * (n + 1))
    if n == 2:
        os.kill(os.getpid(), 9)
    weights = np.linalg.lstsq(np.c_[x, np.ones(len(x))], np.ravel(y), rcond=None)[0]
    return lambda x: np.c_[x, np.ones(len(x))] @ weights
def predict(x):
    return x[:, 0] + x[:, 1]
"""


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def data():
    x = np.random.default_rng(0).uniform(-1, 1, size=(80, 2))
    return x, x[:, 0] + x[:, 1] + 0.1 * np.sin(9 * x[:, 0])


def write(path, columns, names):
    np.savetxt(path, columns, delimiter=",", header=names, comments="", fmt="%.17g")


def test_an_array_of_tasks_continues_an_interrupted_calibration(tmp_path):
    fit, assess = blocks("sh")
    assert "--checkpoint" in fit
    x, y = data()
    write(tmp_path / "runs.csv", np.c_[x, y], "speed,angle,drag")
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "geoq").write_text(f'#!/bin/sh\nexec {sys.executable} -m geoq "$@"\n')
    (tmp_path / "geoq").chmod(0o755)
    environment = {"PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1"}

    def task(script, number):
        place = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": str(number)}
        command = ["bash", "-c", script]
        settings = {"cwd": tmp_path, "env": environment | place}
        return subprocess.run(command, check=False, capture_output=True, text=True, **settings)

    codes = [task(fit, number).returncode for number in (1, 2, 3)]
    assert codes[0] != 0
    assert codes[1:] == [0, 0]
    n_folds = 15
    assert len((tmp_path / "trainings.txt").read_text()) == n_folds + 1
    for number in (0, 1):
        write(tmp_path / f"queries_{number}.csv", x[number::2], "speed,angle")
        assert task(assess, number).returncode == 0
        answer = (tmp_path / f"answer_{number}.csv").read_text().splitlines()
        assert len(answer) == 1 + len(x[number::2])


@pytest.mark.filterwarnings("ignore")
def test_the_model_of_mlflow_answers_with_bounds(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    Path("model.py").write_text(MODEL)
    x, y = data()
    import model

    estimator = GeoQ(model.predict, None, folds=RandomFolds(5)).fit(x, y)
    estimator.save("drag.geoq")
    names = {}
    exec(compile(blocks("py")[0], PAGE.name, "exec"), names)  # noqa: S102
    pandas = pytest.importorskip("pandas")
    found = names["bounded"].predict(pandas.DataFrame(x[:4], columns=["speed", "angle"]))
    np.testing.assert_array_equal(found["error_hat"], estimator.bound(x[:4]))
    assert found["safe"].dtype == bool
