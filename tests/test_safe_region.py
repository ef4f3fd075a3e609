"""Safe regions: scores and thresholds by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.regions.safe_region import DistanceRegion, SafeRegion, leave_one_out_scores


def calibration(displacement, position=None, reach=0):
    displacement = torch.as_tensor(displacement, dtype=torch.float64)
    n = len(displacement)
    zeros = torch.zeros(n, 1, dtype=torch.float64)
    features = GeometricFeatures(displacement, zeros[:, 0], zeros, zeros, zeros)
    fold = torch.zeros(n, dtype=torch.long)
    return CalibrationSet(features, zeros, torch.arange(n), fold, fold, position, reach)


def test_scores_by_hand():
    """Displacements 0, 1, 3 have deviation sqrt(14)/3; the support distance is constant and keeps scale 1."""
    data = calibration([[0.0], [1.0], [3.0]])
    sigma = math.sqrt(14) / 3
    scores = leave_one_out_scores(data, n_neighbors=1)
    assert_close(scores, torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64) / sigma)
    region = SafeRegion(n_neighbors=2).fit(data)
    query = GeometricFeatures(
        *(part[:1] + 2 for part in data.features.parts[:1]),
        *data.features[:1].parts[1:],
    )
    assert_close(region.support_score(query).item(), 1 / sigma)
    assert_close(region.threshold, (3 + 2) / 2 / sigma)


def test_a_duplicated_feature_supports_its_twin_never_itself():
    data = calibration([[0.0], [0.0], [5.0], [9.0]])
    scores = leave_one_out_scores(data, n_neighbors=1)
    assert scores[0] == scores[1] == 0
    assert (scores[2:] > 0).all()


def test_the_region_contains_the_chosen_fraction_of_the_calibration():
    generator = torch.Generator().manual_seed(0)
    data = calibration(torch.randn(200, 3, generator=generator, dtype=torch.float64))
    region = SafeRegion(n_neighbors=5, quantile=0.9).fit(data)
    safe = leave_one_out_scores(data, n_neighbors=5) <= region.threshold
    assert safe.double().mean() == 0.9


def test_the_flag_is_the_score_against_the_threshold():
    region = SafeRegion(n_neighbors=1, quantile=0.5).fit(
        calibration([[0.0], [1.0], [3.0]])
    )
    scores = torch.tensor(
        [region.threshold, region.threshold * 1.0001], dtype=torch.float64
    )
    assert region.contains(scores).tolist() == [True, False]


def test_neighbours_within_reach_do_not_support_each_other():
    """Ten steps of a slow walk: with its neighbours in time left out, each step is farther from support."""
    walk = [[float(step)] for step in range(10)]
    position = torch.arange(10)
    alone = leave_one_out_scores(calibration(walk), n_neighbors=1)
    apart = leave_one_out_scores(calibration(walk, position, reach=3), n_neighbors=1)
    assert_close(apart, 4 * alone)


def test_a_group_does_not_support_itself():
    data = calibration([[0.0], [0.1], [7.0], [7.1]], torch.tensor([0, 0, 1, 1]))
    scores = leave_one_out_scores(data, n_neighbors=1) * data.standardization.scale[0]
    assert_close(scores, torch.tensor([7.0, 6.9, 6.9, 7.0], dtype=torch.float64))


def test_the_distance_region_is_set_by_the_family_that_interpolates():
    """Random folds hold out points at distances 1 to 20, nested ones far away: the former set the threshold."""
    near, far = torch.arange(1.0, 21.0, dtype=torch.float64), torch.full((5,), 100.0)
    distance = torch.cat([far.double(), near])
    zeros = torch.zeros(25, 1, dtype=torch.float64)
    features = GeometricFeatures(zeros, distance, zeros, zeros, zeros)
    family = (distance < 50).long()
    data = CalibrationSet(features, zeros, torch.arange(25), family, family)
    region = DistanceRegion(quantile=0.95).fit(data)
    assert region.threshold == 19.0
    score = region.support_score(features)
    assert torch.equal(score, distance)
    assert region.contains(score).sum() == 19


def test_without_a_number_all_independent_tuples_are_neighbours_up_to_20():
    few = SafeRegion().fit(calibration([[0.0], [1.0], [3.0]]))
    many = SafeRegion().fit(calibration([[float(step)] for step in range(40)]))
    assert (few.n_neighbors, many.n_neighbors) == (2, 20)


@pytest.mark.parametrize("region", [SafeRegion, DistanceRegion])
def test_a_quantile_outside_0_and_1_is_refused(region):
    with pytest.raises(ValueError, match=rf"{region.__name__}.quantile=1.0"):
        region(quantile=1.0)
