"""The command line: the whole job with a model in awk, all file formats, names and units, refusals in one sentence, and the demo."""

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from geoq import GeoQ, RandomFolds, datafiles
from geoq.cli import main

PAGE = Path(__file__).parents[1] / "docs" / "command-line.md"
MODEL = """
import numpy as np
def train(x, y):
    line = np.linalg.lstsq(np.c_[x, np.ones(len(x))], y)[0]
    return lambda x: np.c_[x, np.ones(len(x))] @ line
data = np.loadtxt("runs.csv", delimiter=",", skiprows=1)
predict = train(data[:, :2], data[:, 2])
def broken(x):
    return 1 / 0
"""


FIT = ["fit", "--data", "runs.csv", "--folds", "5"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with runs and a model in Python, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_model", raising=False)
    Path("own_model.py").write_text(MODEL)
    x = np.random.default_rng(0).uniform(size=(80, 2)).round(6)
    columns = {"load [kN]": x[:, 0], "angle": x[:, 1], "drag [N]": x[:, 0] ** 2 + x[:, 1]}
    datafiles.write("runs.csv", columns)
    return x, columns


def answers(path):
    with Path(path).open() as file:
        return list(csv.DictReader(file))


@pytest.mark.skipif(shutil.which("awk") is None, reason="the model of the page is written in awk")
def test_the_page_does_the_whole_job_with_a_model_in_awk(tmp_path):
    """Every block of the page runs, with the command that a user has, and the answer is the one that the page shows."""
    script = "\n".join(re.findall(r"```sh\n(.*?)```", PAGE.read_text(), flags=re.DOTALL))
    geoq = tmp_path / "bin" / "geoq"
    geoq.parent.mkdir()
    geoq.write_text(f'#!/bin/sh\nexec {sys.executable} -m geoq "$@"\n')
    geoq.chmod(0o755)
    env = os.environ | {"PATH": f"{geoq.parent}:{os.environ['PATH']}"}
    how = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True}
    run = subprocess.run(["sh", "-e", "-c", script], check=False, **how)
    assert run.returncode == 0, run.stderr
    assert "answer.csv: 2 of 3 queries are safe" in run.stdout
    assert "Traceback" not in run.stderr
    inside, _, outside = answers(tmp_path / "answer.csv")
    assert [inside["safe"], outside["safe"]] == ["1", "0"]
    assert "input angle [deg] is 45" in outside["reason"]
    truth = 0.01 * 20**2 * (1 + np.sin(10 / 12))
    error = abs(truth - float(inside["prediction of drag [N]"]))
    assert error <= float(inside["bound of drag [N]"])
    assert "Range of each input" in (tmp_path / "drag.html").read_text()
    assert next(row["row"] for row in answers(tmp_path / "next.csv")) == "2"  # far from the data


def test_the_folds_file_marks_all_rows_that_a_training_must_not_see(folder, capsys):
    x, columns = folder
    assert main(["folds", "--data", "runs.csv", "--inputs", "load,angle"]) == 0
    found = datafiles.read("folds.csv")
    import own_model

    seen = []

    def train(x, y):
        seen.append(len(x))
        return own_model.train(x, y)

    GeoQ(own_model.predict, train).fit(x, columns["drag [N]"])
    assert [80 - int(found[f"fold_{k}"].sum()) for k in range(1, 16)] == seen
    assert "15 trainings" in capsys.readouterr().out


def test_a_model_in_python_gets_the_answers_of_the_library(folder):
    x, columns = folder
    model = ["--surrogate", "own_model:predict"]
    assert main([*FIT, "--train", "own_model:train", *model]) == 0
    x = np.concatenate([x, [[9.0, 9.0]]])
    datafiles.write("q.csv", {"angle": x[:, 1], "load": x[:, 0]})  # in another order
    ask = ["assess", "model.geoq", "q.csv", *model, "--out", "a.npz"]
    assert [main(ask), main([*ask, "--require-safe"])] == [0, 3]
    import own_model

    estimator = GeoQ(own_model.predict, own_model.train, folds=RandomFolds(5))
    expected = estimator.fit(x[:80], columns["drag [N]"]).assess(x)
    found = datafiles.read("a.npz")
    np.testing.assert_array_equal(found["bound of drag [N]"], expected.error_hat)
    np.testing.assert_array_equal(found["safe"], expected.safe)


def test_an_interrupted_calibration_continues_from_its_checkpoint(folder, capsys):
    """The job is stopped while fold 4 is trained; the same line then trains only what is missing."""
    counted = """
    calls = Path("calls").read_text() + "x"
    Path("calls").write_text(calls)
    if calls == "xxxxx":
        raise OSError("out of time")
    line"""
    model = "from pathlib import Path" + MODEL.replace("\n    line", counted)
    Path("own_model.py").write_text(model)  # the module itself trains once
    Path("calls").write_text("")
    fit = [*FIT, "--checkpoint", "finished", "--train", "own_model:train"]
    fit += ["--surrogate", "own_model:predict"]
    assert main(fit) == 1
    assert "out of time while training the surrogate of fold 4 of 5" in capsys.readouterr().err
    assert main(fit) == 0
    assert "from the checkpoint" in capsys.readouterr().err


def test_predictions_of_several_outputs_and_of_fields_come_from_files(folder):
    x, columns = folder
    datafiles.write("two.csv", columns | {"lift": x[:, 1]})
    datafiles.write("p.csv", {"drag": columns["drag [N]"] + 0.1, "lift": 0 * x[:, 0]})
    two = ["--predictions", "p.csv"]
    asked = ["--data", "two.csv", "--outputs", "drag,lift", "--folds", "5", *two]
    assert main(["fit", *asked]) == 0  # the model has never seen these rows
    assert main(["assess", "model.geoq", "two.csv", *two]) == 0
    row = answers("answer.csv")[0]
    assert float(row["bound of drag [N]"]) == pytest.approx(0.1, rel=0.3)
    assert float(row["prediction of lift"]) == 0
    field = np.multiply.outer(x[:, 0], np.ones((9, 12)))
    np.savez("field.npz", load=x[:, 0], heat=field)
    np.savez("q.npz", heat=field + x[:, 1, None, None])
    assert datafiles.predictions_of(["q.npz"], ["heat"], 80)[0].shape == (80, 9, 12)
    assert datafiles.stacked(datafiles.read("field.npz"), ["heat"]).shape == (80, 9, 12)


def test_a_table_of_predictions_is_exact_at_its_rows_and_linear_between_two(folder):
    surrogate = datafiles.tabulated(np.array([[0.0], [1.0], [3.0]]), np.array([0.0, 2.0, 0.0]))
    answer = surrogate(np.array([[1.0], [0.5], [2.0], [0.0]]))
    np.testing.assert_allclose(answer, [2, 1, 1, 0], atol=1e-12)


@pytest.mark.parametrize("suffix", [".csv", ".npz", ".parquet", ".nc"])
def test_a_file_keeps_numbers_names_and_units(suffix, tmp_path):
    pytest.importorskip({".nc": "xarray", ".parquet": "polars"}.get(suffix, "numpy"))
    path, values = str(tmp_path / f"file{suffix}"), np.array([0.1, 1e-300, -np.pi])
    datafiles.write(path, {"load [kN]": values, "why": np.array(["a,b", "c", 'd"'], dtype=object)})
    found = datafiles.read(path)
    np.testing.assert_array_equal(found["load [kN]"], values)
    assert found["why"].tolist() == ["a,b", "c", 'd"']
    assert datafiles.chosen(found, ["load"], path) == ["load [kN]"]
    message = r"has the column 'load \[kN\]', but 'load \[N\]' is needed; convert it"
    with pytest.raises(ValueError, match=message):
        datafiles.chosen(found, ["load [N]"], path)


PREDICTED, BROKEN = ["--predictions", "p.csv"], ["--surrogate", "own_model:broken"]
REFUSALS = {
    "missing.csv does not exist": ["folds", "--data", "missing.csv"],
    "runs.csv has no column 'speed'": ["folds", "--data", "runs.csv", "--inputs", "speed"],
    "has the suffix '.txt'; use .csv": ["folds", "--data", "runs.csv", "--out", "folds.txt"],
    "no model is given; pass --predictions": FIT,
    "short.csv has 3 predictions for 80 rows": [*FIT, "--predictions", "short.csv"],
    "PredictedFolds has 1 entries, but there are 5 folds": [*FIT, *PREDICTED, "p.csv"],
    "line 3 of ragged.csv has 1 cells": ["folds", "--data", "ragged.csv"],
    "needs a first line with the names": ["folds", "--data", "bare.csv"],
    "ZeroDivisionError: division by zero while calling surrogate(x) on 80 rows (own_model.py, line 9)": [
        *FIT,
        *BROKEN,
    ],
    "own_model.py is no file of geoq": ["report", "own_model.py"],
    "runs.csv needs either a file of predictions": ["assess", "model.geoq", "runs.csv"],
}


@pytest.mark.parametrize("message", REFUSALS)
def test_a_refusal_is_one_sentence_and_the_exit_code_1(message, folder, capsys):
    estimator = GeoQ(lambda x: x[:, 0], None, folds=RandomFolds(5))
    estimator.fit(folder[0], folder[1]["drag [N]"]).save("model.geoq")
    Path("short.csv").write_text("drag\n1\n2\n3\n")
    Path("ragged.csv").write_text("a,b\n1,2\n3\n")
    Path("bare.csv").write_text("1,2\n3,4\n")
    datafiles.write("p.csv", {"p": folder[1]["drag [N]"] + 0.1})
    assert main(REFUSALS[message]) == 1
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if not line.startswith("inputs:")]
    assert line.startswith("geoq: ")
    assert message in line


@pytest.mark.parametrize("wrong", ["missing/demo.png", "demo.txt", ""])
def test_a_picture_that_cannot_be_written_is_refused_before_any_training(wrong, folder, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--picture", wrong])
    printed = capsys.readouterr()
    assert "is not a picture in an existing folder" in printed.err
    assert "trainings" not in printed.out + printed.err


def test_the_demo_names_the_reasons_and_draws_the_bounds(folder, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    assert main(["demo", "--picture", "demo.svg"]) == 0
    printed = capsys.readouterr().out
    assert "input x is 0.52; its nearest values in the data are" in printed
    assert "input x is 0.98" in printed
    rows = re.findall(r"(\d+)% of the queries are .*: (\d+)% .* is ([\d.]+) times", printed)
    (safe, within, ratio), (other, beyond, _) = ([float(n) for n in row] for row in rows)
    assert safe + other == 100
    assert within > 85
    assert ratio < 1.05  # what is not within its bound exceeds it by rounding
    assert beyond > 85
    assert Path("demo.svg").stat().st_size > 10_000


def test_the_demo_is_useful_without_matplotlib(folder, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("geoq.plots")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("geoq.plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["demo"]) == 0
    assert "NOT safe" in capsys.readouterr().out
    assert not Path("demo.png").exists()
