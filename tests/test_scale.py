import pytest
import torch
from torch.testing import assert_close

from geoq.increments import LowRankScale
from geoq.increments.scale import LEAST_SHARE, coordinate_scale
from geoq.quantiles import inverse_cdf_quantile, pinball_loss

LEVELS = torch.tensor([1.0, 3.0, 0.2, 10.0], dtype=torch.float64)


def uniform(*shape, seed=0):
    return torch.rand(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def even(error):
    return torch.full((len(error),), 1 / len(error), dtype=torch.float64)


def scale_of(error, scale, quantile=0.95):
    return scale(error, even(error), quantile)


def separable():
    """Level of the channel times a map of 6 x 8 cells."""
    return LEVELS[:, None, None] * (2 * uniform(6, 8, seed=1)).exp()


def separable_errors(n=30, seed=2):
    """Errors whose 0.95 quantile is 0.95 times the separable scale."""
    return separable() * uniform(n, 4, 6, 8, seed=seed)


def test_each_coordinate_has_the_quantile_of_its_own_errors():
    error = uniform(40, 2, 3)
    assert_close(
        scale_of(error, coordinate_scale, 0.9), inverse_cdf_quantile(error, 0.9)
    )


def test_weights_count_as_repetitions():
    """The first tuple stands for three."""
    error = uniform(7, 2, 3)
    weight = torch.tensor([3.0, 1, 1, 1, 1, 1, 1], dtype=torch.float64)
    repeated = torch.cat([error[:1], error[:1], error])
    for scale in (coordinate_scale, LowRankScale(rank=1)):
        assert_close(scale(error, weight, 0.7), scale_of(repeated, scale, 0.7))


@pytest.mark.parametrize("seed", range(3))
def test_few_tuples_tell_a_scale_that_channels_share_better_than_each_cell_alone(seed):
    """30 normal errors per cell, whose 0.95 quantile is 1.96 times the scale."""
    noise = torch.randn(
        30, 4, 6, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )

    def relative_error(scale):
        found = scale_of(separable() * noise.abs(), scale)
        return float((found / (1.96 * separable())).log().square().mean().sqrt())

    assert relative_error(LowRankScale(rank=1)) < 0.1
    assert relative_error(LowRankScale(rank=1)) < 0.6 * relative_error(coordinate_scale)


@pytest.mark.parametrize("rank", [0, 1, 4])
def test_each_channel_has_the_level_of_least_pinball_loss(rank):
    error = separable_errors()
    scale = scale_of(error, LowRankScale(rank=rank))

    def loss(factor):
        missed = pinball_loss(error, (factor * scale).expand_as(error), 0.95)
        return missed.mean(dim=(0, 2, 3))

    for factor in (0.9, 0.99, 1.01, 1.1):
        assert (loss(1.0) <= loss(factor)).all()


def test_without_maps_a_channel_has_the_quantile_of_all_its_errors():
    error = separable_errors()
    pooled = inverse_cdf_quantile(error.transpose(1, 3).reshape(-1, 4), 0.95)
    assert_close(
        scale_of(error, LowRankScale(rank=0)), pooled[:, None, None].expand(4, 6, 8)
    )


def test_at_full_rank_the_scale_of_a_channel_is_its_mean_error_times_a_number():
    error = separable_errors() + 0.1 * uniform(30, 4, 6, 8, seed=4)
    ratio = scale_of(error, LowRankScale(rank=4)) / error.mean(dim=0)
    assert_close(ratio, ratio[:, :1, :1].expand_as(ratio))


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_the_unit_of_a_channel_is_the_unit_of_its_scale_and_of_no_other(rank):
    error = separable_errors()
    unit = torch.tensor([1.0, 1e6, 1.0, 1e-6], dtype=torch.float64)[:, None, None]
    scale = LowRankScale(rank=rank)
    assert_close(scale_of(unit * error, scale), unit * scale_of(error, scale))


def test_a_cell_that_was_never_wrong_is_small_but_positive():
    error = separable_errors()
    error[:, 1, 2, 3] = 0
    scale = scale_of(error, LowRankScale(rank=4))
    never = scale[1, 2, 3] / scale[1].mean()
    assert never > 0.1 * LEAST_SHARE
    assert never < 10 * LEAST_SHARE


def test_a_channel_that_was_never_wrong_is_small_beside_the_others_in_any_unit():
    error = separable_errors()
    error[:, 3] = 0
    for unit in (1e-9, 1.0, 1e9):
        scale = scale_of(unit * error, LowRankScale())
        assert (scale[3] > 0).all()
        assert scale[3].max() < 0.1 * scale[:3].mean(dim=(1, 2)).min()


def test_a_channel_whose_quantile_is_zero_keeps_its_map():
    """Wrong in 3 % of the values: the quantile is 0, the mean error is not."""
    wrong = uniform(200, 1, 6, 8, seed=5) < 0.03
    scale = scale_of(wrong * uniform(200, 1, 6, 8), LowRankScale(rank=1))
    assert (scale > 0).all()


def test_no_error_at_all_has_one_scale():
    scale = scale_of(torch.zeros(10, 2, 6, 8), LowRankScale())
    assert_close(scale, torch.full_like(scale, LEAST_SHARE))


def test_all_dimensions_before_the_grid_are_channels():
    error = separable_errors()
    scale = LowRankScale(rank=2)
    assert_close(
        scale_of(error.reshape(30, 2, 2, 6, 8), scale),
        scale_of(error, scale).reshape(2, 2, 6, 8),
    )
    line = LowRankScale(n_spatial=1, rank=2)
    assert_close(
        scale_of(error.reshape(30, 4, 48), line),
        scale_of(error, scale).reshape(4, 48),
    )


def test_an_error_without_a_grid_is_refused():
    with pytest.raises(
        ValueError, match=r"LowRankScale\(n_spatial=2\), but an error has shape \(3,\)"
    ):
        LowRankScale().check_shape((3,))
