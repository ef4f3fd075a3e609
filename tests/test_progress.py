"""The progress of a calibration: a bar on terminals, lines in the log, calls of a function."""

import logging
import os
import subprocess
import sys

import pytest

from geoq import GeoQ, RandomFolds

# Three folds of a line, in a process of its own, which prints nothing itself.
SCRIPT = """
import logging, sys
import numpy as np
from geoq import GeoQ, RandomFolds
logging.basicConfig(level=logging.INFO if "log" in sys.argv else logging.WARNING, format="%(message)s")
x = np.linspace(0, 1, 60)[:, None]
def train(x, y):
    line = np.polyfit(x[:, 0], y, 1)
    return lambda x: np.polyval(line, x[:, 0])
GeoQ(None, train, folds=RandomFolds(3)).fit(x, np.sin(3 * x[:, 0]))
"""


def calibrated(problem, train=None, **settings):
    estimator = GeoQ(None, train or problem.train, folds=RandomFolds(3))
    return estimator.fit(problem.x, problem.y, **settings)


def run(*arguments, stderr):
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, *arguments]
    return subprocess.run(command, stderr=stderr, stdout=stderr, check=True)


def test_a_terminal_shows_one_bar_of_all_trainings():
    pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (24, 100))
    run(stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # Linux reports the end of a pseudo-terminal as an error
        pass
    text = shown.decode()
    for part in ("0/4", "deployed surrogate", "fold 3 of 3: 100%"):
        assert part in text
    assert "\n" not in text


def test_a_pipe_has_lines_of_the_log_and_no_bar(tmp_path):
    with (tmp_path / "log").open("w") as log:
        run("log", stderr=log)
    text = (tmp_path / "log").read_text()
    lines = [line for line in text.splitlines() if "trainings done" in line]
    assert "%|" not in text
    assert len(lines) == 5
    assert lines[0] == "start: 0 of 4 trainings done"
    assert lines[1].startswith("deployed surrogate: 1 of 4 trainings done after ")
    assert lines[1].endswith(" left")
    assert lines[-1].startswith("fold 3 of 3: 4 of 4 trainings done after ")


def test_a_function_receives_the_progress_after_each_training(problem):
    received = []
    calibrated(problem, progress=received.append)
    assert [p.n_done for p in received] == [0, 1, 2, 3, 4]
    assert {p.n_trainings for p in received} == {4}
    assert received[0].remaining is None
    assert received[-1].remaining == 0
    assert received[-1].stage == "fold 3 of 3"
    elapsed = [p.elapsed for p in received]
    assert elapsed == sorted(elapsed)


def test_the_bar_can_be_switched_off_and_the_log_stays(problem, capsys, caplog):
    with caplog.at_level(logging.INFO, logger="geoq"):
        calibrated(problem, progress=None)
    assert sum("trainings done" in message for message in caplog.messages) == 5
    assert capsys.readouterr() == ("", "")
