"""Algorithm 1, line by line, on a few points computed by hand.

The data are x = 0, 1, 3, 7 with y = 0, 2, 6, 20, and the "surrogate" of a training set is its mean output, so every
number below can be checked with pencil and paper. phi is the identity and nu divides by the standard deviation.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from geoq import GeoQ
from geoq.parts import PaperRegion

X, Y = np.array([[0.0], [1.0], [3.0], [7.0]]), np.array([[0.0], [2.0], [6.0], [20.0]])
SIGMA = math.sqrt((0 + 1 + 9 + 49) / 4 - (11 / 4) ** 2)


class TwoFolds:
    """Hold out {0, 7}, then {1, 3}."""

    def split(self, points, y=None, groups=None):
        yield [1, 2], [0, 3]
        yield [0, 3], [1, 2]


@dataclass(frozen=True)
class Sum:
    """The anchor error + ||psi||: a bound model in six lines."""

    tuples: Any = None

    def fit(self, tuples, quantile):
        return replace(self, tuples=tuples)

    def __call__(self, features, quantile=None):
        return features.anchor_error + features.norm[:, None]


def mean_output(x, y):
    return lambda x: np.repeat(y.mean(axis=0)[None], len(x), axis=0)


@pytest.fixture
def estimator():
    return GeoQ(
        None,
        mean_output,
        representation=lambda x: x,
        folds=TwoFolds(),
        bound_model=Sum(),
        n_support=2,
        quantile=0.5,
        safe_region=PaperRegion(n_neighbors=1, quantile=0.5),
    ).fit(X, Y)


@pytest.fixture
def tuples(estimator):
    return estimator.fitted_.tuples


def test_line_1_without_a_surrogate_one_is_trained_on_all_data(estimator):
    assert estimator.surrogate_(X).tolist() == [[7.0]] * 4


def test_line_4_observed_errors_are_those_of_the_deployed_surrogate(estimator):
    assert estimator.fitted_.error.tolist() == [[7.0], [5.0], [1.0], [13.0]]


def test_line_7_and_8_held_out_errors_come_from_the_fold_surrogate(tuples):
    """Fold 1 predicts (2 + 6) / 2 = 4, fold 2 predicts (0 + 20) / 2 = 10."""
    assert tuples.error.tolist() == [[4.0], [16.0], [8.0], [4.0]]


def test_line_8_features_of_the_held_out_points_and_increments(tuples):
    # Anchors of 0, 7, 1, 3 are 1, 3, 0, 0; their in-sample errors |2-4|, |6-4|, |0-10|, |0-10|.
    assert tuples.features.anchor_error.tolist() == [[2.0], [2.0], [10.0], [10.0]]
    assert tuples.features.displacement.tolist() == [[-1.0], [4.0], [1.0], [3.0]]
    # 0 to {1, 3}: 2; 7 to {1, 3}: 5; 1 to {0, 7}: 3.5; 3 to {0, 7}: 3.5; all over sigma.
    expected = np.array([2.0, 5.0, 3.5, 3.5]) / SIGMA
    assert_allclose(tuples.features.support_distance, expected)
    assert tuples.increment.tolist() == [[2.0], [14.0], [0.0], [0.0]]


def test_line_10_tuples_keep_their_point_and_fold(tuples):
    assert tuples.point.tolist() == [0, 3, 1, 2]
    assert tuples.fold.tolist() == [0, 0, 1, 1]


def test_line_11_standardises_features_by_population_mean_and_deviation(tuples):
    """Displacements -1, 4, 1, 3: mean 7/4, variance 27/4 - 49/16."""
    mean, scale = tuples.standardization
    assert_allclose([mean[0], scale[0]], [7 / 4, math.sqrt(27 / 4 - 49 / 16)])


def test_line_12_the_bound_is_fitted_to_the_calibration_tuples(estimator, tuples):
    assert estimator.fitted_.bound.tuples is tuples


def test_line_14_query_features_use_all_data(estimator):
    """Query 4: anchor 3, displacement 1; the nearest two points are 3 and, of 1 and 7 at distance 3, the lower index."""
    answer = estimator.assess(np.array([[4.0]]))
    assert answer.anchors.tolist() == [[2]]
    assert answer.anchor_error.tolist() == [[1.0]]
    assert answer.displacement.tolist() == [[1.0]]
    assert_allclose(answer.support_distance, (1 + 3) / 2 / SIGMA)
    *_, (_, features, *_) = estimator.fitted_.views(np.array([[4.0]]))
    assert features.relation.near.tolist() == [[2, 1]]


def test_the_threshold_is_the_quantile_of_leave_one_out_scores(estimator, tuples):
    """Algorithm 1 uses tau_safe without computing it; eq:safe_threshold_loo does."""
    mean, scale = tuples.standardization
    psi = (tuples.features.flat - mean) / scale
    distance = np.linalg.norm(psi[:, None] - psi, axis=2)
    np.fill_diagonal(distance, math.inf)
    region = estimator.fitted_.region
    assert_allclose(region.leave_one_out(tuples), distance.min(axis=1))
    assert_allclose(region.threshold, np.sort(distance.min(axis=1))[1])


def test_lines_15_and_16_score_bound_and_flag(estimator, tuples):
    """The score of an answer is a ratio to tau_safe."""
    answer, region = estimator.assess(np.array([[4.0], [100.0]])), estimator.fitted_.region
    d = 2 / SIGMA
    mean, scale = tuples.standardization
    cloud, psi = (tuples.features.flat - mean) / scale, ([1.0, d] - mean) / scale
    score = np.linalg.norm(cloud - psi, axis=1).min()
    assert_allclose(answer.support_score[0], score / region.threshold)
    assert_allclose(answer.error_hat[0], 1.0 + math.hypot(1.0, d))
    assert answer.safe.tolist() == [score <= region.threshold, False]
