"""Algorithm 1, line by line, on a few points computed by hand.

The data are x = 0, 1, 3, 7 with y = 0, 2, 6, 20, and the "surrogate" of a training set is its mean output, so every
number below can be checked with pencil and paper. phi is the identity and nu divides by the standard deviation.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from geoq import GeoQ, SafeRegion, identity
from geoq.regions.safe_region import leave_one_out_scores

X = torch.tensor([[0.0], [1.0], [3.0], [7.0]], dtype=torch.float64)
Y = torch.tensor([[0.0], [2.0], [6.0], [20.0]], dtype=torch.float64)
SIGMA = math.sqrt((0 + 1 + 9 + 49) / 4 - (11 / 4) ** 2)


class TwoFolds:
    """Hold out {0, 7}, then {1, 3}."""

    def split(self, points, y=None, groups=None):
        del points, y, groups
        yield [1, 2], [0, 3]
        yield [0, 3], [1, 2]


class Sum:
    """g(psi) = ||psi||: an increment model in six lines."""

    quantile = 0.5

    def fit(self, calibration):
        self.calibration = calibration
        return self

    def __call__(self, features):
        return features.norm[:, None]


def mean_output(x, y):
    del x
    mean = y.mean(dim=0)
    return lambda x: mean.expand(len(x), 1)


@pytest.fixture
def geoq():
    return GeoQ(
        None,
        mean_output,
        representation=identity,
        folds=TwoFolds(),
        increment_model=Sum(),
        n_anchors=1,
        n_support=2,
        safe_region=SafeRegion(n_neighbors=1, quantile=0.5),
    ).fit(X, Y)


def test_line_1_without_a_surrogate_one_is_trained_on_all_data(geoq):
    assert_close(geoq.surrogate_(X), torch.full((4, 1), 7.0, dtype=torch.float64))


def test_line_4_observed_errors_are_those_of_the_deployed_surrogate(geoq):
    expected = torch.tensor([[7.0], [5.0], [1.0], [13.0]], dtype=torch.float64)
    assert_close(geoq.error_, expected)


def test_line_7_and_8_held_out_errors_come_from_the_fold_surrogate(geoq):
    """Fold 1 predicts (2 + 6) / 2 = 4, fold 2 predicts (0 + 20) / 2 = 10."""
    expected = torch.tensor([[4.0], [16.0], [8.0], [4.0]], dtype=torch.float64)
    assert_close(geoq.calibration_.error, expected)


def test_line_8_anchor_errors_are_in_sample_errors_of_the_fold_surrogate(geoq):
    """Anchors of 0, 7, 1, 3 are 1, 3, 0, 0; their in-sample errors |2-4|, |6-4|, |0-10|, |0-10|."""
    expected = torch.tensor([[2.0], [2.0], [10.0], [10.0]], dtype=torch.float64)
    assert_close(geoq.calibration_.features.anchor_error, expected)


def test_line_8_displacements_point_from_the_anchor_to_the_query(geoq):
    expected = torch.tensor([[-1.0], [4.0], [1.0], [3.0]], dtype=torch.float64)
    assert_close(geoq.calibration_.features.displacement, expected)


def test_line_8_support_distances_average_over_the_fold_training_points(geoq):
    """0 to {1, 3}: 2; 7 to {1, 3}: 5; 1 to {0, 7}: 3.5; 3 to {0, 7}: 3.5; all over sigma."""
    expected = torch.tensor([2.0, 5.0, 3.5, 3.5], dtype=torch.float64) / SIGMA
    assert_close(geoq.calibration_.features.support_distance, expected)


def test_line_8_increments_are_positive_parts(geoq):
    expected = torch.tensor([[2.0], [14.0], [0.0], [0.0]], dtype=torch.float64)
    assert_close(geoq.calibration_.increment, expected)


def test_line_10_tuples_keep_their_point_and_fold(geoq):
    assert geoq.calibration_.point.tolist() == [0, 3, 1, 2]
    assert geoq.calibration_.fold.tolist() == [0, 0, 1, 1]


def test_line_11_standardises_features_by_population_mean_and_deviation(geoq):
    """Displacements -1, 4, 1, 3: mean 7/4, variance 27/4 - 49/16."""
    standardization = geoq.calibration_.standardization
    assert_close(standardization.mean[0].item(), 7 / 4)
    assert_close(standardization.scale[0].item(), math.sqrt(27 / 4 - 49 / 16))


def test_line_12_the_increment_model_is_fitted_on_the_calibration_set(geoq):
    assert geoq.increment_model_.calibration is geoq.calibration_


def test_line_14_query_features_use_all_data(geoq):
    """Query 4: anchor 3, displacement 1; nearest two points 3 and 1 or 7, both at distance 3, tie to the lower index."""
    assessment = geoq.assess(torch.tensor([[4.0]], dtype=torch.float64))
    assert assessment.anchors.tolist() == [[2]]
    assert assessment.anchor_error.tolist() == [[1.0]]
    assert_close(assessment.features.displacement.item(), 1.0)
    assert_close(assessment.features.support_distance.item(), (1 + 3) / 2 / SIGMA)


def test_the_threshold_is_the_quantile_of_leave_one_out_scores(geoq):
    """Algorithm 1 uses tau_safe without computing it; eq:safe_threshold_loo does."""
    psi = geoq.calibration_.standardization(geoq.calibration_.features.flat)
    distance = (psi[:, None] - psi[None]).norm(dim=2)
    distance.fill_diagonal_(math.inf)
    scores = distance.min(dim=1).values
    assert_close(leave_one_out_scores(geoq.calibration_, n_neighbors=1), scores)
    assert_close(geoq.safe_region_.threshold, scores.sort().values[1].item())


def test_lines_15_and_16_score_estimate_and_flag(geoq):
    query = torch.tensor([[4.0], [100.0]], dtype=torch.float64)
    assessment = geoq.assess(query)
    d = 2 / SIGMA
    cloud = geoq.calibration_.standardization(geoq.calibration_.features.flat)
    psi = geoq.calibration_.standardization(
        torch.tensor([[1.0, d]], dtype=torch.float64)
    )
    score = (cloud - psi).norm(dim=1).min().item()
    assert_close(assessment.support_score[0].item(), score)
    assert_close(assessment.error_hat[0].item(), 1.0 + math.hypot(1.0, d))
    assert assessment.safe.tolist() == [score <= geoq.safe_region_.threshold, False]


def test_the_bound_is_the_estimate_of_the_assessment(geoq):
    assert_close(geoq.bound(X), geoq.assess(X).error_hat)
