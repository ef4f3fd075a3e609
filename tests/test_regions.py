"""Safe regions: which attack each score detects, thresholds, reasons; the paper's region by hand."""

import math
import re
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from made import Largest
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.linear_model import Ridge

from geoq import GeoQ, Grid, Mesh, RandomFolds, Region
from geoq.core.conformal import ConformalFactors
from geoq.core.geometry import Features
from geoq.data.coordinates import Coordinates
from geoq.data.domain import Layout
from geoq.regions.field_scores import Answers, Moments, Patterns, Windows, middles_of, windows_of
from geoq.regions.region import PaperRegion, joint_thresholds
from geoq.regions.table_scores import (
    EachInput,
    EachPair,
    PrincipalAxes,
    SupportDistance,
    Unexplained,
)
from geoq.regions.views import FieldView, Values

# Tables: what each score alone detects, and what the default region detects.


def box(seed, n=300, d=4):
    return np.random.default_rng(seed).uniform(-1, 1, size=(n, d))


def column(x, j, values):
    x = x.copy()
    x[:, j] = values
    return x


def ridge(seed):
    x = box(seed)
    return column(x, 1, x[:, 0] + 0.02 * np.random.default_rng(seed + 9).normal(size=len(x)))


def ring(seed):
    x = box(seed, 1500)
    return x[np.hypot(x[:, 0], x[:, 1]) > 0.5]


def clusters(seed):
    x = box(seed)
    return column(x, 0, np.sign(x[:, 0]) + 0.1 * x[:, 0])


def codes(seed):
    return column(box(seed), 1, np.random.default_rng(seed).integers(0, 3, size=300))


def decades(seed):
    x = box(seed)
    return column(x, 1, 10 ** (4 * x[:, 1]))


SCORES = (EachInput(), PrincipalAxes(), EachPair(10), SupportDistance(), Unexplained())
# Data, attack on queries like the data, scores that detect it alone (I, A, P, S, U as in SCORES), and words of the reason.
ATTACKS = {
    "far": (box, lambda q: 3 * np.sign(q), "IA SU", r"input \d is -?3, .* (above|below) its range in the data, "),
    "one input out of range": (box, lambda q: column(q, 3, 1.5), "I    ", "input 3 is 1.5, .* above its range.*would change by"),
    "off a ridge": (ridge, lambda q: column(q, 1, -np.sign(q[:, 0]) * abs(q[:, 0]).clip(0.3)), " AP U", "correlation of input [01]"),
    "a hole in two inputs": (ring, lambda q: q * [0.2, 0.2, 1, 1], "  PS ", "each in range, but not together|nearest points are"),
    "a gap": (clusters, lambda q: q * [0.3, 1, 1, 1], "I PSU", r"input 0 is .*; its nearest values in the data are -[\d.]+ and [\d.]+"),
    "a new code": (codes, lambda q: column(q, 1, 3), "I  SU", "input 1 is 3, .* above its range in the data, 0 to 2"),
    "another decade": (decades, lambda q: column(q, 1, 1e-7), "I  SU", "input 1 is 1e-07, 3 decades below its range"),
    "a changed constant": (lambda s: column(box(s), 2, 1.5), lambda q: column(q, 2, 1.8), "IAPSU", "input 2 is 1.8, but it is 1.5 in all the data"),
}  # fmt: skip


def of_table(x, name="", surrogate=None, **settings):
    def truth(x):
        second = np.log10(x[:, 1]) if name == "another decade" else x[:, 1]
        return np.sin(2 * x[:, 0]) + 0.5 * second + 0.1 * x[:, 2:].sum(axis=1)

    settings = {"folds": RandomFolds(5), **settings}
    truth = surrogate or truth
    return GeoQ(lambda x: truth(x) + 0.05 * np.sin(9 * x[:, 0]), None, **settings).fit(x, truth(x))


@pytest.mark.parametrize("number", range(len(SCORES)), ids=lambda i: type(SCORES[i]).__name__)
@pytest.mark.parametrize("name", ATTACKS)
def test_each_score_of_a_table_detects_its_attacks(name, number):
    data, attack, detected, _ = ATTACKS[name]
    estimator = of_table(data(0), name, safe_region=Region((SCORES[number],)))
    queries = data(1)[:200]
    assert estimator.assess(queries).safe.mean() > 0.88
    if detected[number] != " ":
        assert estimator.assess(attack(queries)).safe.mean() <= 0.1


@pytest.mark.parametrize("name", ATTACKS)
def test_the_default_region_detects_all_attacks_names_the_cause_and_keeps_the_interior(name):
    data, attack, _, words = ATTACKS[name]
    estimator, queries = of_table(data(0), name), data(1)[:200]
    honest, attacked = estimator.assess(queries), estimator.assess(attack(queries))
    assert honest.safe.mean() > 0.9
    assert not attacked.safe.any()
    reasons = [attacked.reason(i) for i in range(20)]
    assert all("NOT safe" in reason for reason in reasons)
    assert sum(bool(re.search(words, reason)) for reason in reasons) >= 10, reasons[0]
    inside = honest.reason(int(honest.safe.argmax()))
    assert "within the region of the held-out points" in inside


def test_the_score_is_a_ratio_to_the_threshold_and_a_smaller_quantile_is_stricter():
    queries = 1.3 * box(1, 500)
    answers = [
        of_table(box(0), safe_region=Region(quantile=q)).assess(queries) for q in (0.5, 0.95)
    ]
    for answer in answers:
        assert_array_equal(answer.safe, answer.support_score <= 1 + 1e-9)
    assert answers[0].safe.mean() < answers[1].safe.mean()
    assert "safe up to 1" in answers[0].reason(0)


def test_a_smaller_weight_accepts_inputs_without_influence():
    queries = column(box(1, 500), 3, 1.2)

    def assessed(weight):
        region = Region((EachInput(min_weight=weight),))
        data = box(0, 90)  # too few points to measure the influence
        return of_table(data, surrogate=lambda x: x[:, 0], safe_region=region).assess(queries)

    strict, loose = assessed(1.0), assessed(0.01)
    assert strict.safe.mean() < 0.05 < loose.safe.mean()
    reason = loose.reason(int(loose.safe.argmax()))
    assert "out of its range, which is less than its influence" in reason


def test_the_reason_uses_the_names_of_the_inputs_and_counts_them():
    answer = of_table(box(0)).assess(column(box(1, 5), 0, 2.0))
    assert "input pressure is 2" in answer.reason(0, names=["pressure", "b", "c", "d"])
    with pytest.raises(ValueError, match="names has 1 entries, but there are 4 inputs"):
        answer.reason(0, names=["pressure"])


@pytest.mark.parametrize("settings", [{}, {"representation": lambda x: x}])
def test_many_inputs_have_two_scores_and_functions_the_support_distance(settings):
    x = np.random.default_rng(0).normal(size=(60, 64 if settings else 65))
    region = of_table(x, surrogate=lambda x: x.mean(axis=1), **settings).fitted_.region
    names = [type(score).__name__ for score in region.scores]
    assert names == ["SupportDistance"] if settings else ["EachInput", "SupportDistance"]


@pytest.mark.parametrize("n", [20, 50, 200])
def test_a_new_row_exceeds_no_threshold_with_the_nominal_probability(n):
    """Independent scores: thresholds that rows set for themselves would be exceeded by 8 % for n = 50."""
    rng = np.random.default_rng(n)
    inside = [
        (np.exp(rng.normal(size=(500, 4))) <= thresholds).all(axis=1)
        for thresholds in (
            joint_thresholds(np.exp(rng.normal(size=(n, 4))), 0.95) for _ in range(60)
        )
    ]
    assert np.mean(inside) > 0.94 - 0.5 / n
    assert joint_thresholds(np.zeros((0, 2)), 0.95).tolist() == [0, 0]
    assert joint_thresholds(np.ones((1, 2)), 0.95).tolist() == [1, 1]


def test_thresholds_come_from_the_interpolating_folds_and_all_points_are_scored_against():
    """One score: the distance to the nearest point in a plane. Random folds hold out points at small distances."""
    x = box(0, 200, 2)
    region = Region((EachPair(2),))
    alone, combined = (
        of_table(x, surrogate=lambda x: x[:, 0], safe_region=region, **settings).fitted_.region
        for settings in ({}, {"folds": GeoQ(None, None).folds})
    )
    assert_allclose(alone.thresholds, combined.thresholds)
    assert len(alone.scores[0].points) == 200


# Fields: the same for their four scores.

GRIDS = {1: (48,), 2: (16, 16), 3: (8, 8, 8)}


def fields(n, n_axes=2, smoothness=4.0, seed=0):
    """Two channels of random waves; the second one is three times as large."""
    grid, rng = GRIDS[n_axes], np.random.default_rng(seed)
    waves = np.meshgrid(*(np.fft.fftfreq(m, 1 / m) for m in grid), indexing="ij")
    power = (sum(k**2 for k in waves) + 4.0) ** (-smoothness / 2)
    axes = tuple(range(2, 2 + n_axes))
    white = np.fft.fftn(rng.normal(size=(n, 2, *grid)), axes=axes)
    x = np.fft.ifftn(white * power, axes=axes).real / np.sqrt((power**2).mean())
    return x * np.array([1.0, 3.0]).reshape(1, 2, *(1,) * n_axes)


def noise(x, size):
    return size * np.random.default_rng(3).normal(size=x.shape)


def of_fields(x, y=None, model=np.sin, **settings):
    y = np.sin(x) + 0.02 * x if y is None else y
    settings = {"folds": RandomFolds(5), "bound_model": Largest(), **settings}
    return GeoQ(model, None, **settings).fit(x, y)


FIELD_SCORES = {"W": Windows(), "M": Moments(), "P": Patterns(), "A": Answers()}
# The attack, the scores that detect it alone on a plane, and words of the reason of the default region.
FIELD_ATTACKS = {
    "rougher": (lambda x: fields(len(x), x.ndim - 2, 2.0, seed=2), "WA", "within a few cells|do not occur together|pattern"),
    "noisy": (lambda x: x + noise(x, 0.3 * x.std()), "WA", "within a few cells|do not occur together|pattern"),
    "larger": (lambda x: 3 * x, "WMPA", "the (mean|standard deviation) of channel|windows|pattern"),
    "steps": (np.sign, "WMA", "the standard deviation of channel 1|windows|together"),
    "offset": (lambda x: x + 8, "WMPA", "the mean of channel|windows|pattern"),
    "channels exchanged": (lambda x: x[:, ::-1].copy(), "WMA", "the standard deviation of channel|windows|together"),
    "another large wave": (lambda x: x + 6 * np.sin(np.linspace(0, 6, x.shape[-1])), "WMPA", "pattern|windows|mean"),
}  # fmt: skip


@cache
def fitted_fields(n_axes=2, score=""):
    region = Region((FIELD_SCORES[score],) if score else None)
    return of_fields(fields(120, n_axes), safe_region=region)


@pytest.mark.parametrize("name", FIELD_ATTACKS)
@pytest.mark.parametrize("score", FIELD_SCORES)
def test_each_score_of_a_field_detects_its_attacks(score, name):
    attack, detected, _ = FIELD_ATTACKS[name]
    if score in detected:
        attacked = attack(fields(40, seed=1))
        assert fitted_fields(score=score).assess(attacked).safe.mean() <= 0.1


@pytest.mark.parametrize("n_axes", GRIDS)
def test_the_default_region_of_fields_detects_all_attacks_and_keeps_the_interior(n_axes):
    estimator, queries = fitted_fields(n_axes), fields(60, n_axes, seed=1)
    assert estimator.fitted_.layout.n_axes == n_axes
    assert estimator.assess(queries).safe.mean() > 0.88
    assert estimator.assess(fields(60, n_axes, 5.0, seed=1)).safe.mean() > 0.8  # smoother
    for name, (attack, _, words) in FIELD_ATTACKS.items():
        answer = estimator.assess(attack(queries))
        assert answer.safe.mean() <= 0.1, name
        reason = answer.reason(int(answer.safe.argmin()))
        assert "NOT safe" in reason
        assert n_axes != 2 or re.search(words, reason), (name, reason)


def test_a_prediction_that_does_not_fit_its_input_is_not_safe():
    """Only the score of input and prediction together detects a surrogate that fails on familiar inputs."""
    queries = fields(60, seed=1)
    for score, detects in {"W": False, "M": False, "P": False, "A": True, "": True}.items():
        failed = replace(fitted_fields(score=score).fitted_, surrogate=lambda x: -np.sin(x))
        assert (failed.assess(queries).safe.mean() <= 0.1) == detects


def test_the_reason_names_the_place_and_the_channel():
    query = fields(1, seed=1)
    query[0, :, 9:12, 3:6] += 6 * np.random.default_rng(0).normal(size=(2, 3, 3))
    text = fitted_fields(score="W").assess(query).reason(0)
    row, column = map(int, re.search(r"around cell \((\d+), (\d+)\)", text).groups())
    assert 8 <= row <= 12
    assert 2 <= column <= 6
    answer = fitted_fields(score="M").assess(20 + fields(1, seed=1))
    reason = answer.reason(0, names=["wind", "wind"])
    assert re.search(r"mean of channel wind is \d+.*; it ranges from -.* to .* in the data", reason)
    with pytest.raises(ValueError, match=r"names has 3 entries.*2 channels"):
        answer.reason(0, names=["a", "b", "c"])


def test_a_constant_channel_that_changes_is_not_safe():
    """A parameter of the equation as a channel: a new value is detected."""
    x = np.concatenate([fields(60, 1), np.full((60, 1, 48), 0.2)], axis=1)
    estimator = of_fields(x)
    assert estimator.assess(x).safe.mean() > 0.9
    answer = estimator.assess(np.concatenate([x[:, :2], np.full((60, 1, 48), 0.12)], axis=1))
    assert not answer.safe.any()
    assert "is 0.12, but it is 0.2 in all the data" in answer.reason(0)


def on_nodes(n, nodes, seed=0):
    """Smooth random functions at the nodes of a mesh."""
    waves = 4 * np.random.default_rng(9).standard_normal((12, 2)) @ nodes.T
    return np.random.default_rng(seed).standard_normal((n, 1, 12)) @ np.sin(waves) / 4


def test_a_region_on_a_mesh_detects_noise_whatever_the_numbers_of_the_nodes():
    rng = np.random.default_rng(1)
    nodes, numbers = rng.uniform(size=(300, 2)), rng.permutation(300)
    x, queries = on_nodes(120, nodes), on_nodes(60, nodes, seed=1)
    scores, maps = [], []
    for order in (np.arange(300), numbers):
        estimator = of_fields(x[..., order], domain=Mesh(nodes[order]))
        inside = estimator.assess(queries[..., order])
        noisy = estimator.assess((queries + noise(queries, 0.2))[..., order])
        assert inside.safe.mean() >= 0.85
        assert noisy.safe.mean() <= 0.05
        scores.append(inside.support_score)
        maps.append(noisy.support_map(0))
    assert_allclose(scores[0], scores[1], rtol=1e-6)
    assert_allclose(maps[0][numbers], maps[1], rtol=1e-6)
    node = int(re.search(r"around node (\d+)", noisy.reason(0))[1])
    assert maps[1][node] == maps[1].max() > 1


def test_the_map_of_support_has_the_mean_of_the_score_and_the_place_of_the_reason():
    """On a line of 70 cells each of the 64 windows has its own cell in the middle."""
    x = np.random.default_rng(0).normal(size=(80, 70)).cumsum(axis=1) / 8
    estimator = of_fields(x, domain=Grid(1), safe_region=Region((Windows(), Moments())))
    queries = x[:2] + np.array([[0], [30]])
    queries[0, 30:36] += 3 * (-1) ** np.arange(6)
    answer = estimator.assess(queries)
    found = answer.support_map(0)
    assert found[3:67].mean() == pytest.approx(answer.support_score[0])
    assert 27 <= found.argmax() <= 38
    assert f"around cell {found.argmax()}:" in answer.reason(0)
    assert "around" not in answer.reason(1)
    paper = replace(answer, fitted=replace(answer.fitted, region=PaperRegion()))
    for without in (paper, of_table(box(0)).assess(box(1)[:2])):
        with pytest.raises(
            TypeError, match="needs inputs that are fields on the cells of the output"
        ):
            without.support_map(0)


def test_windows_and_gaps_by_hand():
    field = np.arange(400.0).reshape(1, 1, 20, 20)
    windows = windows_of(field)
    assert windows.shape == (1, 64, 9)
    for number in (0, 20, 63):
        rows, columns = middles_of((20, 20))
        assert windows[0, number, 4] == field[0, 0, rows[number // 8], columns[number % 8]]
    two = np.random.default_rng(0).normal(size=(4, 2, 30))
    known = Coordinates.fit(two, logarithms=False)
    view = FieldView(known(two), two, np.zeros(4), known, Layout(Grid(1), (30,), on_cells=True))
    assert Windows().fit(view).gaps(view).max() < 1e-6
    values = Values(np.array([2.0]), np.array([[0.0, 1.0, 5.0]]))
    queries = np.array([[-1.0], [0.4], [3.5], [9.0]])
    assert_allclose(values.gaps(queries)[:, 0], [0.5, 0.2, 0.75, 2.0])
    assert [values.around(0, at) for at in (-1.0, 3.5)] == [(0.0, 5.0), (1.0, 5.0)]


# The paper's region by hand.


@dataclass
class TuplesOf:
    """Tuples of which the paper's region sees the features, and who depends on whom."""

    features: Features
    position: np.ndarray | None = None
    reach: int = 0

    @staticmethod
    def at(displacement, position=None, reach=0):
        moved = np.asarray(displacement, dtype=float)
        zeros = np.zeros((len(moved), 1))
        return TuplesOf(Features(moved, zeros[:, 0], zeros, zeros, zeros), position, reach)

    @property
    def n_independent(self):
        return len(self.features) - 1


def fit_paper(tuples, *settings):
    region = PaperRegion(*settings).fit(tuples)
    return region, region.leave_one_out(tuples)


of_any_object = pytest.mark.usefixtures("unchecked")


@of_any_object
def test_scores_by_hand():
    """Displacements 0, 1, 3 have deviation sqrt(14)/3; the support distance is constant and keeps scale 1."""
    tuples, sigma = TuplesOf.at([[0.0], [1.0], [3.0]]), math.sqrt(14) / 3
    assert_allclose(fit_paper(tuples, 1)[1], np.array([1.0, 1.0, 2.0]) / sigma)
    region, _ = fit_paper(tuples, 2)
    assert_allclose(region.threshold, (3 + 2) / 2 / sigma)
    query = TuplesOf.at([[2.0]]).features
    assert_allclose(region.support_score(query), [1 / sigma / region.threshold])
    assert "contains similar features" in region.explain(query)
    assert "too few similar features" in region.explain(TuplesOf.at([[99.0]]).features)


@of_any_object
def test_neighbours_in_time_and_of_a_group_do_not_support_each_other():
    """Ten steps of a slow walk: with its neighbours in time left out, each step is farther from support."""
    walk = [[float(step)] for step in range(10)]
    alone = fit_paper(TuplesOf.at(walk), 1)[1]
    assert_allclose(fit_paper(TuplesOf.at(walk, np.arange(10), reach=3), 1)[1], 4 * alone)
    region, scores = fit_paper(TuplesOf.at([[0.0], [0.1], [7.0], [7.1]], np.array([0, 0, 1, 1])), 1)
    assert_allclose(scores * region.scale[0], [7.0, 6.9, 6.9, 7.0])


def test_the_largest_ratio_of_several_scores_decides():
    fitted = of_table(box(0), surrogate=lambda x: x[:, 0]).fitted_
    region, features = fitted.region, fitted.tuples[:50].features
    queries = region.view.of_queries(features)
    every = [s(queries) / t for s, t in zip(region.scores, region.thresholds, strict=True)]
    assert_allclose(region.support_score(features), np.max(every, axis=0))


# Beyond the range of an input, and between levels.


def test_an_input_without_influence_does_not_decide_and_an_influential_one_does():
    """The last input has no influence; the bound of a query that is safe only because of this has a margin."""
    estimator = of_table(box(0), surrogate=lambda x: np.sin(2 * x[:, 0]) + x[:, 1] ** 2 + x[:, 2])
    inside = box(1, 200)
    calm, moved = (estimator.assess(column(inside, j, 1.3)) for j in (3, 2))
    assert calm.safe.mean() > 0.6
    assert not moved.safe.any()
    for features in (view[1] for view in estimator.fitted_.views(column(inside, 3, 1.3))):
        assert_allclose(
            calm.error_hat[calm.safe], 1.25 * estimator.fitted_.bound(features)[calm.safe]
        )
        assert (features.change[calm.safe] <= 0.15).all()
    assert "where prediction and Gaussian process hardly change" in calm.reason(
        int(calm.safe.argmax())
    )
    assert not estimator.assess(
        column(inside, 3, 2.1)
    ).safe.any()  # more than half of the range beyond
    plain = estimator.assess(inside)
    raw = np.concatenate(
        [estimator.fitted_.bound(view[1]) for view in estimator.fitted_.views(inside)]
    )
    assert_array_equal(plain.error_hat, raw)


@pytest.mark.parametrize(
    ("data", "j", "value"),
    [(box(0, 90), 3, 1.3), (column(box(0), 3, codes(0)[:, 1]), 3, 3)],
    ids=["few points", "a code"],
)
def test_an_input_without_influence_decides_where_little_is_known(data, j, value):
    estimator = of_table(data, surrogate=lambda x: np.sin(2 * x[:, 0]) + x[:, 1])
    assert not estimator.assess(column(data, j, value)).safe.any()


def test_between_levels_the_bound_contains_the_error_at_levels_that_were_left_out():
    """A kink between the levels of a factorial design, which no held-out point shows."""

    def truth(x):
        return abs(x[:, 0] - 0.13) + x[:, 1]

    def train(x, y):
        return Ridge().fit(x, y).predict

    grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, 6)] * 2), axis=-1).reshape(-1, 2)
    estimator, queries = GeoQ(None, train).fit(grid, truth(grid)), box(1, 300, 2)
    answer = estimator.assess(queries)
    assert answer.safe.mean() > 0.9
    assert (abs(answer.prediction - truth(queries)) <= answer.error_hat).mean() > 0.95
    between = estimator.fitted_.between
    assert between.shape == (2 * 4 * 6, 1)  # four inner levels of two inputs, six runs at each
    opinion = answer.second_opinion
    least = abs(answer.prediction - opinion.prediction) + np.quantile(between, 0.95, method="inverted_cdf")  # fmt: skip
    assert (answer.error_hat >= least - 1e-12).all()
    doubled = replace(estimator.fitted_, conformal=ConformalFactors(2.0, 2.0))
    assert_allclose(doubled.bound_of(queries), 2 * answer.error_hat)
