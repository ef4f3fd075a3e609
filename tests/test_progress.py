import io
import sys

from geoq import GeoQ, NormScaledIncrement, RandomFolds, Training
from geoq.training import progress

QUICK = NormScaledIncrement(training=Training(n_steps=40, check_every=20))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_one_bar_shows_all_trainings_and_stages(problem, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    geoq = GeoQ(None, problem.train, folds=RandomFolds(3), increment_model=QUICK)
    geoq.fit(problem.x, problem.y)
    shown = screen.getvalue()
    assert "100%" in shown
    for stage in ("deployed surrogate", "fold 1 of 3", "fold 3 of 3", "safe region"):
        assert stage in shown
    assert shown.count("\n") == 1


def test_a_stage_advances_the_bar_by_its_length(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.bar(4):
        with progress.stage("first", 2):
            progress.stage_done(0.5)
            assert progress.position() == 1
            progress.stage_done(0.25)  # the bar does not move back
            assert progress.position() == 1
        assert progress.position() == 2
        progress.move_to(3)
        assert progress.position() == 3


def test_reports_without_a_bar_have_no_effect():
    with progress.stage("alone"):
        progress.stage_done(0.5)
    progress.move_to(7)
    assert progress.position() == 0
