import logging
import os
import pty
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from geoq import GeoQ, NormScaledIncrement, RandomFolds, TrainedFolds, Training
from geoq.training import ProgressBar, progress
from geoq.training.duration import TrainingTime
from geoq.training.threads import n_weights, threads_for

QUICK = NormScaledIncrement(training=Training(n_steps=40, check_every=20))
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
    geoq = GeoQ(
        None, train or problem.train, folds=RandomFolds(3), increment_model=QUICK
    )
    return geoq.fit(problem.x, problem.y, **settings)


def run(*arguments, stderr):
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(command, stderr=stderr, stdout=stderr, check=True)


def test_a_terminal_shows_one_bar_of_all_trainings_and_stages():
    ours, theirs = pty.openpty()
    run(stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # Linux reports the end of a pseudo-terminal as an error
        pass
    text = shown.decode()
    for stage in ("deployed surrogate:  ", "fold 1 of 3:  ", "fold 3 of 3:  "):
        assert stage in text
    assert "safe region: 100%" in text
    assert ": :" not in text
    assert text.count("\n") == 1


def test_a_pipe_has_lines_of_the_log_and_no_bar(tmp_path):
    with (tmp_path / "log").open("w") as log:
        run("log", stderr=log)
    lines = (tmp_path / "log").read_text().splitlines()
    assert not any("%|" in line for line in lines)
    lines = [line for line in lines if "trainings done" in line]
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


def test_folds_of_a_checkpoint_are_not_counted_as_trainings(problem, tmp_path):
    geoq = GeoQ(
        problem.train(problem.x, problem.y),
        problem.train,
        folds=RandomFolds(3),
        increment_model=QUICK,
    )
    geoq.fit(problem.x, problem.y, checkpoint=tmp_path)
    received = []
    geoq.fit(problem.x, problem.y, checkpoint=tmp_path, progress=received.append)
    assert str(received[-1]) == "3 folds from the checkpoint: 0 of 0 trainings done"


def test_the_bar_can_be_drawn_anywhere_and_switched_off(problem, tmp_path, caplog):
    with (tmp_path / "bar").open("w") as file:
        calibrated(problem, progress=ProgressBar(file))
    assert "100%" in (tmp_path / "bar").read_text()
    with caplog.at_level(logging.INFO, logger="geoq"):
        calibrated(problem, progress=None)
    assert sum("trainings done" in message for message in caplog.messages) == 5


def test_a_kernel_of_jupyter_shows_the_bar(problem, monkeypatch, capsys):
    kernel = SimpleNamespace(kernel=object())
    ipython = SimpleNamespace(get_ipython=lambda: kernel)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    calibrated(problem)
    assert "safe region: 100%" in capsys.readouterr().err


@pytest.mark.parametrize("show", [True, False, "bar", 1, ProgressBar])
def test_anything_else_is_refused_before_any_training(problem, show):
    def train(x, y):
        raise AssertionError

    with pytest.raises(TypeError, match=r"progress=.*pass progress=print for a line"):
        calibrated(problem, train, progress=show)


def test_a_stage_advances_the_bar_by_its_length(tmp_path):
    with (tmp_path / "bar").open("w") as file, progress.shown(ProgressBar(file), 4, 4):
        with progress.stage("first", 2):
            progress.stage_done(0.5)
            assert progress.position() == 1
            progress.stage_done(0.25)  # the bar does not move back
            assert progress.position() == 1
        assert progress.position() == 2
        progress.move_to(3)
        assert progress.position() == 3


def test_reports_outside_a_calibration_have_no_effect():
    with progress.stage("alone"):
        progress.stage_done(0.5)
    progress.move_to(7)
    progress.trained("alone")
    progress.restored(2)
    assert progress.position() == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.234, "0.23 s"), (99.4, "99 s"), (481, "8 min"), (7300, "2.03 h")],
)
def test_durations_in_words(seconds, text):
    assert progress.duration(seconds) == text


def test_the_time_of_all_trainings_is_estimated_from_one(problem):
    trained_on = []

    def train(x, y):
        trained_on.append(len(x))
        return problem.train(x, y)

    geoq = GeoQ(None, train, folds=RandomFolds(4), increment_model=QUICK)
    time = geoq.estimate(problem.x, problem.y)
    assert time.n_trainings == 5
    assert time.seconds == 5 * time.seconds_of_one > 0
    assert trained_on == [len(problem.x) * 3 // 4]
    assert not hasattr(geoq, "coordinates_")


def test_nothing_is_trained_to_estimate_the_time_of_no_trainings(problem):
    model = problem.train(problem.x, problem.y)
    for source in (None, TrainedFolds([model] * 3)):
        geoq = GeoQ(model, source, folds=RandomFolds(3), increment_model=QUICK)
        assert str(geoq.estimate(problem.x, problem.y)) == "no trainings"


def test_the_estimate_counts_workers_and_networks_that_are_trained_together():
    time = TrainingTime(16, n_together=4, seconds_of_one=30.0, n_workers=2)
    assert time.seconds == 60
    assert str(time) == (
        "16 trainings, 4 at once: 30 s for one, about 60 s in total on 2 workers"
    )


class Model:
    def __init__(self, network):
        self.network = network

    def predict(self, x):
        return self.network(x)


def behind(network):
    return lambda x: network(x)


NETWORK = torch.nn.Linear(3, 2)


@pytest.mark.parametrize(
    ("surrogate", "n"),
    [
        (NETWORK, 8),
        (NETWORK.forward, 8),
        (Model(NETWORK).predict, 8),
        (behind(NETWORK), 8),
        (np.sin, None),
        (torch.nn.Linear(3, 2, device="meta"), None),
        (None, None),
    ],
)
def test_the_weights_of_a_network_are_found_behind_functions(surrogate, n):
    assert n_weights(surrogate) == n


@pytest.mark.parametrize(
    ("n", "x", "n_threads"),
    [
        (8, np.zeros((500, 6)), 1),
        (10**6, np.zeros((500, 6)), 2),
        (8, np.zeros((10**5, 6)), 2),
        (None, np.zeros((500, 6)), 2),
    ],
)
def test_small_networks_are_trained_with_one_thread(n, x, n_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with threads_for(n, x):
            assert torch.get_num_threads() == n_threads
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_folds_of_a_small_network_use_one_thread(problem):
    used = []

    def train(x, y):
        used.append(torch.get_num_threads())
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return torch.nn.Linear(2, 1).to(x).eval()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        GeoQ(
            train(problem.x, problem.y),
            train,
            folds=RandomFolds(3),
            increment_model=QUICK,
        ).fit(problem.x, problem.y)
    finally:
        torch.set_num_threads(before)
    assert used == [2, 1, 1, 1]
