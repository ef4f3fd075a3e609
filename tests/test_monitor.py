"""Alarms and intervals that are valid at any time, and the monitor around an estimator."""

import itertools
import json
from functools import cache

import numpy as np
import pytest

from geoq import GeoQ, RandomFolds
from geoq.monitor import (
    FILE,
    LOG,
    Monitor,
    bins_of_gaps,
    evidence,
    gains_of_fraction,
    gains_of_rank,
    interval,
    stepped,
    upper_limit,
)

LEVEL, OWN = 0.05, 0.05 / 3


def truth(x):
    return np.sin(3 * x[:, 0]) + x[:, 1]


def calibrated(seed=0, outputs=truth):
    x = np.random.default_rng(seed).uniform(-1, 1, size=(200, 2))
    model = {"folds": RandomFolds(5)}
    return GeoQ(lambda x: outputs(x) + 0.1 * np.sin(40 * truth(x)), None, **model).fit(
        x, outputs(x)
    )


@pytest.fixture(scope="module")
def estimator():
    return calibrated()


def queries(n, width=1.0, seed=7):
    return np.random.default_rng(seed).uniform(-width, width, size=(n, 2))


def largest_evidence(gains):
    """The largest evidence of each stream, looked at after every observation; gains are (streams, observations, bets)."""
    capital, largest = np.zeros((len(gains), gains.shape[2])), np.zeros(len(gains))
    for i in range(gains.shape[1]):
        capital = stepped(capital, gains[:, i], i + 1)
        largest = np.maximum(largest, evidence(capital, i + 1))
    return largest


def test_the_evidence_has_the_expectation_1_under_the_hypothesis():
    """Over all sequences of eight zeros and ones with their probabilities; it is less for fractions of the same mean."""
    ones = np.array([*itertools.product([0, 1], repeat=8)])
    probability = 0.1 ** ones.sum(axis=1) * 0.9 ** (8 - ones.sum(axis=1))
    for values, exact in ((ones, True), (0.05 + 0.5 * ones, False)):
        capital = np.zeros((len(ones), 7))
        for i in range(8):
            capital = stepped(capital, gains_of_fraction(values[:, i], 0.1), i + 1)
        expectation = float(probability @ evidence(capital, 8))
        assert expectation == pytest.approx(1) if exact else expectation < 1


@pytest.mark.parametrize("n_gaps", [2, 7, 101, 128])
def test_bets_on_ranks_are_fair_and_bins_contain_all_gaps(n_gaps):
    sizes = bins_of_gaps(n_gaps)
    assert sizes.sum() == n_gaps
    assert sizes[-1] == 1
    counts = sizes + np.arange(len(sizes))[::-1]  # with earlier queries
    gains = gains_of_rank(np.tile(counts, (len(sizes), 1)), np.arange(len(sizes)))
    np.testing.assert_allclose(counts @ gains / counts.sum(), 1)
    assert (np.diff(gains, axis=0) > 0).all()


def test_a_thousand_stable_streams_raise_few_alarms_though_looked_at_after_every_query():
    """Each stream has a reference of its own; two fifths of the queries that are verified miss as often as allowed."""
    rng, n, n_reference = np.random.default_rng(0), 1000, 150
    unsafe = rng.random((1000, n)) < 0.05
    counts = rng.binomial(n_reference, 0.05, 1000).tolist()
    limits = [upper_limit(k, n_reference, OWN / 2) for k in counts]
    bets = np.stack([gains_of_fraction(x, p) for x, p in zip(unsafe, limits, strict=True)])
    alarms = largest_evidence(bets) >= 2 / OWN
    sizes, ranked = bins_of_gaps(n_reference + 1), []
    for _ in range(1000):
        gap = np.searchsorted(np.sort(rng.random(n_reference)), rng.random(n))
        place = np.searchsorted(np.cumsum(sizes), gap, "right")
        falls = np.eye(len(sizes))[place]
        ranked.append(gains_of_rank(sizes + falls.cumsum(axis=0) - falls, place))
    alarms |= largest_evidence(np.stack(ranked)) >= 1 / OWN
    missed = rng.random((1000, 400)) < LEVEL
    alarms |= largest_evidence(gains_of_fraction(missed, LEVEL)) >= 1 / OWN
    assert 0 < alarms.mean() <= LEVEL


def test_an_interval_contains_the_mean_at_all_times():
    rng, n = np.random.default_rng(1), np.arange(10, 400, 20)
    sums = (rng.random((200, 400)) < 0.05).cumsum(axis=1)
    missed, ends_of = 0, cache(interval)
    for stream in sums:
        ends = np.array([ends_of(int(stream[i - 1]), int(i), 0.1) for i in n])
        missed += bool(((ends[:, 0] > 0.05) | (ends[:, 1] < 0.05)).any())
    assert 0 < missed <= 0.1 * 200
    assert interval(0, 0, 0.05) == (0, 1)


def test_a_change_after_a_long_stable_stream_is_found_quickly():
    """Bets that start at the first query would need a multiple of the stable time."""
    rng = np.random.default_rng(2)
    for n_stable in (0, 2000):
        x = np.concatenate(
            [rng.random((100, n_stable)) < 0.05, rng.random((100, 100)) < 0.5], axis=1
        )
        before = gains_of_fraction(x[:, : n_stable + 50], 0.05)
        assert (largest_evidence(before) >= 1 / OWN).mean() > 0.95


def test_stable_queries_raise_no_alarm_and_their_coverage_is_measured(estimator):
    monitor = Monitor(estimator, verify=0.3)
    x = queries(600)
    answer, drawn = monitor.observe(x)
    np.testing.assert_array_equal(answer.error_hat, estimator.bound(x))
    assert 0.2 < len(drawn) / 600 < 0.4
    monitor.verified(x[drawn], truth(x[drawn]))
    status = monitor.status()
    safe = answer.safe[drawn]
    within = abs(answer.prediction - truth(x))[drawn] <= answer.error_hat[drawn]
    assert not status.alarms
    assert status.numbers["coverage"] == pytest.approx(within[safe].mean())
    low, high = status.numbers["coverage_interval"]
    assert low < within[safe].mean() < high
    assert status.numbers["verified"] == safe.sum()
    assert "no alarm" in str(status)
    assert f"{len(drawn)} drawn for verification, 0 of them without a result" in str(status)


def test_queries_that_leave_the_data_raise_both_alarms(estimator):
    monitor = Monitor(estimator)
    monitor.observe(queries(300))
    assert not monitor.status().alarms
    monitor.observe(queries(100, width=2))
    alarms = monitor.status().alarms
    assert len(alarms) == 2
    numbers = [int(text.split("query ")[1].split(":")[0]) for text in alarms]
    assert all(300 < number < 340 for number in numbers)


def test_a_simulator_that_changes_raises_the_alarm_of_the_coverage_and_the_factor(estimator):
    monitor = Monitor(estimator, verify=1)
    x = queries(100)
    monitor.observe(x)
    monitor.verified(x, truth(x) + 0.5)
    status = monitor.status()
    assert [text.split(": ")[1] for text in status.alarms] == [
        "the bounds of safe queries cover too few errors"
    ]
    assert status.numbers["factor"] > 1.2


def test_verifying_only_suspicious_queries_does_not_count(estimator):
    """The trap: the largest errors are chosen, so their coverage is far too small; the monitor counts only what it has drawn."""
    monitor = Monitor(estimator, verify=0.1)
    x = queries(800)
    answer, drawn = monitor.observe(x)
    ratio = abs(answer.prediction - truth(x)) / answer.error_hat
    suspicious = np.argsort(-ratio)[:60]
    assert (ratio[suspicious] <= 1).mean() < 0.7
    monitor.verified(x[suspicious], truth(x[suspicious]))
    found = set(drawn) & set(suspicious)
    status = monitor.status().numbers
    assert status["chosen"] == 60 - len(found)
    assert status["outstanding"] == len(drawn) - len(found)
    monitor.verified(x[drawn], truth(x[drawn]))
    safe = drawn[answer.safe[drawn]]
    assert monitor.status().numbers["coverage"] == pytest.approx((ratio[safe] <= 1).mean())
    assert "were not drawn; they do not count" in str(monitor.status())


def test_a_monitor_continues_after_a_restart_and_draws_do_not_depend_on_batches(
    estimator, tmp_path
):
    x, whole = queries(120), Monitor(estimator, verify=0.2)
    _, drawn = whole.observe(x)
    whole.verified(x[drawn], truth(x[drawn]))
    parts = []
    for start in range(0, 120, 40):
        monitor = Monitor(estimator, verify=0.2, folder=tmp_path)
        parts.append(start + monitor.observe(x[start : start + 40])[1])
    monitor = Monitor(estimator, verify=0.2, folder=tmp_path)
    monitor.verified(x[drawn], truth(x[drawn]))
    np.testing.assert_array_equal(np.concatenate(parts), drawn)
    assert Monitor(estimator, verify=0.2, folder=tmp_path).status() == whole.status()
    log = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert [line["verify"] for line in log if "verify" in line] == x[drawn].tolist()
    assert len([line for line in log if "outside" in line]) == len(drawn)
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE, LOG]


def test_a_folder_of_another_monitor_or_a_damaged_file_is_refused(estimator, tmp_path):
    Monitor(estimator, folder=tmp_path).observe(queries(5))
    with pytest.raises(ValueError, match="another calibration, reference or setting"):
        Monitor(estimator, level=0.01, folder=tmp_path)
    with pytest.raises(ValueError, match="another calibration"):
        Monitor(calibrated(seed=1), folder=tmp_path)
    for other in ("{}", "[]"):
        (tmp_path / FILE).write_text(other)
        with pytest.raises(ValueError, match="another calibration"):
            Monitor(estimator, folder=tmp_path)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(ValueError, match="Expecting") as caught:
        Monitor(estimator, folder=tmp_path)
    assert "to start again" in caught.value.__notes__[0]


def test_a_monitor_of_an_earlier_calibration_is_refused():
    estimator = calibrated()
    monitor = Monitor(estimator)
    estimator.conformalize(queries(60), truth(queries(60)))
    with pytest.raises(ValueError, match="another calibration now; make a new monitor"):
        monitor.observe(queries(1))
    with pytest.raises(ValueError, match="another calibration now"):
        monitor.verified(queries(1), truth(queries(1)))


def test_planned_queries_are_the_reference(estimator):
    """Queries in a wider box are as planned, so that they raise no alarm; without the plan they do."""
    wide = queries(400, width=1.3, seed=3)
    later = queries(200, width=1.3, seed=4)
    planned, unplanned = Monitor(estimator, wide), Monitor(estimator)
    for monitor in (planned, unplanned):
        monitor.observe(later)
    assert not planned.status().alarms
    assert unplanned.status().alarms
    fraction = 1 - estimator.assess(wide).safe.mean()
    assert fraction < planned.status().numbers["unsafe_limit"] < fraction + 0.1


def test_of_several_outputs_the_fraction_outside_counts():
    def two(x):
        return np.stack([truth(x), x[:, 0] ** 2], axis=1)

    x = queries(200, seed=5)
    estimator = GeoQ(lambda x: two(x) + 0.1, None, folds=RandomFolds(5)).fit(x, two(x))
    monitor, new = Monitor(estimator, verify=1), queries(50, width=0.9)
    monitor.observe(new)
    monitor.verified(new, two(new) + np.array([0, 9]))
    assert monitor.status().numbers["coverage"] == pytest.approx(0.5)


def test_lost_queries_are_not_safe_and_never_drawn(estimator):
    monitor = Monitor(estimator, verify=1)
    _, drawn = monitor.observe(np.array([[0.1, 0.2], [np.nan, 0.2]]))
    assert drawn.tolist() == [0]
    assert monitor.status().numbers["unsafe"] == 0.5


def test_unusable_arguments_are_refused(estimator, tmp_path):
    with pytest.raises(TypeError, match="must be a GeoQ"):
        Monitor(truth)
    with pytest.raises(ValueError, match="not fitted"):
        Monitor(GeoQ(truth, None))
    with pytest.raises(ValueError, match="verify=0, but it is a fraction"):
        Monitor(estimator, verify=0)
    estimator.save(tmp_path / "m.geoq", calibration=False)
    bare = GeoQ.load(tmp_path / "m.geoq", surrogate=estimator.surrogate)
    with pytest.raises(ValueError, match="pass planned"):
        Monitor(bare)
    assert not Monitor(bare, queries(50)).status().alarms
    with pytest.raises(ValueError, match=r"x has 1 rows and y has 2"):
        Monitor(estimator).verified(queries(1), [1.0, 2.0])
