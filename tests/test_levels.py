from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from geoq import PowerLawIncrement, PredictionLevels
from geoq.crossfit import CalibrationSet
from geoq.geometry import GeometricFeatures
from geoq.increment import Shapes, inverse_cdf_quantile, pinball_loss

FOUR = PredictionLevels(n_bins=4)
LEVELS = PowerLawIncrement.for_fields(reference=FOUR)


def uniform(*shape, seed=0):
    return torch.rand(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def tuples(n=60, seed=0, unit=1.0):
    """In channel 0 errors are ten times larger where more than one half is predicted; channel 1 is alike everywhere."""
    prediction = uniform(n, 2, 6, 8, seed=seed)
    large = torch.where(prediction[:, 0] > 0.5, 10.0, 1.0)
    size = unit * torch.stack([large, torch.ones_like(large)], dim=1)
    error = size * uniform(n, 2, 6, 8, seed=seed + 1)
    features = GeometricFeatures(
        prediction, 1 + uniform(n, seed=seed + 2), 0 * error, prediction, prediction
    )
    one = torch.zeros(n, dtype=torch.long)
    return CalibrationSet(features, error, torch.arange(n), one, one)


def flat(data):
    return data.features.prediction.flatten(1)


def test_each_bin_has_the_quantile_of_its_own_errors():
    data = tuples()
    levels = FOUR.fit(data, 0.9)
    prediction, error = (
        part.transpose(0, 1).flatten(1)
        for part in (data.features.prediction, data.error)
    )
    for channel in (0, 1):
        low, high = prediction[channel].min(), prediction[channel].max()
        number = ((prediction[channel] - low) / (high - low) * 4).long().clamp(max=3)
        expected = [
            inverse_cdf_quantile(error[channel][number == k], 0.9) for k in range(4)
        ]
        assert_close(levels.table[channel], torch.stack(expected))


def test_the_level_of_a_value_is_that_of_its_bin_and_channel():
    levels = FOUR.fit(tuples(), 0.9)
    prediction = torch.full((1, 2, 48), 0.6, dtype=torch.float64).flatten(1)
    found = levels(prediction).reshape(2, 48)
    assert_close(found, levels.table[:, 2:3].expand(2, 48))


def test_beyond_the_predictions_seen_the_last_bins_go_on():
    levels = FOUR.fit(tuples(), 0.9)
    for value, place in ((-100.0, 0), (100.0, 3)):
        found = levels(torch.full((1, 96), value, dtype=torch.float64))
        assert_close(found.reshape(2, 48), levels.table[:, [place]].expand(2, 48))


def test_a_bin_with_few_errors_takes_the_level_of_its_channel():
    """Five predictions lie far from all others, and are wrong by much."""
    data = tuples()
    data.features.prediction[0, 0, 0, :5] = 10.0
    data.error[0, 0, 0, :5] = 1000.0
    levels = FOUR.fit(data, 0.9)
    pooled = inverse_cdf_quantile(data.error[:, 0].flatten(), 0.9)
    assert_close(levels.table[0, 1:], pooled.expand(3))


def test_predictions_that_are_all_alike_have_one_level():
    data = tuples()
    data.features.prediction[:, 1] = 3.0
    levels = FOUR.fit(data, 0.9)
    expected = inverse_cdf_quantile(data.error[:, 1].flatten(), 0.9)
    assert_close(levels(flat(data))[:, 48:], expected.expand(60, 48))


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_a_channel_that_was_never_wrong_spoils_no_other_in_any_unit(unit):
    data = tuples(unit=unit)
    data.error[:, 1] = 0
    levels = FOUR.fit(data, 0.95)
    assert (levels.table > 0).all()
    assert levels.table[1].max() <= levels.table[0].max()
    bound = replace(LEVELS, factor=None).fit(data)(data.features)
    covered = (data.error <= bound)[:, 0].double().mean()
    assert 0.94 < covered < 0.98


def test_a_bound_that_knows_the_levels_loses_less_on_fresh_queries():
    data, queries = tuples(), tuples(200, seed=50)
    told, plain = (
        pinball_loss(
            queries.error,
            replace(LEVELS, factor=None, reference=reference).fit(data)(
                queries.features
            ),
            0.95,
        )[:, 0].mean()
        for reference in (FOUR, None)
    )
    assert told < 0.8 * plain


def test_the_state_of_a_model_restores_it():
    data = tuples()
    model = replace(LEVELS, factor=None).fit(data)
    again = PowerLawIncrement.from_state(*model.state())
    assert again == model
    assert torch.equal(again(data.features), model(data.features))


def test_shapes_that_do_not_fit_are_refused():
    shapes = Shapes(z=(3,), error=(2, 6, 8), inputs=(3,), outputs=(2, 6, 8))
    FOUR.check_shapes(shapes)
    with pytest.raises(ValueError, match=r"an error has shape \(8,\); put the grid"):
        FOUR.check_shapes(shapes._replace(error=(8,)))
    with pytest.raises(ValueError, match="they serve elementwise errors"):
        replace(LEVELS, factor=None).check_shapes(shapes._replace(error=(6, 8)))
